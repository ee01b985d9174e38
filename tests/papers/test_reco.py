"""ReCo: its two levels, the switches of its open questions, and the trap of its stop-gradient."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import laws
import reference
from postrl.errors import UserError
from postrl.papers.grpo import grpo
from postrl.papers.reco import reco, response_weight, variance

OPTIONS = [
    {"typical": "sequence"},
    {"typical": "sequence", "cap": 0.6, "trust": "variance"},
    {"typical": "empirical", "rescale": False},
    {"rescale": False, "cap": 0.9, "floor": 0.3},
    {"response_level": False},
    {"token_level": False, "low": 0.1, "high": 0.3},
    {"response_level": False, "token_level": False},
    {"trust": "variance", "missing": "zero", "singleton": "raw"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(reco(**options), case, **options))


@pytest.mark.parametrize("law", laws.LAWS)
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[2], OPTIONS[5]])
def test_laws(options, law):
    laws.hold(law, reco(**options), examples=8)


def test_by_hand():
    """G = 2; geometric means 1/2 and 1/4, so 1/(G·π̄) = 1 and 2, after rescaling 2/3 and 4/3. A = ±1/√2.

    0.5 → 0.55 in the first answer: v = 0.2475/0.25 = 0.99. The second answer's tokens do not move: v = 1.
    """
    case = laws.by_hand([3, 3], [1.0, 0.0], old=[[0.5], [0.5, 0.125]], new=[[0.55], [0.5, 0.125]])
    laws.equal(response_weight(case.batch), [2 / 3, 4 / 3])
    assert response_weight(case.batch, rescale=False).tolist() == pytest.approx([1.0, 2.0])
    got = laws.update(reco(eps=0.0), case.batch, case.now)
    a = 2**-0.5
    wanted = [[-2 / 3 / 2 * 0.99 * a, 0], [4 / 3 / 4 * a] * 2]
    laws.equal(got.gradient["logp"], wanted)
    said = reco(eps=0.0).figures(case.batch, case.now["logp"])
    assert said == {"weighted_advantage": pytest.approx((2 / 3 - 4 / 3) / 2 * a)}
    plain = reco(response_level=False).figures(case.batch, case.now["logp"])
    assert plain == {"weighted_advantage": pytest.approx(0, abs=1e-12)}


@pytest.mark.parametrize(
    ("old", "new", "r", "v"),
    [(0.5, 0.9, 1.80, 0.36), (0.9, 0.5, 0.56, 2.78), (0.1, 0.5, 5.0, 2.78), (0.9, 0.99, 1.10, 0.11)],
)
def test_ratio_and_variance_ratio(old, new, r, v):
    mask = torch.ones(1, 1, dtype=torch.bool)
    logp, logp_old = (torch.tensor([[math.log(p)]], dtype=torch.float64) for p in (new, old))
    assert float((logp - logp_old).exp()) == pytest.approx(r, abs=5e-3)
    assert float(variance(mask, logp, 1e-5) / variance(mask, logp_old, 1e-5)) == pytest.approx(v, abs=5e-3)


@pytest.mark.parametrize("trust", ["ratio", "variance"])
def test_the_gradient_pushes_a_good_likely_token_up(trust):
    """p = 0.9, A > 0. Differentiating v itself gives (1 − 2p)/(1 − p) = −8 times the wanted sign; see the control."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.85], [0.5]], new=[[0.9], [0.5]])
    got = laws.update(reco(trust=trust), case.batch, case.now)
    assert got.gradient["logp"][0, 0] < 0, "minimising must raise log π"

    logp = case.now["logp"].clone().requires_grad_()
    live = variance(case.batch.mask, logp, 1e-5) / variance(case.batch.mask, case.batch.logp_old, 1e-5)
    (-got.weights[0] * got.advantage * live).sum().backward()
    assert logp.grad[0, 0] > 0, "the control no longer falls into the trap"


def test_trust_region_on_the_variance_misses_a_jump():
    """0.5 → 0.9 with A > 0: r = 1.8 stops it, v = 0.36 does not."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5], [0.5]], new=[[0.9], [0.5]])
    ratio, change = (laws.update(reco(trust=t), case.batch, case.now).gradient["logp"] for t in ("ratio", "variance"))
    assert ratio[0, 0] == 0 and change[0, 0] < 0


def test_each_distinct_answer_counts_once_in_expectation():
    """E_{o~π} [1/π(o) · f(o)] = Σ_o f(o): what the literal weight is for, by enumeration of all pairs of answers.

    Answers of probability 0.6, 0.3, 0.1; each is one cluster, f picks one of them. G·w summed over the pair and
    weighted by the pair's probability gives G for each, however likely the answer.
    """
    p = [0.6, 0.3, 0.1]
    seen = [0.0] * 3
    for pair in itertools.product(range(3), repeat=2):
        case = laws.by_hand([0, 0], [1.0, 0.0], old=[[p[i]] for i in pair], new=[[p[i]] for i in pair])
        weight = response_weight(case.batch, "sequence", cap=1e6, rescale=False)
        for i, w in zip(pair, weight.tolist(), strict=True):
            seen[i] += p[pair[0]] * p[pair[1]] * w
    assert seen == pytest.approx([1.0, 1.0, 1.0])


def test_sequence_probability_of_long_answers_meets_the_cap():
    """2000 tokens of 0.5 and of 0.7: 1/π overflows any float; in logs both meet the cap, and are equal."""
    old = [[0.5] * 2000, [0.7] * 2000]
    case = laws.by_hand([0, 0], [1.0, 0.0], old=old, new=old)
    for batch in (case.batch, case.batch.to(dtype=torch.float32)):
        assert response_weight(batch, "sequence", rescale=False).tolist() == pytest.approx([5.0, 5.0])
        assert response_weight(batch, "geometric").tolist() == pytest.approx([7 / 6, 5 / 6], rel=1e-5)


def test_empirical_counts_answers_within_the_group():
    """Clusters "8" thrice and "9" once in group 0; the same answers elsewhere do not count. w ∝ 1/count."""
    case = laws.by_hand([0, 0, 0, 0, 1, 1], [1.0] * 6, [[0.5]] * 6, [[0.5]] * 6, clusters=[8, 8, 9, 8, 8, 9])
    raw = response_weight(case.batch, "empirical", rescale=False)
    assert raw.tolist() == pytest.approx([1 / 3, 1 / 3, 1, 1 / 3, 1, 1])
    assert response_weight(case.batch, "empirical")[:4].tolist() == pytest.approx([2 / 3, 2 / 3, 2, 2 / 3])


def test_weights_have_mean_one_per_group_and_skip_empty_answers():
    def check(case):
        weight, lengths = response_weight(case.batch), case.batch.lengths()
        for group in case.batch.group().unique():
            inside = (case.batch.group() == group) & (lengths > 0)
            if inside.any():
                assert float(weight[inside].mean()) == pytest.approx(1.0)
        assert (weight[lengths == 0] == 0).all()

    laws.over_cases(check)


def test_both_levels_off_is_grpo_and_nothing_happens_on_policy_without_the_response_level():
    def check(case):
        plain = laws.update(grpo(), case.batch, case.now)
        laws.same(laws.update(reco(response_level=False, token_level=False), case.batch, case.now), plain)
        now = {**case.now, "logp": torch.where(case.batch.mask, case.batch.logp_old, 0)}
        token = laws.update(reco(response_level=False), case.batch, now).gradient["logp"]
        laws.near(token, laws.update(grpo(), case.batch, now).gradient["logp"], "token level at r = 1")

    laws.over_cases(check)


def test_raw_weight_changes_the_step_size():
    """Why the raw weight is a switch: with G = 8 and likely answers it shrinks the update about eightfold."""
    old = [[0.9, 0.95]] * 8
    case = laws.by_hand([0] * 8, [1.0, 0.0] * 4, old=old, new=old)
    scaled, raw = (laws.update(reco(rescale=r), case.batch, case.now).gradient["logp"].norm() for r in (True, False))
    assert raw / scaled == pytest.approx(1 / (8 * math.sqrt(0.9 * 0.95)))


def test_certain_tokens_stay_finite():
    """p = 1 before, after, and both, in float32: 1 − p is floored."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[1.0, 1.0, 0.5], [1.0]], new=[[1.0, 0.5, 1.0], [0.9]])
    batch, now = case.batch.to(dtype=torch.float32), {n: p.float() for n, p in case.now.items()}
    assert torch.isfinite(laws.update(reco(), batch, now).gradient["logp"]).all()


def test_tokens_out_of_float32s_reach_stay_finite():
    """e^−110 is 0 in float32: a foreign text's token, whose v would be 0 / 0."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    old, now = torch.tensor([[-110.0, -2.0]]), torch.tensor([[-105.0, -1.0]])
    ratio = variance(mask, now, 1e-5) / variance(mask, old, 1e-5)
    assert ratio[0, 0] == 1 and 1 < ratio[0, 1] < math.e


def test_bad_input_is_named():
    for cap in (0.0, -1.0, math.inf):
        with pytest.raises(UserError, match="reco: cap is"):
            reco(cap=cap)
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5]] * 2, new=[[0.5]] * 2)
    alone = replace(case.batch, groups=case.batch.groups[:, :1], group_names=("task",))
    with pytest.raises(UserError, match=r"grouping 'answer'; this batch has: task"):
        reco(typical="empirical").terms[0].weight(alone)
