"""ExpRL: a judge that holds a reference scores an answer step by step; each step is credited with what it changed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from postrl.advantages import MIN_SPREAD, Groups, Singleton, given_steps, over_steps, total_reward, zscored
from postrl.batch import Batch, Stop, spread
from postrl.errors import UserError
from postrl.method import Method, Paper, Term
from postrl.papers.grpo import clip_loss
from postrl.rollout import Rollout, Source, Turn

PAPER = Paper(
    title="ExpRL: Exploratory RL for LLM Mid-Training",
    arxiv="2606.17024",
    status="text and released code read; vectors of the released trainer, matched where it does what the text says",
)

Credit = Literal["process", "outcome", "end_norm", "group_norm"]
SingleSegment = Literal["zero", "raw", "group_mean"]
Verdict = Callable[[Rollout, str], int | None]  # (rollout, text to judge) -> 1 … 5, None if it could not be read


def exprl(
    credit: Credit = "process",
    single_segment: SingleSegment = "zero",
    clip_overflow: bool = True,
    low: float = 0.2,
    high: float | None = None,
    singleton: Singleton = "zero",
    ddof: int = 1,
    eps: float = 1e-6,
    min_spread: float = MIN_SPREAD,
) -> Method:
    """A reference solution need not be imitated: a judge that reads it can say how far each step gets.

        s_t = (verdict − 1)/4 in [0, 1], T segments
        process     A_t = s_t − s_{t−1} for t > 1,   A_1 = s_1 − s_T: they sum to 0 over the segments (Eq. 2)
        end_norm    A_t = s_t − s_T for t < T,   A_T = s_T
        group_norm  A_t = s_t − mean of s over the segments of all answers to the prompt
        outcome     A = (s − mean_j s_j)/(std_j s_j + eps) of one score for the whole answer, as in GRPO
        every token of segment t gets A_t,   W = 1/Σ|o|,   l = −min(r·A, clip(r, 1−low, 1+high)·A)

    arXiv 2606.17024. One update per step makes l REINFORCE, as the paper runs the process forms. It adds a KL penalty:
    `.plus(reference_kl(1e-3))`. `judged` or the source `Judged` cut answers and fill `step_rewards`; for "outcome" s is
    the total reward. An answer with a verdict that could not be read (NaN) leaves every statistic and the loss.

    single_segment: "process" of an answer with T = 1. "zero": Eq. 2 to the letter. "raw": s_1, as released; s_1 ≥ 0
        favours giving up the delimiter. "group_mean": s_1 − the mean final score of the prompt's answers.
    clip_overflow: an answer cut at a length limit has score 0 throughout (paper); False leaves it its scores.
    low, high: of the clip. None is the paper's high: 0.26, and 0.28 for "outcome".
    singleton, ddof, eps, min_spread: of "outcome", as in `grpo` (released: "raw", 1, 1e-6).

    The released code further differs: end_norm gives the last segment 0 and an overlong answer −s_T; group_norm divides
    its mean by the padded length once more; an unread *first* verdict trains with A = −100.5; an unread outcome counts
    as 0 in its group. None of these is offered.
    """
    bound = (0.28 if credit == "outcome" else 0.26) if high is None else high

    def advantage(batch: Batch) -> Tensor:
        if credit == "outcome":
            score = outcome_scores(batch, clip_overflow)
            a = zscored(score, batch.group(), ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread)
            return spread(a, batch)
        score, number = step_scores(batch, clip_overflow)
        rule = {"process": partial(_process, single=single_segment), "end_norm": _end_norm, "group_norm": _group_norm}
        return over_steps(rule[credit](score, number, batch), batch).nan_to_num(nan=0.0)

    def read(batch: Batch) -> Tensor:
        if credit == "outcome":
            return ~torch.isnan(outcome_scores(batch, clip_overflow))
        return unread(*step_scores(batch, clip_overflow)).logical_not()

    def weight(batch: Batch) -> Tensor:
        mask = (batch.mask & read(batch)[batch.unit][:, None]).to(batch.logp_old.dtype)
        return mask / mask.sum().clamp(min=1)

    def total(batch: Batch) -> float:
        return float((read(batch) & (batch.lengths() > 0)).any())

    def figures(batch: Batch, logp: Tensor) -> dict[str, float]:
        steps = step_counts(batch)
        found = {"unread": float((~read(batch)).double().mean()), "segments": float(steps.double().mean())}
        return found | {"single_segment": float((steps == 1).double().mean())}

    policy = Term("policy", clip_loss(low, bound), weight, total=total)
    needs = frozenset() if credit == "outcome" else frozenset({"step_rewards"})
    return Method("exprl", advantage, (policy,), figures=figures, needs=needs)


def outcome_scores(batch: Batch, clip_overflow: bool) -> Float[Tensor, "N"]:
    """Total reward; 0 for a truncated answer if `clip_overflow`, NaN where it is missing."""
    reward = total_reward(batch)
    return torch.where((batch.stop == Stop.TRUNCATED) & clip_overflow, torch.zeros_like(reward), reward)


def step_counts(batch: Batch) -> Int[Tensor, "N"]:
    """Segments of each unit's sampled tokens, T."""
    rows = torch.where(batch.mask, batch.segment, -1)
    rows = rows.amax(1) if rows.shape[1] else rows.new_full((len(rows),), -1)
    last = torch.full((batch.size,), -1, dtype=rows.dtype, device=rows.device)
    return last.scatter_reduce(0, batch.unit, rows, "amax").long() + 1


def step_scores(batch: Batch, clip_overflow: bool) -> tuple[Float[Tensor, "N S"], Int[Tensor, "N"]]:
    """s of every segment and the number of segments; NaN beyond them, and for a whole unit with an unread verdict.

    Truncated units have 0 throughout if `clip_overflow`. A unit that lacks its reward counts as unread too. Raises
    UserError if no unit has step rewards.
    """
    number, given = step_counts(batch), given_steps(batch)
    width = max([given.shape[1], *number.tolist()])
    score = torch.cat([given, given.new_full((batch.size, width - given.shape[1]), torch.nan)], 1)
    over = (batch.stop == Stop.TRUNCATED) & clip_overflow
    score = torch.where(over[:, None], torch.zeros_like(score), score)
    lost = unread(score, number) | (torch.isnan(total_reward(batch)) & ~over)
    exists = torch.arange(width, device=number.device) < number[:, None]
    return torch.where(exists & ~lost[:, None], score, torch.nan), number


def unread(score: Float[Tensor, "N S"], number: Int[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """Units with a segment whose score is NaN."""
    exists = torch.arange(score.shape[1], device=number.device) < number[:, None]
    return (exists & torch.isnan(score)).any(1)


def _last(score: Tensor, number: Tensor) -> Float[Tensor, "N"]:
    """s_T; NaN for a unit without segments."""
    padded = torch.cat([score.new_full((len(score), 1), torch.nan), score], 1)
    return padded.gather(1, number[:, None])[:, 0]


def _process(score: Tensor, number: Tensor, batch: Batch, single: SingleSegment) -> Float[Tensor, "N S"]:
    last = _last(score, number)
    change = score - torch.cat([last[:, None], score[:, :-1]], 1)[:, : score.shape[1]]
    if single == "zero":
        return change
    alone = last if single == "raw" else last - Groups(last, batch.group()).mean()
    return torch.where((number == 1)[:, None], alone[:, None], change)


def _end_norm(score: Tensor, number: Tensor, batch: Batch) -> Float[Tensor, "N S"]:
    at_end = torch.arange(score.shape[1], device=number.device) == number[:, None] - 1
    return torch.where(at_end, score, score - _last(score, number)[:, None])


def _group_norm(score: Tensor, number: Tensor, batch: Batch) -> Float[Tensor, "N S"]:
    group = batch.group()[:, None].expand_as(score).flatten()
    return score - Groups(score.flatten(), group).mean().reshape(score.shape)


def likert(verdict: int | None) -> float:
    """1 … 5 -> 0 … 1; None, a verdict that could not be read, -> NaN. Raises UserError for another number."""
    if verdict is None:
        return float("nan")
    if verdict not in (1, 2, 3, 4, 5):
        raise UserError(f"exprl: the judge's verdict is {verdict!r}; it must be 1, 2, 3, 4, 5 or None")
    return (verdict - 1) / 4


def judged(
    rollouts: Sequence[Rollout],
    text: Callable[[Sequence[int]], str],
    judge: Verdict,
    unit: Literal["prefix", "step"] = "prefix",
    delimiter: str = "###",
) -> list[Rollout]:
    """The same rollouts, their sampled turns cut into steps at `delimiter` and each step scored into `step_rewards`.

    text: tokens -> text, such as a renderer's. judge(rollout, text) reads everything written up to the end of a step
    ("prefix", the paper's text) or that step alone ("step", the released trainer). Contexts after the first are cut but
    read the steps of the first. Rewards of the whole answer must be there already: `completion` becomes the last step.
    """
    out = []
    for rollout in rollouts:
        whole = replace(rollout, contexts=[_cut(turns, text, delimiter) for turns in rollout.contexts])
        steps = [turn.text for turn in whole.contexts[0] if turn.sampled] if whole.contexts else []
        read = ["".join(steps[: k + 1]) if unit == "prefix" else step for k, step in enumerate(steps)]
        out.append(replace(whole, step_rewards=[likert(judge(rollout, part)) for part in read]))
    return out


def _cut(turns: Sequence[Turn], text: Callable[[Sequence[int]], str], delimiter: str) -> list[Turn]:
    out: list[Turn] = []
    for turn in turns:
        if not turn.sampled:
            out.append(turn)
            continue
        for start, end in pairwise([0, *step_ends(turn.tokens, text, delimiter)]):
            piece = text(turn.tokens[:end])[len(text(turn.tokens[:start])) :]
            out.append(Turn(turn.tokens[start:end], True, text=piece, logp=turn.logp[start:end]))
    return out


def step_ends(tokens: Sequence[int], text: Callable[[Sequence[int]], str], delimiter: str = "###") -> list[int]:
    """Where each step of a turn ends: with the token that completes a delimiter, and at the end.

    The delimiter belongs to the step it closes. What follows the last one is a step only if it has a text other than
    white space: a stop token alone joins the step before. The released trainer also counts overlapping delimiters, so
    that a fourth "#" is a step of its own.
    """
    ends: list[int] = []
    for count in range(1, text(tokens).count(delimiter) + 1):
        low, high = ends[-1] if ends else 0, len(tokens)
        while low < high:  # the least number of tokens whose text holds `count` delimiters
            middle = (low + high) // 2
            low, high = (low, middle) if text(tokens[:middle]).count(delimiter) >= count else (middle + 1, high)
        if not ends or low > ends[-1]:
            ends.append(low)
    if ends and not text(tokens)[len(text(tokens[: ends[-1]])) :].strip():
        ends.pop()
    return [*ends, len(tokens)] if not ends or ends[-1] < len(tokens) else ends


@dataclass
class Judged:
    """A source whose rollouts are cut and scored by `judged`."""

    source: Source
    text: Callable[[Sequence[int]], str]
    judge: Verdict
    unit: Literal["prefix", "step"] = "prefix"
    delimiter: str = "###"

    def __call__(self, step: int) -> list[Rollout]:
        return judged(self.source(step), self.text, self.judge, self.unit, self.delimiter)

    def state_dict(self) -> dict[str, object]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.source.load_state_dict(state)
