"""From figures to an answer: the verdict in words, what a reader must know before believing it, and its files."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from postrl.files import whole_file
from postrl.study.definition import Contrast, Measured
from postrl.study.plan import State
from postrl.study.records import Crashed, Done
from postrl.study.registration import Registration
from postrl.study.statistics import LEAST_SEEDS, Estimate, Finding, estimate, findings

LARGEST = 2_000_000  # bytes of per-problem values in results.json
Figures = Mapping[str, Mapping[int, Mapping[str, Measured]]]  # arm -> seed -> metric
Verdict = Literal["supported", "not supported", "too noisy to say", "instrument broken", "unfinished"]


@dataclass(frozen=True)
class Level:
    """What one arm reached in one metric."""

    arm: str
    metric: str
    estimate: Estimate
    exploratory: bool


@dataclass(frozen=True)
class Answer:
    """Everything that the report, the console and results.json say."""

    name: str
    variant: str
    summary: str
    question: str
    hypothesis: str
    verdict: Verdict
    sentence: str
    broken: bool
    contrasts: tuple[Finding, ...]
    must_fail: tuple[Finding, ...]
    exploratory: tuple[Finding, ...]
    levels: tuple[Level, ...]
    metrics: tuple[tuple[str, str], ...]  # name, caption
    notes: tuple[str, ...]
    crashed: tuple[Crashed, ...]
    absent: tuple[tuple[str, int], ...]
    registrations: tuple[Registration, ...]
    runs: tuple[Done, ...]
    cpu_minutes: float
    papers: tuple[str, ...] = ()


def answer(state: State, registrations: Sequence[Registration]) -> Answer:
    """Judge what is there."""
    plan, study = state.plan, state.plan.study
    core_arms = {arm.name for arm in plan.core}
    core = _figures(done for done in state.done if done.arm in core_arms and done.seed in plan.seeds)
    everything = _figures(state.done)
    contrasts = findings(_possible(study.contrasts, core_arms), core)
    must_fail = findings(_possible(study.must_fail, core_arms), core, correct=False)
    more = [*study.exploratory]
    if any(done.arm in core_arms and done.seed not in plan.seeds for done in state.done):
        more = [*_possible(study.contrasts, core_arms), *more]
    exploratory = findings([c for c in more if {c.treatment, c.control} <= everything.keys()], everything)
    broken = any(finding.word == "supported" for finding in must_fail)
    cpu = (sum(done.cpu_seconds for done in state.done) + state.base_cpu_seconds) / 60
    verdict = _verdict(contrasts, broken, state)
    return Answer(
        name=plan.found.name,
        variant=plan.options.variant,
        summary=plan.found.summary,
        question=study.question.strip(),
        hypothesis=study.hypothesis.strip(),
        verdict=verdict,
        sentence=_sentence(verdict, contrasts, must_fail, state),
        broken=broken,
        contrasts=tuple(contrasts),
        must_fail=tuple(must_fail),
        exploratory=tuple(exploratory),
        levels=_levels(state, core, everything),
        metrics=tuple((metric.name, metric.caption) for metric in study.metrics),
        notes=tuple(_notes(state, registrations, [*contrasts, *must_fail, *exploratory], cpu)),
        crashed=state.crashed,
        absent=state.absent,
        registrations=tuple(registrations),
        runs=tuple(sorted(state.done, key=lambda done: (done.arm, done.seed))),
        cpu_minutes=cpu,
        papers=study.papers,
    )


def _figures(runs: Iterable[Done]) -> dict[str, dict[int, dict[str, Measured]]]:
    found: dict[str, dict[int, dict[str, Measured]]] = {}
    for done in runs:
        by_metric = {measured.metric: measured for measured in done.figures.measured}
        found.setdefault(done.arm, {})[done.seed] = by_metric
    return found


def _possible(contrasts: Sequence[Contrast], arms: set[str]) -> list[Contrast]:
    """Those whose arms the variant has."""
    return [contrast for contrast in contrasts if {contrast.treatment, contrast.control} <= arms]


def _levels(state: State, core: Figures, everything: Figures) -> tuple[Level, ...]:
    levels = []
    for arm in state.plan.study.arms:
        figures = everything if arm.exploratory else core
        for metric in state.plan.study.metrics:
            rows = [by_metric[metric.name] for _, by_metric in sorted(figures.get(arm.name, {}).items())]
            if rows:
                reached = replace(estimate(rows), p=math.nan)  # nobody asks whether a level is zero
                levels.append(Level(arm.name, metric.name, reached, arm.exploratory))
    return tuple(levels)


def _verdict(contrasts: Sequence[Finding], broken: bool, state: State) -> Verdict:
    """A hypothesis of several contrasts is supported if all are, and not if one is not."""
    if broken:
        return "instrument broken"
    if state.absent:
        return "unfinished"
    words = {finding.word for finding in contrasts}
    if "not supported" in words:
        return "not supported"
    return "supported" if words == {"supported"} else "too noisy to say"


def _sentence(verdict: Verdict, contrasts: Sequence[Finding], must_fail: Sequence[Finding], state: State) -> str:
    parts = []
    if state.plan.options.quick:
        parts.append("Quick variant, too small to answer the question.")
    if verdict == "instrument broken":
        said = "; ".join(told(f) for f in must_fail if f.word == "supported")
        parts.append(f"The instrument is broken: what must not show the effect showed it ({said}).")
    elif verdict == "unfinished":
        parts.append(f"Unfinished: {len(state.absent)} runs of the core have not been run, so there is no verdict yet.")
    else:
        parts.append(f"{verdict[0].upper()}{verdict[1:]}: {'; '.join(told(f) for f in contrasts)}.")
    lost = [one for one in state.crashed if one.arm in {arm.name for arm in state.plan.core}]
    if lost:
        parts.append(f"{len(lost)} runs of the core crashed and are missing from these numbers.")
    return " ".join(parts)


def told(finding: Finding) -> str:
    """A contrast with its effect, interval and p-value, as a phrase."""
    c, e = finding.contrast, finding.estimate
    if not e.seeds:
        return f"{c.treatment} − {c.control} in {c.metric} has no pair of runs"
    size = f"{e.seeds} seeds" + (f" × {e.problems} problems" if e.problems else "")
    return (
        f"{c.treatment} − {c.control} in {c.metric} {e.mean:+.4g} ({interval(e)}; p {probability(finding.p)}; {size})"
    )


def interval(found: Estimate, sign: bool = True) -> str:
    """Its bounds as text."""
    if math.isnan(found.low):
        return "no interval"
    style = "+.4g" if sign else ".4g"
    return f"{found.low:{style}} … {found.high:{style}}"


def probability(p: float) -> str:
    return "undefined" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def outcome(finding: Finding) -> str:
    """What a contrast that must fail did."""
    return {
        "supported": "showed the effect: the instrument is broken",
        "not supported": "did not show the effect, as it must",
        "too noisy to say": "showed no clear effect, but too noisy to exclude one",
    }[finding.word]


def _notes(state: State, registrations: Sequence[Registration], judged: Sequence[Finding], cpu: float) -> list[str]:
    plan, study = state.plan, state.plan.study
    notes = [f"{one.arm}, seed {one.seed}, crashed: {one.reason} ({one.file})." for one in state.crashed]
    if state.absent:
        notes.append(f"Not run yet: {', '.join(f'{arm} seed {seed}' for arm, seed in state.absent)}.")
    for before, after in pairwise(registrations):
        names = [name for name in after.plan if after.plan[name] != before.plan.get(name)]
        what = f"changed the plan ({', '.join(names)})" if names else "kept the plan"
        discarded = " and discarded them" if after.why == "fresh" else ""
        notes.append(f"On {after.date}, with {after.results} runs already done, the author {what}{discarded}.")
    for label, values in (
        ("commits", {done.commit or "none" for done in state.done}),
        ("versions of postrl", {done.version for done in state.done}),
    ):
        if len(values) > 1:
            notes.append(f"The runs come from {len(values)} {label}: {', '.join(sorted(values))}.")
    if any((done.commit or "").endswith("+") for done in state.done):
        notes.append("Runs whose commit ends in + were made with changes that were not committed.")
    if not plan.options.quick and cpu > study.budget.minutes:
        notes.append(f"The runs took {cpu:.0f} CPU minutes; the author's budget was {study.budget.minutes:g}.")
    if state.foreign:
        notes.append(f"Left out: results of arms that the study no longer has: {', '.join(state.foreign)}.")
    for finding in judged:
        if finding.estimate.undefined:
            c = finding.contrast
            said = f"{finding.estimate.undefined} pairs or problems without a defined value are left out"
            notes.append(f"{c.treatment} against {c.control} in {c.metric}: {said}.")
    if len(plan.seeds) < LEAST_SEEDS:
        notes.append(f"Fewer than {LEAST_SEEDS} seeds are always too noisy to say.")
    return notes


def write_answer(found: Answer, folder: Path) -> None:
    """results.json, summary.md, pictures and report.html."""
    from postrl.study.page import write_page
    from postrl.study.pictures import write_pictures

    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / "results.json") as beside:
        beside.write_text(results_json(found), encoding="utf-8")
    pictures = write_pictures(found, folder)
    with whole_file(folder / "summary.md") as beside:
        beside.write_text(summary(found, pictures), encoding="utf-8")
    write_page(found, folder / "report.html")


def results_json(found: Answer) -> str:
    """Everything but the curves, a run a line, numbers with 6 significant digits.

    Values per problem are left out where they would make the file too large to commit; it then says so.
    """
    runs = [_line(done, problems=True) for done in found.runs]
    whole = sum(map(len, runs)) <= LARGEST
    if not whole:
        runs = [_line(done, problems=False) for done in found.runs]
    head = asdict(found)
    for name in ("runs", "summary"):
        del head[name]
    lines = [f" {json.dumps(name)}: {json.dumps(_short(value), ensure_ascii=False)}" for name, value in head.items()]
    lines.append(f' "values_per_problem": {json.dumps(whole)}')
    lines.append(' "runs": [\n  ' + ",\n  ".join(runs) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(done: Done, problems: bool) -> str:
    fields = done.to_json()
    measured = [
        m if problems else {**m, "values": [done_mean(m["values"])], "items": []} for m in fields["figures"]["measured"]
    ]
    del fields["figures"]
    return json.dumps(_short({**fields, "measured": measured}), ensure_ascii=False)


def done_mean(values: Sequence[float | None]) -> float | None:
    """None if one of them is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def _short(value: Any) -> Any:
    """Plain JSON with floats of 6 significant digits; what is not finite becomes null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def summary(found: Answer, pictures: Sequence[Path]) -> str:
    """Markdown for a README: the verdict, the contrasts, what each arm reached."""
    lines = [f"**{found.verdict}** ({found.variant}). {found.sentence}", ""]
    lines += ["| contrast | metric | effect | 95 % interval | p | answer |", "|---|---|---|---|---|---|"]
    for label, group in (("", found.contrasts), ("must fail: ", found.must_fail), ("exploratory: ", found.exploratory)):
        for f in group:
            said = outcome(f) if label.startswith("must") else f.word
            names = f"{label}{f.contrast.treatment} − {f.contrast.control}"
            numbers = f"{f.estimate.mean:+.4g} | {interval(f.estimate)} | {probability(f.p)}"
            lines.append(f"| {names} | {f.contrast.metric} | {numbers} | {said} |")
    metrics = [name for name, _ in found.metrics]
    lines += ["", f"| arm | {' | '.join(metrics)} |", "|---" * (len(metrics) + 1) + "|"]
    for arm in dict.fromkeys(level.arm for level in found.levels):
        own = {level.metric: level for level in found.levels if level.arm == arm}
        name = f"{arm} (exploratory)" if any(level.exploratory for level in own.values()) else arm
        cells = [f"{own[m].estimate.mean:.4g} ({interval(own[m].estimate, sign=False)})" for m in metrics]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"- {note}" for note in found.notes), *([""] if found.notes else [])]
    lines += [f"![{path.stem}]({path.name})" for path in pictures]
    return "\n".join(lines) + "\n"


def show(found: Answer, folder: Path) -> None:
    """The answer on the console."""
    print(f"\n{found.question}\n\n{found.sentence}")
    for finding in found.must_fail:
        print(f"must fail: {told(finding)}: {outcome(finding)}")
    for finding in found.exploratory:
        print(f"exploratory: {told(finding)}: {finding.word}")
    for note in found.notes:
        print(f"note: {note}")
    print(f"{found.cpu_minutes:.1f} CPU minutes; report: {folder / 'report.html'}", flush=True)
