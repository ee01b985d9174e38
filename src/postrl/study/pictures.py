"""The answer as PNG files, for a README: effects with intervals, and what each arm reached."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from postrl.errors import UserError
from postrl.files import whole_file
from postrl.report.figures import COLOURS, GREY, colour
from postrl.study.answer import Answer, Level
from postrl.study.statistics import EXTRA, Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_pictures(found: Answer, folder: Path) -> list[Path]:
    """effects.png and a picture for each metric. Raises UserError if matplotlib is missing."""
    drawn = {"effects": _effects(found)}
    for name, caption in found.metrics:
        levels = [level for level in found.levels if level.metric == name]
        drawn[name] = _levels(found, levels, f"{name}: {caption}")
    paths = []
    for name, picture in drawn.items():
        if picture is not None:
            path = folder / f"{name}.png"
            with whole_file(path) as beside:
                picture.savefig(beside, format="png", dpi=110, metadata={"Software": None})
            paths.append(path)
    return paths


def _figure(rows: int) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(EXTRA) from error
    return Figure(figsize=(7.5, 1.2 + 0.42 * rows), layout="constrained")


def _effects(found: Answer) -> "Figure | None":
    """A row per contrast in units of the difference that matters, so that metrics of different units share an axis."""
    groups = ((found.contrasts, COLOURS[0], ""), (found.must_fail, COLOURS[1], "must fail: "))
    rows: list[tuple[Finding, str, str]] = [(f, tone, label) for group, tone, label in groups for f in group]
    rows += [(f, GREY, "exploratory: ") for f in found.exploratory]
    rows = [row for row in rows if row[0].estimate.seeds]
    if not rows:
        return None
    picture = _figure(len(rows))
    axes = picture.subplots()
    for place, (finding, tone, _) in enumerate(rows):
        e, worth = finding.estimate, finding.contrast.worth
        _bar(axes, place, e.mean / worth, e.low / worth, e.high / worth, tone)
    axes.axvline(0, color=GREY, linewidth=1)
    for edge in (-1, 1):
        axes.axvline(edge, color=GREY, linewidth=0.8, linestyle=":")
    names = [f"{label}{f.contrast.treatment} − {f.contrast.control}, {f.contrast.metric}" for f, _, label in rows]
    _finish(axes, names, "difference, in units of the smallest one that matters (dotted); 95 % intervals")
    return picture


def _levels(found: Answer, levels: Sequence[Level], caption: str) -> "Figure | None":
    if not levels:
        return None
    picture = _figure(len(levels))
    axes = picture.subplots()
    for place, level in enumerate(levels):
        e, tone = level.estimate, GREY if level.exploratory else colour(place)
        _bar(axes, place, e.mean, e.low, e.high, tone)
        values = [
            m.mean
            for done in found.runs
            if done.arm == level.arm
            for m in done.figures.measured
            if m.metric == level.metric
        ]
        axes.plot(values, [place + 0.22] * len(values), ".", color=tone, alpha=0.6)
    names = [f"{level.arm} (exploratory)" if level.exploratory else level.arm for level in levels]
    _finish(axes, names, f"{caption}; 95 % intervals, a dot per seed")
    return picture


def _bar(axes, place: int, mean: float, low: float, high: float, tone: str) -> None:
    axes.plot([mean], [place], "o", color=tone)
    axes.plot([low, high], [place, place], "-", color=tone, linewidth=2)


def _finish(axes, names: Sequence[str], label: str) -> None:
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(label.replace("$", r"\$"), fontsize=9, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
