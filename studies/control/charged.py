"""The mean return over equal numbers of environment steps, those that filled the critic's data included: after the run.

python studies/control/charged.py RUNS   (the `runs` folder of a full run; writes results/charged.json)

The study's own figure "charged" is one evaluation, at the end, where the arms are alike with or without the charge.
This one charges the figure of the core, a mean over the way: while its data are filled a policy stays where it starts.
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

from postrl.files import write_json

BUDGET, EVERY = 6000, 500  # environment steps


def mean_return(steps: list[float], returns: list[float]) -> float:
    """Of the latest policy at every `EVERY` steps up to `BUDGET`."""
    places = np.searchsorted(steps, np.arange(EVERY, BUDGET + 1, EVERY), side="right") - 1
    return float(np.mean(np.array(returns)[np.maximum(places, 0)]))


def curves(runs: Path, arm: str) -> dict[int, tuple[list[float], list[float]]]:
    """seed -> environment steps and returns."""
    found = {}
    for path in sorted((runs / arm).glob("*/figures.json")):
        curve = json.loads(path.read_text(encoding="utf-8"))["figures"]["curves"][0]
        found[int(path.parent.name)] = curve["x"], curve["y"]
    return found


def difference(first: dict[int, float], second: dict[int, float]) -> dict[str, float]:
    """Mean over the seeds of both, and its 95 % interval by Student's t."""
    pairs = np.array([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])
    half = stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / np.sqrt(len(pairs))
    return {"mean": pairs.mean(), "low": pairs.mean() - half, "high": pairs.mean() + half, "seeds": len(pairs)}


def main(runs: Path) -> None:
    """Print and write the figures."""
    arms = ("random", "single", "pooled", "buffer", "dealt")
    found = {arm: curves(runs, arm) for arm in arms}
    charged = {arm: {seed: mean_return(*curve) for seed, curve in found[arm].items()} for arm in arms}
    plain = {arm: {seed: float(np.mean(curve[1][1:])) for seed, curve in found[arm].items()} for arm in arms}
    result = {
        "start": {str(seed): curve[1][0] for seed, curve in found["random"].items()},
        "charged": {
            f"{a} - {b}": difference(charged[a], charged[b])
            for a, b in (("single", "random"), ("pooled", "random"), ("pooled", "single"))
        },
        "uncharged": {"buffer - random": difference(plain["buffer"], plain["random"])},
    }
    write_json(Path(__file__).parent / "results" / "charged.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
