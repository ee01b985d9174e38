"""Figures as plain data: what plotly.js draws, and the same numbers as a table for whoever cannot see it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from postrl.evaluate import Evaluation
from postrl.report.data import Run

COLOURS = ("#2f86d1", "#db6325", "#1f9e78", "#b565b8", "#b98a00", "#5f7fb5", "#c2455f", "#6b8e23")  # on dark and light
GREY = "#888888"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "star")
BINS = 41

CURVES = {
    "reward": ("Reward", "mean trained reward of a step's rollouts"),
    "pass@1": ("Correct while training", "share of a step's rollouts that are right"),
    "entropy": ("Entropy", "nats per sampled token"),
    "kl": ("KL to the step's old policy", "k3 estimate, nats per token, mean over the step's updates"),
    "kl_reference": ("KL to the reference policy", "k3 estimate, nats per token, mean over the step's updates"),
    "clip": ("Clipped share", "tokens with an advantage that got no gradient"),
    "length": ("Length", "sampled tokens per rollout"),
    "gradient_norm": ("Gradient norm", "largest 2-norm of the step's updates, before clipping"),
    "time/tokens_per_second": ("Speed", "sampled tokens per second of a whole step"),
    "mismatch/mean": ("Sampler mismatch", "mean |log π_train − log π_sampler|, nats"),
    "groups/constant": ("Groups without variance", "share of units whose group teaches nothing"),
    "truncated": ("Truncated", "share of rollouts cut off at the length limit"),
}

DIVERSITY: dict[str, tuple[str, str, Callable[[Evaluation], float]]] = {
    "distinct_correct": ("Different right answers", "per problem", lambda e: e.distinct_correct),
    "distinct_answers": ("Different answers", "per problem", lambda e: e.distinct_answers),
    "distinct_2": ("Distinct-2", "share of different bigrams among a problem's completions", lambda e: e.distinct_2),
    "answer_entropy": ("Entropy of answers", "nats, per problem", lambda e: e.answer_entropy),
}


@dataclass(frozen=True)
class Figure:
    """One picture. `caption` says what is shown; `header` and `rows` say the same in numbers."""

    key: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    layout: dict[str, Any] = field(default_factory=dict)


def number(value: float | None) -> str:
    """Three significant figures; a dash for what is not defined."""
    if value is None or not np.isfinite(value):
        return "–"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.2e}"


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def band(colour_: str, opacity: float = 0.15) -> str:
    red, green, blue = (int(colour_[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def curves(runs: Sequence[Run]) -> list[Figure]:
    """One figure per metric that any run recorded: its course over the steps, a line per run."""
    figures = []
    for metric, (title, caption) in CURVES.items():
        lines = [(i, run.name, *run.curve(metric)) for i, run in enumerate(runs)]
        lines = [line for line in lines if line[2]]
        if not lines:
            continue
        traces = [_line(name, x, y, i, markers=len(x) <= 60) for i, name, x, y in lines]
        rows = [
            (name, number(y[0]), number(y[-1]), number(min(y)), number(max(y)), str(len(y))) for _, name, _, y in lines
        ]
        header = ("run", "first", "last", "least", "most", "steps")
        figures.append(Figure(f"curve-{metric}", title, caption, traces, header, rows, {"x": "step"}))
    return figures


def held_out(runs: Sequence[Run]) -> list[Figure]:
    """pass@ the smallest k of every evaluation over the steps, where a run was evaluated on the way."""
    if not any(len(run.evaluations) > 2 for run in runs):
        return []
    k = next(k for run in runs for judged in run.evaluations for k in judged.full.pass_at)
    traces: list[dict[str, Any]] = []
    rows = []
    for i, run in enumerate(runs):
        points = [(e.step, e.full.pass_at[k], e.full.intervals[k]) for e in run.evaluations if k in e.full.pass_at]
        if points:
            steps = [step for step, _, _ in points]
            traces.append(_band(steps, [bounds for _, _, bounds in points], colour(i)))
            traces.append(_line(run.name, steps, [value for _, value, _ in points], i))
        rows += [(run.name, str(step), number(value), show(bounds)) for step, value, bounds in points]
    title = f"pass@{k} of the evaluated problems while training"
    caption = "each evaluation, with 95 % intervals over problems"
    return [Figure("held-out", title, caption, traces, ("run", "step", f"pass@{k}", "interval"), rows, {"x": "step"})]


def show(bounds: tuple[float, float] | None) -> str:
    return "–" if bounds is None or not np.isfinite(bounds).all() else f"{bounds[0]:.3f} … {bounds[1]:.3f}"


def befores(runs: Sequence[Run]) -> list[tuple[str, str, Evaluation]]:
    """(label, colour, evaluation) of the untrained policies; one only if all runs began with the same figures."""
    first = [(i, run, run.before.full) for i, run in enumerate(runs) if run.before]
    if len(first) > 1 and all(full.pass_at == first[0][2].pass_at for _, _, full in first):
        return [("before training", GREY, first[0][2])]
    return [(f"{run.name}, before", GREY if len(runs) == 1 else colour(i), full) for i, run, full in first]


def afters(runs: Sequence[Run]) -> list[tuple[str, str, Evaluation]]:
    return [
        (f"{run.name}, after {run.after.step} steps", colour(i), run.after.full)
        for i, run in enumerate(runs)
        if run.after
    ]


def pass_at_k(runs: Sequence[Run]) -> list[Figure]:
    """pass@k before and after, with interval bands."""
    everything = (("dash", befores(runs)), ("solid", afters(runs)))
    ticks = sorted({k for _, series in everything for _, _, full in series for k in full.pass_at}, key=int)
    traces: list[dict[str, Any]] = []
    rows = []
    for dash, series in everything:
        for number_, (label, line_colour, full) in enumerate(series):
            ks = [int(k) for k in full.pass_at]
            values = list(full.pass_at.values())
            bounds = [full.intervals[k] for k in full.pass_at]
            traces.append(_band(ks, bounds, line_colour))
            line = _line(label, ks, values, number_)
            line["line"] |= {"color": line_colour, "dash": dash}
            line["marker"]["color"] = line_colour
            traces.append(line)
            cells = {k: f"{number(v)} ({show(full.intervals[k])})" for k, v in full.pass_at.items()}
            rows.append((label, *(cells.get(k, "–") for k in ticks)))
    if not traces:
        return []
    header = ("", *(f"pass@{k}" for k in ticks))
    layout = {"x": "k (answers per problem)", "ticks": [int(k) for k in ticks], "y_from_zero": True}
    caption = "chance that at least one of k answers is right; bands are 95 % intervals over problems"
    return [Figure("pass-at-k", "pass@k before and after", caption, traces, header, rows, layout)]


def diversity(runs: Sequence[Run]) -> list[Figure]:
    """Bars of each figure of diversity, before and after."""
    bars = [*befores(runs), *afters(runs)]
    if not bars:
        return []
    figures = []
    for key, (title, caption, read) in DIVERSITY.items():
        values = [read(full) for _, _, full in bars]
        if not np.isfinite(values).any():
            continue
        trace = {
            "type": "bar",
            "x": [escape(label).replace(", ", ",<br>") for label, _, _ in bars],
            "y": _finite(values),
            "marker": {"color": [bar_colour for _, bar_colour, _ in bars]},
        }
        rows = [(label, number(value)) for (label, _, _), value in zip(bars, values, strict=True)]
        figures.append(Figure(key, title, caption, [trace], ("", title), rows, {"y_from_zero": True}))
    return figures


def ratios(runs: Sequence[Run]) -> list[Figure]:
    """How far the last step's updates moved single tokens: shares of tokens by π/π_old, on a log scale."""
    moved = [(i, run, _ratios(run)) for i, run in enumerate(runs) if run.rollouts]
    moved = [(i, run, r) for i, run, r in moved if len(r)]
    if not moved:
        return []
    reach = max(0.05, *(float(np.abs(np.log(r)).max()) for _, _, r in moved))
    edges = np.linspace(-reach, reach, BINS + 1)
    middles = np.exp((edges[1:] + edges[:-1]) / 2)
    traces = []
    rows = []
    for i, run, r in moved:
        counts = np.histogram(np.log(r), edges)[0] / len(r)
        line = _line(run.name, [float(m) for m in middles], [float(c) if c else None for c in counts], i)
        line["line"]["shape"] = "hvh"
        line["marker"]["size"] = 3  # a bin between empty ones is no line
        traces.append(line)
        quantiles = np.quantile(r, [0, 0.01, 0.5, 0.99, 1])
        rows.append((run.name, *(number(float(q)) for q in quantiles), str(len(r))))
    header = ("run", "least", "1 %", "median", "99 %", "most", "tokens")
    caption = "share of the last step's tokens by π/π_old at their last update; both axes are logarithmic"
    layout = {"x": "π / π_old", "log_x": True, "log_y": True}
    return [Figure("ratios", "Probability ratios", caption, traces, header, rows, layout)]


def _ratios(run: Run) -> np.ndarray:
    values = [
        ratio
        for row in run.rollouts[-1].rows
        for ratio, sampled in zip(row["ratio"], row["mask"], strict=True)
        if sampled
    ]
    array = np.array(values, dtype=np.float64)
    return array[np.isfinite(array) & (array > 0)]


def _finite(values: Sequence[float | None]) -> list[float | None]:
    """JSON has no NaN: plotly leaves a gap at null."""
    return [value if value is not None and np.isfinite(value) else None for value in values]


def _line(name: str, x: Sequence[float], y: Sequence[float | None], index: int, markers: bool = True) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": escape(name),
        "x": list(x),
        "y": _finite(y),
        "line": {"color": colour(index), "width": 2},
        "marker": {"color": colour(index), "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 5},
    }


def _band(x: Sequence[float], bounds: Sequence[tuple[float, float]], line_colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": _finite([*(high for _, high in bounds), *(low for low, _ in reversed(bounds))]),
        "fill": "toself",
        "fillcolor": band(line_colour),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
