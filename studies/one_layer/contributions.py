"""What each layer contributes, and whether layers keep their rank, from the results of an --extended run.

python studies/one_layer/contributions.py FOLDER   (which holds results.json; writes contributions.json beside it)
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from postrl.errors import UserError
from postrl.files import read_json, write_json
from postrl.papers.one_layer import Contribution, contribution
from postrl.study.statistics import need_scipy

RESAMPLES = 10_000


@dataclass(frozen=True)
class Condition:
    """A task and a method: the arms that train each layer in order, the one that trains all, the untrained one."""

    name: str
    layers: tuple[str, ...]
    whole: str
    base: str


CONDITIONS = (
    Condition("root, GRPO", (*(f"root-grpo-{k}" for k in (0, 1)), "middle", *(f"root-grpo-{k}" for k in (3, 4, 5))),
              "all", "base"),
    Condition("root, Dr. GRPO", tuple(f"root-dr-grpo-{k}" for k in range(6)), "root-dr-grpo-all", "base"),
    Condition("mirror, GRPO", tuple(f"mirror-grpo-{k}" for k in range(6)), "mirror-grpo-all", "mirror-base"),
)  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """Spearman's ρ of the layers' mean scores in two conditions, with the ends of its 95 % interval."""

    first: str
    second: str
    rho: float
    low: float
    high: float


@dataclass(frozen=True)
class Scores:
    """Of some arms of one task: [arms, seeds, problems]."""

    items: tuple[str, ...]
    seeds: tuple[int, ...]
    values: Float[np.ndarray, "A S P"]


def scores(runs: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> Scores:
    """The shares of right answers, at the seeds that all the arms have. Raises UserError if there are under two."""
    found = {(run["arm"], run["seed"]): run["measured"][0] for run in runs if run["arm"] in arms}
    seeds = [seed for seed in sorted({seed for _, seed in found}) if all((arm, seed) in found for arm in arms)]
    if len(seeds) < 2:
        raise UserError(f"arms {', '.join(arms)} have {len(seeds)} seeds in common: run the study with --extended")
    items = tuple(found[arms[0], seeds[0]]["items"])
    if not items:
        raise UserError("the results hold no values per problem: make the study's evaluation smaller")
    by_item = [[dict(zip(m["items"], m["values"], strict=True)) for m in (found[arm, s] for s in seeds)]
               for arm in arms]  # fmt: skip
    values = np.array([[[values[item] for item in items] for values in row] for row in by_item], dtype=np.float64)
    return Scores(items, tuple(seeds), values)


def contributions(runs: Sequence[Mapping[str, Any]], condition: Condition) -> list[Contribution | str]:
    """C of each layer, or why it is refused."""
    there = scores(runs, (*condition.layers, condition.whole, condition.base)).values
    *layers, whole, base = there
    return [_contribution(layer, whole, base) for layer in layers]


def _contribution(layer: np.ndarray, whole: np.ndarray, base: np.ndarray) -> Contribution | str:
    try:
        return contribution(layer, whole, base, resamples=RESAMPLES)
    except UserError as refusal:
        return str(refusal)


def agreement(
    runs: Sequence[Mapping[str, Any]], first: Condition, second: Condition, resamples: int = RESAMPLES
) -> Agreement:
    """ρ between two conditions. A draw takes the same seeds (each is a base) for both, and the same problems if the
    task is the same. An interval of six layers is wide: ρ = .83 is where its two-sided p falls under .05."""
    one, other = (scores(runs, condition.layers) for condition in (first, second))
    if one.seeds != other.seeds:
        raise UserError(f"{first.name} and {second.name} have other seeds: run the study with --extended")
    rng, draws = np.random.default_rng(0), []
    for _ in range(resamples):
        seeds = rng.integers(0, len(one.seeds), len(one.seeds))
        here = rng.integers(0, len(one.items), len(one.items))
        there = here if one.items == other.items else rng.integers(0, len(other.items), len(other.items))
        draws.append(spearman(_means(one, seeds, here), _means(other, seeds, there)))
    low, high = np.quantile(draws, [0.025, 0.975])
    rho = spearman(one.values.mean((1, 2)), other.values.mean((1, 2)))
    return Agreement(first.name, second.name, rho, float(low), float(high))


def _means(scores: Scores, seeds: np.ndarray, problems: np.ndarray) -> np.ndarray:
    return scores.values[:, seeds][:, :, problems].mean((1, 2))


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Of two rankings, ties at their mean rank; 0 if one of them has no order at all."""
    ranks = [need_scipy().rankdata(x) for x in (first, second)]
    return 0.0 if min(np.ptp(r) for r in ranks) == 0 else float(np.corrcoef(*ranks)[0, 1])


def between_seeds(runs: Sequence[Mapping[str, Any]], condition: Condition) -> list[float]:
    """ρ of the layers' scores for each pair of seeds: two bases of one kind."""
    values = scores(runs, condition.layers).values.mean(2)
    return [spearman(values[:, a], values[:, b]) for a, b in combinations(range(values.shape[1]), 2)]


def main(folder: Path) -> None:
    runs = read_json(folder / "results.json", "the results of a study")["runs"]
    found = {c.name: contributions(runs, c) for c in CONDITIONS}
    agree = [agreement(runs, a, b) for a, b in combinations(CONDITIONS, 2)]
    print("| layer | " + " | ".join(found) + " |\n|" + "---|" * (1 + len(found)))
    for k, row in enumerate(zip(*found.values(), strict=True)):
        print(f"| {k} | " + " | ".join(map(told, row)) + " |")
    for a in agree:
        print(f"ρ({a.first}; {a.second}) = {a.rho:.2f} ({a.low:.2f} … {a.high:.2f})")
    pairs = {c.name: between_seeds(runs, c) for c in CONDITIONS}
    for name, rho in pairs.items():
        print(f"ρ between seeds, {name}: {', '.join(f'{r:.2f}' for r in rho)}")
    plain = {name: [c if isinstance(c, str) else asdict(c) for c in row] for name, row in found.items()}
    whole = {"contributions": plain, "agreement": [asdict(a) for a in agree], "between_seeds": pairs}
    write_json(folder / "contributions.json", whole)


def told(found: Contribution | str) -> str:
    """A cell of the table."""
    return "refused" if isinstance(found, str) else f"{found.value:.2f} ({found.low:.2f} … {found.high:.2f})"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
