"""What a run leaves behind: its configuration, metrics and rollouts, and what is refused."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from builders import ragged_batch, ragged_rollouts, rollout, units
from postrl.errors import UserError
from postrl.record import Metrics, open_run, read_metrics, take_back, write_rollouts
from postrl.rollout import collate

FREE = frozenset({"steps"})


def test_a_run_says_what_it_was(tmp_path: Path):
    open_run(tmp_path, {"seed": 3, "method": "grpo"}, False, FREE)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["configuration"] == {"seed": 3, "method": "grpo"}
    assert run["versions"]["torch"] == torch.__version__ and run["threads"] == torch.get_num_threads()
    assert {"command", "git", "machine"} <= set(run)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "checkpoints", "rollouts"])
def test_a_folder_that_holds_a_run_is_refused(name: str, tmp_path: Path):
    """Even if only its checkpoints are left: a new run would be taken for the older, and its checkpoints forgotten."""
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{tmp_path} already holds a run: add --resume"):
        open_run(tmp_path, {}, False, FREE)


def test_resume_without_a_run(tmp_path: Path):
    with pytest.raises(UserError, match=r"holds no run to go on with: leave --resume away"):
        open_run(tmp_path, {}, True, FREE)


@pytest.mark.parametrize("content", ["{}", '{"configuration": 3}'])
def test_resume_of_a_run_without_configuration(content: str, tmp_path: Path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run\.json cannot be read as a run to resume: it has no configuration"):
        open_run(tmp_path, {}, True, FREE)


def test_resume_with_the_same_options(tmp_path: Path):
    open_run(tmp_path, {"seed": 3, "steps": 5, "betas": (0.9, 0.95), "cap": None}, False, FREE)
    before = (tmp_path / "run.json").read_text()
    open_run(tmp_path, {"seed": 3, "steps": 9, "betas": (0.9, 0.95), "cap": None}, True, FREE)
    assert (tmp_path / "run.json").read_text() == before


@pytest.mark.parametrize("change", [{"seed": 4}, {"cap": 2.0}, {"new": 1}])
def test_a_changed_option_is_named(change: dict, tmp_path: Path):
    open_run(tmp_path, {"seed": 3, "cap": None}, False, FREE)
    with pytest.raises(UserError, match=f"was run with {next(iter(change))}="):
        open_run(tmp_path, {"seed": 3, "cap": None} | change, True, FREE)


def test_damaged_configuration(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"configuration": {"se')
    with pytest.raises(UserError, match=r"run\.json cannot be read as a run to resume"):
        open_run(tmp_path, {}, True, FREE)


def test_a_run_that_recorded_no_step_is_taken_back(tmp_path: Path):
    open_run(tmp_path, {}, False, FREE)
    Metrics(tmp_path, -1, -1).write({"step": 0, "evaluation": {}})
    take_back(tmp_path)
    open_run(tmp_path, {"other": 1}, False, FREE)
    Metrics(tmp_path, -1, -1)
    (tmp_path / "rollouts").mkdir()
    take_back(tmp_path)
    assert (tmp_path / "run.json").exists()


# ---------------------------------------------------------------- metrics


def lines_of(folder: Path, step: int, evaluated: int) -> list[dict]:
    Metrics(folder, step, evaluated)
    return read_metrics(folder / "metrics.jsonl")


def test_steps_that_will_be_run_again_are_dropped(tmp_path: Path):
    metrics = Metrics(tmp_path, -1, -1)
    metrics.write({"step": 0, "evaluation": {"a": 1}})
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": 0.1 * step})
    metrics.write({"step": 3, "evaluation": {"a": 2}})
    assert [m["step"] for m in lines_of(tmp_path, 3, 3)] == [0, 1, 2, 3, 3]
    assert [m["step"] for m in lines_of(tmp_path, 3, 0)] == [0, 1, 2, 3], "the evaluation was not saved: it comes again"
    assert lines_of(tmp_path, 2, 0)[-1] == {"step": 2, "loss": 0.2}
    assert lines_of(tmp_path, -1, -1) == []


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_last_line_cut_by_a_kill_is_left_out(cut: int, tmp_path: Path):
    metrics = Metrics(tmp_path, -1, -1)
    for step in (1, 2):
        metrics.write({"step": step, "loss": 1 / 3})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [{"step": 1, "loss": 1 / 3}, {"step": 2, "loss": 1 / 3}]
    assert read_metrics(path) == whole[: 2 if cut == 1 else 1]  # cut == 1: only the end of the line is lost
    Metrics(tmp_path, 5, -1).write({"step": 9})
    assert read_metrics(path)[-1] == {"step": 9}, "the next line does not continue the cut one"


@pytest.mark.parametrize("damage", [b"{oops", b"12", b"[]", b"{}", b"\xff\xfe"])
def test_damage_before_the_last_line_is_named(damage: bytes, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is no line of metrics"):
        read_metrics(path)


def test_no_metrics(tmp_path: Path):
    with pytest.raises(UserError, match=r"metrics\.jsonl is missing"):
        read_metrics(tmp_path / "metrics.jsonl")


# ---------------------------------------------------------------- rollouts


def test_rollouts_as_parquet(tmp_path: Path):
    """Ragged, several contexts and turns, empty completions, missing rewards: against a Python loop."""
    rollouts, batch = ragged_rollouts(0), ragged_batch(0)
    a, w, r = batch.logp_old + 1, batch.logp_old + 2, batch.logp_old + 3
    write_rollouts(tmp_path / "r.parquet", rollouts, batch, a, w, r)
    table = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert len(table) == len(rollouts)
    wanted = {"logp_sampler": batch.logp_sampler, "logp_old": batch.logp_old, "advantage": a, "weight": w, "ratio": r}
    for name, value in wanted.items():
        on_mask = [[x for x, m in zip(row[name], row["mask"], strict=True) if m] for row in table]
        assert on_mask == [pytest.approx(unit) for unit in units(batch, value)]
    for row, source in zip(table, rollouts, strict=True):
        turns = [(number, turn) for number, turns in enumerate(source.contexts) for turn in turns]
        assert row["tokens"] == [token for _, turn in turns for token in turn.tokens]
        assert row["mask"] == [turn.sampled for _, turn in turns for _ in turn.tokens]
        assert row["context"] == [number for number, turn in turns for _ in turn.tokens]
        assert [row["item"], row["group"], row["sample"]] == [source.item, source.group, source.sample]
        assert {name: row[f"reward/{name}"] for name in source.rewards} == source.rewards
    assert any(value is None for row in table for value in (row["reward/correct"], row["reward/form"]))


def test_text_and_empty_completions(tmp_path: Path):
    text = "naïve [bold] \u2028 line\x00"
    rollouts = [rollout(completion=(), messages=[{"role": "user", "content": text}]), rollout()]
    batch = collate(rollouts)
    write_rollouts(tmp_path / "r.parquet", rollouts, batch, batch.logp_old, batch.logp_old, batch.logp_old)
    table = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert json.loads(table[0]["messages"])[0]["content"] == text
    assert table[0]["tokens"] == [1, 2] and table[0]["mask"] == [False, False] and table[0]["stop"] == "finished"


def test_rollouts_without_rewards(tmp_path: Path):
    rollouts = [rollout(rewards={}), rollout(rewards={}, sample=1)]
    batch = collate(rollouts)
    write_rollouts(tmp_path / "r.parquet", rollouts, batch, batch.logp_old, batch.logp_old, batch.logp_old)
    assert pq.read_table(tmp_path / "r.parquet").num_rows == 2
