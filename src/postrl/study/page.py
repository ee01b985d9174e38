"""The answer as one HTML file that opens offline; everything a study's author or a model wrote stays text."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from postrl.files import whole_file
from postrl.report import page as report
from postrl.report.figures import SYMBOLS, Figure, band, colour, number
from postrl.report.text import visible
from postrl.study.answer import Answer, interval, outcome, probability
from postrl.study.definition import Curve

HERE = Path(__file__).resolve().parent


def write_page(found: Answer, path: Path) -> None:
    """The report."""
    pictures = [*levels(found), *curves(found)]
    scripts = [get_plotlyjs(), (report.HERE / "page.js").read_text(encoding="utf-8")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["visible"] = lambda value: visible(str(value))
    text = environment.get_template("page.html").render(
        found=found,
        groups=_rows(found),
        figures=pictures,
        data=report.script_json([asdict(picture) for picture in pictures]),
        style=Markup((report.HERE / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        policy=report.security_policy(scripts),
    )
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _rows(found: Answer) -> list[tuple[str, list[tuple[str, ...]]]]:
    """(heading, rows of the table of contrasts) of those groups that have any."""
    groups = [
        ("The core contrasts, fixed before the first run", found.contrasts),
        ("What must not show the effect", found.must_fail),
        ("Exploratory: to look at, not to believe", found.exploratory),
    ]
    return [
        (
            heading,
            [
                (
                    f"{f.contrast.treatment} − {f.contrast.control}",
                    f.contrast.metric,
                    f"{f.contrast.expect}, by {f.contrast.worth:g} or more",
                    number(f.estimate.mean),
                    interval(f.estimate),
                    probability(f.p),
                    f"{f.estimate.seeds} × {f.estimate.problems}" if f.estimate.problems else str(f.estimate.seeds),
                    outcome(f) if group is found.must_fail else f.word,
                )
                for f in group
            ],
        )
        for heading, group in groups
        if group
    ]


def levels(found: Answer) -> list[Figure]:
    """One figure per metric: each arm's seeds as points, its mean and interval."""
    pictures = []
    for index, (metric, caption) in enumerate(found.metrics):
        own = [level for level in found.levels if level.metric == metric]
        traces: list[dict[str, Any]] = []
        rows = []
        for place, level in enumerate(own):
            e, name = level.estimate, f"{level.arm} (exploratory)" if level.exploratory else level.arm
            points = [
                (done.seed, measured.mean)
                for done in found.runs
                if done.arm == level.arm
                for measured in done.figures.measured
                if measured.metric == metric and math.isfinite(measured.mean)
            ]
            dots = {"color": colour(place), "opacity": 0.5, "size": 6}
            traces.append(_trace([name] * len(points), [value for _, value in points], dots, "markers", name))
            bars = {"type": "data", "array": [e.high - e.mean if math.isfinite(e.high) else 0.0], "thickness": 2}
            mean = _trace(
                [name],
                [e.mean if math.isfinite(e.mean) else None],
                {"color": colour(place), "size": 11},
                "markers",
                name,
            )
            traces.append(mean | {"error_y": bars, "showlegend": False})
            seeds = ", ".join(f"{seed}: {number(value)}" for seed, value in points)
            rows.append((name, number(e.mean), interval(e, sign=False), seeds))
        if own:
            said = f"{caption}; mean with its 95 % interval, and each seed"
            header = ("arm", "mean", "95 % interval", "each seed")
            pictures.append(Figure(f"level-{index}", metric, said, traces, header, rows))
    return pictures


def curves(found: Answer) -> list[Figure]:
    """One figure per curve: an arm's mean over seeds, and the band from its lowest to its highest seed."""
    names = dict.fromkeys(curve.name for done in found.runs for curve in done.figures.curves)
    return [_curve(found, name, index) for index, name in enumerate(names)]


def _curve(found: Answer, name: str, index: int) -> Figure:
    traces: list[dict[str, Any]] = []
    rows = []
    label = "step"
    for place, arm in enumerate(dict.fromkeys(done.arm for done in found.runs)):
        own = [c for done in found.runs if done.arm == arm for c in done.figures.curves if c.name == name]
        if not own:
            continue
        label = own[0].x_label
        x, low, mean, high = spread(own)
        tone = colour(place)
        edge = {"x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself", "fillcolor": band(tone)}
        traces.append(
            {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False} | edge
        )
        traces.append(_trace(x, mean, {"color": tone}, "lines", arm) | {"line": {"color": tone}})
        if x:
            rows.append((arm, number(mean[0]), number(mean[-1]), str(len(own))))
    said = "mean over seeds, and the band from the lowest to the highest"
    return Figure(f"curve-{index}", name, said, traces, ("arm", "first", "last", "seeds"), rows, {"x": escape(label)})


def spread(own: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """(x, lowest, mean, highest) where all seeds have a defined value."""
    points = [{x: y for x, y in zip(c.x, c.y, strict=True) if math.isfinite(y)} for c in own]
    x = sorted(set(points[0]).intersection(*points))
    table = np.array([[at[value] for value in x] for at in points]).reshape(len(points), len(x))
    return x, table.min(0).tolist(), table.mean(0).tolist(), table.max(0).tolist()


def _trace(
    x: Sequence[object], y: Sequence[float | None], marker: dict[str, Any], mode: str, name: str
) -> dict[str, Any]:
    shown = [escape(value) if isinstance(value, str) else value for value in x]
    look = {"type": "scatter", "mode": mode, "name": escape(name), "showlegend": mode == "lines"}
    return look | {"x": shown, "y": list(y), "marker": {"symbol": SYMBOLS[0], **marker}}
