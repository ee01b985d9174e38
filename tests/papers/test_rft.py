"""RFT: who is imitated, by what normaliser; offline, iterated and on policy."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import laws
import reference
from builders import rollout
from copy_run import figures as lines
from copy_run import quiet
from postrl.batch import Kind
from postrl.errors import UserError
from postrl.papers.reinforce import reinforce
from postrl.papers.rft import Iterated, demonstrations, rft
from postrl.policies.tabular import Tabular
from postrl.rollout import Rollout, collate
from postrl.settings import Settings
from postrl.source import Dataset
from postrl.train import train


@pytest.mark.parametrize(
    "options", [{"correct": "correct"}, {"threshold": 0.25}, {"correct": "style", "threshold": 0.0}]
)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(rft(**options), case, **options), examples=12)


def test_by_hand():
    """Rewards 1, 0, 1: the two successes share the update, their tokens at −1/2 each; the failure is left alone."""
    rows = [[0.5], [0.25, 0.25], [0.5, 0.25]]
    case = laws.by_hand([0, 0, 1], [1.0, 0.0, 1.0], rows, rows)
    got = laws.update(rft(), case.batch, case.now)
    laws.equal(got.gradient["logp"], [[-0.5, 0.0], [0.0, 0.0], [-0.5, -0.5]])
    assert float(got.loss) == pytest.approx(2 * math.log(2))
    assert rft().figures(case.batch, case.batch.logp_old) == {"successes": 2.0}


def test_it_is_reinforce_divided_by_the_share_of_successes():
    """E over samples: Σ r∇log π / Σ r. With rewards 0 and 1 that is REINFORCE's update times N / #successes."""

    def check(case):
        binary = (torch.nan_to_num(case.batch.rewards[:, :1]) > 0.5).double()
        batch = replace(case.batch, rewards=binary, reward_names=("correct",), reward_weights=torch.ones(1).double())
        real = batch.lengths() > 0
        number, good = int(real.sum()), int((real & (binary[:, 0] > 0)).sum())
        got, plain = (laws.update(m, batch, case.now).gradient["logp"] for m in (rft(), reinforce()))
        laws.near(got * good, plain * number, "gradient")

    laws.over_cases(check)


def test_demonstrations_count_whatever_their_rewards():
    case = laws.by_hand([0, 1], [0.0, torch.nan], [[0.5]] * 2, [[0.5]] * 2)
    given = replace(case.batch, kind=torch.full((2,), int(Kind.DEMONSTRATION), dtype=torch.int8))
    assert (rft().advantage(case.batch) == 0).all() and (rft().advantage(given) == 1).all()
    bare = replace(given, rewards=given.rewards[:, :0], reward_weights=given.reward_weights[:0], reward_names=())
    for method in (rft(), rft("solved")):  # a data set of demonstrations has no components, whichever is asked for
        laws.equal(laws.update(method, bare, case.now).gradient["logp"], [[-0.5], [-0.5]])


def test_a_threshold_met_up_to_rounding_is_met():
    case = laws.by_hand([0, 0], [0.1 + 0.2 + 0.7 - 2e-16, 0.99], [[0.5]] * 2, [[0.5]] * 2)
    for batch in (case.batch, case.batch.to(dtype=torch.float32)):
        assert rft().advantage(batch)[:, 0].tolist() == [1.0, 0.0]


def test_an_unknown_component_is_named():
    case = laws.by_hand([0], [1.0], [[0.5]], [[0.5]])
    with pytest.raises(UserError, match=r"'solved'.*correct"):
        rft(correct="solved").advantage(case.batch)
    one = torch.tensor([int(Kind.DEMONSTRATION), int(Kind.ROLLOUT)], dtype=torch.int8)
    both = laws.by_hand([0, 1], [1.0, 1.0], [[0.5]] * 2, [[0.5]] * 2).batch
    with pytest.raises(UserError, match=r"'solved'.*correct"):  # a sampled unit beside the demonstration needs it
        rft(correct="solved").advantage(replace(both, kind=one))
    with pytest.raises(UserError, match=r"'solved'.*score"):
        demonstrations([rollout()], correct="solved")


# ---------------------------------------------------------------- demonstrations


def sampled(item: int, sample: int, completion, score) -> Rollout:
    return rollout(item, sample, completion=completion, rewards={"score": score, "form": 0.0},
                   reward_weights={"form": 0.0}, step_rewards=[1.0])  # fmt: skip


def test_one_demonstration_for_each_distinct_success_of_a_problem():
    rollouts = [
        sampled(0, 0, [3, 4], 1.0),
        sampled(0, 1, [3, 4], 1.0),  # again
        sampled(0, 2, [4, 3], 1.0),
        sampled(0, 3, [5], 0.0),
        sampled(0, 4, [6], None),
        sampled(0, 5, [], 1.0),
        sampled(1, 0, [3, 4], 1.0),  # of another problem
    ]
    kept = demonstrations(rollouts)
    assert [(r.item, r.sample) for r in kept] == [("item0", 0), ("item0", 2), ("item1", 0)]
    assert [r.group for r in kept] == [0, 1, 2] and rollouts[0].kind == Kind.ROLLOUT and rollouts[6].group == 1
    batch = collate(kept)
    assert (batch.kind == Kind.DEMONSTRATION).all() and batch.rewards.shape == (3, 0) and batch.step_rewards is None
    assert len(demonstrations(rollouts, most=1)) == 2
    assert len(demonstrations(rollouts, trace=lambda r: sum(t for turn in r.contexts[0] for t in turn.tokens))) == 2
    assert demonstrations(rollouts, threshold=2.0) == []
    assert len(demonstrations(rollouts, correct="form", threshold=0.0)) == 5
    with pytest.raises(UserError, match="most"):
        demonstrations(rollouts, most=0)


# ---------------------------------------------------------------- the three ways, through the loop

TARGET = 2


class Letters:
    """Samples one letter per answer from the policy; the letter 2 is right."""

    def __init__(self, policy: Tabular, size: int = 8):
        self.policy, self.size, self.calls = policy, size, 0

    def __call__(self, step: int) -> list[Rollout]:
        generator = torch.Generator().manual_seed(1000 * step + self.calls)
        self.calls += 1
        chance = self.policy.table[self.policy.state([1])].detach().softmax(-1)
        drawn = torch.multinomial(chance, self.size, True, generator=generator).tolist()
        return [
            rollout(self.calls, k, prompt=[1], completion=[letter], rewards={"correct": float(letter == TARGET)})
            for k, letter in enumerate(drawn)
        ]

    def state_dict(self) -> dict[str, object]:
        return {"calls": self.calls}

    def load_state_dict(self, state) -> None:
        self.calls = int(state["calls"])


def chance(policy: Tabular) -> float:
    return float(policy.table[policy.state([1])].detach().softmax(-1)[TARGET])


@pytest.mark.parametrize("way", ["on policy", "offline", "iterated"])
def test_it_learns(way: str, tmp_path: Path):
    policy = Tabular.uniform(4, 1, 4)
    letters = Letters(policy)
    if way == "offline":
        source = Dataset(demonstrations([r for step in range(4) for r in letters(step)]), 1)
    else:
        source = letters if way == "on policy" else Iterated(letters, every=5, draws=2, per_step=2)
    display, said = quiet(20)
    settings = Settings(steps=20, learning_rate=0.1, warn_constant=5)
    train(rft("correct"), policy, source, settings, tmp_path, display=display)
    assert chance(policy) > 0.6
    assert all(line["method/successes"] == line["units"] for line in lines(tmp_path)[-3:]) or way == "on policy"
    if way != "on policy":
        assert "no group had any variance" not in said.getvalue(), "demonstrations have no rewards to vary"
    assert letters.calls == {"on policy": 20, "offline": 4, "iterated": 8}[way]


def test_a_failure_is_never_pushed_down_beyond_the_softmax():
    """The same update with or without the failures in the batch; REINFORCE with a baseline would differ."""
    rows = [[0.5], [0.25], [0.25]]
    whole = laws.by_hand([0, 0, 0], [1.0, 0.0, 0.0], rows, rows)
    alone = laws.by_hand([0], [1.0], rows[:1], rows[:1])
    got = laws.update(rft(), whole.batch, whole.now).gradient["logp"]
    laws.near(got[:1], laws.update(rft(), alone.batch, alone.now).gradient["logp"], "gradient")
    assert (got[1:] == 0).all()


# ---------------------------------------------------------------- the iterated source


def test_rounds_and_epochs():
    """A round is sampled at its first step only; within it every demonstration comes once per epoch."""
    letters = Letters(Tabular.uniform(4, 1, 4), 40)
    source = Iterated(
        letters, every=3, draws=1, per_step=2, choose=lambda r: demonstrations(r, trace=lambda x: x.sample)
    )
    first = [source(step) for step in range(3)]
    assert letters.calls == 1
    number = len(source.kept)
    assert number > 6
    samples = [r.sample for step in first for r in step]
    assert len(set(samples)) == 6 and [r.group for step in first for r in step] == list(range(6))
    source(3)
    assert letters.calls == 2 and source.position == 2 and source.served == 8


def test_resumed_in_the_middle_of_a_round_it_goes_on_alike():
    """The answers of the round come from weights that are gone, so they are in the state, as plain JSON."""

    def fresh() -> Iterated:
        return Iterated(Letters(Tabular.uniform(4, 1, 4), 20), every=4, draws=2, per_step=3, seed=7)

    whole, cut = fresh(), fresh()
    wanted = [whole(step) for step in range(8)]
    for step in range(2):
        cut(step)
    state = json.loads(json.dumps(cut.state_dict()))
    again = fresh()
    again.load_state_dict(state)
    assert [again(step) for step in range(2, 8)] == wanted[2:]


def test_a_barren_round_and_wrong_numbers_are_named():
    policy = Tabular(torch.tensor([[9.0, 0, -90, 0]] * 5), 1, 4)
    with pytest.raises(UserError, match=r"none of the 16 answers sampled in step 3 .* raise draws"):
        Iterated(Letters(policy), every=2, draws=2, per_step=1)(2)
    for wrong in ({"every": 0}, {"draws": 0}, {"per_step": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Iterated(Letters(policy), **{"every": 1, "draws": 1, "per_step": 1, **wrong})


@pytest.mark.parametrize("damage", [{"kept": "[{]"}, {"kept": '[{"item": 1}]'}, {"round": "x"}, {"source": None}])
def test_a_damaged_state_is_named(damage):
    source = Iterated(Letters(Tabular.uniform(4, 1, 4)), every=1, draws=1, per_step=1)
    state = {**source.state_dict(), **damage}
    with pytest.raises(UserError, match="resume another"):
        source.load_state_dict(state)
