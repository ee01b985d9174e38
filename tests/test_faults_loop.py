"""Faults that users of today's trainers report, against the whole loop: resume and determinism, kills and signals, full
disks and exhausted memory, rewards and gradients that break, memory that grows. One test per fault."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from copy_run import PLACES, Copying, assert_same_run, evaluation, figures, letters_policy, overlap, quiet, run
from postrl import checkpoint, record
from postrl.checkpoint import checkpoints
from postrl.display import Display
from postrl.errors import UserError
from postrl.papers import method
from postrl.policies.tabular import Tabular
from postrl.source import Dataset

TESTS = Path(__file__).parent
OPTIONS = {"steps": 6, "updates": 2, "epochs": 2, "checkpoint_every": 2, "schedule": "linear", "warmup": 3}
CONSTANT = OPTIONS | {"schedule": "constant", "warmup": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run that others are compared with."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, **OPTIONS)
    return folder


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a learning rate that does not know how many steps there are."""
    folder = tmp_path_factory.mktemp("constant")
    run(folder, **CONSTANT)
    return folder


def start(*arguments: str) -> subprocess.Popen:
    source = TESTS.parent / "src"
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "copy_run.py"), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.fixture(scope="module")
def kill() -> Iterator[Callable[..., None]]:
    """kill(folder, place, number): a run in a process of its own that SIGKILL ends there."""
    server = start()

    def run_and_kill(folder: Path, place: str, number: int, **options) -> None:
        job = [str(folder), place, str(number), json.dumps(OPTIONS | options)]
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline().strip()
        assert answer == str(-signal.SIGKILL), answer

    yield run_and_kill
    server.stdin.close()
    server.wait(timeout=30)


# ---------------------------------------------------------------- same seed, same run


def test_same_seed_same_run(whole: Path, tmp_path: Path):
    """verl #1683, #3126, #6570."""
    run(tmp_path, **OPTIONS)
    assert_same_run(whole, tmp_path)


def test_another_seed_another_run(whole: Path, tmp_path: Path):
    policy = letters_policy()
    run(tmp_path, policy=policy, source=Copying(policy, seed=1), **(OPTIONS | {"seed": 1}))
    assert figures(tmp_path) != figures(whole)


def test_global_random_numbers_do_not_reach_a_run(whole: Path, tmp_path: Path):
    torch.manual_seed(123)
    run(tmp_path, **OPTIONS)
    assert_same_run(whole, tmp_path)


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("stop", range(1, 6))
def test_resume_after_every_step(stop: int, constant: Path, tmp_path: Path):
    """More steps may be asked for: a run that ended there goes on as if it had not."""
    run(tmp_path, **(CONSTANT | {"steps": stop}))
    run(tmp_path, **CONSTANT, resume=True)
    assert_same_run(constant, tmp_path)


@pytest.mark.parametrize("place", [name for name in PLACES if name != "nowhere"])
def test_killed_then_resumed_is_the_uninterrupted_run(place: str, kill, whole: Path, tmp_path: Path):
    """SIGKILL in the middle of step 4 (of a checkpoint: of the one after step 4; forgetting: after step 6)."""
    number = {"collection": 21, "update": 14, "checkpoint": 4, "rename": 2, "forgetting": 1}.get(place, 4)
    kill(tmp_path, place, number)
    assert len(figures(tmp_path)) < 6 or place == "forgetting"
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_killed_twice(kill, whole: Path, tmp_path: Path):
    kill(tmp_path, "update", 11)
    kill(tmp_path, "update", 11, resume=True)
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


def test_killed_before_the_first_checkpoint_starts_over(kill, whole: Path, tmp_path: Path):
    kill(tmp_path, "update", 3)
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_resume_exactly_at_the_boundary_of_the_data(stop: int, tmp_path: Path):
    """verl #5725: resuming there trained zero steps in silence. Six groups, three a step: an epoch is two steps."""
    given = Copying(letters_policy())(0)

    def go(folder: Path, steps: int, resume: bool = False) -> int:
        source = Dataset(given, per_step=3)
        return run(folder, source=source, steps=steps, checkpoint_every=1, resume=resume).progress.step

    assert go(tmp_path / "a", 7) == 7
    assert go(tmp_path / "b", stop) == stop and go(tmp_path / "b", 7, resume=True) == 7
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert len(figures(tmp_path / "b")) == 7


def test_resume_with_a_changed_option_is_refused(tmp_path: Path):
    run(tmp_path, steps=2, rest={"describe": {"data": "abc"}})
    before = figures(tmp_path)
    for change in ({"learning_rate": 0.2}, {"updates": 3}, {"seed": 1}, {"importance_cap": None}):
        with pytest.raises(UserError, match=f"was run with {next(iter(change))}="):
            run(tmp_path, **({"steps": 3} | change), resume=True, rest={"describe": {"data": "abc"}})
    with pytest.raises(UserError, match="was run with method='grpo', not 'rloo'"):
        run(tmp_path, "rloo", steps=3, resume=True, rest={"describe": {"data": "abc"}})
    with pytest.raises(UserError, match="was run with data='abc', not 'abd'"):
        run(tmp_path, steps=3, resume=True, rest={"describe": {"data": "abd"}})
    assert figures(tmp_path) == before


def test_resume_with_changed_data_is_refused(tmp_path: Path):
    """NeMo-RL #2519."""
    given = Copying(letters_policy())(0)
    run(tmp_path, source=Dataset(given, per_step=3), steps=2)
    given[0].rewards["overlap"] = 0.125
    with pytest.raises(UserError, match="rollouts are not those of the checkpoint"):
        run(tmp_path, source=Dataset(given, per_step=3), steps=3, resume=True)


def test_a_finished_run_resumed_does_nothing(whole: Path, tmp_path: Path):
    run(tmp_path, **OPTIONS)
    policy = letters_policy()
    source = Copying(policy)
    result = run(tmp_path, policy=policy, source=source, **OPTIONS, resume=True)
    assert result.status == "finished" and source.calls == []
    assert_same_run(whole, tmp_path)


def test_fewer_steps_than_were_done_do_nothing(constant: Path, tmp_path: Path):
    run(tmp_path, **CONSTANT)
    assert run(tmp_path, **(CONSTANT | {"steps": 3}), resume=True).status == "finished"
    assert_same_run(constant, tmp_path)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [2, 8])
def test_a_schedule_that_ends_is_not_stretched_on_resume(schedule: str, steps: int, tmp_path: Path):
    options = {"steps": 4, "schedule": schedule}
    run(tmp_path, **options)
    before = figures(tmp_path)
    with pytest.raises(UserError, match=f"was run with steps=4, not {steps}, and option schedule='{schedule}'"):
        run(tmp_path, **(options | {"steps": steps}), resume=True)
    assert figures(tmp_path) == before
    assert run(tmp_path, **options, resume=True).status == "finished"


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path):
    run(tmp_path, steps=1)
    before = figures(tmp_path)
    with pytest.raises(UserError, match="already holds a run: add --resume"):
        run(tmp_path, steps=1)
    assert figures(tmp_path) == before


def test_a_damaged_newest_checkpoint_is_named_and_an_older_one_serves(whole: Path, tmp_path: Path):
    run(tmp_path, **(OPTIONS | {"steps": 6}))
    newest = checkpoints(tmp_path / "checkpoints")[-1]
    weights = newest / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=f"{weights} is damaged or missing .*delete its folder to use an older one"):
        run(tmp_path, **OPTIONS, resume=True)
    checkpoint.shutil.rmtree(newest)
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


def test_a_weight_without_gradient_does_not_change_the_resumed_run(tmp_path: Path):
    """AdamW moves a weight whose gradient is zero (by its momentum), but not one whose gradient is absent."""

    class Fading(Tabular):
        """Its second weight is used in the first two steps only."""

        def __init__(self) -> None:
            super().__init__(letters_policy().table.detach().clone(), 4, 8)
            self.extra = torch.nn.Parameter(torch.zeros(1))
            self.uses = True

        def forward(self, batch, want=frozenset()):
            out = super().forward(batch, want)
            return replace(out, logp=out.logp * (1 + self.extra)) if self.uses else out

    def go(folder: Path, steps: int, resume: bool = False) -> float:
        policy = Fading()

        class Watching(Copying):
            def __call__(self, step: int):
                policy.uses = step < 2
                return super().__call__(step)

        run(folder, policy=policy, source=Watching(policy), steps=steps, resume=resume)
        return float(policy.extra.detach())

    straight = go(tmp_path / "a", 6)
    go(tmp_path / "b", 4)
    assert go(tmp_path / "b", 6, resume=True) == straight != 0.0


def test_dropout_does_not_change_the_resumed_run(tmp_path: Path):
    """torch's random numbers follow from the seed and the step, not from what was drawn before."""

    class Dropping(Tabular):
        def forward(self, batch, want=frozenset()):
            out = super().forward(batch, want)
            drop = torch.nn.functional.dropout(torch.ones_like(out.logp), 0.2, training=torch.is_grad_enabled())
            return replace(out, logp=out.logp * drop)

    def go(folder: Path, steps: int, resume: bool = False) -> None:
        run(folder, policy=Dropping.uniform(3, 4, 8), steps=steps, resume=resume)

    go(tmp_path / "a", 6)
    go(tmp_path / "b", 4)
    go(tmp_path / "b", 6, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


# ---------------------------------------------------------------- signals


def wait_for_step(folder: Path, step: int, running: subprocess.Popen) -> None:
    path = folder / "metrics.jsonl"
    for _ in range(1200):
        if running.poll() is not None:
            raise AssertionError(f"ended too early: {running.communicate()[0]}")
        if path.exists() and path.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.05)
    raise AssertionError("never got there")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(number: signal.Signals, tmp_path: Path):
    options = OPTIONS | {"steps": 100_000, "checkpoint_every": 100_000, "schedule": "constant"}
    running = start(str(tmp_path), "nowhere", "1", json.dumps(options))
    try:
        wait_for_step(tmp_path, 2, running)
        running.send_signal(number)
        output, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, output
    done = len(figures(tmp_path))
    assert f"interrupted {done}" in output, "the step it was in is whole, and in the metrics"
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == [f"step_{done:06d}"]
    run(tmp_path, **(options | {"steps": done + 2}), resume=True)
    run(tmp_path / "straight", **(options | {"steps": done + 2}))
    assert_same_run(tmp_path / "straight", tmp_path)


class Interrupting(Copying):
    """Sends itself signals in the middle of the collection of one step."""

    def __init__(self, policy: Tabular, step: int, count: int = 1):
        super().__init__(policy)
        self.step, self.count = step, count

    def __call__(self, step: int):
        rollouts = super().__call__(step)
        for _ in range(self.count if step == self.step else 0):
            signal.raise_signal(signal.SIGINT)
        return rollouts


def test_an_interrupted_run_says_how_to_go_on(whole: Path, tmp_path: Path):
    policy = letters_policy()
    display, text = quiet()
    result = run(tmp_path, policy=policy, source=Interrupting(policy, 2), **OPTIONS, rest={"display": display})
    assert (result.status, result.progress.step) == ("interrupted", 3)
    assert "stopped after step 3; go on with the same command and --resume" in text.getvalue()
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


def test_a_second_signal_ends_at_once_and_the_last_checkpoint_serves(whole: Path, tmp_path: Path):
    policy = letters_policy()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, policy=policy, source=Interrupting(policy, 2, count=2), **OPTIONS)
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == ["step_000002"]
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


def test_a_signal_before_an_evaluation_saves_first_and_evaluates_when_resumed(tmp_path: Path):
    """An evaluation may take minutes: who interrupts does not wait for it, and it is not left out either."""

    def go(folder: Path, source=None, policy=None, resume=False) -> str:
        rest = {"evaluate": lambda: evaluation(0.25)}
        return run(folder, policy=policy, source=source, steps=4, evaluate_every=3, resume=resume, rest=rest).status

    go(tmp_path / "a")
    for step in (2, 3):
        folder = tmp_path / f"b{step}"
        policy = letters_policy()
        assert go(folder, Interrupting(policy, step), policy) == "interrupted"
        assert [line["step"] for line in figures(folder) if "evaluation" in line] == [0, 3][: step - 1]
        assert go(folder, resume=True) == "finished"
        assert_same_run(tmp_path / "a", folder)


# ---------------------------------------------------------------- rewards, evaluations and gradients that break


def breaking(step: int, error: Exception | float):
    """A source whose reward breaks in the middle of the collection of a step."""

    class Breaking(Copying):
        def _group(self, now: int, group: int):
            if now == step and group % 3 == 2 and isinstance(error, Exception):
                raise error
            rollouts = super()._group(now, group)
            for rollout in rollouts if now == step and not isinstance(error, Exception) else []:
                rollout.rewards["overlap"] = error
            return rollouts

    policy = letters_policy()
    return policy, Breaking(policy)


@pytest.mark.parametrize("error", [UserError("reward 'overlap' raised on item 'ab'"), RuntimeError("boom")])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_reward_that_raises_loses_nothing(error: Exception, step: int, whole: Path, tmp_path: Path):
    """verifiers' legacy rubric gives 0.0. Here the run stops, with the whole step before it saved, and the place in the
    data that it had before the collection that broke."""
    policy, source = breaking(step, error)
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path, policy=policy, source=source, **OPTIONS)
    assert checkpoints(tmp_path / "checkpoints")[-1].name == f"step_{step:06d}"
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


def test_a_reward_that_raises_in_the_first_step_gives_the_folder_back(whole: Path, tmp_path: Path):
    policy, source = breaking(0, UserError("reward 'overlap' raised on item 'ab'"))
    with pytest.raises(UserError, match="raised on item 'ab'"):
        run(tmp_path, policy=policy, source=source, **OPTIONS)
    run(tmp_path, **OPTIONS)
    assert_same_run(whole, tmp_path)


def test_an_infinite_reward_stops_before_the_weights(whole: Path, tmp_path: Path):
    policy, source = breaking(3, -math.inf)
    with pytest.raises(UserError, match="advantage of method grpo is not finite"):
        run(tmp_path, policy=policy, source=source, **OPTIONS)
    assert bool(torch.isfinite(policy.table).all())
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


def test_a_gradient_that_is_not_finite_spoils_nothing(whole: Path, tmp_path: Path):
    built = method("grpo")
    loss, calls = built.terms[0].loss, []

    def breaking_loss(batch, advantage, forward):
        calls.append(1)
        factor = math.nan if len(calls) == 14 else 1.0
        return loss(batch, advantage, forward) * factor

    policy = letters_policy()
    broken = replace(built, terms=(replace(built.terms[0], loss=breaking_loss),))
    with pytest.raises(UserError, match=r"gradient of an update is nan.*lower learning_rate"):
        run(tmp_path, broken, policy, **OPTIONS)
    assert bool(torch.isfinite(policy.table).all())
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


def test_an_evaluation_that_raises_loses_nothing(tmp_path: Path):
    def evaluate_or_fail(fail: bool, calls: list[int]):
        def evaluate():
            calls.append(1)
            if fail and len(calls) == 2:
                raise RuntimeError("boom")
            return evaluation(0.25)

        return evaluate

    options = {"steps": 5, "checkpoint_every": 100, "evaluate_every": 3}
    run(tmp_path / "a", **options, rest={"evaluate": evaluate_or_fail(False, [])})
    with pytest.raises(RuntimeError, match="boom"):
        run(tmp_path / "b", **options, rest={"evaluate": evaluate_or_fail(True, [])})
    assert [p.name for p in checkpoints(tmp_path / "b" / "checkpoints")] == ["step_000003"]
    run(tmp_path / "b", **options, resume=True, rest={"evaluate": evaluate_or_fail(False, [])})
    assert_same_run(tmp_path / "a", tmp_path / "b")


# ---------------------------------------------------------------- full disks, exhausted memory


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("place", "name", "file"),
    [
        (checkpoint, "save_file", r"checkpoints/step_000002"),
        (record.pq, "write_table", r"rollouts/step_000001\.parquet"),
        (record.Metrics, "_append", r"metrics\.jsonl"),
    ],
)
def test_a_full_disk_is_named_and_the_run_goes_on_later(place, name: str, file: str, whole: Path, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, full)
        with pytest.raises(UserError, match=f"the disk is full: .*{file} was not written"):
            run(tmp_path, **OPTIONS)
    run(tmp_path, **OPTIONS, resume=(tmp_path / "run.json").exists())
    assert_same_run(whole, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system too small for a second checkpoint."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=88k", "tmpfs", str(tmp_path)], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {tried.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_really_full_disk(small_disk: Path, whole: Path):
    with pytest.raises(UserError, match=r"the disk is full: .* was not written"):
        run(small_disk, **(OPTIONS | {"steps": 60}))
    assert not list(small_disk.rglob(".*")), "nothing half-written is left"
    saved = checkpoints(small_disk / "checkpoints")
    assert saved, "the older checkpoint is still there"
    checkpoint.restore(saved[-1], letters_policy(), None, {})


def test_exhausted_memory_names_the_option(whole: Path, tmp_path: Path):
    class Hungry(Tabular):
        def forward(self, batch, want=frozenset()):
            if self.table.abs().max() > 0.3:
                torch.empty(10**15)
            return super().forward(batch, want)

    policy = Hungry.uniform(3, 4, 8)
    with pytest.raises(UserError, match="out of memory with token_budget=4096: lower token_budget"):
        run(tmp_path, policy=policy, **OPTIONS)
    assert 0 < len(figures(tmp_path)) < 6
    run(tmp_path, **OPTIONS, resume=True)
    assert_same_run(whole, tmp_path)


# ---------------------------------------------------------------- growth


def growth(steps: int, folder: Path, policy, source, skip: int) -> tuple[float, int]:
    """(MB of resident memory, open files) that a run adds between step `skip` and its end."""
    here = psutil.Process()
    seen: list[tuple[int, int]] = []

    class Watching(Display):
        def step(self, step: int, metrics) -> None:
            seen.append((here.memory_info().rss, here.num_fds()))

    run(folder, "reco", policy, source, steps=steps, checkpoint_every=10, rest={"display": Watching(steps)})
    early = max(rss for rss, _ in seen[skip - 20 : skip])
    return (max(rss for rss, _ in seen[-20:]) - early) / 2**20, seen[-1][1] - seen[skip][1]


def test_memory_and_open_files_are_flat_over_two_hundred_steps(tmp_path: Path):
    """verl #429, #630, #2950, #3453, #4995, #5206."""
    policy = letters_policy()
    megabytes, files = growth(200, tmp_path, policy, Copying(policy, groups=2), skip=60)
    assert megabytes < 4 and files <= 0


@pytest.mark.slow
def test_memory_is_flat_over_two_hundred_steps_of_a_decoder(tmp_path: Path):
    from tiny import tiny_decoder

    policy = tiny_decoder(vocab=8)
    megabytes, files = growth(200, tmp_path, policy, Copying(policy, groups=4), skip=60)
    assert megabytes < 8 and files <= 0


def test_a_leak_would_be_seen(tmp_path: Path):
    """The measurement above can fail: a source that keeps 100 kB a step."""
    policy = letters_policy()
    kept: list[bytearray] = []

    class Leaking(Copying):
        def __call__(self, step: int):
            kept.append(bytearray(os.urandom(100_000)))
            return super().__call__(step)

    megabytes, _ = growth(100, tmp_path, policy, Leaking(policy, groups=2), skip=30)
    assert megabytes > 4


def test_shaped_rewards_alone_are_told(tmp_path: Path):
    """verl-recipe #125: all wrong, yet the shaped reward varies and trains: the metrics tell."""
    policy = letters_policy()

    def wrong(prompt: list[int], answer: list[int]) -> dict[str, float | None]:
        return overlap(prompt, answer) | {"correct": 0.0}

    run(tmp_path, policy=policy, source=Copying(policy, score=wrong), steps=1)
    assert figures(tmp_path)[0]["groups/shaped_only"] > 0.5
