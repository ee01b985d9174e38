"""Weights: how token losses of a mini-batch become one number. Batch -> W [B, T], zero off the mask.

Call them on a whole mini-batch, never on a micro-batch: the normaliser counts everything the update sees. A unit
without sampled tokens has no numerator and is not counted; `count_empty=True` counts it, as TRL does.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from postrl.batch import Batch


def token_mean(batch: Batch) -> Float[Tensor, "B T"]:
    """Every sampled token counts the same: 1 / Σ_i |o_i| (DAPO's token-level mean, arXiv 2503.14476)."""
    mask = batch.mask.to(batch.logp_old.dtype)
    return mask / mask.sum().clamp(min=1)


def sequence_mean(batch: Batch, count_empty: bool = False) -> Float[Tensor, "B T"]:
    """Every unit counts the same, its tokens share its part: 1 / (N · |o_i|) (GRPO, arXiv 2402.03300)."""
    lengths = batch.lengths()
    return _per_unit(batch, 1 / lengths.clamp(min=1).to(batch.logp_old.dtype)) / _units(lengths, count_empty)


def sequence_sum(batch: Batch, count_empty: bool = False) -> Float[Tensor, "B T"]:
    """Mean over units of the sum over tokens: 1 / N. The exact policy gradient of an episode's reward."""
    return _per_unit(batch, torch.ones(batch.size, dtype=batch.logp_old.dtype, device=batch.mask.device)) / _units(
        batch.lengths(), count_empty
    )


def fixed_length(batch: Batch, length: int, count_empty: bool = False) -> Float[Tensor, "B T"]:
    """One constant for all: 1 / (N · L), so that long answers are not diluted (Dr. GRPO, arXiv 2503.20783)."""
    return sequence_sum(batch, count_empty) / length


def mean_length(batch: Batch, count_empty: bool = False) -> float:
    """Sampled tokens per unit: what `sequence_sum` sums to, and `fixed_length` times its L."""
    lengths = batch.lengths()
    return int(lengths.sum()) / _units(lengths, count_empty)


def share_counted(batch: Batch, count_empty: bool = False) -> float:
    """What `sequence_mean` sums to: 1, or the share of units with sampled tokens if empty ones are counted."""
    lengths = batch.lengths()
    return int((lengths > 0).sum()) / _units(lengths, count_empty)


def _per_unit(batch: Batch, value: Float[Tensor, "N"]) -> Float[Tensor, "B T"]:
    return torch.where(batch.mask, value[batch.unit][:, None], torch.zeros_like(value[:1]))


def _units(lengths: Tensor, count_empty: bool) -> int:
    return max(1, len(lengths) if count_empty else int((lengths > 0).sum()))
