"""Does the loud arm score higher than the plain one? A toy whose answer is known: no model, no training."""

import os
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from helpers_of_toy import noise

from postrl.study import (
    Arm,
    Base,
    BaseContext,
    Budget,
    Context,
    Contrast,
    Curve,
    Figures,
    Metric,
    Quick,
    Study,
    per_problem,
    scalar,
)

QUESTION = "Does the loud arm score higher than the plain one?"
HYPOTHESIS = "It does, by 0.3; the echo, which is the plain arm under another name, does not."


@dataclass(frozen=True)
class Sizes:
    problems: int = 12
    level: float = 0.4


def prepare(context: BaseContext[float]) -> None:
    (context.folder / "level.txt").write_text(str(context.options + noise(context.seed, 1, 0.1)[0]), encoding="utf-8")


LEVEL = Base("level", prepare, options=lambda sizes: sizes.level)


def run(context: Context[Sizes], gain: float, key: int) -> Figures:
    if os.environ.get("TOY_WAIT") == context.arm:
        time.sleep(60)
    (context.folder / "note.txt").write_text("a file of the arm", encoding="utf-8")
    if os.environ.get("TOY_CRASH") == f"{context.arm}/{context.seed}":
        raise ValueError("the toy was told to crash <b>here</b>")
    level = float((context.base / "level.txt").read_text(encoding="utf-8"))
    problems = np.random.default_rng(5).normal(0, 0.2, context.config.problems)
    values = level + gain + problems + noise(100 * context.seed + key, context.config.problems, 0.05)
    items = [f"problem {i}" for i in range(context.config.problems)]
    steps = tuple(float(i) for i in range(5))
    curve = Curve("reward", steps, tuple(gain * step / 4 for step in steps))
    return Figures((per_problem("score", items, values.tolist()), scalar("threads", context.threads)), (curve,))


def against_chance(context: Context[Sizes]) -> Figures:
    return run(context, gain=0.1, key=9)


STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        Arm("plain", partial(run, gain=0.0, key=1), (LEVEL,)),
        Arm("loud", partial(run, gain=0.3, key=2), (LEVEL,)),
        Arm("echo", partial(run, gain=0.0, key=3), (LEVEL,)),
        Arm("extra", against_chance, (LEVEL,), exploratory=True),
    ),
    seeds=(0, 1, 2),
    metrics=(Metric("score", "points, mean over problems"), Metric("threads", "threads of the run")),
    contrasts=(Contrast("loud", "plain", "score", "higher", worth=0.1),),
    must_fail=(Contrast("echo", "plain", "score", "higher", worth=0.1),),
    budget=Budget(minutes=5, run_minutes=2),
    quick=Quick(Sizes(problems=4), seeds=(0, 1)),
    exploratory=(Contrast("extra", "plain", "score", "higher", worth=0.05),),
    exploratory_seeds=(0, 1),
)
