"""DPO: its losses and their slopes, who is paired with whom, and a chosen answer that becomes less likely."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import laws
import reference
from copy_run import figures as lines
from copy_run import quiet
from postrl.envs import written
from postrl.errors import UserError
from postrl.papers.dpo import dpo, preferences
from postrl.policies.chat import Characters
from postrl.policies.tabular import Tabular
from postrl.rollout import Rollout
from postrl.settings import Settings
from postrl.source import Dataset
from postrl.train import train

OPTIONS = [
    {"kind": "ipo", "beta": 0.5},
    {"label_smoothing": 0.2, "beta": 2.0},
    {"length_normalised": True},
    {"kind": "ipo", "length_normalised": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(dpo(**options), case, **options), examples=12)


@pytest.mark.parametrize("law", laws.LAWS)
def test_laws(law):
    laws.hold(law, dpo(kind="ipo", length_normalised=True), examples=5)


def two(chosen, rejected, reference_chosen=None, reference_rejected=None, groups=(0, 0), rewards=(1.0, 0.0)):
    """A pair with the given token probabilities now and under the reference (by default 1/2 each)."""
    rows = [chosen, rejected]
    case = laws.by_hand(groups, rewards, rows, rows)
    ref = torch.full_like(case.batch.logp_old, math.log(0.5))
    for b, row in enumerate((reference_chosen, reference_rejected)):
        if row is not None:
            ref[b, : len(row)] = torch.tensor(row, dtype=torch.float64).log()
    return replace(case, batch=replace(case.batch, logp_ref=ref))


def test_by_hand():
    """h⁺ = log(0.8/0.5), h⁻ = log(0.4·0.5/0.25) over two tokens: Δ = log 2, and σ(log 2) = 2/3.

    L = log(3/2), slope −β·σ(−Δ) = −1/3 for each chosen token and +1/3 for each rejected one.
    """
    case = two([0.8], [0.4, 0.5])
    got = laws.update(dpo(beta=1.0), case.batch, case.now)
    assert float(got.loss) == pytest.approx(math.log(1.5))
    laws.equal(got.gradient["logp"], [[-1 / 3, 0.0], [1 / 3, 1 / 3]])
    laws.equal(got.advantage, [[1.0, 0.0], [-1.0, -1.0]])
    laws.equal(got.weights[0], [[1 / 3, 0.0], [1 / 3, 1 / 3]])
    # the mean of the rejected answer's two tokens: h⁻ = log(0.8)/2, Δ = log 1.6 − log(0.8)/2
    gap = math.log(1.6) - math.log(0.8) / 2
    slope = -1 / (1 + math.exp(gap))
    got = laws.update(dpo(beta=1.0, length_normalised=True), case.batch, case.now)
    laws.equal(got.gradient["logp"], [[slope, 0.0], [-slope / 2, -slope / 2]])


def test_at_the_reference_every_pair_has_loss_log_2_and_slope_half_beta():
    case = two([0.5], [0.5])
    got = laws.update(dpo(beta=0.3), case.batch, case.now)
    assert float(got.loss) == pytest.approx(math.log(2))
    laws.equal(got.gradient["logp"], [[-0.15], [0.15]])
    # label smoothing takes 2ε of it
    laws.equal(
        laws.update(dpo(beta=0.3, label_smoothing=0.25), case.batch, case.now).gradient["logp"], [[-0.075], [0.075]]
    )


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        ({"kind": "ipo", "beta": 0.5}, 1.0),  # Δ = 1/(2β)
        ({"beta": 2.0, "label_smoothing": 0.2}, math.log(4) / 2),  # σ(βΔ) = 1 − ε
    ],
)
def test_where_the_slope_is_zero(options, gap):
    """Sigmoid without smoothing never stops pushing; these two know when a preference is strong enough."""
    case = two([0.5 * math.exp(gap / 2)], [0.5 * math.exp(-gap / 2)])
    laws.near(laws.update(dpo(**options), case.batch, case.now).gradient["logp"], torch.zeros(2, 1).double(), "slope")
    plain = laws.update(dpo(), case.batch, case.now).gradient["logp"]
    assert plain[0, 0] < 0 < plain[1, 0]


def test_pairs_of_a_larger_group():
    """Rewards 2, 1, 1, 0 and one missing: five pairs, none across groups. A = (won − lost)/5."""
    rows = [[0.5]] * 7
    case = laws.by_hand([0] * 5 + [1, 2], [2.0, 1.0, 1.0, 0.0, torch.nan, 9.0, 0.0], rows, rows)
    better, worse = preferences(case.batch)
    assert set(zip(better.tolist(), worse.tolist(), strict=True)) == {(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)}
    got = laws.update(dpo(), case.batch, case.now)
    laws.equal(got.advantage, [[3 / 5], [0.0], [0.0], [-3 / 5], [0.0], [0.0], [0.0]])
    laws.equal(got.weights[0], [[0.25]] * 4 + [[0.0]] * 3)


def test_groups_count_alike_however_many_pairs_they_have():
    """A group of two and one of three (two pairs): the pair alone has as much pull as both together."""
    rows = [[0.5]] * 5
    case = laws.by_hand([0, 0, 1, 1, 1], [1.0, 0.0, 1.0, 0.0, 0.0], rows, rows)
    case = replace(case, batch=replace(case.batch, logp_ref=case.batch.logp_old))
    got = laws.update(dpo(beta=1.0), case.batch, case.now).gradient["logp"]
    laws.equal(got, [[-0.25], [0.25], [-0.25], [0.125], [0.125]])


def test_displacement_is_seen():
    """Both answers fall, the rejected one further: accuracy and margin look well, the chosen answer is less likely."""
    case = two([0.25], [0.05])
    said = dpo(beta=2.0).figures(case.batch, case.now["logp"])
    assert said == pytest.approx(
        {
            "chosen": -math.log(2),
            "rejected": -math.log(10),
            "margin": 2 * math.log(5),
            "accuracy": 1.0,
            "displaced": 1.0,
        }
    )


def test_large_margins_stay_finite():
    case = two([0.5] * 300, [0.5] * 300, [1e-9] * 300, [1 - 1e-9] * 300)
    for sign in (1.0, -1.0):
        batch = replace(case.batch, rewards=sign * case.batch.rewards)
        got = laws.update(dpo(beta=10.0), batch.to(dtype=torch.float32), {"logp": case.now["logp"].float()})
        assert torch.isfinite(got.loss) and torch.isfinite(got.gradient["logp"]).all()


def pair(group: int, prompt: str, chosen: str, rejected: str) -> list[Rollout]:
    return written.pair([{"role": "user", "content": prompt}], chosen, rejected, group, Characters("abc"))


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.0}, {"beta": -1.0}, {"label_smoothing": 0.5}, {"kind": "ipo", "label_smoothing": 0.1}],
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(UserError, match=list(options)[-1]):
        dpo(**options)


def test_through_the_loop(tmp_path: Path):
    """Pairs from a data set, no second loop: the preference is learnt, and its figures are in the metrics.

    The prompt's last token is preferred to any other; 4 updates of 2 groups per step."""
    rollouts = [r for k in range(12) for r in pair(k, "a" + "abc"[k % 3], "abc"[k % 3], "abc"[(k + 1) % 3])]
    policy, frozen = (Tabular.uniform(4, 2, 8) for _ in range(2))
    settings = Settings(steps=12, updates=4, learning_rate=0.1, seed=1)
    train(dpo(), policy, Dataset(rollouts, 8), settings, tmp_path, reference=frozen, display=quiet(12)[0])
    met = [line for line in lines(tmp_path) if "method/margin" in line]
    assert len(met) == 12
    assert abs(met[0]["method/margin"]) < met[5]["method/margin"] < met[-1]["method/margin"]
    assert met[-1]["method/accuracy"] == 1.0 and met[-1]["method/chosen"] > 0 > met[-1]["method/rejected"]
    assert met[-1]["loss"] < 0.9 * met[0]["loss"] and met[0]["loss"] < math.log(2)


def test_without_a_reference_the_loop_says_what_is_missing(tmp_path: Path):
    rollouts = pair(0, "a", "b", "c")
    with pytest.raises(UserError, match="reference"):
        train(dpo(), Tabular.uniform(4, 2, 8), Dataset(rollouts, 1), Settings(steps=1), tmp_path)
