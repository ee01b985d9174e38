"""Rounds of a row -> ratios. A round holds one lap of every side, made one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.work import Work

OURS = "postrl"
LIMIT = "limit"
Report = Mapping[str, object]
Round = Mapping[str, Report]  # side -> the report of its lap


class Mismatch(Exception):
    """The sides did not do the same work, so nothing may be compared."""


@dataclass(frozen=True)
class Spread:
    """Median and extremes of a ratio, and of how many pairs."""

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        return cls(median(values), min(values), max(values), len(values)) if values else None


def seconds(report: Report) -> float:
    """Of a lap; a limit has no lap but a figure."""
    return float(report["limit_seconds"] if "limit_seconds" in report else report["seconds"])  # type: ignore[arg-type]


def speed(rounds: Sequence[Round], peer: str) -> Spread | None:
    """How many times as fast as `peer` we are, per sampled or trained token: each round's pair gives one ratio.

    For the limit it is the share of it that we reach.
    """
    ratios = []
    for ours, theirs in _pairs(rounds, peer):
        ratio = seconds(theirs) / seconds(ours)
        if "limit_seconds" not in theirs:
            ratio *= float(ours["tokens"]) / float(theirs["tokens"])  # type: ignore[arg-type]
        ratios.append(ratio)
    return Spread.of(ratios)


def memory(rounds: Sequence[Round], peer: str) -> Spread | None:
    """Our peak memory as a share of the peer's; None where the system did not tell it."""
    pairs = [(ours["peak_bytes"], theirs["peak_bytes"]) for ours, theirs in _pairs(rounds, peer)]
    return Spread.of([a / b for a, b in pairs if a is not None and b is not None])  # type: ignore[operator]


def typical(rounds: Sequence[Round], side: str, figure: str) -> float | None:
    """Median of a figure of one side's laps."""
    found = [float(r[side][figure]) for r in rounds if side in r and r[side].get(figure) is not None]  # type: ignore[arg-type]
    return median(found) if found else None


def _pairs(rounds: Sequence[Round], peer: str) -> list[tuple[Report, Report]]:
    return [(r[OURS], r[peer]) for r in rounds if OURS in r and peer in r]


def check(work: Work, side: str, report: Report) -> None:
    """Raises Mismatch if a lap is not the work that was asked for."""
    wanted = {"step": work.rows * work.new_tokens, "sample": work.rows * work.new_tokens}.get(work.kind)
    if wanted is not None and not work.natural and report["tokens"] != wanted:
        raise Mismatch(f"{side} sampled {report['tokens']} tokens instead of {wanted}")
    if wanted is not None and not work.natural and set(report["lengths"]) != {work.new_tokens}:  # type: ignore[arg-type]
        raise Mismatch(f"{side} gave completions of other lengths than {work.new_tokens}: {report['lengths']}")
    if work.kind == "step" and not work.natural:
        processed = work.rows * (work.prompt_tokens + work.new_tokens)
        if report["processed"] != processed:
            raise Mismatch(f"{side} had {report['processed']} tokens of prompts and completions, not {processed}")
    if work.kind == "train" and report["tokens"] != work.prompts * work.prompt_tokens:
        raise Mismatch(f"{side} trained on {report['tokens']} tokens, not {work.prompts * work.prompt_tokens}")
    if work.kind in ("step", "agreement", "train") and (report["updates"] != 1 or not report["moved"]):
        raise Mismatch(f"{side} made {report['updates']} updates in a lap, and its weights moved: {report['moved']}")


def check_losses(ours: Report, theirs: Report, peer: str, compute: str) -> None:
    """Raises Mismatch if the first laps of two sides that train on the same rows differ in loss or gradient norm."""
    bound = 1e-3 if compute == "float32" else 2e-2
    for figure in ("loss", "gradient_norm"):
        a, b = float(ours[figure]), float(theirs[figure])  # type: ignore[arg-type]
        if not abs(a - b) <= bound * abs(b):
            raise Mismatch(f"{figure} is {a} here but {b} with {peer}: more than {bound:g} apart")
