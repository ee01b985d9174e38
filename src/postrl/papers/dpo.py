"""DPO: a preference between two answers is a logistic regression on their log-probability ratios; no reward model."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from postrl.advantages import MIN_SPREAD, dense, total_reward
from postrl.batch import Batch, spread, unit_sum
from postrl.errors import UserError
from postrl.losses import log_ratio, on
from postrl.method import Forward, Method, Paper, Term

PAPER = Paper(
    title="Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    arxiv="2305.18290",
    status="textbook form; IPO is 2310.12036; no released code compared",
)


def dpo(
    beta: float = 0.1,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalised: bool = False,
) -> Method:
    """The policy is its own reward model, h(o) = log π(o|q) − log π_ref(o|q): raise it for the better answer of a pair.

        Δ = h(o⁺) − h(o⁻)
        sigmoid   L = −(1−ε) log σ(βΔ) − ε log σ(−βΔ)
        ipo       L = (Δ − 1/(2β))²
        l = L of the token's group;   W = 1/(#groups with a pair · sampled tokens of the group's paired answers)

    Rafailov et al., arXiv 2305.18290; IPO: Azar et al., arXiv 2310.12036. An update's loss is the mean of L over
    groups; a micro-batch never cuts one. In a group of two the answer with the greater total reward is o⁺;
    `envs.written.pair` makes such groups of text. In a larger one L is the mean over all pairs of unequal reward, so
    that groups sampled on policy serve. Answers that are missing their reward, or have no token, are in no pair.

    beta: β, strength of the tie to π_ref (paper: 0.1). kind: see above; IPO bounds Δ where preferences are sure.
    label_smoothing: ε, the share of labels taken to be wrong, in [0, 0.5); sigmoid only.
    length_normalised: h is the mean over an answer's tokens instead of the sum, so that length alone makes no margin.

    Figures: `chosen` and `rejected` are the mean h of o⁺ and o⁻, margin is the mean of βΔ, accuracy the share of pairs
    with Δ > 0, and `displaced` the share whose *chosen* answer has become less likely than under π_ref, which the loss
    permits as long as the rejected one falls further.

    Raises UserError for β or ε out of range. Needs reference log-probabilities.
    """
    if not 0 < beta < math.inf:
        raise UserError(f"dpo: beta is {beta}; give a positive number, such as 0.1")
    if not 0 <= label_smoothing < 0.5:
        raise UserError(f"dpo: label_smoothing is {label_smoothing}; it must be at least 0 and below 0.5")
    if kind == "ipo" and label_smoothing:
        raise UserError("dpo: label_smoothing belongs to kind='sigmoid'; set it to 0 with kind='ipo'")

    def each(gap: Tensor) -> Tensor:
        if kind == "ipo":
            return (gap - 1 / (2 * beta)).square()
        right, wrong = F.logsigmoid(beta * gap), F.logsigmoid(-beta * gap)
        return -(1 - label_smoothing) * right - label_smoothing * wrong

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        better, worse = preferences(batch)
        gain = implicit_reward(batch, forward.logp, length_normalised)
        group, number = dense(batch.group())
        pairs = _tally(better, group, number)
        mean = gain.new_zeros(number).index_add(0, group[better], each(gain[better] - gain[worse])) / pairs.clamp(min=1)
        return on(batch.mask, mean[group][batch.unit][:, None].expand(batch.mask.shape))

    def figures(batch: Batch, logp: Tensor) -> dict[str, float]:
        better, worse = preferences(batch)
        gain = implicit_reward(batch, logp, length_normalised).double()
        up, down = gain[better], gain[worse]
        parts = {"chosen": up, "rejected": down, "margin": beta * (up - down), "accuracy": (up > down).double()}
        parts["displaced"] = (up < 0).double()
        return {name: float(part.mean()) for name, part in parts.items()}  # the mean of none is NaN: left out

    policy = Term("policy", loss, group_mean_weight, total=lambda batch: float(len(preferences(batch)[0]) > 0))
    exempt = {"on-policy gradient": "the slope of a pair depends on the margin between both answers, not on credit"}
    needs = frozenset({"logp_ref"})
    return Method("dpo", standing, (policy,), figures=figures, atom="group", needs=needs, exempt=exempt)


def preferences(batch: Batch) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """(better unit, worse unit) of every pair: two answers of one group, unequal in total reward, neither empty."""
    reward = torch.where(batch.lengths() > 0, total_reward(batch), torch.nan)
    group = batch.group()
    better = (group[:, None] == group[None]) & (reward[:, None] > reward[None] + MIN_SPREAD)
    pairs = better.nonzero()
    return pairs[:, 0], pairs[:, 1]


def implicit_reward(batch: Batch, logp: Float[Tensor, "B T"], length_normalised: bool = False) -> Float[Tensor, "N"]:
    """h of each unit: the sum, or the mean, over its sampled tokens of log π − log π_ref."""
    if batch.logp_ref is None:
        raise UserError("method dpo needs reference log-probabilities: give `train` a reference")
    gain = unit_sum(log_ratio(batch.mask, logp, batch.logp_ref), batch)
    return gain / batch.lengths().clamp(min=1) if length_normalised else gain


def standing(batch: Batch) -> Float[Tensor, "B T"]:
    """(pairs won − pairs lost) / pairs of the group on every token: 1 and −1 in a group of two, 0 without a pair.

    The loss reads the pairs themselves; this says who is chosen, and that there is something to train on.
    """
    better, worse = preferences(batch)
    group, number = dense(batch.group())
    pairs = _tally(better, group, number)[group].clamp(min=1)
    index = torch.arange(batch.size, device=group.device)
    won, lost = (_tally(side, index, batch.size) for side in (better, worse))
    return spread((won - lost).to(batch.logp_old.dtype) / pairs, batch)


def group_mean_weight(batch: Batch) -> Float[Tensor, "B T"]:
    """Every group with a pair counts the same, the tokens of its paired answers share its part. Sums to 1."""
    better, worse = preferences(batch)
    group, number = dense(batch.group())
    paired = torch.zeros(batch.size, dtype=torch.bool, device=group.device)
    paired[better] = paired[worse] = True
    lengths = torch.where(paired, batch.lengths(), 0)
    tokens = torch.zeros(number, dtype=lengths.dtype, device=group.device).index_add(0, group, lengths)
    share = paired.to(batch.logp_old.dtype) / (tokens[group].clamp(min=1) * (tokens > 0).sum().clamp(min=1))
    return spread(share, batch)


def _tally(units: Int[Tensor, " P"], index: Int[Tensor, "N"], number: int) -> Int[Tensor, " _"]:
    """How often each value of `index` is met at `units`."""
    return torch.bincount(index[units], minlength=number)
