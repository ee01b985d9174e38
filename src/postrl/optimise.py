"""One update: weights before the cut, micro-batches, one optimiser step. And what was seen on the way."""

import math
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from postrl.advantages import truncated_importance
from postrl.batch import Batch
from postrl.enrich import forward_all, mode
from postrl.errors import UserError
from postrl.losses import kl_k3, log_ratio
from postrl.method import Forward, Method, check_shape, objective
from postrl.parallel import gradient_sync
from postrl.ranks import Pass, Ranks, here
from postrl.settings import Settings

MATRICES = ("ratio", "weight", "logp_old", "logp")
SUMS = ("tokens", "kl", "kl_reference", "entropy", "pushed", "clipped")


@dataclass
class Seen:
    """Sums over the masked tokens of a step's updates, and the last ratio of every token."""

    ratio: Tensor  # [B, T] of the rollout batch
    weight: Tensor  # [B, T], summed over terms
    logp_old: Tensor  # [B, T], as the updates used it
    logp: Tensor = field(init=False)  # [B, T], at each row's last update; logp_old before the first
    observed: Tensor | None = None  # [B, T], of each row's last update, for methods that observe
    tokens: float = 0.0
    kl: float = 0.0
    kl_reference: float = 0.0  # k3 against logp_ref, where the batch has it
    entropy: float = 0.0
    pushed: float = 0.0  # tokens with A ≠ 0 and W ≠ 0
    clipped: float = 0.0  # those of them whose log-probability got no gradient from the policy's term
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def __post_init__(self) -> None:
        self.logp = self.logp_old.clone()

    def take(self, part: "Seen", rows: Tensor, loss: float, ranks: Ranks) -> float:
        """Take over what the passes over some rows, in all processes, saw; returns their loss."""
        for name in MATRICES:
            getattr(self, name)[rows] = ranks.total(getattr(part, name))
        figures = [loss, *(getattr(part, name) for name in SUMS)]
        loss, *sums = ranks.total(torch.tensor(figures, dtype=torch.float64, device=ranks.device)).tolist()
        for name, value in zip(SUMS, sums, strict=True):
            setattr(self, name, getattr(self, name) + value)
        return loss


@dataclass(frozen=True)
class Trainer:
    """What an update needs; constant over a run."""

    method: Method
    policy: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    settings: Settings
    free_old: bool  # a step has one update: logp_old is the detached value of that update's own forward

    @property
    def wanted(self) -> frozenset[str]:
        parts = self.method.needs & {"entropy", "values", "logits", "hidden"}
        return parts | {"entropy"} if self.free_old else parts


def update(trainer: Trainer, batch: Batch, rows: Tensor, advantage: Tensor, rate: float, seen: Seen) -> None:
    """One optimiser step on a mini-batch; `rows` says where its rows stand in the rollout batch `seen` speaks of.

    Skipped, and counted, iff A is 0 everywhere and the method has no other term than the policy's. Raises UserError if
    an advantage, a weight or the gradient is not finite; then no weight has changed.
    """
    method, settings = trainer.method, trainer.settings
    if method.observe is not None:
        now = forward_all(trainer.policy, batch, settings.token_budget, frozenset()).logp
        batch = replace(batch, logp_old=now) if trainer.free_old else batch
        observed = method.observe(batch, now)
        batch = replace(batch, observed=observed)
        _note(seen, rows, observed)
    _check(method, "advantage", advantage, batch)
    if len(method.terms) == 1 and not bool((advantage != 0).any()):
        seen.skipped += 1
        return
    weights = tuple(term.weight(batch) for term in method.terms)
    for term, weight in zip(method.terms, weights, strict=True):
        _check(method, f"weight of term {term.name!r}", weight, batch)
    trainer.optimizer.zero_grad(set_to_none=False)
    loss, ranks = 0.0, here()
    part = Seen(torch.zeros_like(batch.logp_old), torch.zeros_like(batch.logp_old), torch.zeros_like(batch.logp_old))
    with mode(trainer.policy, True):
        for micro in ranks.passes(batch, settings.token_budget, method.atom):
            index = micro.rows
            parts = tuple(w[index] if micro.counts else torch.zeros_like(w[index]) for w in weights)
            with gradient_sync(trainer.policy, micro.last):
                loss += _pass(trainer, batch.rows(index), parts, advantage[index], micro, part)
    loss = seen.take(part, rows, loss, ranks)
    norm = _clip(trainer)
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient of an update is {norm}: the run stops before it spoils the weights; "
            "resume from the last checkpoint with a lower learning_rate"
        )
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)  # `parameters` may scale a group, for example a critic
    trainer.optimizer.step()
    seen.losses.append(loss)
    seen.gradient_norms.append(norm)


def _note(seen: Seen, rows: Tensor, observed: Tensor) -> None:
    if seen.observed is None:
        seen.observed = torch.zeros_like(seen.logp_old)
    seen.observed[rows] = observed.to(seen.logp_old.dtype)


def _check(method: Method, what: str, value: Tensor, batch: Batch) -> None:
    check_shape(f"{what} of method {method.name}", value, batch)
    if not bool(torch.isfinite(value[batch.mask]).all()):
        raise UserError(
            f"the {what} of method {method.name} is not finite on some sampled token: look at the rewards, and if it "
            "reads logp_old, the method must say so in `needs`"
        )


def _clip(trainer: Trainer) -> float:
    """Each parameter group by its own norm, so that a critic's gradient cannot shrink the policy's; the norm of all."""
    norms = []
    for group in trainer.optimizer.param_groups:
        norm = trainer.accelerator.clip_grad_norm_(group["params"], trainer.settings.max_gradient_norm)
        assert norm is not None  # only other backends answer None
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    return math.hypot(*norms)


def _pass(
    trainer: Trainer, batch: Batch, weights: tuple[Tensor, ...], advantage: Tensor, micro: Pass, part: Seen
) -> float:
    """Forward and backward of one micro-batch; returns its part of the update's loss."""
    out = trainer.policy(batch, trainer.wanted)
    if trainer.free_old:
        batch = replace(batch, logp_old=out.logp.detach())
    cap = trainer.settings.importance_cap
    if cap is not None:
        advantage = advantage * truncated_importance(batch, cap)
    method = trainer.method
    first, others = replace(method, terms=method.terms[:1]), replace(method, terms=method.terms[1:])
    alone = objective(first, batch, out, weights[:1], advantage)
    loss = alone + objective(others, batch, out, weights[1:], advantage)
    push = _push(alone, out.logp)
    if loss.requires_grad:  # else no sampled token is among these rows
        # Processes average their gradients, but W has counted everything once: here they must add up.
        trainer.accelerator.backward(loss * here().world)
    if micro.counts:
        _look(batch, out, push, weights, advantage, micro.rows, part)
    return float(loss.detach())


def _push(alone: Tensor, logp: Tensor) -> Tensor:
    """[b, t] gradient at logp of the first term alone: it shows, for any method, which tokens the policy's loss pushes.
    Together with a penalty every token would seem pushed, also those that the clip has silenced."""
    if not alone.requires_grad:
        return torch.zeros_like(logp)
    return torch.autograd.grad(alone, logp, retain_graph=True, allow_unused=True, materialize_grads=True)[0]


def _look(
    batch: Batch,
    out: Forward,
    push: Tensor,
    weights: tuple[Tensor, ...],
    advantage: Tensor,
    rows: Tensor,
    seen: Seen,
) -> None:
    mask, logp = batch.mask, out.logp.detach()
    log_r = log_ratio(mask, logp, batch.logp_old)
    seen.ratio[rows] = log_r.exp().to(seen.ratio.dtype)
    seen.weight[rows] = torch.stack(weights).sum(0).to(seen.weight.dtype)
    seen.logp_old[rows] = batch.logp_old.to(seen.logp_old.dtype)
    seen.logp[rows] = logp.to(seen.logp.dtype)
    seen.tokens += float(mask.sum())
    seen.kl += float((torch.expm1(log_r) - log_r).sum())
    if batch.logp_ref is not None:
        seen.kl_reference += float(kl_k3(mask, logp, batch.logp_ref).sum())
    if out.entropy is not None:
        seen.entropy += float(torch.where(mask, out.entropy.detach(), 0).sum())
    pushed = mask & (advantage != 0) & (weights[0] != 0)
    seen.pushed += float(pushed.sum())
    seen.clipped += float((pushed & (push == 0)).sum())
