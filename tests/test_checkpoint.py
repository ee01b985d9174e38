"""Checkpoints come back bit for bit, are whole or absent, and damaged or foreign ones are named."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from postrl import checkpoint
from postrl.checkpoint import Progress, checkpoints, restore, save, snapshot
from postrl.errors import UserError
from postrl.policies.tabular import Tabular


class Counter:
    """A state of a run."""

    def __init__(self, count: int = 0):
        self.value = {"count": count, "history": [0.1] * count}

    def state_dict(self) -> dict:
        return self.value

    def load_state_dict(self, state: dict) -> None:
        self.value = state


def trained(key: int = 0, memory: int = 2, dtype: torch.dtype = torch.float32, steps: int = 3):
    """A policy and its AdamW after some steps on noise."""
    policy = Tabular.random(4, memory, 16, key=(key,), dtype=dtype)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(key)
    for _ in range(steps):
        policy.table.grad = torch.randn(policy.table.shape, generator=generator, dtype=dtype)
        optimizer.step()
    return policy, optimizer


def saved(folder: Path, step: int = 3, best: int | None = None) -> Path:
    policy, optimizer = trained()
    return save(folder, policy, optimizer, snapshot({"counter": Counter(2)}), Progress(step, 5, 1, best_step=best))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_everything_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path):
    policy, optimizer = trained(0, dtype=dtype)
    progress = Progress(step=7, update=28, constant=2, evaluated=5, best=1 / 3, best_step=5)
    path = save(tmp_path, policy, optimizer, snapshot({"counter": Counter(2)}), progress)
    other, fresh = trained(1, dtype=dtype, steps=0)
    counter = Counter()
    assert restore(path, other, fresh, {"counter": counter}) == progress
    assert counter.value == {"count": 2, "history": [0.1, 0.1]}
    for _ in range(3):  # the moments too: both go on alike
        for model, adam in ((policy, optimizer), (other, fresh)):
            model.table.grad = torch.ones_like(model.table)
            adam.step()
        assert torch.equal(policy.table, other.table)


def test_an_optimiser_that_never_stepped(tmp_path: Path):
    policy, optimizer = trained(steps=0)
    path = save(tmp_path, policy, optimizer, {}, Progress(1))
    other, fresh = trained(1, steps=0)
    assert restore(path, other, fresh, {}) == Progress(1) and torch.equal(policy.table, other.table)


def test_thread_count_comes_back(tmp_path: Path):
    path = saved(tmp_path)
    state = json.loads((path / "state.json").read_text())
    assert state["threads"] == torch.get_num_threads() and state["dtype"] == ["torch.float32"]
    (path / "state.json").write_text(json.dumps(state | {"threads": 2}))
    before = torch.get_num_threads()
    try:
        restore(path, *trained(), {})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_safetensors_and_json_only(tmp_path: Path):
    assert sorted(p.name for p in saved(tmp_path).iterdir()) == [
        "optimizer.safetensors",
        "policy.safetensors",
        "state.json",
    ]


def test_frozen_weights_are_not_saved_nor_asked_for(tmp_path: Path):
    policy, optimizer = trained()
    policy.register_parameter("frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    path = save(tmp_path, policy, optimizer, {}, Progress(1))
    assert list(load_file(path / "policy.safetensors")) == ["table"]
    restore(path, policy, optimizer, {})


def test_last_two_and_the_best_are_kept(tmp_path: Path):
    for step in range(2, 12, 2):
        saved(tmp_path, step, best=4 if step >= 4 else None)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000004", "step_000008", "step_000010"]


def test_order_is_that_of_numbers(tmp_path: Path):
    for step in (999_998, 999_999, 1_000_000):
        saved(tmp_path, step)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_999999", "step_1000000"]


def test_half_written_and_foreign_folders_are_ignored(tmp_path: Path):
    (tmp_path / ".step_000009.part").mkdir()
    (tmp_path / "step_best").mkdir()
    (tmp_path / "step_000008").touch()
    path = saved(tmp_path)
    assert checkpoints(tmp_path) == [path]


def test_a_snapshot_does_not_move_with_its_state():
    counter = Counter(1)
    taken = snapshot({"counter": counter})
    counter.value["history"].append(5.0)
    assert taken == {"counter": {"count": 1, "history": [0.1]}}


FILES = ["policy.safetensors", "optimizer.safetensors", "state.json"]


def refused(path: Path, name: str, policy: Tabular | None = None, states: dict | None = None) -> str:
    fresh, optimizer = trained(5) if policy is None else (policy, torch.optim.AdamW(policy.parameters()))
    with pytest.raises(UserError, match=str(path / name)) as caught:
        restore(path, fresh, optimizer, {"counter": Counter()} if states is None else states)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage"])
def test_damage_is_named(name: str, damage: str, tmp_path: Path):
    path = saved(tmp_path)
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        new = {"empty": b"", "truncated": content[: len(content) // 2], "garbage": b"\x93" * len(content)}
        (path / name).write_bytes(new[damage])
    refused(path, name)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"progress": {"step": 1, "stride": 2}},
        {"progress": None},
        {"progress": {"step": "four"}},
        {"threads": "many"},
        {"threads": 0},
        {"states": 5},
        {"states": {"another": {}}},
    ],
)
def test_foreign_state_is_named(change: dict, tmp_path: Path):
    path = saved(tmp_path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | change))
    refused(path, "state.json")


@pytest.mark.parametrize("part", ["format", "progress", "threads", "states"])
def test_a_state_without_a_part_is_named(part: str, tmp_path: Path):
    path = saved(tmp_path)
    state = json.loads((path / "state.json").read_text())
    del state[part]
    (path / "state.json").write_text(json.dumps(state))
    refused(path, "state.json")


@pytest.mark.parametrize(
    "policy",
    [Tabular.uniform(4, 1, 16), Tabular.uniform(4, 2, 16, dtype=torch.bfloat16)],
    ids=["shape", "dtype"],
)
def test_another_model_is_named(policy: Tabular, tmp_path: Path):
    assert "'table'" in refused(saved(tmp_path), "policy.safetensors", policy)


def test_tensors_of_other_names_are_named(tmp_path: Path):
    path = saved(tmp_path)
    save_file({"model.embed": torch.zeros(2)}, path / "policy.safetensors")
    refused(path, "policy.safetensors")


@pytest.mark.parametrize("key", ["0.exp_avg", "1.exp_avg", "exp_avg", "x.y", "0."])
def test_a_foreign_optimiser_is_named(key: str, tmp_path: Path):
    """Its moments would be used as they are, and fail, or worse, broadcast at the first step."""
    path = saved(tmp_path)
    save_file({key: torch.zeros(25, 1)}, path / "optimizer.safetensors")
    refused(path, "optimizer.safetensors")


@pytest.mark.parametrize("number", [1, 2])
def test_a_full_disk_leaves_the_older_checkpoints(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path, 2)
    older = saved(tmp_path, 4)
    calls = []

    def failing(tensors: dict, path: Path) -> None:
        calls.append(path)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", failing)
    with pytest.raises(UserError, match=r"disk is full: .*step_000006 was not written"):
        saved(tmp_path, 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000004"]
    monkeypatch.undo()
    restore(older, *trained(5), {"counter": Counter()})
