"""The ratios with their goals, and how they change with size."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks import pairs
from postrl.files import whole_file

OURS_COLOUR, GOAL_COLOUR = "#3b6ea5", "#b3452c"


def draw(data: Mapping, path: Path) -> bool:
    """Write the picture; False if there is nothing to show."""
    bars = _bars(data["rows"])
    axes = _axes(data["rows"])
    if not bars and not axes:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 1 + len(axes)
    figure = Figure(figsize=(9.5 + 3.2 * len(axes), 1.5 + 0.42 * max(8, len(bars))), layout="constrained")
    places = figure.subplots(1, panels, width_ratios=[2.0, *([1.0] * len(axes))], squeeze=False)[0]
    _draw_bars(places[0], bars)
    for place, (axis, points) in zip(places[1:], axes.items(), strict=True):
        _draw_axis(place, axis, points)
    canvas = FigureCanvasAgg(figure)
    with whole_file(path) as beside:
        canvas.print_png(beside, metadata={"Software": None})
    return True


def _bars(rows: Mapping[str, Mapping]) -> list[tuple[str, pairs.Spread, float | None]]:
    """(label, ratio, goal) of every comparison that is no scaling row."""
    bars = []
    for entry in rows.values():
        if entry["axis"] is not None or entry["work"]["kind"] in ("agreement", "statistics"):
            continue
        for peer in [*entry["peers"], *entry["once"]]:
            ratio = pairs.speed(entry["rounds"], peer)
            goals = [g["bound"] for g in entry["goals"] if g["peer"] == peer and g["figure"] in ("speed", "share")]
            if ratio is not None:
                side = "of the limit" if peer == pairs.LIMIT else f"beside {peer}"
                bars.append((f"{entry['title']}\n{side}", ratio, goals[0] if goals else None))
    return bars


def _axes(rows: Mapping[str, Mapping]) -> dict[str, list[tuple[int, pairs.Spread]]]:
    """Scaling rows by what they vary."""
    axes: dict[str, list[tuple[int, pairs.Spread]]] = {}
    for entry in rows.values():
        axis, value = entry["axis"] or ("", 0)
        ratio = pairs.speed(entry["rounds"], entry["peers"][0]) if axis else None
        if ratio is not None:
            axes.setdefault(axis, []).append((value, ratio))
    return {axis: sorted(points, key=lambda point: point[0]) for axis, points in axes.items()}


def _draw_bars(place, bars: list[tuple[str, pairs.Spread, float | None]]) -> None:
    for number, (_, ratio, goal) in enumerate(bars):
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        place.barh(number, ratio.median, xerr=error, color=OURS_COLOUR, height=0.6, error_kw={"capsize": 3})
        if goal is not None:
            place.plot([goal, goal], [number - 0.4, number + 0.4], color=GOAL_COLOUR, linewidth=2)
        place.annotate(
            f"{ratio.median:.2g}", (ratio.high, number), xytext=(6, -3), textcoords="offset points", fontsize=8
        )
    place.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    place.invert_yaxis()
    place.axvline(1, color="grey", linewidth=0.8)
    place.margins(x=0.12)
    place.set_xlabel("times as fast (share, for the limit); red: goal")


def _draw_axis(place, axis: str, points: list[tuple[int, pairs.Spread]]) -> None:
    values, ratios = [value for value, _ in points], [ratio for _, ratio in points]
    errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    place.errorbar(values, [r.median for r in ratios], yerr=errors, color=OURS_COLOUR, marker="o", capsize=3)
    place.set_xscale("log", base=2)
    place.set_xticks(values, [str(value) for value in values])
    place.set_ylim(bottom=0)
    place.axhline(1, color="grey", linewidth=0.8)
    place.set_xlabel(axis)
    place.set_title("times as fast as TRL", fontsize=9)
