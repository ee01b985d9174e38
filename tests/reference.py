"""Every method again, from its equations, in plain Python numbers and loops; shares nothing with src but the record.

One function per method of the shelf, named like it and with the same options. Derivatives are written by hand.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from laws import Case, near, update
from postrl.batch import Batch
from postrl.method import Method


@dataclass
class Answer:
    """A unit: its group and cluster, its reward (None = missing), and its sampled tokens."""

    group: int
    cluster: int
    rewards: list[float | None]
    tokens: list[tuple[int, int]] = field(default_factory=list)  # (row, column)
    new: list[float] = field(default_factory=list)  # log-probabilities
    old: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass
class Result:
    """A, W and the gradient with respect to log π as [B][T] lists, and the loss."""

    advantage: list[list[float]]
    weight: list[list[float]]
    gradient: list[list[float]]
    loss: float = 0.0
    values: list[list[float]] | None = None  # the gradient with respect to a critic's values


def answers(batch: Batch, logp) -> list[Answer]:
    groups, rewards = batch.groups.tolist(), batch.rewards.tolist()
    out = [
        Answer(groups[n][0], groups[n][-1], [None if math.isnan(r) else r for r in rewards[n]])
        for n in range(batch.size)
    ]
    mask, new, old = batch.mask.tolist(), logp.tolist(), batch.logp_old.tolist()
    for b, n in enumerate(batch.unit.tolist()):
        for t, sampled in enumerate(mask[b]):
            if sampled:
                out[n].tokens.append((b, t))
                out[n].new.append(new[b][t])
                out[n].old.append(old[b][t])
    return out


def total(answer: Answer, weights: Sequence[float], missing: str) -> float | None:
    used = [(r, w) for r, w in zip(answer.rewards, weights, strict=True) if w != 0]
    if missing == "exclude" and any(r is None for r, _ in used):
        return None
    if all(r is None for r, _ in used):
        return None
    return sum(r * w for r, w in used if r is not None)


def over_group(units: list[Answer], rewards: list[float | None], credit: Callable, singleton: str, min_spread: float):
    """credit(reward, rewards of the group) for each unit, with the rules for missing, lone and equal rewards."""
    out = []
    for unit, reward in zip(units, rewards, strict=True):
        if reward is None:
            out.append(0.0)
            continue
        group = [r for u, r in zip(units, rewards, strict=True) if u.group == unit.group and r is not None]
        if len(group) == 1:
            out.append(reward if singleton == "raw" else 0.0)
        elif max(group) - min(group) <= min_spread:
            out.append(0.0)
        else:
            out.append(credit(reward, group))
    return out


def standard_score(ddof: int, eps: float) -> Callable[[float, list[float]], float]:
    def credit(reward: float, group: list[float]) -> float:
        mean = sum(group) / len(group)
        variance = sum((r - mean) ** 2 for r in group) / max(1, len(group) - ddof)
        return (reward - mean) / (math.sqrt(variance) + eps)

    return credit


def credits_of(units, batch, ddof=1, eps=1e-6, singleton="zero", min_spread=1e-6, missing="exclude", shaping=None):
    rewards = [total(u, batch.reward_weights.tolist(), missing) for u in units]
    if shaping is not None:
        rewards = [None if r is None else r + shaping(u.length) for u, r in zip(units, rewards, strict=True)]
    return over_group(units, rewards, standard_score(ddof, eps), singleton, min_spread)


def assemble(batch: Batch, units: list[Answer], credit, weight: Callable[[Answer], float], token: Callable) -> Result:
    """token(answer, k, A) -> (l, dl/dlog π of the k-th token); the sum over tokens of W·l."""
    grid = [[[0.0] * batch.mask.shape[1] for _ in range(batch.mask.shape[0])] for _ in range(3)]
    result = Result(*grid)
    for unit, a in zip(units, credit, strict=True):
        for k, (b, t) in enumerate(unit.tokens):
            w = weight(unit)
            loss, slope = token(unit, k, a)
            result.advantage[b][t], result.weight[b][t], result.gradient[b][t] = a, w, w * slope
            result.loss += w * loss
    return result


def counted(units: list[Answer], count_empty: bool) -> int:
    return max(1, len(units) if count_empty else sum(u.length > 0 for u in units))


def ratio(unit: Answer, k: int) -> float:
    return math.exp(unit.new[k] - unit.old[k])


def surrogate(r: float, a: float, low: float, high: float, dual: float | None = None) -> tuple[float, float]:
    """PPO's clipped loss and its derivative with respect to log r."""
    clipped = min(max(r, 1 - low), 1 + high)
    loss, slope = (-r * a, -r * a) if r * a <= clipped * a else (-clipped * a, 0.0)
    if dual is not None and a < 0 and loss > -dual * a:
        return -dual * a, 0.0
    return loss, slope


# ---------------------------------------------------------------- the methods


def reinforce(batch, logp, missing="exclude", count_empty=False) -> Result:
    units = answers(batch, logp)
    credit = [total(u, batch.reward_weights.tolist(), missing) or 0.0 for u in units]
    n = counted(units, count_empty)
    return assemble(batch, units, credit, lambda u: 1 / n, lambda u, k, a: (-a * u.new[k], -a))


def rloo(batch, logp, singleton="zero", min_spread=1e-6, missing="exclude", count_empty=False) -> Result:
    units = answers(batch, logp)
    rewards = [total(u, batch.reward_weights.tolist(), missing) for u in units]

    def credit(reward, group):
        others = list(group)
        others.remove(reward)
        return reward - sum(others) / len(others)

    n = counted(units, count_empty)
    chosen = over_group(units, rewards, credit, singleton, min_spread)
    return assemble(batch, units, chosen, lambda u: 1 / n, lambda u, k, a: (-a * u.new[k], -a))


def grpo(batch, logp, low=0.2, high=0.2, dual=None, count_empty=False, **statistics) -> Result:
    units = answers(batch, logp)
    n = counted(units, count_empty)
    return assemble(
        batch,
        units,
        credits_of(units, batch, **statistics),
        lambda u: 1 / (n * u.length),
        lambda u, k, a: surrogate(ratio(u, k), a, low, high, dual),
    )


def dr_grpo(
    batch, logp, length=3000, low=0.2, high=0.2, singleton="zero", min_spread=1e-6, missing="exclude", count_empty=False
) -> Result:
    units = answers(batch, logp)
    rewards = [total(u, batch.reward_weights.tolist(), missing) for u in units]
    credit = over_group(units, rewards, lambda r, group: r - sum(group) / len(group), singleton, min_spread)
    n = counted(units, count_empty)
    return assemble(
        batch, units, credit, lambda u: 1 / (n * length), lambda u, k, a: surrogate(ratio(u, k), a, low, high)
    )


def dapo(
    batch, logp, low=0.2, high=0.28, correct="", max_length=20480, cache=4096, penalty=1.0, dual=None, **statistics
) -> Result:
    units = answers(batch, logp)

    def overlong(length: int) -> float:
        if length <= max_length - cache:
            return 0.0
        if length <= max_length:
            return penalty * ((max_length - cache) - length) / cache
        return -penalty

    tokens = sum(u.length for u in units)
    return assemble(
        batch,
        units,
        credits_of(units, batch, shaping=overlong, **statistics),
        lambda u: 1 / tokens,
        lambda u, k, a: surrogate(ratio(u, k), a, low, high, dual),
    )


def cispo(batch, logp, high=5.0, low=None, bound="absolute", **statistics) -> Result:
    units = answers(batch, logp)
    shift = 1.0 if bound == "delta" else 0.0
    floor = 0.0 if low is None else (1 - low if bound == "delta" else low)
    tokens = sum(u.length for u in units)

    def token(u, k, a):
        r = min(max(ratio(u, k), floor), shift + high)
        return -r * a * u.new[k], -r * a

    return assemble(batch, units, credits_of(units, batch, **statistics), lambda u: 1 / tokens, token)


def gspo(batch, logp, low=3e-4, high=4e-4, count_empty=False, **statistics) -> Result:
    """The sequence form: one ratio per answer, (1/N) Σ_i l_i, whose slope every token shares 1/|o_i|."""
    units = answers(batch, logp)
    n = counted(units, count_empty)

    def token(u, k, a):
        s = math.exp(sum(new - old for new, old in zip(u.new, u.old, strict=True)) / u.length)
        return surrogate(s, a, low, high)

    return assemble(batch, units, credits_of(units, batch, **statistics), lambda u: 1 / (n * u.length), token)


def gmpo(batch, logp, low=0.4, high=0.4, count_empty=False, **statistics) -> Result:
    """(Π_t clipped r)^(1/|o|) as a product; a token past its bound has no slope."""
    units = answers(batch, logp)
    n = counted(units, count_empty)

    def token(u, k, a):
        product = 1.0
        for j in range(u.length):
            r = ratio(u, j)
            product *= min(r, math.exp(high)) if a > 0 else max(r, math.exp(-low))
        mean = product ** (1 / u.length)
        past = ratio(u, k) > math.exp(high) if a > 0 else ratio(u, k) < math.exp(-low)
        return -a * mean, 0.0 if past else -a * mean

    return assemble(batch, units, credits_of(units, batch, **statistics), lambda u: 1 / (n * u.length), token)


def reco(
    batch, logp, typical="geometric", cap=5.0, rescale=True, response_level=True, token_level=True, trust="ratio",
    low=0.2, high=0.2, floor=1e-5, clusters="answer", **statistics,
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    n = counted(units, False)

    def group(u: Answer) -> list[Answer]:
        return [v for v in units if v.group == u.group and v.length]

    def raw(u: Answer) -> float:
        probability = 1.0
        for old in u.old:
            probability *= math.exp(old)
        if typical == "geometric":
            probability = probability ** (1 / u.length)
        if typical == "empirical":
            probability = sum(v.cluster == u.cluster for v in group(u)) / len(group(u))
        return min(1 / (len(group(u)) * probability), cap)

    def response(u: Answer) -> float:
        if not response_level:
            return 1.0
        return raw(u) / (sum(raw(v) for v in group(u)) / len(group(u)) if rescale else 1.0)

    def spread(logp: float) -> float:
        p = math.exp(logp)
        return p * max(1 - p, floor)

    def token(u, k, a):
        if not token_level:
            return surrogate(ratio(u, k), a, low, high)
        v = spread(u.new[k]) / spread(u.old[k])
        tested = ratio(u, k) if trust == "ratio" else v
        if (a > 0 and tested > 1 + high) or (a < 0 and tested < 1 - low):
            return 0.0, 0.0
        return -v * a * u.new[k], -v * a

    return assemble(batch, units, credits_of(units, batch, **statistics), lambda u: response(u) / (n * u.length), token)


def steps_of(batch, units):
    """For each unit, (segment, tokens as positions k of the unit) pairs, read token by token."""
    segment = batch.segment.tolist()
    return [[segment[b][t] for b, t in u.tokens] for u in units]


def per_token(batch, units, credit, weight, slope) -> Result:
    """Like `assemble`, with credit(n, k) and weight(n, k) of the k-th token of unit n."""
    grid = [[[0.0] * batch.mask.shape[1] for _ in range(batch.mask.shape[0])] for _ in range(3)]
    result = Result(*grid)
    for n, unit in enumerate(units):
        for k, (b, t) in enumerate(unit.tokens):
            a, w = credit(n, k), weight(n, k)
            loss, d = slope(unit, k, a)
            result.advantage[b][t], result.weight[b][t], result.gradient[b][t] = a, w, w * d
            result.loss += w * loss
    return result


def gigpo(
    batch, logp, omega=1.0, gamma=0.95, norm="mean_norm", steps="world", singleton="zero", low=0.2, high=0.2,
    dual=None, ddof=1, eps=1e-6, min_spread=1e-6, missing="exclude",
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    rewards = [total(u, batch.reward_weights.tolist(), missing) for u in units]
    score = standard_score(ddof, eps) if norm == "mean_std_norm" else (lambda r, group: r - sum(group) / len(group))
    episode = over_group(units, rewards, score, singleton, min_spread)
    seen, given = batch.step_groups.tolist(), batch.step_rewards.tolist()
    visits = []  # one entry per step, as if it were a unit of a group named by task and observation
    for n, u in enumerate(units):
        there = [k for k, observation in enumerate(seen[n]) if observation >= 0]
        for k in there:
            back = 0.0
            for j in range(k, len(seen[n])):
                r = (rewards[n] if j == there[-1] else 0.0) if steps == "outcome" else given[n][j]
                r = 0.0 if r is None or math.isnan(r) else r
                back += gamma ** (j - k) * r
            visits.append((n, k, Answer((u.group, seen[n][k]), 0, []), None if rewards[n] is None else back))
    step = over_group([v[2] for v in visits], [v[3] for v in visits], score, "zero", min_spread)
    gain = {(n, k): a for (n, k, _, _), a in zip(visits, step, strict=True)}
    where, tokens = steps_of(batch, units), sum(u.length for u in units)
    return per_token(
        batch, units,
        lambda n, k: episode[n] + omega * gain.get((n, where[n][k]), 0.0),
        lambda n, k: 1 / tokens,
        lambda u, k, a: surrogate(ratio(u, k), a, low, high, dual),
    )  # fmt: skip


def ppo(
    batch, logp, values, gamma=1.0, lam=0.95, lam_critic=1.0, gap="carry", whiten=True, low=0.2, high=0.2, dual=None,
    value_coef=1.0, value_clip=0.2, missing="exclude",
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    rewards = [total(u, batch.reward_weights.tolist(), missing) for u in units]
    rows, columns = batch.mask.shape
    sampled = [[t for t in range(columns) if batch.mask[b, t]] for b in range(rows)]
    old, after = batch.values.tolist(), [0.0] * rows if batch.value_after is None else batch.value_after.tolist()

    def credit(b: int, r: float, lam: float) -> dict[int, float]:
        """A of each sampled token of a row, by the sum over later one-step errors."""
        path = sampled[b] if gap == "carry" else list(range(sampled[b][0], sampled[b][-1] + 1)) if sampled[b] else []
        v = [old[b][t] if t in sampled[b] else 0.0 for t in path]
        errors = [(gamma * v[k + 1] if k + 1 < len(path) else r + gamma * after[b]) - v[k] for k in range(len(path))]
        sums = [sum((gamma * lam) ** (j - k) * errors[j] for j in range(k, len(path))) for k in range(len(path))]
        return {t: a for t, a in zip(path, sums, strict=True) if t in sampled[b]}

    taught = [b for b, n in enumerate(batch.unit.tolist()) if rewards[n] is not None]
    gain = {(b, t): a for b in taught for t, a in credit(b, rewards[int(batch.unit[b])], lam).items()}
    goal = {
        (b, t): a + old[b][t] for b in taught for t, a in credit(b, rewards[int(batch.unit[b])], lam_critic).items()
    }
    if whiten and gain:
        mean = sum(gain.values()) / len(gain)
        variance = sum((a - mean) ** 2 for a in gain.values()) / max(1, len(gain) - 1)
        gain = {at: (a - mean) / math.sqrt(variance + 1e-8) for at, a in gain.items()}
    tokens = max(1, sum(u.length for u in units))
    grids = [[[0.0] * columns for _ in range(rows)] for _ in range(4)]
    result = Result(grids[0], grids[1], grids[2], 0.0, grids[3])
    for u in units:
        for k, (b, t) in enumerate(u.tokens):
            a = gain.get((b, t), 0.0)
            loss, slope = surrogate(ratio(u, k), a, low, high, dual)
            result.advantage[b][t], result.weight[b][t] = a, 1 / tokens
            result.gradient[b][t] = slope / tokens
            result.loss += loss / tokens
    for (b, t), r in goal.items():
        v, before = float(values[b, t]), old[b][t]
        error, slope = (v - r) ** 2, 2 * (v - r)
        if value_clip is not None:
            near_old = min(max(v, before - value_clip), before + value_clip)
            if (near_old - r) ** 2 > error:
                error, slope = (near_old - r) ** 2, 2 * (v - r) if near_old == v else 0.0
        result.loss += value_coef * error / len(goal)
        result.values[b][t] = value_coef * slope / len(goal)
    return result


def exprl(
    batch, logp, credit="process", single_segment="zero", clip_overflow=True, low=0.2, high=None, singleton="zero",
    ddof=1, eps=1e-6, min_spread=1e-6,
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    rewards = [total(u, batch.reward_weights.tolist(), "exclude") for u in units]
    over = [clip_overflow and stop == 1 for stop in batch.stop.tolist()]
    where, given = steps_of(batch, units), batch.step_rewards.tolist()
    scores: list[list[float] | None] = []  # of each segment; None: out of the loss
    for n in range(len(units)):
        length = max(where[n], default=-1) + 1
        s = [0.0 if over[n] else (given[n][k] if k < len(given[n]) else math.nan) for k in range(length)]
        scores.append(None if any(map(math.isnan, s)) or (rewards[n] is None and not over[n]) else s)
    if credit == "outcome":
        rewards = [0.0 if o else r for o, r in zip(over, rewards, strict=True)]
        scores = [None if r is None else [] for r in rewards]
        whole = over_group(units, rewards, standard_score(ddof, eps), singleton, min_spread)

    def siblings(n):
        return [s for u, s in zip(units, scores, strict=True) if u.group == units[n].group and s]

    def step(n, k):
        s = scores[n]
        if s is None:
            return 0.0
        if credit == "outcome":
            return whole[n]
        t = where[n][k]
        if credit == "end_norm":
            return s[t] - s[-1] if t < len(s) - 1 else s[t]
        if credit == "group_norm":
            everything = [x for other in siblings(n) for x in other]
            return s[t] - sum(everything) / len(everything)
        if len(s) == 1 and single_segment == "raw":
            return s[0]
        if len(s) == 1 and single_segment == "group_mean":
            ends = [other[-1] for other in siblings(n)]
            return s[0] - sum(ends) / len(ends)
        return s[0] - s[-1] if t == 0 else s[t] - s[t - 1]

    tokens = sum(u.length for u, s in zip(units, scores, strict=True) if s is not None)
    if high is None:
        high = 0.28 if credit == "outcome" else 0.26
    return per_token(
        batch, units, step,
        lambda n, k: 0.0 if scores[n] is None else 1 / tokens,
        lambda u, k, a: surrogate(ratio(u, k), a, low, high),
    )  # fmt: skip


def clip_higher(batch, logp, low=0.2, high=0.28, **options) -> Result:
    return grpo(batch, logp, low, high, **options)


def masked_cispo(
    batch, logp, low=0.2, high=0.3, floor=0.0, ceiling=1.45, count_empty=False, **statistics
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    n = counted(units, count_empty)

    def token(u, k, a):
        r = ratio(u, k)
        if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low):
            return 0.0, 0.0
        held = min(max(r, floor), ceiling)
        return -held * a * u.new[k], -held * a

    return assemble(batch, units, credits_of(units, batch, **statistics), lambda u: 1 / (n * u.length), token)


def acpo(
    batch, logp, alpha=3.0, base=0.2, least=0.0, most=3.0, bins=5, bin_by=None, sigma="std", variant="paper", dual=3.0,
    count_empty=False, **statistics,
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    n = counted(units, count_empty)
    by_old = bin_by == "behaviour" or (bin_by is None and variant == "paper")

    def place(u, k):
        p = math.exp(u.old[k] if by_old else u.new[k])
        return next((j for j in range(bins) if j / bins <= p < (j + 1) / bins), bins - 1)

    def middle(x):
        x = sorted(x)
        return (x[(len(x) - 1) // 2] + x[len(x) // 2]) / 2

    ratios = {}
    for u in units:
        for k in range(u.length):
            ratios.setdefault(place(u, k), []).append(ratio(u, k))
    width = {}
    for j, inside in ratios.items():
        mean = sum(inside) / len(inside)
        spread = math.sqrt(sum((r - mean) ** 2 for r in inside) / len(inside))
        if sigma == "robust":
            spread = 1.4826 * middle([abs(r - middle(inside)) for r in inside])
        width[j] = min(max(base + alpha * math.sqrt(spread**2 + 1e-8), least), most)

    def token(u, k, a):
        epsilon = width[place(u, k)]
        return surrogate(ratio(u, k), a, epsilon, epsilon, dual)

    return assemble(batch, units, credits_of(units, batch, **statistics), lambda u: 1 / (n * u.length), token)


def per_reward(batch, units, singleton, min_spread, missing, ddof, eps) -> list[list[float] | None]:
    """A^k of each unit, for the rewards with a weight; None for a unit that is missing."""
    used = [k for k, w in enumerate(batch.reward_weights.tolist()) if w != 0]
    rewards = [[u.rewards[k] for k in used] for u in units]
    gone = [(any if missing == "exclude" else all)(r is None for r in row) for row in rewards]
    score = standard_score(ddof, eps)
    columns = []
    for k in range(len(used)):
        column = [None if g else row[k] for g, row in zip(gone, rewards, strict=True)]
        columns.append(over_group(units, column, score, singleton, min_spread))
    return [None if g else [column[n] for column in columns] for n, g in enumerate(gone)]


def whitened_sums(units, sums: list[float | None], whiten, shift_mean, eps) -> list[float]:
    """(S − mean) / deviation over responses or over tokens; 0 for None."""
    counts = [0 if s is None else (u.length if whiten == "token" else 1) for u, s in zip(units, sums, strict=True)]
    if whiten is None:
        return [s or 0.0 for s in sums]
    number = sum(counts)
    mean = sum((s or 0.0) * c for s, c in zip(sums, counts, strict=True)) / max(1, number) if shift_mean else 0.0
    far = [0.0 if s is None else s - mean for s in sums]
    if whiten == "response" and all(abs(x) <= 1e-6 for x in far):
        return [0.0] * len(far)
    variance = sum(x * x * c for x, c in zip(far, counts, strict=True)) / max(1, number - (1 if shift_mean else 0))
    scale = math.sqrt(variance + eps**2) if whiten == "token" else math.sqrt(variance) + eps
    return [x / scale for x in far]


def gdpo(
    batch, logp, whiten="response", shift_mean=True, whiten_eps=1e-4, ddof=1, eps=1e-6, singleton="zero",
    min_spread=1e-6, missing="exclude", low=0.2, high=0.2, dual=None, count_empty=False,
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    n, weights = counted(units, count_empty), [w for w in batch.reward_weights.tolist() if w != 0]
    parts = per_reward(batch, units, singleton, min_spread, missing, ddof, eps)
    sums = [None if p is None else sum(w * a for w, a in zip(weights, p, strict=True)) for p in parts]
    credit = whitened_sums(units, sums, whiten, shift_mean, whiten_eps)
    return assemble(
        batch, units, credit, lambda u: 1 / (n * u.length), lambda u, k, a: surrogate(ratio(u, k), a, low, high, dual)
    )


def gd2po(
    batch, logp, filter="hard", threshold=0.8, query_weight="loss", sign_eps=1e-3, whiten="response", shift_mean=True,
    whiten_eps=1e-4, ddof=1, eps=1e-6, singleton="zero", min_spread=1e-6, missing="exclude", low=0.2, high=0.2,
    dual=None, count_empty=False,
) -> Result:  # fmt: skip
    units = answers(batch, logp)
    n, weights = counted(units, count_empty), [w for w in batch.reward_weights.tolist() if w != 0]
    parts = per_reward(batch, units, singleton, min_spread, missing, ddof, eps)

    def keeps(p) -> bool:
        signs = {math.copysign(1, a * w) for a, w in zip(p, weights, strict=True) if abs(a) > sign_eps}
        agreement = abs(sum(a * w for a, w in zip(p, weights, strict=True)))
        size = sum(abs(a * w) for a, w in zip(p, weights, strict=True))
        loud = filter == "snr" and len(signs) == 2 and agreement >= threshold * size
        return filter is None or len(signs) < 2 or loud

    kept = [p is not None and keeps(p) for p in parts]
    rho = []
    for u in units:
        group = [k for v, p, k in zip(units, parts, kept, strict=True) if v.group == u.group and p is not None]
        rho.append(1.0 if query_weight is None else sum(group) / len(group) if group else 0.0)
    sums = []
    for p, k, q in zip(parts, kept, rho, strict=True):
        s = sum(w * a for w, a in zip(weights, p, strict=True)) if k else None
        sums.append(q * s if k and query_weight == "pre_whiten" else s)
    credit = whitened_sums(units, sums, whiten, shift_mean, whiten_eps)
    if query_weight == "loss":
        credit = [q * a for q, a in zip(rho, credit, strict=True)]
    return assemble(
        batch, units, credit, lambda u: 1 / (n * u.length), lambda u, k, a: surrogate(ratio(u, k), a, low, high, dual)
    )


def rft(batch, logp, correct=None, threshold=1.0) -> Result:
    units = answers(batch, logp)
    rewards = [total(u, batch.reward_weights.tolist(), "exclude") for u in units]
    if correct is not None:
        rewards = [u.rewards[batch.reward_names.index(correct)] for u in units]
    good = [
        1.0 if kind == 2 or (r is not None and r > threshold - 1e-6) else 0.0
        for r, kind in zip(rewards, batch.kind.tolist(), strict=True)
    ]
    number = sum(g for g, u in zip(good, units, strict=True) if u.length)
    return per_token(
        batch, units,
        lambda n, k: good[n],
        lambda n, k: good[n] / number if number else 0.0,
        lambda u, k, a: (-a * u.new[k], -a),
    )  # fmt: skip


def dpo(batch, logp, beta=0.1, kind="sigmoid", label_smoothing=0.0, length_normalised=False) -> Result:
    """Each pair by itself: its loss, and what it gives to the tokens of its two answers."""
    units = answers(batch, logp)
    rewards = [total(u, batch.reward_weights.tolist(), "exclude") for u in units]
    ref = batch.logp_ref.tolist()

    def gain(u):
        change = sum(new - ref[b][t] for new, (b, t) in zip(u.new, u.tokens, strict=True))
        return change / u.length if length_normalised else change

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    def one(gap):
        """Loss of a pair and its derivative with respect to the gap."""
        if kind == "ipo":
            return (gap - 1 / (2 * beta)) ** 2, 2 * (gap - 1 / (2 * beta))
        e = label_smoothing
        loss = -(1 - e) * math.log(sigmoid(beta * gap)) - e * math.log(sigmoid(-beta * gap))
        return loss, -(1 - e) * beta * sigmoid(-beta * gap) + e * beta * sigmoid(beta * gap)

    pairs = [
        (i, j)
        for i, a in enumerate(units)
        for j, b in enumerate(units)
        if a.group == b.group and a.length and b.length and None not in (rewards[i], rewards[j])
        and rewards[i] > rewards[j] + 1e-6
    ]  # fmt: skip
    groups = {units[i].group: [p for p in pairs if units[p[0]].group == units[i].group] for i, _ in pairs}
    slope, value = [0.0] * len(units), 0.0
    for members in groups.values():
        for i, j in members:
            loss, d = one(gain(units[i]) - gain(units[j]))
            value += loss / len(members) / len(groups)
            for n, side in ((i, d), (j, -d)):
                slope[n] += side / len(members) / len(groups) / (units[n].length if length_normalised else 1)

    def paired(n):
        return any(n in p for p in pairs)

    def weight(n, k):
        there = [u.length for m, u in enumerate(units) if paired(m) and u.group == units[n].group]
        return 1 / (len(groups) * sum(there)) if paired(n) else 0.0

    def credit(n, k):
        members = groups.get(units[n].group, [])
        return sum((n == i) - (n == j) for i, j in members) / len(members) if members else 0.0

    result = per_token(batch, units, credit, weight, lambda u, k, a: (0.0, 0.0))
    result.loss = value
    for n, u in enumerate(units):
        for b, t in u.tokens:
            result.gradient[b][t] = slope[n]
    return result


# ---------------------------------------------------------------- comparison


def agree(method: Method, case: Case, **options: object) -> None:
    """Advantage, weights, loss and gradient of a one-term method are those of the function of its name: 1e-10."""
    got = update(method, case.batch, case.now)
    loops = vars(sys.modules[__name__]).get(method.name)
    assert loops is not None, f"tests/reference.py has no function {method.name}: write the equation as plain loops"
    parts = {name: case.now[name] for name in ("values",) if name in method.needs}
    wanted = loops(case.batch, case.now["logp"], **parts, **options)
    extra = [] if wanted.values is None else [("gradient of values", got.gradient["values"], wanted.values)]
    for what, x, y in (
        *extra,
        ("advantage", torch.where(case.batch.mask, got.advantage, 0), wanted.advantage),
        ("weight", got.weights[0], wanted.weight),
        ("loss", got.loss, wanted.loss),
        ("gradient", got.gradient["logp"], wanted.gradient),
    ):
        near(x, torch.tensor(y, dtype=torch.float64).reshape(x.shape), what)
