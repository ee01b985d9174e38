"""The figures of a step, from what its batch and its updates hold."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from postrl.advantages import Groups, total_reward
from postrl.batch import Batch, Kind, Stop
from postrl.losses import on
from postrl.method import Method
from postrl.optimise import Seen


def step_metrics(
    method: Method, batch: Batch, advantage: Tensor, seen: Seen, entropy: Tensor | None
) -> dict[str, float]:
    """One flat mapping of plain numbers; a figure that is undefined (no token, no reward, no forward) is left out."""
    mask = batch.mask
    tokens = int(mask.sum())
    reward = total_reward(batch)
    constant = Groups(reward, batch.group()).spread() <= 1e-6
    ratios = seen.ratio[mask]
    figures = {
        **outcome_metrics(batch),
        "entropy": _ratio(seen.entropy, seen.tokens) if entropy is None else _ratio(on(mask, entropy).sum(), tokens),
        "kl": _ratio(seen.kl, seen.tokens),
        "kl_reference": math.nan if batch.logp_ref is None else _ratio(seen.kl_reference, seen.tokens),
        "clip": seen.clipped / max(1.0, seen.pushed),
        "ratio/max": float(ratios.max()) if len(ratios) else 1.0,
        "ratio/min": float(ratios.min()) if len(ratios) else 1.0,
        "advantage/std": float(advantage[mask].std(correction=0)) if len(ratios) else 0.0,
        "length": tokens / batch.size,
        "truncated": _share(batch.stop == Stop.TRUNCATED),
        "errors": _share(batch.stop == Stop.ERROR),
        "missing": _share(torch.isnan(reward)),
        "groups/constant": _share_of_groups(constant, batch) if batch.reward_names else math.nan,
        "groups/shaped_only": _share_of_groups(constant_but_shaped(batch, reward), batch),
        "units": float(batch.size),
        "tokens": float(tokens),
        "updates/skipped": float(seen.skipped),
        "loss": sum(seen.losses) / max(1, len(seen.losses)),
        "gradient_norm": max(seen.gradient_norms, default=0.0),
        **_mismatch(batch),
        **_own(method, batch, seen),
    }
    return {name: value for name, value in figures.items() if value == value}


def outcome_metrics(batch: Batch) -> dict[str, float]:
    """How good the rollouts are. Of everything that was drawn: what a method keeps is no fair sample of the policy."""
    figures = {
        "reward": _mean(total_reward(batch)),
        **{f"reward/{n}": _mean(batch.reward(n)) for n in batch.reward_names},
        "pass@1": _mean(batch.reward("correct")) if "correct" in batch.reward_names else math.nan,
    }
    return {name: value for name, value in figures.items() if value == value}


def constant_but_shaped(batch: Batch, reward: Tensor) -> Tensor:
    """Units of groups whose answers are all right or all wrong while the trained reward still varies: normalising such
    a group amplifies what is left, which is often noise (reported against verl's recipes)."""
    if "correct" not in batch.reward_names:
        return torch.zeros_like(reward, dtype=torch.bool)
    same = Groups(batch.reward("correct"), batch.group()).spread() <= 1e-6
    return same & (Groups(reward, batch.group()).spread() > 1e-6)


def _own(method: Method, batch: Batch, seen: Seen) -> dict[str, float]:
    if method.figures is None:
        return {}
    figures = method.figures(replace(batch, observed=seen.observed), seen.logp)
    return {f"method/{name}": value for name, value in figures.items()}


def _mismatch(batch: Batch) -> dict[str, float]:
    drawn = batch.mask & (batch.kind == Kind.ROLLOUT)[batch.unit][:, None]  # pairs and demonstrations had no sampler
    gap = (batch.logp_old - batch.logp_sampler)[drawn].abs()
    if not len(gap):
        return {}
    return {"mismatch/mean": float(gap.mean()), "mismatch/max": float(gap.max())}


def _mean(x: Tensor) -> float:
    present = x[~torch.isnan(x)]
    return float(present.double().mean()) if len(present) else math.nan


def _ratio(part: float | Tensor, whole: float) -> float:
    return float(part) / whole if whole else math.nan


def _share(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else 0.0


def _share_of_groups(x: Tensor, batch: Batch) -> float:
    """Groups may be ragged: each counts once, however many units it has."""
    return torch.unique(batch.group()[x]).numel() / torch.unique(batch.group()).numel()
