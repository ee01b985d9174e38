"""Every method of the shelf on a real language model, briefly: the same problems, seed and settings for each.

    postrl train shelf --methods grpo acpo

Twenty-four steps of 4 × 8 short answers show that a method runs on a pretrained model, and what its own figures do
there. They are far too few to compare methods; studies do that, on small models. GDPO and GD²PO get the second reward
they are for, PPO a critic, and ExpRL scores whole answers, for no judge is at hand. An answer is GiGPO's only step, so
its credit is the episode's twice. `curves/` of `out` holds a small file per method. An interrupted tour goes on where
it stopped when it is started again.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import reasoning

from postrl.cli import run_recipe
from postrl.envs.base import Task
from postrl.errors import UserError
from postrl.papers import methods
from postrl.record import read_metrics
from postrl.settings import Settings
from postrl.train import Result

ELSEWHERE = {
    "dpo": "it learns from pairs of answers that exist already, and this recipe samples",
}
SPECIAL: dict[str, dict[str, Any]] = {
    "exprl": {"options": {"credit": "outcome"}},
    "gdpo": {"brevity": 0.5},
    "gd2po": {"brevity": 0.5},
    "gigpo": {"options": {"steps": "outcome"}},
    "rft": {"options": {"correct": "correct"}},
}
LEFT_OUT = ("time/", "pass@")  # of a machine; and of groups too small to say anything


@dataclass(frozen=True)
class Config:
    """Options of the tour. The defaults are those of `recipes/curves/shelf`."""

    model: str = "smollm2"
    """A Hugging Face folder, a .gguf file, a model id of the hub, or smollm2."""
    methods: tuple[str, ...] = ()
    """Which; none named is every one that learns from what it samples in one turn."""
    groups_per_step: int = 4
    """Problems per step."""
    group_size: int = 8
    """Completions per problem."""
    max_tokens: int = 8
    """Longest completion."""
    threads: int = 2
    """Processor threads."""
    train: Settings = field(default_factory=lambda: Settings(steps=24, updates=2, learning_rate=1e-5, warmup=8))
    out: Path = Path("runs/shelf")
    """Folder of the runs."""


def main(config: Config) -> Result | None:
    """The runs one after another; the `Result` of one that was interrupted."""
    config.train.check()
    base = reasoning.Config(
        model=config.model,
        task_options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        max_tokens=config.max_tokens,
        threads=config.threads,
        measure=reasoning.Measure(items=8, samples=2, ks=(1, 2)),
        train=config.train,
    )
    for name in checked(config.methods):
        result = run(replace(base, method=name, out=config.out / name, **SPECIAL.get(name, {})))
        if result.status == "interrupted":
            return result
        write_curve(config.out / name, config.out / "curves" / f"{name}.jsonl")
    return None


def checked(names: tuple[str, ...]) -> tuple[str, ...]:
    """The methods of the tour. Raises UserError for one it cannot run, before any of them has cost time."""
    known = [name for name in methods() if name not in ELSEWHERE]
    for name in names:
        if name in ELSEWHERE:
            raise UserError(f"option methods: {name} is not for this recipe, for {ELSEWHERE[name]}; leave it out")
        if name not in known:
            raise UserError(f"option methods: no method {name!r} on the shelf; choose from: {', '.join(known)}")
    return tuple(dict.fromkeys(names)) or tuple(known)


def run(config: reasoning.Config) -> Result:
    """One method, from its start or from where it stopped."""
    task: Task = reasoning.make_task(config)
    return reasoning.main(replace(config, resume=(config.out / "run.json").exists()), task=task, title=config.method)


def write_curve(folder: Path, path: Path) -> None:
    """The figures of every step, rounded, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if "evaluation" not in line]
    thin = [{k: short(v) for k, v in line.items() if not k.startswith(LEFT_OUT)} for line in steps]
    path.write_text("".join(json.dumps(line) + "\n" for line in thin), encoding="utf-8")


def short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    run_recipe(Config, main)
