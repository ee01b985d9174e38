"""Several processes, started by torchrun or accelerate, train what one process trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from builders import ragged_batch, rollout
from postrl.batch import Batch
from postrl.packing import shares
from postrl.ranks import ALONE, Ranks
from postrl.record import read_metrics
from postrl.rollout import collate

RUN = Path(__file__).with_name("ranks_run.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def environment() -> dict[str, str]:
    paths = [str(RUN.parent), str(RUN.parent.parent / "src")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def launch(world: int, folder: Path, launcher: tuple[str, ...] = (), **options: object) -> subprocess.CompletedProcess:
    """`ranks_run.py` in `world` processes."""
    if not launcher:
        launcher = (sys.executable,) if world == 1 else (*TORCHRUN, str(world))
    command = [*launcher, str(RUN), str(folder), json.dumps(options)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)


def trained(world: int, folder: Path, **options: object) -> Path:
    done = launch(world, folder, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.glob("checkpoints/step_*"))
    return load_file(newest / "policy.safetensors") | load_file(newest / "optimizer.safetensors")


def figures(folder: Path) -> list[dict]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def assert_same(one: Path, other: Path) -> None:
    """Weights, moments and figures equal but for the order of float64 sums."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys() and all(value.dtype == torch.float64 for name, value in a.items() if "step" not in name)
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=0, atol=1e-10 * max(1.0, float(value.abs().max())))
    for left, right in zip(figures(one), figures(other), strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert right[name] == (pytest.approx(value, rel=1e-6, abs=1e-8) if isinstance(value, float) else value), (
                name
            )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(1, tmp_path_factory.mktemp("alone") / "run")


def test_two_processes_train_what_one_trains(alone: Path, tmp_path: Path) -> None:
    assert_same(alone, trained(2, tmp_path / "run"))


@pytest.mark.slow
def test_four_processes_of_which_one_has_no_group_train_the_same(alone: Path, tmp_path: Path) -> None:
    assert_same(alone, trained(4, tmp_path / "run"))  # three groups a step


def test_sharded_training_is_sharded_and_the_same(alone: Path, tmp_path: Path) -> None:
    # The run asserts that its parameters, gradients and moments are DTensors: a launcher may ignore such a wish.
    assert_same(alone, trained(2, tmp_path / "run", parallel="shard"))


@pytest.fixture(scope="module")
def alone_with_critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of four steps warm the critic up."""
    return trained(1, tmp_path_factory.mktemp("alone_with_critic") / "run", warmup=2)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_critic_and_its_warm_up_on_two_processes(alone_with_critic: Path, tmp_path: Path, parallel: str) -> None:
    assert_same(alone_with_critic, trained(2, tmp_path / "run", warmup=2, parallel=parallel))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_run_goes_on_with_another_number_of_processes(alone: Path, tmp_path: Path, parallel: str) -> None:
    trained(2, tmp_path / "run", steps=2, parallel=parallel)
    trained(1, tmp_path / "run", resume=True)
    assert_same(alone, tmp_path / "run")
    trained(1, tmp_path / "back", steps=2)
    assert_same(alone, trained(3, tmp_path / "back", resume=True, parallel=parallel))


@pytest.mark.slow
def test_accelerate_launches_the_same_run(alone: Path, tmp_path: Path) -> None:
    launcher = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    )
    launcher = (*launcher, "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
    done = launch(2, tmp_path / "run", launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(alone, tmp_path / "run")


@pytest.mark.slow
def test_the_example_shows_equal_rewards(tmp_path: Path) -> None:
    script = RUN.parent.parent / "examples" / "accelerate_two_processes.sh"
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = environment() | {"PATH": paths, "STEPS": "2"}
    command = ["bash", str(script), str(tmp_path / "out"), "--method", "reco"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.split("step  one process  two processes")[1].splitlines()) == 3
    assert [line["step"] for line in figures(tmp_path / "out" / "two") if "reward" in line] == [1, 2]


@pytest.mark.slow
def test_a_source_that_cannot_be_divided_works_in_the_first_process(alone: Path, tmp_path: Path) -> None:
    assert_same(alone, trained(2, tmp_path / "run", divisible=False))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_with_a_sentence_and_a_good_checkpoint(alone: Path, tmp_path: Path) -> None:
    done = launch(2, tmp_path / "run", die=3)
    assert done.returncode != 0
    assert "another process of this run has ended" in done.stdout + done.stderr
    trained(2, tmp_path / "run", resume=True)
    assert_same(alone, tmp_path / "run")


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(alone: Path, tmp_path: Path) -> None:
    done = launch(2, tmp_path / "run", interrupt=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures(tmp_path / "run")[-1]["step"] == 2
    trained(1, tmp_path / "run", resume=True)
    assert_same(alone, tmp_path / "run")


def test_bad_input_is_told_by_every_process_and_leaves_nobody_waiting(alone: Path) -> None:
    done = launch(2, alone)  # the folder holds a run already
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("holds a run") >= 2


# ---------------------------------------------------------------- shares, without processes


@pytest.mark.parametrize("atom", ["row", "unit", "group"])
@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_shares_hold_every_row_once_and_cut_no_atom(world: int, atom: str) -> None:
    batch = ragged_batch(seed=0)
    parts = shares(batch, world, atom)
    assert len(parts) == world and sorted(torch.cat(parts).tolist()) == list(range(len(batch.unit)))
    names = {"row": torch.arange(len(batch.unit)), "unit": batch.unit, "group": batch.group()[batch.unit]}[atom]
    homes = [{int(names[row]) for row in part} for part in parts]
    assert sum(map(len, homes)) == len(set(names.tolist()))


@pytest.mark.parametrize("world", [2, 3, 6])
def test_shares_are_equal_in_tokens_and_keep_a_prompt_at_one_process(world: int) -> None:
    batch = collate([rollout(group, sample, (1, group)) for group in range(6) for sample in range(4)])
    parts = shares(batch, world)
    assert len({len(part) for part in parts}) == 1
    assert sum(len(set(batch.prefix_id[part].tolist())) for part in parts) == 6
    crowded = shares(batch, 12)  # more processes than prompts: then the answers of a prompt are spread
    assert {len(part) for part in crowded} == {2}


def test_alone_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", None)
    assert ALONE.any(True) and not ALONE.any(False)
    assert ALONE.gather("a") == ["a"]
    assert torch.equal(ALONE.total(torch.ones(2)), torch.ones(2))


def test_alone_every_micro_batch_counts_and_the_last_is_the_last() -> None:
    batch: Batch = ragged_batch(seed=0)
    passes = Ranks().passes(batch, token_budget=8)
    assert len(passes) > 2 and all(each.counts for each in passes)
    assert [each.last for each in passes] == [False] * (len(passes) - 1) + [True]
