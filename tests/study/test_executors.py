"""Processes that end badly are told apart, and where a run ran does not change its figures."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

import postrl
from postrl.files import read_json
from postrl.study.executors import local, on_node, ray
from postrl.study.finding import load
from postrl.study.plan import Options, make_plan
from postrl.study.records import Job
from postrl.study.runner import execute, prepare


def job(study: Path, folder: Path, minutes: float = 2.0) -> Job:
    made = Job("run", study, "plain", 0, "key", "full", {"level": str(folder / "level")}, folder, 1, minutes, None)
    (folder / "level").mkdir(parents=True)
    (folder / "level" / "level.txt").write_text("0.5", encoding="utf-8")
    made.write()
    return made


def test_how_a_process_ended(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOY_CRASH", "plain/0")
    crashed = job(toy, tmp_path / "crashed")
    text = toy.read_text(encoding="utf-8").replace("raise ValueError", "os.kill(os.getpid(), 9)  # ")
    killed = tmp_path / "other" / "study.py"
    killed.parent.mkdir()
    killed.write_text(text, encoding="utf-8")
    (killed.parent / "helpers_of_toy.py").write_bytes((toy.parent / "helpers_of_toy.py").read_bytes())
    ends = {ended.job.folder.name: ended.reason for ended in local([crashed, job(killed, tmp_path / "killed")], 2)}
    assert ends == {"crashed": "ended with exit code 1", "killed": "was killed by SIGKILL"}
    assert "told to crash" in (tmp_path / "crashed" / "traceback.txt").read_text(encoding="utf-8")
    assert "told to crash" in (tmp_path / "crashed" / "log.txt").read_text(encoding="utf-8")


CHILD = """    import subprocess
        (context.folder / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)"""


def gone(pid: int) -> bool:
    """No such process, or only its entry that nobody has read yet."""
    line = Path(f"/proc/{pid}/cmdline")
    return not line.exists() or not line.read_bytes()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for a process in /proc")
def test_a_run_past_its_limit_is_ended_with_all_it_started(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOY_WAIT", "plain")
    text = toy.read_text(encoding="utf-8").replace("    time.sleep(60)", CHILD)
    toy.write_text(text, encoding="utf-8")
    late = job(toy, tmp_path / "late", minutes=0.2)
    (ended,) = local([late], 1)
    assert "past its limit of 0.2 minutes" in ended.reason
    pid = int((late.folder / "work" / "child").read_text(encoding="utf-8"))
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path):
    assert "choose an --out that all nodes share" in on_node(str(tmp_path / "elsewhere"))


def test_no_jobs_start_nothing():
    assert not list(local([], 2)) and not list(ray([], 2))


@pytest.mark.slow
def test_ray_and_local_processes_give_the_same_figures(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cluster = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(postrl.__file__).parent.parent))
    cluster.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for name in ("local", "ray"):
            options = Options(out=tmp_path / name, seeds=(0, 1), extended=True, jobs=2)
            plan = make_plan(load(toy), replace(options, executor=name))
            plan.out.mkdir()
            prepare(plan)
            execute(plan)
    finally:
        cluster.shutdown()
    runs = [sorted((tmp_path / name / "runs").glob("*/*/figures.json")) for name in ("local", "ray")]
    assert len(runs[0]) == len(runs[1]) == 8
    for one, other in zip(*runs, strict=True):
        assert read_json(one, "figures")["figures"] == read_json(other, "figures")["figures"]
