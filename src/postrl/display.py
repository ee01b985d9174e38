"""What a person sees while a run goes on: a progress bar in a terminal, one line a step elsewhere."""

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SHOWN = {
    "reward": "reward",
    "pass@1": "pass@1",
    "entropy": "entropy",
    "kl": "kl(old)",
    "kl_reference": "kl(ref)",
    "clip": "clip",
}


class Display:
    """Progress of one run. `title` stands in front of every line."""

    def __init__(self, steps: int, title: str = "", console: Console | None = None):
        self.console = console or Console()
        self.title, self.steps = title, steps
        title_column = TextColumn("{task.description}", markup=False)  # a title may hold brackets
        columns = (title_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        figures_column = TextColumn("{task.fields[figures]}", markup=False)
        self.bar = Progress(*columns, figures_column, console=self.console)
        self.task = self.bar.add_task(title or "training", total=steps, figures="")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = " ".join(f"{label} {metrics[name]:.3f}" for name, label in SHOWN.items() if name in metrics)
        figures += f" {metrics['time/tokens_per_second']:.0f} tok/s"
        self.bar.update(self.task, completed=step, figures=figures)
        if not self.console.is_terminal:
            self.say(f"step {step}/{self.steps}  {figures}  {metrics['time/step']:.1f} s")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = " ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self.say(f"evaluation after step {step}: {figures}")

    def say(self, text: str) -> None:
        # Text may hold brackets from a model or a file: never read it as markup.
        self.console.print(
            f"{self.title}: {text}" if self.title else text, markup=False, highlight=False, soft_wrap=True
        )
