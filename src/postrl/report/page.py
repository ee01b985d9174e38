"""The report as one HTML file. Nothing is fetched, and what a model wrote stays text.

Jinja2 escapes every value; data for the figures is JSON in which no character can end a script; and the page's content
security policy names its own scripts by hash, so that a script which got in all the same would not run.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from postrl.errors import UserError
from postrl.files import whole_file
from postrl.report import figures, gallery, tables
from postrl.report.data import Run, read_runs
from postrl.report.text import visible

HERE = Path(__file__).resolve().parent


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report on the runs in `folders` to the file `out`, and return that. Raises UserError as `read_runs`
    does, or if there is no run or `out` cannot be written."""
    runs = read_runs(folders)
    if not runs:
        raise UserError("name at least one run folder to report on")
    page = render(runs)
    try:
        with whole_file(out) as beside:
            beside.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the report cannot be written to {out} ({error}); choose another --out") from error
    return out


def render(runs: Sequence[Run]) -> str:
    """The page."""
    groups = {
        "main": [*figures.pass_at_k(runs), *figures.held_out(runs)],
        "diversity": figures.diversity(runs),
        "curves": figures.curves(runs),
        "ratios": figures.ratios(runs),
    }
    everything = [figure for group in groups.values() for figure in group]
    scripts = [get_plotlyjs(), (HERE / "page.js").read_text(encoding="utf-8")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["visible"] = lambda value: visible(str(value))
    return environment.get_template("page.html").render(
        title=" · ".join(run.name for run in runs),
        runs=runs,
        courses=[tables.course(run) for run in runs],
        changes=tables.changes(runs),
        against_first=tables.against_first(runs),
        notes=tables.notes(runs),
        figures=groups,
        questions=gallery.questions([*figures.befores(runs), *figures.afters(runs)]),
        galleries=[(run.name, gallery.gallery(run)) for run in runs],
        configurations=_side_by_side(runs),
        data=script_json([asdict(figure) for figure in everything]),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        policy=security_policy(scripts),
    )


def script_json(value: object) -> Markup:
    """JSON that can stand in a <script> element: nothing in it can end the element or a line of it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def security_policy(scripts: Sequence[str]) -> str:
    """Of a page that runs these scripts and nothing else."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _side_by_side(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """(what, its value in each run, whether the runs differ) for configuration and surroundings."""
    flat = [_flatten(run.configuration) | _flatten(run.surroundings) for run in runs]
    rows = []
    for name in dict.fromkeys(name for values in flat for name in values):
        values = [_cell(one.get(name, "–")) for one in flat]
        rows.append((name, values, len(set(values)) > 1))
    return rows


def _flatten(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, object] = {}
    for name, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
