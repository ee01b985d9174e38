"""The loop: how often it does what, when, and in which order; refills, evaluations, trackers, options."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from builders import rollout
from copy_run import Copying, evaluation, figures, letters_policy, overlap, quiet, run, tables
from postrl import optimise
from postrl import train as loop
from postrl.batch import Batch
from postrl.checkpoint import checkpoints
from postrl.errors import UserError
from postrl.method import Method
from postrl.papers import method
from postrl.policies.tabular import Tabular
from postrl.rollout import Rollout


class Counting(Tabular):
    """Counts its forward passes, with and without gradients."""

    forwards = 0
    gradients = 0

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()):
        self.forwards += 1
        self.gradients += torch.is_grad_enabled()
        return super().forward(batch, want)


def counting() -> Counting:
    return Counting.uniform(3, 4, 8)


def always(reward: float):
    return lambda prompt, answer: {"correct": reward}


# ---------------------------------------------------------------- updates and forwards


@pytest.mark.parametrize(
    ("updates", "epochs", "needs", "passes"),
    [(1, 1, frozenset(), 0), (1, 1, frozenset({"logp_old"}), 1), (2, 1, frozenset(), 1), (1, 2, frozenset(), 1)],
)
def test_old_log_probabilities_cost_a_pass_only_where_needed(updates, epochs, needs, passes, tmp_path: Path):
    policy = counting()
    built = replace(method("grpo"), needs=needs)
    run(tmp_path, built, policy, steps=3, updates=updates, epochs=epochs)
    assert policy.gradients == 3 * updates * epochs
    assert policy.forwards - policy.gradients == 3 * passes


def test_training_mode_in_updates_only(tmp_path: Path):
    """Else dropout would reach the old log-probabilities, sampling and evaluation."""
    passes, elsewhere = [], []

    class Watched(Tabular):
        def forward(self, batch: Batch, want: frozenset[str] = frozenset()):
            passes.append((torch.is_grad_enabled(), self.training))
            return super().forward(batch, want)

    policy = Watched.uniform(3, 4, 8).train()
    source = Copying(policy)

    def watched_source(step: int) -> list[Rollout]:
        elsewhere.append(policy.training)
        return source(step)

    def watched_evaluation():
        elsewhere.append(policy.training)
        return evaluation(0.1)

    rest = {"evaluate": watched_evaluation}
    run(tmp_path, policy=policy, source=watched_source, steps=2, evaluate_every=1, rest=rest)
    assert set(passes) == {(True, True), (False, False)} and elsewhere == [False] * 5


def test_both_routes_train_alike(tmp_path: Path):
    first, second = letters_policy(), letters_policy()
    run(tmp_path / "a", method("grpo"), first, updates=1)
    run(tmp_path / "b", replace(method("grpo"), needs=frozenset({"logp_old"})), second, updates=1)
    assert torch.equal(first.table, second.table)
    free, paid = figures(tmp_path / "a"), figures(tmp_path / "b")
    for a, b in zip(free, paid, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert free[-1]["mismatch/max"] > 0, "float32 training against the float64 sampler: measured with one update too"


def test_several_updates_and_epochs_move_off_policy(tmp_path: Path):
    run(tmp_path, steps=1, updates=2, epochs=3)
    assert figures(tmp_path)[0]["ratio/max"] > 1.05
    run(tmp_path / "one", steps=1, updates=1)
    assert figures(tmp_path / "one")[0]["ratio/max"] == 1.0


def recorded_updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float]]:
    """(group ids, learning rate) of every update."""
    seen: list[tuple[list[int], float]] = []
    real = optimise.update

    def watching(trainer, batch, rows, advantage, rate, sums) -> None:
        seen.append((batch.group().tolist(), rate))
        real(trainer, batch, rows, advantage, rate, sums)

    monkeypatch.setattr(loop, "update", watching)
    return seen


def test_updates_are_whole_groups_in_seeded_shuffles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = recorded_updates(monkeypatch)
    run(tmp_path / "a", steps=2, updates=3, epochs=2)
    assert len(seen) == 12
    epochs = [seen[i : i + 3] for i in range(0, 12, 3)]
    for number, epoch in enumerate(epochs):
        step = number // 2
        wanted = sorted(g for g in range(6 * step + 1, 6 * step + 7) for _ in range(4))
        assert sorted(g for groups, _ in epoch for g in groups) == wanted, "each unit once an epoch"
        assert all(groups.count(g) == 4 for groups, _ in epoch for g in groups), "groups are never cut"
    cut = [[sorted(groups) for groups, _ in epoch] for epoch in epochs]
    assert cut[0] != cut[1] and cut[2] != cut[3]
    first = list(seen)
    seen.clear()
    run(tmp_path / "b", steps=2, updates=3, epochs=2)
    assert seen == first
    seen.clear()
    run(tmp_path / "c", steps=2, updates=3, epochs=2, seed=1)
    assert seen != first


def test_schedule_runs_over_every_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = recorded_updates(monkeypatch)
    run(tmp_path, steps=2, updates=3, epochs=2, learning_rate=1.2, warmup=2, schedule="linear")
    assert [rate for _, rate in seen] == pytest.approx([0.6, 1.2] + [1.2 * k / 10 for k in range(10, 0, -1)])
    last_of_each_step = [seen[5][1], seen[11][1]]
    assert [m["learning_rate"] for m in figures(tmp_path)] == pytest.approx(last_of_each_step)


def test_skipped_updates_are_counted_and_the_schedule_goes_on(tmp_path: Path):
    policy = letters_policy()
    result = run(tmp_path, policy=policy, source=Copying(policy, score=always(0.7)), steps=3, schedule="linear")
    got = figures(tmp_path)
    assert [m["updates/skipped"] for m in got] == [2, 2, 2] and result.progress.update == 6
    assert [m["learning_rate"] for m in got] == pytest.approx([0.1 * (1 - k / 6) for k in (1, 3, 5)])
    assert torch.equal(policy.table, torch.zeros_like(policy.table))
    assert [m["gradient_norm"] for m in got] == [0, 0, 0] and [m["groups/constant"] for m in got] == [1, 1, 1]


def test_a_penalty_moves_what_rewards_do_not(tmp_path: Path):
    reference = Tabular.random(3, 4, 8, key=(5,), dtype=torch.float32)
    policy = letters_policy()
    source = Copying(policy, score=always(0.7))
    run(tmp_path, policy=policy, source=source, steps=2, kl_coef=0.1, rest={"reference": reference})
    assert [m["updates/skipped"] for m in figures(tmp_path)] == [0, 0]
    assert not torch.equal(policy.table, torch.zeros_like(policy.table))


def test_warned_after_some_steps_without_variance(tmp_path: Path):
    policy = letters_policy()
    display, text = quiet()
    source = Copying(policy, score=always(0.0))
    run(tmp_path, policy=policy, source=source, steps=5, warn_constant=2, rest={"display": display})
    assert text.getvalue().count("no group had any variance in reward") == 2
    assert "for 2 steps" in text.getvalue() and "for 4 steps" in text.getvalue()


# ---------------------------------------------------------------- keep and refill


def keeping() -> Method:
    return replace(method("grpo"), keep=method("dapo").keep)


def by_number(outcomes: str):
    """Scores of groups in turn: "m"ixed outcomes, all "w"rong but shaped, all "r"ight."""
    count = iter(range(10**6))

    def score(prompt: list[int], answer: list[int]) -> dict[str, float]:
        number = next(count)
        kind, sample = outcomes[number // 4 % len(outcomes)], number % 4
        correct = {"m": float(sample % 2), "w": 0.0, "r": 1.0}[kind]
        return {"correct": correct, "shaped": correct + 0.1 * sample}

    return score


def kept_groups(folder: Path, step: int) -> list[int]:
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet")["group"].to_pylist()


def test_keep_reads_the_raw_component_while_the_shaped_reward_varies(tmp_path: Path):
    """NeMo-RL #2431, verl-recipe #125."""
    policy = letters_policy()
    source = Copying(policy, score=by_number("mwrmwr"))
    run(tmp_path, keeping(), policy, source, steps=1)
    assert sorted(set(kept_groups(tmp_path, 1))) == [1, 4]
    got = figures(tmp_path)[0]
    assert (got["units/kept"], got["units/dropped"], got["refills"]) == (8, 16, 0)
    assert got["groups/shaped_only"] == 0.0


def test_warned_after_some_steps_that_keep_nothing(tmp_path: Path):
    """The shaped reward varies, so only the method says that there is nothing to learn from."""
    policy = letters_policy()
    display, text = quiet()
    source = Copying(policy, score=by_number("wr"))
    run(tmp_path, keeping(), policy, source, steps=3, warn_constant=2, rest={"display": display})
    assert text.getvalue().count("the method kept none") == 1


def test_refill_is_bounded_and_counted(tmp_path: Path):
    policy = letters_policy()
    source = Copying(policy, score=by_number("mwwwww"))
    run(tmp_path, keeping(), policy, source, steps=2, refill=3)
    assert source.calls == [0] * 4 + [1] * 4
    got = figures(tmp_path)[0]
    assert (got["units/kept"], got["units/dropped"], got["refills"]) == (16, 80, 3)
    # Of all that were drawn: those that were kept are half right whatever the policy can do.
    assert got["pass@1"] == pytest.approx(1 / 12) and got["reward"] == pytest.approx(1 / 12 + 0.15)
    assert sorted(set(kept_groups(tmp_path, 1))) == [1, 7, 13, 19]


def test_refill_stops_when_full_and_keeps_whole_groups(tmp_path: Path):
    policy = letters_policy()
    source = Copying(policy, score=by_number("mmmmwr"))
    run(tmp_path, keeping(), policy, source, steps=1, refill=9)
    assert source.calls == [0, 0]
    groups = kept_groups(tmp_path, 1)
    assert len(groups) == 24 and all(groups.count(g) == 4 for g in groups)


def test_interleaved_groups_are_dropped_whole(tmp_path: Path):
    policy = letters_policy()
    inner = Copying(policy, score=by_number("mmmmwr"))

    def interleaved(step: int) -> list[Rollout]:
        return sorted(inner(step), key=lambda r: (r.sample, r.group))

    run(tmp_path, keeping(), policy, interleaved, steps=1, refill=9)
    groups = kept_groups(tmp_path, 1)
    assert len(groups) == 24 and all(groups.count(g) == 4 for g in groups)


def test_nothing_kept_means_no_update(tmp_path: Path):
    policy = letters_policy()
    source = Copying(policy, score=by_number("w"))
    result = run(tmp_path, keeping(), policy, source, steps=2, refill=2)
    assert torch.equal(policy.table, torch.zeros_like(policy.table))
    got = figures(tmp_path)[0]
    assert (got["units/kept"], got["units/dropped"], got["refills"], got["updates/skipped"]) == (0, 72, 2, 2)
    assert result.progress.update == 4 and source.calls == [0, 0, 0, 1, 1, 1]


def test_a_refill_of_the_same_groups_is_refused(tmp_path: Path):
    policy = letters_policy()
    inner = Copying(policy, score=by_number("w"))
    same = inner(0)
    with pytest.raises(UserError, match="gave group 1 twice in step 1"):
        run(tmp_path, keeping(), policy, lambda step: same, steps=1, refill=1)


# ---------------------------------------------------------------- evaluation, checkpoints, trackers


def evaluations(folder: Path) -> list[int]:
    return [line["step"] for line in figures(folder) if "evaluation" in line]


def scored(*scores: float):
    left = list(scores)
    return lambda: evaluation(left.pop(0))


def test_evaluated_before_during_and_after(tmp_path: Path):
    result = run(tmp_path, steps=5, evaluate_every=2, rest={"evaluate": scored(0.1, 0.5, 0.4, 0.3)})
    assert evaluations(tmp_path) == [0, 2, 4, 5]
    assert (result.progress.best, result.progress.best_step, result.status) == (0.5, 2, "finished")
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == ["step_000002", "step_000004", "step_000005"]


def test_a_known_evaluation_of_the_start_is_not_repeated(tmp_path: Path):
    run(tmp_path, steps=1, rest={"evaluate": scored(0.2), "before": evaluation(0.1)})
    lines = [line["evaluation"]["pass_at"] for line in figures(tmp_path) if "evaluation" in line]
    assert lines == [{"1": 0.1}, {"1": 0.2}]


def test_nan_is_never_the_best(tmp_path: Path):
    result = run(tmp_path, steps=2, evaluate_every=1, rest={"evaluate": scored(math.nan, 0.2, math.nan)})
    assert (result.progress.best, result.progress.best_step) == (0.2, 1)


def test_last_two_checkpoints(tmp_path: Path):
    run(tmp_path, steps=7, checkpoint_every=2)
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == ["step_000006", "step_000007"]


def test_no_steps(tmp_path: Path):
    result = run(tmp_path, steps=0, rest={"evaluate": scored(0.1)})
    assert result.status == "finished" and evaluations(tmp_path) == [0]


def test_states_join_the_checkpoint(tmp_path: Path):
    class Moving:
        mean = 0.0

        def state_dict(self) -> dict:
            return {"mean": self.mean}

        def load_state_dict(self, state: dict) -> None:
            self.mean = state["mean"]

    first, second = Moving(), Moving()

    def fill(batch: Batch) -> Batch:
        first.mean += 1.5
        return batch

    run(tmp_path, steps=2, rest={"states": {"moving": first}, "enrich": [fill]})
    run(tmp_path, steps=2, resume=True, rest={"states": {"moving": second}})
    assert second.mean == 3.0


def test_parameter_groups(tmp_path: Path):
    policy = letters_policy()
    policy.register_parameter("other", torch.nn.Parameter(torch.ones(2)))
    run(tmp_path, policy=policy, rest={"parameters": lambda p: [{"params": [p.table]}]}, weight_decay=0.1)
    assert torch.equal(policy.other, torch.ones(2)) and policy.table.abs().max() > 0


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard")
    run(tmp_path, steps=2, rest={"trackers": ["tensorboard"]})
    assert list((tmp_path / "postrl").rglob("events.out.tfevents*"))
    assert len(figures(tmp_path)) == 2


@pytest.mark.parametrize("name", ["tensorbord", "all"])
def test_a_tracker_that_is_not_there_is_named(name: str, tmp_path: Path):
    """accelerate only warns, and the run would go untracked."""
    with pytest.raises(UserError, match=f"option trackers: '{name}' is not installed or not known"):
        run(tmp_path, rest={"trackers": [name]})
    assert list(tmp_path.iterdir()) == []


def test_metrics_hold_what_a_person_looks_for(tmp_path: Path):
    display, text = quiet(1)
    run(tmp_path, steps=1, rest={"display": display})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    wanted = ["reward", "pass@1", "entropy", "kl", "clip", "ratio/max", "mismatch/mean", "time/tokens_per_second"]
    assert set(wanted) <= set(line)
    assert line["entropy"] == pytest.approx(math.log(3), abs=1e-5), "uniform over three tokens"
    assert "reward" in text.getvalue() and "tok/s" in text.getvalue()
    assert line["time/step"] == pytest.approx(line["time/sample"] + line["time/train"])


def test_rollouts_on_disk_are_those_trained_on(tmp_path: Path):
    run(tmp_path, steps=2, updates=2)
    assert sorted(tables(tmp_path)) == ["step_000001.parquet", "step_000002.parquet"]
    rows = pq.read_table(tmp_path / "rollouts" / "step_000002.parquet").to_pylist()
    assert len(rows) == 24
    weights = [w for row in rows for w, m in zip(row["weight"], row["mask"], strict=True) if m]
    assert sum(weights) == pytest.approx(2.0, rel=1e-5), "1 per update, two updates"
    assert all(np.isfinite(row["logp_old"]).all() for row in rows)
    advantages = [[a for a, m in zip(row["advantage"], row["mask"], strict=True) if m] for row in rows]
    assert all(len(set(values)) == 1 for values in advantages)


# ---------------------------------------------------------------- options and methods that cannot be


def test_group_size_one_with_a_group_baseline(tmp_path: Path):
    policy = letters_policy()
    with pytest.raises(UserError, match=r"method grpo compares .* group_size=1"):
        run(tmp_path, policy=policy, source=Copying(policy, size=1))
    run(tmp_path, "reinforce", policy, Copying(policy, size=1), steps=1)  # and the folder was not taken


def test_needs_are_checked_before_anything_moves(tmp_path: Path):
    policy = letters_policy()
    needy = replace(method("grpo"), needs=frozenset({"returns"}))
    with pytest.raises(UserError, match=r"method grpo needs returns, .* give `train` an enricher"):
        run(tmp_path, needy, policy)
    assert torch.equal(policy.table, torch.zeros_like(policy.table)) and list(tmp_path.iterdir()) == []
    run(tmp_path, needy, policy, steps=1, rest={"enrich": [lambda b: replace(b, returns=b.logp_old)]})


def test_advantages_and_weights_of_another_shape_are_refused(tmp_path: Path):
    policy, good = letters_policy(), method("grpo")
    short = replace(good, advantage=lambda batch: batch.rewards[:, 0])
    flat = replace(good, terms=(replace(good.terms[0], weight=lambda batch: batch.mask.sum(1).double()),))
    for number, (wrong, what) in enumerate(((short, "advantage"), (flat, "weight of term 'policy'"))):
        with pytest.raises(UserError, match=f"the {what} of method grpo has shape .* give one number per token"):
            run(tmp_path / str(number), wrong, policy)
    assert torch.equal(policy.table, torch.zeros_like(policy.table))


def test_parameters_that_are_not_there_leave_the_folder_free(tmp_path: Path):
    def none(policy: torch.nn.Module) -> list[dict]:
        raise UserError("no such layer")

    with pytest.raises(UserError, match="no such layer"):
        run(tmp_path, rest={"parameters": none})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("needs", [frozenset(), frozenset({"logp_ref"})])
def test_kl_without_a_reference(needs: frozenset[str], tmp_path: Path):
    built = replace(method("grpo"), needs=needs)
    said = "method grpo compares with a reference" if needs else r"option kl_coef=0\.1 needs a reference policy"
    with pytest.raises(UserError, match=said):
        run(tmp_path, built, kl_coef=0.0 if needs else 0.1)
    assert list(tmp_path.iterdir()) == [], "the corrected command may use the folder"


def test_an_impossible_option_leaves_no_folder(tmp_path: Path):
    with pytest.raises(UserError, match="option updates=0"):
        run(tmp_path, updates=0)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_gives_nothing(tmp_path: Path):
    with pytest.raises(UserError, match="step 1 cannot use the source's rollouts: 0 rollouts"):
        run(tmp_path, source=lambda step: [])
    with pytest.raises(UserError, match="step 1 cannot use the source's rollouts: 0 rollouts"):
        run(tmp_path, keeping(), source=lambda step: [])


def test_rollouts_of_different_rewards_are_named(tmp_path: Path):
    mixed = [rollout(rewards={"a": 1.0}), rollout(group=1, rewards={"b": 1.0})]
    with pytest.raises(UserError, match="step 1 cannot use the source's rollouts: item 'item1' has rewards"):
        run(tmp_path, policy=Tabular.uniform(5, 2, 8), source=lambda step: mixed)


@pytest.mark.parametrize("name", ["grpo", "reinforce"])
def test_a_step_of_empty_answers(name: str, tmp_path: Path):
    """All rollouts end before their first token: nothing is learnt, nothing breaks."""
    policy = Tabular.uniform(5, 2, 8)
    empty = [rollout(g, i, completion=(), rewards={"correct": float(i)}) for g in range(2) for i in range(2)]
    run(tmp_path, name, policy, lambda step: empty, steps=2)
    assert torch.equal(policy.table, torch.zeros_like(policy.table))
    assert [m["updates/skipped"] for m in figures(tmp_path)] == [2, 2]


def test_ragged_groups_missing_rewards_and_singletons(tmp_path: Path):
    policy = Tabular.uniform(5, 2, 8)
    rewards = [[1.0, None, 0.0], [0.5], [None, None], [1.0, 0.0, 0.0, 1.0, None]]
    ragged = [
        rollout(g, i, completion=(3,) * (i % 4), rewards={"correct": r})
        for g, group in enumerate(rewards)
        for i, r in enumerate(group)
    ]
    run(tmp_path, "grpo", policy, lambda step: ragged, steps=2, updates=3, epochs=2)
    assert bool(torch.isfinite(policy.table).all()) and policy.table.abs().max() > 0
    assert figures(tmp_path)[0]["missing"] == pytest.approx(4 / 11)


def test_a_vocabulary_of_one_token(tmp_path: Path):
    policy = Tabular.uniform(1, 2, 8)
    same = [rollout(0, i, (0,), (0,) * (1 + i), rewards={"correct": float(i)}) for i in range(3)]
    run(tmp_path, policy=policy, source=lambda step: same, steps=2)
    assert torch.equal(policy.table, torch.zeros_like(policy.table))
    assert figures(tmp_path)[0]["entropy"] == 0.0


def test_fewer_groups_than_updates(tmp_path: Path):
    policy = letters_policy()
    result = run(tmp_path, policy=policy, source=Copying(policy, groups=2), steps=2, updates=4)
    assert result.progress.update == 8 and policy.table.abs().max() > 0


def test_infinite_rewards_are_refused(tmp_path: Path):
    policy = letters_policy()
    source = Copying(policy, score=lambda prompt, answer: {"correct": math.inf * overlap(prompt, answer)["overlap"]})
    with pytest.raises(UserError, match=r"not finite|the gradient of an update is inf"):
        run(tmp_path, "reinforce", policy, source)
    assert bool(torch.isfinite(policy.table).all())
