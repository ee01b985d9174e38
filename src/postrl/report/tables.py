"""The report's tables in words: what changed, how sure that is, and what it does not show."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from postrl.evaluate import Evaluation
from postrl.probes.passk import bootstrap_interval, pass_at_k
from postrl.report.data import Run
from postrl.report.figures import number, show


@dataclass(frozen=True)
class Row:
    """A figure of one run before and after training, as text."""

    run: str
    metric: str
    before: str
    before_interval: str
    after: str
    after_interval: str
    change: str


def changes(runs: Sequence[Run]) -> list[Row]:
    """A row per run and k."""
    rows = []
    for run in runs:
        before, after = (judged.full if judged else None for judged in (run.before, run.after))
        for k in dict.fromkeys(k for full in (before, after) if full for k in full.pass_at):
            change = difference(before, after, k) if before and after else ""
            rows.append(Row(run.name, f"pass@{k}", *_value(before, k), *_value(after, k), change or "–"))
    return rows


def _value(full: Evaluation | None, k: str) -> tuple[str, str]:
    if full is None or k not in full.pass_at:
        return "–", "–"
    return number(full.pass_at[k]), show(full.intervals[k])


def against_first(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(run, figure, difference of its final pass@k to the first run's), paired over problems."""
    first = runs[0].after
    later = [(run.name, run.after.full) for run in runs[1:] if run.after]
    if first is None:
        return []
    return [
        (name, f"pass@{k}", found)
        for name, full in later
        for k in first.full.pass_at
        if (found := difference(first.full, full, k))
    ]


def difference(old: Evaluation, new: Evaluation, k: str) -> str:
    """new − old of pass@k with its 95 % interval, problem by problem; "" if they are not about the same problems."""
    if old.items != new.items:
        return ""
    scored = np.minimum(old.scored, new.scored)
    enough = scored >= int(k)
    if not enough.any():
        return ""
    values = [pass_at_k(np.array(e.scored)[enough], np.array(e.correct)[enough], int(k)) for e in (old, new)]
    gap = values[1] - values[0]
    low, high = bootstrap_interval(gap, seed=old.seed)
    return f"{gap.mean():+.3f} ({low:+.3f} … {high:+.3f})"


def course(run: Run) -> dict[str, str]:
    """What the training of a run was, in a few figures."""
    planned, tokens = run.configuration.get("steps"), sum(line.get("tokens", 0) for line in run.steps)
    seconds = sum(line.get("time/step", 0) for line in run.steps)
    return {
        "method": str(run.configuration.get("method", "–")),
        "seed": str(run.configuration.get("seed", "–")),
        "steps": f"{len(run.steps)} of {planned}" if planned != len(run.steps) else str(planned),
        "updates skipped": f"{sum(line.get('updates/skipped', 0) for line in run.steps):.0f}",
        "tokens sampled": f"{tokens:,.0f}",
        "training time": duration(seconds),
        "tokens per second": number(tokens / seconds if seconds else None),
    }


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def notes(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before believing the figures."""
    said = []
    for run in runs:
        judged = run.after or run.before
        if judged is None:
            said.append(f"{run.name} was never evaluated: its curves are about the rollouts it was trained on.")
        else:
            said.append(f"{run.name}: {_evaluated(judged.full)}")
        planned = run.configuration.get("steps")
        if isinstance(planned, int) and len(run.steps) < planned:
            said.append(f"{run.name} has done {len(run.steps)} of its {planned} steps.")
    if len(runs) > 1:
        seeds = sorted({str(run.configuration.get("seed", "unknown")) for run in runs})
        said.append(
            f"Each run is one training with one seed ({', '.join(seeds)}). Intervals are about the choice of problems, "
            "not about the chance in training: a difference between runs may vanish with another seed."
        )
    said.append(
        "Intervals are 95 % bootstrap intervals over problems; changes are compared problem by problem. "
        "Curves are about training rollouts, tables and pass@k about the evaluated problems."
    )
    return said


def _evaluated(full: Evaluation) -> str:
    trained = "the problems it was trained on" if full.split == "train" else f"the {full.split} split"
    text = f"{len(full.items)} problems of task {full.task} ({trained}), {full.samples} answers each"
    oddities = {
        "problems left out for want of scores": full.left_out,
        "answers without a score": full.missing,
        "answers cut off at the length limit": full.truncated,
    }
    return ", ".join([text, *(f"{count} {what}" for what, count in oddities.items() if count)]) + "."
