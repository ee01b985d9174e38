"""Paired differences, their intervals, and the words chosen by the numbers.

A contrast gives a table of differences, treatment − control, a row per seed and a column per problem (one column for a
metric that is one number per run). Pairing removes whatever the two arms of a seed have in common.

Interval: mean ± t · se. The standard error comes from two bootstraps, over seeds and over problems, because both were
drawn: other seeds and other problems would have moved the mean. With S seeds, P problems and the residual mean square
MS = Σ (d_sp − d_s. − d_.p + d..)² / ((S − 1)(P − 1)):

    se² = se_seeds² + max(0, se_problems² − MS / (S · P))

each bootstrap variance times n / (n − 1), its known bias for few draws. The noise within a seed and problem is in both
bootstraps, so it is taken out of one (the variance of a mean in the two-way random-effects layout). t is Student's
quantile, with Satterthwaite's degrees of freedom: percentiles of five seeds are far too narrow, Student's interval
is not. If the seeds have different problems, only the seeds' means count: problems then are part of a seed's chance.

The p-value is of the same t; Holm's method corrects it over a family of contrasts. The words, with the difference
turned so that the expected direction is positive:

    not supported     the 95 % interval lies below `worth`: no difference that matters, or one the other way
    supported         otherwise, if Holm's p ≤ 0.05 and the difference has the expected sign
    too noisy to say  otherwise; always with fewer than 3 seeds
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np
from jaxtyping import Float

from postrl.errors import UserError
from postrl.study.definition import Contrast, Measured

ALPHA, RESAMPLES, LEAST_SEEDS = 0.05, 9999, 3
EXTRA = 'studies need more packages: pip install "postrl[study]"'
Word = Literal["supported", "not supported", "too noisy to say"]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; NaN where too few seeds leave it undefined.

    problems is 0 for a metric that is one number per run, or whose problems differ between seeds. undefined counts
    seeds, or problems, left out because a figure was not defined.
    """

    mean: float
    low: float
    high: float
    p: float  # two-sided, of a mean of zero
    seeds: int
    problems: int
    undefined: int


@dataclass(frozen=True)
class Finding:
    """One contrast with its numbers and its word. `p` is Holm's; `seeds` are those that both arms have."""

    contrast: Contrast
    estimate: Estimate
    p: float
    word: Word


def estimate(rows: Sequence[Measured]) -> Estimate:
    """The mean over seeds (one `Measured` each) and problems, with its interval."""
    table, undefined, crossed = _table(rows)
    seeds, problems = table.shape
    if not table.size:
        return Estimate(math.nan, math.nan, math.nan, math.nan, seeds, 0, undefined)
    mean = float(table.mean())
    error, freedom = standard_error(table)
    if math.isnan(error):
        low, high, p = math.nan, math.nan, math.nan
    else:
        from scipy.stats import t as student

        reach = float(student.ppf(1 - ALPHA / 2, freedom)) * error
        low, high = mean - reach, mean + reach
        p = float(2 * student.sf(abs(mean) / error, freedom)) if error > 0 else float(mean == 0)
    return Estimate(mean, low, high, p, seeds, problems if crossed else 0, undefined)


def standard_error(table: Float[np.ndarray, "S P"], resamples: int = RESAMPLES) -> tuple[float, float]:
    """Of the mean of a table (seeds × problems), with its degrees of freedom; NaN with fewer than two seeds."""
    seeds, problems = table.shape
    if seeds < 2:
        return math.nan, math.nan
    by_seed, by_problem = table.mean(1), table.mean(0)
    of_seeds = _bootstrap_variance(by_seed, resamples)
    of_problems = 0.0
    if problems > 1:
        residual = table - by_seed[:, None] - by_problem[None] + table.mean()
        noise = float((residual**2).sum()) / ((seeds - 1) * (problems - 1)) / table.size
        of_problems = max(0.0, _bootstrap_variance(by_problem, resamples) - noise)
    variance = of_seeds + of_problems
    parts = of_seeds**2 / (seeds - 1) + (of_problems**2 / (problems - 1) if problems > 1 else 0.0)
    return math.sqrt(variance), variance**2 / parts if parts > 0 else float(seeds - 1)


def _bootstrap_variance(values: Float[np.ndarray, "n"], resamples: int) -> float:
    """Of the mean of n values, without the bootstrap's bias (n − 1) / n. Values that are all equal have none."""
    stats = need_scipy()
    if np.ptp(values) == 0:
        return 0.0
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=resamples, method="percentile", rng=np.random.default_rng(len(values))
    )
    return float(found.standard_error) ** 2 * len(values) / (len(values) - 1)


def need_scipy() -> ModuleType:
    """scipy.stats. Raises UserError naming the extra that brings it."""
    try:
        from scipy import stats
    except ImportError as error:
        raise UserError(EXTRA) from error
    return stats


def paired(treatment: Mapping[int, Measured], control: Mapping[int, Measured]) -> list[Measured]:
    """Treatment − control for each seed that both have; problem by problem if they are about the same problems."""
    rows = []
    for seed in sorted(treatment.keys() & control.keys()):
        one, other = treatment[seed], control[seed]
        if set(one.items) == set(other.items) and one.items:
            values = dict(zip(other.items, other.values, strict=True))
            differences = tuple(v - values[item] for item, v in zip(one.items, one.values, strict=True))
            rows.append(Measured(one.metric, differences, one.items))
        else:
            rows.append(Measured(one.metric, (one.mean - other.mean,)))
    return rows


def _table(rows: Sequence[Measured]) -> tuple[Float[np.ndarray, "S P"], int, bool]:
    """(seeds × problems, how many seeds or problems were left out as undefined, whether columns are problems)."""
    if rows and rows[0].items and all(set(row.items) == set(rows[0].items) for row in rows):
        by_item = [dict(zip(row.items, row.values, strict=True)) for row in rows]
        whole = np.array([[values[item] for item in rows[0].items] for values in by_item], dtype=np.float64)
        defined = np.isfinite(whole).all(0)
        return whole[:, defined], int((~defined).sum()), True
    means = np.array([row.mean for row in rows], dtype=np.float64)
    defined = np.isfinite(means)
    return means[defined][:, None], int((~defined).sum()), False


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values; an undefined one counts as 1, so that it still makes the family larger."""
    if not p:
        return []
    try:
        from statsmodels.stats.multitest import multipletests
    except ImportError as error:
        raise UserError(EXTRA) from error
    known = [1.0 if math.isnan(value) else value for value in p]
    return np.asarray(multipletests(known, alpha=ALPHA, method="holm")[1]).tolist()


def word(contrast: Contrast, found: Estimate, p: float) -> Word:
    """The word for a contrast by its numbers; p is the one to judge by (corrected, or not)."""
    sign = 1 if contrast.expect == "higher" else -1
    if found.seeds < LEAST_SEEDS or math.isnan(found.low):
        return "too noisy to say"
    if max(sign * found.low, sign * found.high) < contrast.worth:
        return "not supported"
    return "supported" if p <= ALPHA and sign * found.mean > 0 else "too noisy to say"


def findings(
    contrasts: Sequence[Contrast], figures: Mapping[str, Mapping[int, Mapping[str, Measured]]], correct: bool = True
) -> list[Finding]:
    """Each contrast judged on figures[arm][seed][metric]; Holm over all of them, unless `correct` is off."""

    def of(arm: str, metric: str) -> dict[int, Measured]:
        return {seed: by_metric[metric] for seed, by_metric in figures.get(arm, {}).items() if metric in by_metric}

    estimates = [estimate(paired(of(c.treatment, c.metric), of(c.control, c.metric))) for c in contrasts]
    p = holm([e.p for e in estimates]) if correct else [e.p for e in estimates]
    return [Finding(c, e, q, word(c, e, q)) for c, e, q in zip(contrasts, estimates, p, strict=True)]
