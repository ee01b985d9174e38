"""The main job: a real language model gets better at sums, by GRPO and by ReCo, from the same start and seed.

    make demo          or          postrl train demo

SmolLM2-135M-Instruct, held-out problems, one shared evaluation of the untrained model. Everything lands in `out`, with
`report.html` at its top. An interrupted demo goes on where it stopped when it is started again.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import reasoning
from rich.console import Console
from rich.table import Table

from postrl.cli import run_recipe, use_threads
from postrl.compute import compute_dtype
from postrl.envs.base import Task
from postrl.evaluate import Evaluation
from postrl.files import read_json, write_json
from postrl.policies.loading import load_policy
from postrl.record import read_metrics
from postrl.report import write_report
from postrl.settings import Settings
from postrl.train import Result


@dataclass(frozen=True)
class Config:
    """Options of the demo. The defaults are those of the figures in the README."""

    model: str = "smollm2"
    """A Hugging Face folder, a .gguf file, a model id of the hub, or smollm2."""
    methods: tuple[str, ...] = ("grpo", "reco")
    """The arms, side by side."""
    groups_per_step: int = 8
    """Problems per step."""
    group_size: int = 8
    """Completions per problem."""
    threads: int = 2
    """Processor threads."""
    measure: reasoning.Measure = field(default_factory=lambda: reasoning.Measure(items=64, samples=32))
    train: Settings = field(default_factory=lambda: Settings(steps=20, updates=4, learning_rate=2e-5, warmup=8))
    out: Path = Path("runs/demo")
    """Folder of the runs and the report."""


def main(config: Config) -> Result | None:
    """Both arms, the table and the report; the arm's `Result` if it was interrupted."""
    config.train.check()
    base = reasoning.Config(
        model=config.model,
        task="chain_sum",
        task_options={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        threads=config.threads,
        measure=config.measure,
        train=config.train,
    )
    console = Console()
    task = reasoning.make_task(base)
    before = evaluation_before(base, task, config.out / "before.json", console)
    for name in config.methods:
        folder = config.out / name
        arm = replace(base, method=name, out=folder, resume=(folder / "run.json").exists())
        result = reasoning.main(arm, task=task, before=before, title=name)
        if result.status == "interrupted":
            return result
    runs = [config.out / name for name in config.methods]
    show(before, {run.name: evaluation_after(run) for run in runs}, console)
    report = write_report(runs, config.out / "report.html")
    console.print(f"report: {report}", markup=False)
    return None


def evaluation_before(config: reasoning.Config, task: Task, path: Path, console: Console) -> Evaluation:
    """Of the untrained model: measured once, kept in a file, shared by all arms."""
    if path.exists():
        return Evaluation.from_json(read_json(path, "an evaluation"))
    use_threads(config.threads)
    console.print(f"evaluating {config.model} before training")
    policy, renderer = load_policy(config.model, compute_dtype=compute_dtype(config.compute_dtype))
    evaluation = reasoning.measure(config, policy, renderer, task)
    write_json(path, evaluation.to_json())
    return evaluation


def evaluation_after(run: Path) -> Evaluation:
    """The last one a run has recorded."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "evaluation" in line]
    return Evaluation.from_json(lines[-1]["evaluation"])


def show(before: Evaluation, after: dict[str, Evaluation], console: Console) -> None:
    """Table of pass@k and diversity, and the same problems answered before and after."""
    columns = {"before": before, **after}
    table = Table("held-out problems", *columns, title=f"{len(before.items)} problems, {before.samples} samples each")
    for k in before.pass_at:
        cells = [f"{e.pass_at[k]:.3f} [{e.intervals[k][0]:.2f}, {e.intervals[k][1]:.2f}]" for e in columns.values()]
        table.add_row(f"pass@{k}", *cells)
    figures = {
        "distinct correct answers": "distinct_correct",
        "distinct answers": "distinct_answers",
        "entropy of answers (nats)": "answer_entropy",
        "Distinct-2": "distinct_2",
        "tokens per answer": "mean_tokens",
    }
    for label, name in figures.items():
        table.add_row(label, *(f"{getattr(e, name):.2f}" for e in columns.values()))
    console.print(table)
    for index, sample in enumerate(before.examples):
        console.print(f"\n{sample.prompt}", markup=False)
        for label, evaluation in columns.items():
            answer = json.dumps(evaluation.examples[index].completion, ensure_ascii=False)
            console.print(f"  {label}: {answer}", markup=False)


if __name__ == "__main__":
    run_recipe(Config, main)
