"""Any method of the shelf inside TRL: `MethodTrainer`, a GRPOTrainer whose advantages and losses are the method's.

TRL generates, scores, distributes, logs and saves as ever. Taken over are the three places where a policy-gradient
method lives: advantages on whole groups over all processes, weights once per update (TRL: per accumulation window) and
token losses. `docs/trl.md` says how to use it, `trl_checks.support` what it can do with a method.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from postrl.adapters import arrays
from postrl.adapters.trl_checks import (
    check_columns,
    check_finite,
    check_method,
    check_names,
    check_options,
    check_rewards,
    check_seams,
    check_unpatched,
    checked,
)
from postrl.adapters.trl_rows import Extras, Rows, answers_of, filled, scores_of, taken
from postrl.advantages import unit_mean
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.losses import kl_k3, log_ratio, on
from postrl.method import Forward, Method, objective
from postrl.terms import reference_kl

Base: Any = object  # TRL's trainer is joined in `trainer_class`, so that this module loads without trl


@dataclass(frozen=True, eq=False)
class Generation:
    """What one round of sampling gave. `found` are this process's answers; `batch` and A are those of all of them."""

    found: Rows
    batch: Batch
    keep: Tensor  # [N], units worth training on
    advantage: Float[Tensor, "B T"]
    known_old: bool  # False: logp_old is the detached value of the update's own forward
    number: int  # of the update that follows, for the shuffle
    seen: Tensor  # [n, T], log-probabilities of this process's answers in their last update
    observed: Tensor  # [B, T], what the method observed before each unit's last update


@dataclass(frozen=True, eq=False)
class Window:
    """One update: its units over all processes, and which of them are here."""

    batch: Batch
    advantage: Float[Tensor, "B T"]
    weights: tuple[Tensor, ...]  # one [B, T] per term
    local: Int[Tensor, "n"]  # places of this process's rows in `Generation.found`
    place: Int[Tensor, "n"]  # their rows in `batch`


@dataclass(frozen=True, eq=False)
class Piece:
    """One forward pass: a micro-batch of a window."""

    batch: Batch
    advantage: Float[Tensor, "b T"]
    weights: tuple[Tensor, ...]
    local: Int[Tensor, "b"]  # places of its rows in `Generation.found`
    generation: Generation
    last: bool  # no further update of this generation follows


class MethodSteps(Base):
    """The steps of a GRPOTrainer that a method takes over; `MethodTrainer` is this joined to TRL's class.

    method: what to train by. extras: groupings, and what there is per step, for methods that read them. Everything else
    is GRPOTrainer's, in the same order.

    Raises UserError for a method, an option or a combination that cannot be right; see docs/trl.md.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *,
        method: Method | str,  # a name is refused, with a sentence that says what to give
        extras: Extras | None = None,
        **rest: Any,
    ) -> None:
        self.extras = Extras() if extras is None else extras
        method = check_method(method, self.extras.step_rewards is not None)
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if rest.get("rollout_func") is None:  # which may add columns of its own
            check_columns(functions, self.extras.functions(), train_dataset)
        self.method, beta = method, 0.0
        if args is not None:
            beta = args.beta
            self.method = _with_options(method, args)
        elif "logp_ref" in method.needs:
            raise UserError(f"method {method.name} needs a reference model: give args=GRPOConfig(...)")
        super().__init__(model, reward_funcs, args, train_dataset, **rest)
        self.args.beta = beta
        self._check_model()
        check_names(self.reward_func_names)
        self.reward_funcs = [
            checked(function, name) for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        self._generation: Generation | None = None
        self._window: Window | None = None
        self._name, self._paper = f"postrl {method.name}", _paper(method.name)  # of the model card

    def _check_model(self) -> None:
        if self._is_vlm:
            raise UserError("MethodTrainer carries text only: give a tokenizer, not a processor of images")
        if self.aux_loss_enabled:
            raise UserError(
                "this mixture-of-experts model adds TRL's balancing loss, which the method does not know: set "
                "router_aux_loss_coef=0"
            )

    # ---------------------------------------------------------------- scores and credit, once per generation

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list
    ) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        check_rewards(rewards, self.reward_func_names)
        known = {key: [row[key] for row in inputs] for key in inputs[0] if key not in ("prompt", "completion")}
        known |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids_list}
        if self.environments is not None:
            known["environments"] = self.environments
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        names, weights = self.reward_func_names, self.reward_weights
        self._scores = scores_of(self.extras, rewards, weights, names, ends, known, self._everywhere)
        self._steps = None if self.extras.steps is None else self.extras.steps(**known)
        return rewards

    def _collect(self, inputs: list[dict]) -> Generation:
        """Sampling and scoring by TRL, then credit on the answers of all processes."""
        found = self._generate_and_score_completions(inputs)
        if "pixel_values" in found:
            raise UserError("MethodTrainer carries text only, but the data set has images")
        old = found.get("old_per_token_logps")
        if old is None and "logp_old" in self.method.needs:
            old = found["old_per_token_logps"] = self._present_logp(found)
        if self._steps is not None:
            shape = found["completion_ids"].shape
            found["steps"] = arrays.step_columns(self._steps, shape, found["completion_ids"].device)
        answers = answers_of(found)
        fields = {name: self._gathered(value) for name, value in arrays.rows(answers).items()}
        for name in ("valid", "mask"):
            fields[name] = fields[name].bool()
        scores = self._scores
        if scores.step_groups is None and "step_groups" in self.method.needs:
            heard = self._everywhere(arrays.observations(answers))
            scores = replace(scores, step_groups=arrays.step_numbers(heard, fields["tokens"].device))
        group = self.num_generations if self.model.training else self.num_generations_eval
        batch = arrays.batch(fields, scores, group, self.temperature, self.state.global_step)
        method, keep = self.method, torch.ones(batch.size, dtype=torch.bool, device=batch.unit.device)
        if method.keep is not None:
            keep = method.keep(batch)
            self._log("units/dropped", float((~keep).sum()))
        advantage = torch.zeros(batch.mask.shape, dtype=batch.rewards.dtype, device=keep.device)
        if bool(keep.any()):
            credit = method.advantage(batch.select(keep))
            advantage = filled(credit, keep)
        check_finite(method, "advantage", advantage, batch)
        self._log_advantages(unit_mean(advantage, batch))
        seen = torch.zeros(len(found["prompt_ids"]), batch.mask.shape[1], device=keep.device)
        step, observed = self.state.global_step, torch.zeros_like(batch.logp_old)
        return Generation(found, batch, keep, advantage, old is not None, step, seen, observed)

    # ---------------------------------------------------------------- weights, once per update

    def _prepare_inputs(self, generation_batch: Any) -> Rows:
        args, step = self.args, self._step
        if not self.model.training:
            generation = self._collect(generation_batch)
            everything = torch.arange(len(generation.found["prompt_ids"]), device=generation.keep.device)
            return self._cut(generation, self._open(generation, everything), slice(None), last=False)
        every = args.steps_per_generation * self.num_iterations
        if self._generation is None or step % every == 0:
            self._generation, self._window = self._collect(generation_batch), None
        iteration, place = divmod(step % every, args.steps_per_generation)
        update, micro = divmod(place, args.gradient_accumulation_steps)
        if self._window is None or micro == 0:
            self._window = self._open(self._generation, self._members(self._generation, iteration, update))
        size = args.per_device_train_batch_size
        part = slice(micro * size, (micro + 1) * size)
        return self._cut(self._generation, self._window, part, last=step % every == every - 1)

    def _members(self, generation: Generation, iteration: int, update: int) -> Tensor:
        """Places of this process's answers that belong to an update: whole groups, shuffled anew in each iteration.

        With one update per iteration these are all, in order. Every process draws the same order of its own groups.
        """
        count, size = len(generation.found["prompt_ids"]), self.num_generations
        updates = self.args.steps_per_generation // self.args.gradient_accumulation_steps
        if updates == 1:
            return torch.arange(count, device=generation.keep.device)
        rng = np.random.default_rng([self.args.seed, generation.number, iteration])
        groups = torch.from_numpy(rng.permutation(count // size)).reshape(updates, -1)[update]
        return (groups[:, None] * size + torch.arange(size)).reshape(-1).to(generation.keep.device)

    def _open(self, generation: Generation, local: Tensor) -> Window:
        """W, and what the method observes, over the rows `local` of all processes."""
        method, batch = self.method, generation.batch
        here = len(generation.found["prompt_ids"])
        ranks = range(self.accelerator.num_processes)
        members = torch.cat([rank * here + local for rank in ranks])  # as `_gathered` orders them
        chosen = torch.zeros_like(generation.keep).index_fill(0, members, True)
        place = (torch.cumsum(chosen, 0) - 1)[members]
        whole, keep, advantage = batch.select(chosen), generation.keep[chosen], generation.advantage[chosen]
        if method.observe is not None:
            rows = taken(generation.found, local)
            rows["old_per_token_logps"] = self._present_logp(rows)
            now = torch.empty_like(whole.logp_old)
            now[place] = self._gathered(arrays.rows(answers_of(rows))["logp_old"], now.shape[1])
            whole = whole if generation.known_old else replace(whole, logp_old=now)
            observed = method.observe(whole.select(keep), now[keep]) if bool(keep.any()) else now[keep]
            whole = replace(whole, observed=filled(observed, keep))
            generation.observed[chosen] = filled(observed, keep)
        kept = whole.select(keep)
        weights = tuple(filled(term.weight(kept), keep) for term in method.terms)
        for term, weight in zip(method.terms, weights, strict=True):
            check_finite(method, f"weight of term {term.name!r}", weight, whole)
        mine = slice(self.accelerator.process_index * len(local), (self.accelerator.process_index + 1) * len(local))
        return Window(whole, advantage, weights, local, place[mine])

    def _cut(self, generation: Generation, window: Window, part: slice, last: bool) -> Rows:
        local, place = window.local[part], window.place[part]
        rows = taken(generation.found, local)
        advantage = window.advantage[place]
        if (ratio := rows.get("importance_sampling_ratio")) is not None:  # of the vLLM sampler: [b, C] or [b, 1]
            answers = answers_of(rows)
            length = answers.prompt_mask.long().sum(1)
            factor = ratio.expand(answers.sampled.shape)
            advantage = advantage * arrays.placed(factor, answers.sampled, length, advantage.shape[1])
        weights = tuple(weight[place] for weight in window.weights)
        rows["postrl"] = Piece(window.batch.rows(place), advantage, weights, local, generation, last)
        return rows

    # ---------------------------------------------------------------- losses, once per micro-batch

    def _compute_loss(self, model: Any, inputs: Rows) -> Tensor:
        piece: Piece = inputs["postrl"]
        batch, width = piece.batch, piece.batch.mask.shape[1]
        logp, entropy = self._forward(model, inputs, entropy=True)
        answers = answers_of(inputs)
        length = answers.prompt_mask.long().sum(1)
        forward = Forward(
            logp=arrays.placed(logp, answers.sampled, length, width),
            entropy=arrays.placed(entropy, answers.sampled, length, width),
        )
        if not piece.generation.known_old and self.method.observe is None:
            batch = replace(batch, logp_old=forward.logp.detach())
        method = self.method
        policy, others = replace(method, terms=method.terms[:1]), replace(method, terms=method.terms[1:])
        alone = objective(policy, batch, forward, piece.weights[:1], piece.advantage)
        loss = alone + objective(others, batch, forward, piece.weights[1:], piece.advantage)
        self._look(batch, forward, alone, piece)
        return loss * self.accelerator.num_processes  # processes average their gradients

    def _look(self, batch: Batch, forward: Forward, alone: Tensor, piece: Piece) -> None:
        """TRL's metrics of an update, over all processes, under TRL's names."""
        mask, logp = batch.mask, forward.logp.detach()
        log_r = log_ratio(mask, logp, batch.logp_old)
        pushed, clipped = mask & (piece.advantage != 0) & (piece.weights[0] != 0), torch.zeros_like(mask)
        if alone.requires_grad:
            push = torch.autograd.grad(alone, forward.logp, retain_graph=True, allow_unused=True)[0]
            clipped = pushed if push is None else pushed & (push == 0)
        sums = {"policy_kl": torch.expm1(log_r) - log_r}
        if forward.entropy is not None:
            sums["entropy"] = on(mask, forward.entropy.detach())
        if batch.logp_ref is not None:
            sums["kl"] = kl_k3(mask, logp, batch.logp_ref)
        counts = torch.stack([mask.sum(), pushed.sum(), clipped.sum()]).to(logp.dtype)
        totals = self.accelerator.reduce(torch.cat([counts, torch.stack([x.sum() for x in sums.values()])]), "sum")
        tokens, active, silent, *rest = totals.tolist()
        for name, total in zip(sums, rest, strict=True):
            self._log(name, total / max(1.0, tokens))
        self._log("clip_ratio/region_mean", silent / max(1.0, active))
        generation = piece.generation
        generation.seen[piece.local] = logp.to(generation.seen.dtype)
        if piece.last and self.method.figures is not None:
            self._log_figures(generation, self.method.figures)

    def _log_figures(self, generation: Generation, figures: Callable[[Batch, Tensor], Mapping[str, float]]) -> None:
        """The method's own figures, as in our loop's metrics: of the units it kept, after their last update."""
        seen, keep = self._gathered(generation.seen), generation.keep
        batch = generation.batch if generation.known_old else replace(generation.batch, logp_old=seen)
        if self.method.observe is not None:
            batch = replace(batch, observed=generation.observed)
        if bool(keep.any()):
            for name, value in figures(batch.select(keep), seen[keep]).items():
                self._log(f"method/{name}", value)  # TRL leaves NaN out

    # ---------------------------------------------------------------- small parts

    def _forward(self, model: Any, rows: Rows, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities and, if wanted, entropies [n, C] of answers, at the sampling temperature."""
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        attention = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        keep = rows["completion_ids"].shape[1]
        size = None if entropy else self.args.per_device_train_batch_size
        found = self._get_per_token_logps_and_entropies(
            model, ids, attention, keep, batch_size=size, compute_entropy=entropy
        )
        return found[0], found[1] if entropy else found[0]

    def _present_logp(self, rows: Rows) -> Tensor:
        """Log-probabilities [n, C] of answers at the present weights, without gradients or dropout."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._forward(self.model, rows)[0]
        finally:
            self.model.train(training)

    def _gathered(self, x: Tensor, width: int = 0) -> Tensor:
        """The rows of all processes in their order; [n, T] padded on the right to one width, at least `width`."""
        x = x.long() if x.dtype == torch.bool else x
        if x.dim() > 1:
            x = self.accelerator.pad_across_processes(x, dim=1)
            x = torch.nn.functional.pad(x, (0, width - x.shape[1])) if x.shape[1] < width else x
        return self.accelerator.gather(x)

    def _everywhere(self, values: Sequence) -> list:
        """Python values of all processes in their order."""
        from accelerate.utils import gather_object

        return list(gather_object(list(values)))

    def _log(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _log_advantages(self, advantage: Float[Tensor, "N"]) -> None:
        """In the table of completions, the method's advantages instead of TRL's (a unit's mean over its tokens)."""
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantage))):
            logged.pop()
        logged.extend(advantage.tolist())


def _with_options(method: Method, args: Any) -> Method:
    """The method with what the options add to it. Changes `args.beta` to 1 if the method itself needs a reference: TRL
    makes and reads one only then."""
    check_options(args, method)
    if "logp_ref" in method.needs:
        args.beta = 1.0
    elif args.beta:
        term = reference_kl(args.beta, off_policy_correction=args.use_bias_correction_kl)
        return method.plus(term, needs=frozenset({"logp_ref"}))
    return method


def _paper(name: str) -> dict[str, str]:
    """What TRL's model card cites."""
    from postrl.papers import shelf

    module = shelf().get(name)
    paper = None if module is None else module.PAPER
    return {} if paper is None or not paper.arxiv else {"title": paper.title, "id": paper.arxiv}


@functools.cache
def trainer_class() -> type:
    """`MethodTrainer`. Raises UserError without trl, for a trl whose seams moved, or one that Unsloth has patched."""
    try:
        import trl
        from trl.trainer.grpo_trainer import GRPOTrainer
    except ImportError as error:
        raise UserError(f"MethodTrainer needs trl ({error}): pip install 'postrl[trl]'") from error
    check_unpatched(GRPOTrainer)
    check_unpatched(trl.GRPOTrainer)
    check_seams(GRPOTrainer, trl.__version__)
    return type("MethodTrainer", (MethodSteps, GRPOTrainer), {"__module__": __name__, "__doc__": MethodSteps.__doc__})


if TYPE_CHECKING:
    MethodTrainer = MethodSteps


def __getattr__(name: str) -> type:
    if name == "MethodTrainer":
        return trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
