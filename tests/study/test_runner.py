"""A study runs what is missing, keeps what is there, mixes nothing, and says what went wrong."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

import postrl
from postrl.errors import UserError
from postrl.files import read_json
from postrl.study import registration, runner
from postrl.study.answer import Answer, answer
from postrl.study.finding import Found, load
from postrl.study.identity import base_key
from postrl.study.plan import Options, make_plan
from postrl.study.records import read_done
from postrl.study.runner import alone, execute, prepare, run_study, survey

Edit = Callable[..., Found]
DRIVE = """
import sys
from pathlib import Path
from typing import TextIO
from postrl.study.finding import load
from postrl.study.plan import Options, make_plan
from postrl.study.runner import alone, execute, prepare

plan = make_plan(load(Path(sys.argv[1])), Options(out=Path(sys.argv[2]), seeds=(0,), jobs=1))
plan.out.mkdir(parents=True, exist_ok=True)
with alone(plan.out):
    prepare(plan)
    execute(plan)
"""


def sit(found: Found, options: Options) -> Answer:
    """One sitting, without pictures."""
    plan = make_plan(found, options)
    plan.out.mkdir(parents=True, exist_ok=True)
    prepare(plan)
    execute(plan)
    return answer(survey(plan), registration.read(plan.out / "registered.json"))


def figures(out: Path) -> dict[str, object]:
    """What the runs measured, without what it cost."""
    files = sorted((out / "runs").glob("*/*/figures.json"))
    return {str(file.parent.relative_to(out)): read_json(file, "figures")["figures"] for file in files}


def test_a_study_from_start_to_report(toy: Path, ran: list[str], options: Options, capsys: pytest.CaptureFixture[str]):
    assert run_study(str(toy), options) == 0
    assert ran[:3] == ["base level seed 0", "base level seed 1", "base level seed 2"]
    assert ran[3:6] == ["plain seed 0", "loud seed 0", "echo seed 0"]  # whole pairs first
    results = read_json(options.out / "results" / "results.json", "results")
    assert results["verdict"] == "supported" and results["broken"] is False
    assert results["contrasts"][0]["estimate"]["mean"] == pytest.approx(0.3, abs=0.05)
    assert results["must_fail"][0]["word"] == "not supported"
    assert len(results["runs"]) == 9 and len(results["runs"][0]["measured"][0]["values"]) == 12
    names = {path.name for path in (options.out / "results").iterdir()}
    assert names == {"results.json", "summary.md", "report.html", "effects.png", "score.png", "threads.png"}
    assert "Supported: loud − plain in score" in capsys.readouterr().out
    assert (options.out / "results" / "results.json").stat().st_size < 20_000


def test_nothing_is_run_twice(edited: Edit, ran: list[str], options: Options):
    found = edited()
    part = sit(found, replace(options, seeds=(1,)))
    assert part.verdict == "unfinished" and len(part.absent) == 6 and "6 runs" in part.sentence
    first = len(ran)
    whole = sit(found, options)
    assert len(ran) - first == 2 + 6  # bases and runs of the other two seeds
    assert sit(found, options) == whole
    assert len(ran) - first == 8
    assert whole.verdict == "supported"


def test_a_changed_definition_is_not_mixed_with_old_results(edited: Edit, ran: list[str], options: Options):
    sit(edited(), options)
    changed = edited(("gain=0.3", "gain=0.2"))
    with pytest.raises(UserError, match=r"another definition of loud .*--fresh"):
        sit(changed, options)
    before = len(ran)
    again = sit(changed, replace(options, fresh=True))
    assert len(ran) - before == 9  # the bases are what they were
    assert again.contrasts[0].estimate.mean == pytest.approx(0.2, abs=0.05)
    assert [one.why for one in again.registrations] == ["first", "fresh"]
    assert any("9 runs already done" in note and "discarded" in note for note in again.notes)


def test_threads_are_part_of_the_definition(edited: Edit, ran: list[str], options: Options):
    sit(edited(), replace(options, seeds=(0,)))
    with pytest.raises(UserError, match="threads"):
        sit(edited(), replace(options, seeds=(0,), threads=2))


def test_a_new_arm_leaves_old_runs_as_they_are(edited: Edit, ran: list[str], options: Options):
    one = replace(options, seeds=(0,))
    sit(edited(), one)
    before = len(ran)
    sit(edited(('Arm("extra"', 'Arm("other"'), ('Contrast("extra"', 'Contrast("other"')), one)
    assert len(ran) == before


def test_the_hypothesis_is_registered_before_the_first_run_and_its_changes_after(
    edited: Edit, ran: list[str], options: Options
):
    plan = make_plan(edited(), options)
    plan.out.mkdir()
    prepare(plan)
    (entry,) = registration.read(plan.out / "registered.json")
    assert entry.why == "first" and entry.results == 0 and not ran
    assert entry.plan["hypothesis"] == plan.study.hypothesis
    assert entry.plan["contrasts"] == ["loud higher than plain in score; a difference of 0.1 matters"]
    sit(edited(), options)
    changes = (('HYPOTHESIS = "It does, by 0.3', 'HYPOTHESIS = "It does, by 0.2'), ("worth=0.1", "worth=0.2"))
    later = sit(edited(*changes), options)
    first, second = later.registrations
    assert (first, second.why, second.results) == (entry, "changed", 9)
    assert any("changed the plan (hypothesis, contrasts, must_fail)" in note for note in later.notes)
    assert len(sit(edited(*changes), options).registrations) == 2


def test_a_crash_is_reported_everywhere_and_tried_again(
    toy: Path, ran: list[str], options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TOY_CRASH", "loud/1")
    assert run_study(str(toy), options) == 1
    out, results = capsys.readouterr().out, options.out / "results"
    file = "runs/loud/1/traceback.txt"
    assert "loud seed 1: CRASHED" in out and "1 runs of the core crashed" in out
    (crash,) = read_json(results / "results.json", "results")["crashed"]
    assert crash["file"] == file and "told to crash" in crash["reason"]
    assert "told to crash" in (options.out / file).read_text(encoding="utf-8")
    page = (results / "report.html").read_text(encoding="utf-8")
    assert file in page and "told to crash &lt;b&gt;here" in page and "crash <b>" not in page
    assert file in (results / "summary.md").read_text(encoding="utf-8")
    monkeypatch.delenv("TOY_CRASH")
    before = len(ran)
    found = sit(load(toy), options)
    assert ran[before:] == ["loud seed 1"] and not found.crashed and found.verdict == "supported"


def test_runs_of_a_base_that_fails_are_crashes(edited: Edit, ran: list[str], options: Options):
    found = sit(edited(("sizes: sizes.level", "sizes: str(sizes.level)")), options)
    assert len(found.crashed) == 9 and "its base level-" in found.crashed[0].reason
    assert found.crashed[0].file.startswith("bases/level-")
    assert found.verdict == "too noisy to say" and "has no pair of runs" in found.sentence


def test_the_instrument_is_broken_if_what_must_fail_does_not(edited: Edit, ran: list[str], options: Options):
    found = sit(edited(("gain=0.0, key=3", "gain=0.3, key=3")), options)
    assert found.broken and found.verdict == "instrument broken"
    assert "echo − plain" in found.sentence and found.contrasts[0].word == "supported"


def test_a_broken_instrument_is_an_exit_code(
    edited: Edit, ran: list[str], options: Options, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "write_answer", lambda found, folder: None)  # pictures are tested elsewhere
    assert run_study(str(edited(("gain=0.0, key=3", "gain=0.3, key=3")).path), options) == 1


def test_several_contrasts_are_supported_only_together(edited: Edit, ran: list[str], options: Options):
    one = '(Contrast("loud", "plain", "score", "higher", worth=0.1),'
    two = one + ' Contrast("loud", "echo", "score", "lower", worth=0.1),'
    found = sit(edited((f"contrasts={one}", f"contrasts={two}")), options)
    assert [finding.word for finding in found.contrasts] == ["supported", "not supported"]
    assert found.verdict == "not supported"


def test_quick_has_its_own_sizes_seeds_and_folder_and_answers_nothing(edited: Edit, ran: list[str], tmp_path: Path):
    found, quick = edited(), Options(quick=True)
    assert make_plan(found, quick).out == Path("runs/studies/toy/quick").resolve()
    assert make_plan(found, Options()).out == Path("runs/studies/toy/full").resolve()
    result = sit(found, replace(quick, out=tmp_path / "quick"))
    assert result.sentence.startswith("Quick variant, too small to answer")
    assert {done.seed for done in result.runs} == {0, 1} and len(result.runs[0].figures.measured[0].values) == 4
    with pytest.raises(UserError, match="another definition"):
        sit(found, Options(out=tmp_path / "quick"))


def test_quick_may_leave_arms_out(edited: Edit, ran: list[str], options: Options):
    found = edited(("seeds=(0, 1))", 'seeds=(0, 1), arms=("plain", "loud"))'))
    result = sit(found, replace(options, quick=True))
    assert {done.arm for done in result.runs} == {"plain", "loud"} and not result.must_fail


def test_what_is_exploratory_is_labelled_and_never_part_of_the_verdict(edited: Edit, ran: list[str], options: Options):
    found = edited()
    plain = sit(found, options)
    more = sit(found, replace(options, extended=True))
    assert (more.contrasts, more.verdict) == (plain.contrasts, plain.verdict)
    assert [finding.contrast.treatment for finding in more.exploratory] == ["extra"]
    assert {level.arm for level in more.levels if level.exploratory} == {"extra"}
    with pytest.raises(UserError, match=r"\[3\] are not among .*--extended"):
        sit(found, replace(options, seeds=(2, 3)))
    seeds = sit(found, replace(options, seeds=(3,), extended=True))
    assert seeds.contrasts == plain.contrasts
    assert [(f.contrast.treatment, f.estimate.seeds) for f in seeds.exploratory] == [("loud", 4), ("extra", 3)]
    assert sit(found, options).exploratory == seeds.exploratory  # what is there is shown


def test_results_of_arms_that_are_gone_are_named(edited: Edit, ran: list[str], options: Options):
    options = replace(options, seeds=(0,))
    sit(edited(), replace(options, extended=True))
    gone = edited(('Arm("extra"', 'Arm("other"'), ('Contrast("extra"', 'Contrast("other"'))
    assert any("no longer has: extra" in note for note in sit(gone, options).notes)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (('scalar("threads", context.threads)', 'scalar("thread", 1)'), "gave the metrics score, thread"),
        (("values.tolist())", "[float('inf')] * len(items))"), "infinite"),
        (('f"problem {i}"', '"problem"'), "named twice"),
        (("    return Figures(", "    return dict.fromkeys("), "must return Figures"),
    ],
)
def test_figures_that_cannot_be_right_crash_their_run(
    edited: Edit, ran: list[str], options: Options, edit: tuple[str, str], said: str
):
    found = sit(edited(edit), replace(options, seeds=(0,)))
    assert len(found.crashed) == 3 and said in found.crashed[0].reason


def test_bases_that_need_bases(edited: Edit, ran: list[str], options: Options):
    """A shared base uses the base of seed 0, whatever the seed of the run that asks for it."""
    more = """LEVEL = Base("level", prepare, options=lambda sizes: sizes.level)


def copied(context: BaseContext[None]) -> None:
    (context.folder / "level.txt").write_text((context.bases["level"] / "level.txt").read_text())


COPY = Base("copy", copied, options=lambda sizes: None, shared=True, needs=(LEVEL,))
"""
    old = more.partition("\n")[0] + "\n"
    found = edited((old, more), ("gain=0.3, key=2), (LEVEL,)", "gain=0.3, key=2), (COPY,)"))
    sit(found, replace(options, seeds=(1,)))
    assert set(ran[:2]) == {"base level seed 1", "base level seed 0"} and ran[2] == "base copy seed 0"
    assert len(ran) == 6
    level = found.study.arm("plain").bases[0]
    key = base_key(level, found.study.config, 0, 1, found.path.parent)
    (copy,) = (options.out / "bases").glob("copy-*/files/level.txt")
    assert copy.read_bytes() == (options.out / "bases" / f"level-{key}" / "files" / "level.txt").read_bytes()


def test_undefined_figures_survive_the_file(edited: Edit, ran: list[str], options: Options):
    found = edited(('scalar("threads", context.threads)', 'scalar("threads", float("nan"))'))
    result = sit(found, replace(options, seeds=(0,)))
    assert "NaN" not in (options.out / "runs" / "plain" / "0" / "figures.json").read_text(encoding="utf-8")
    assert result.runs[0].figures.measured[1].mean != result.runs[0].figures.measured[1].mean


def test_a_damaged_file_is_named(edited: Edit, ran: list[str], options: Options):
    found, options = edited(), replace(options, seeds=(0,))
    sit(found, options)
    file = options.out / "runs" / "plain" / "0" / "figures.json"
    file.write_text('{"arm": "plain"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"plain/0/figures\.json"):
        sit(found, options)


def test_two_processes_do_not_share_a_folder(tmp_path: Path):
    with alone(tmp_path), pytest.raises(UserError, match="another process"), alone(tmp_path):
        pass


def test_what_an_arm_left_half_done_is_not_there_the_next_time(edited: Edit, ran: list[str], options: Options):
    work = options.out / "runs" / "plain" / "0" / "work"
    work.mkdir(parents=True)
    (work / "stale.txt").write_text("of a killed run", encoding="utf-8")
    sit(edited(), replace(options, seeds=(0,)))
    assert [path.name for path in work.iterdir()] == ["note.txt"]


def test_options_that_cannot_be_right(edited: Edit, options: Options):
    for changes, said in (({"jobs": -1}, "jobs=-1"), ({"threads": 0}, "threads=0"), ({"seeds": (-1,)}, "seeds")):
        with pytest.raises(UserError, match=said):
            make_plan(edited(), replace(options, **changes))


def free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def test_killed_half_way_and_restarted_ends_with_the_same_numbers(toy: Path, tmp_path: Path, ran: list[str]):
    """SIGKILL of the study, processes and all; nothing of it goes on in the background."""
    out = tmp_path / "killed"
    command = [sys.executable, "-c", DRIVE, str(toy), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(postrl.__file__).parent.parent)}
    process = subprocess.Popen(command, env={**environment, "TOY_WAIT": "loud"}, stdout=subprocess.DEVNULL)
    running = out / "runs" / "loud" / "0"
    deadline = time.monotonic() + 120
    while not (running / "work").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with (running / "lock").open("w") as lock:  # held by the run's process, which would sleep for a minute
        deadline = time.monotonic() + 20
        while not free(lock) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert free(lock)
    assert read_done(out / "runs" / "plain" / "0") is not None
    kept = (out / "runs" / "plain" / "0" / "figures.json").stat().st_mtime_ns
    subprocess.run(command, env=environment, check=True, timeout=200, stdout=subprocess.DEVNULL)
    assert (out / "runs" / "plain" / "0" / "figures.json").stat().st_mtime_ns == kept

    whole = Options(out=tmp_path / "whole", seeds=(0,))
    sit(load(toy), whole)
    assert len(figures(out)) == 3
    assert json.dumps(figures(out)) == json.dumps(figures(tmp_path / "whole"))
