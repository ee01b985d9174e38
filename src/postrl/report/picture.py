"""One picture for a README: pass@k before and after, as an SVG file made without a browser."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from postrl.errors import UserError
from postrl.files import whole_file
from postrl.report.data import read_runs
from postrl.report.figures import afters, befores
from postrl.report.text import visible

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 24, 24, 56  # of the picture, and of the margins around the plot


@dataclass(frozen=True)
class Curve:
    """A line with markers and its band, in pixels; `dashed` for untrained policies."""

    label: str
    colour: str
    dashed: bool
    points: list[tuple[float, float]]
    band: list[tuple[float, float]]
    said: str  # the values, for those who cannot see them


def write_picture(folders: Sequence[Path], out: Path) -> Path:
    """Draw the runs' pass@k into the SVG file `out`. Raises UserError if no run was evaluated."""
    runs = read_runs(folders)
    series = [(*one, True) for one in befores(runs)] + [(*one, False) for one in afters(runs)]
    if not series:
        raise UserError(f"there is no pass@k to draw: none of {', '.join(map(str, folders))} was evaluated")
    ks = sorted({int(k) for _, _, full, _ in series for k in full.pass_at})
    highest = max(high for _, _, full, _ in series for _, high in full.intervals.values())
    top = next(limit for limit in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if limit >= min(1.0, highest))

    def place(k: int, value: float) -> tuple[float, float]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        share = math.log(k / ks[0]) / math.log(ks[-1] / ks[0]) if len(ks) > 1 else 0.5
        return round(LEFT + share * width, 1), round(TOP + (1 - value / top) * height, 1)

    curves = []
    for label, colour, full, dashed in series:
        points = [place(int(k), value) for k, value in full.pass_at.items()]
        lows = [place(int(k), low) for k, (low, _) in full.intervals.items()]
        highs = [place(int(k), high) for k, (_, high) in full.intervals.items()]
        said = ", ".join(f"pass@{k} {value:.3f}" for k, value in full.pass_at.items())
        curves.append(Curve(visible(label), colour, dashed, points, [*highs, *reversed(lows)], said))
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    ticks = [top * i / 4 for i in range(5)]
    text = environment.get_template("picture.svg").render(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        bottom=HEIGHT - BOTTOM,
        curves=curves,
        columns=[(k, place(k, 0)[0]) for k in ks],
        lines=[(f"{value:.2f}", place(ks[0], value)[1]) for value in ticks],
    )
    with whole_file(out) as beside:
        beside.write_text(text, encoding="utf-8")
    return out
