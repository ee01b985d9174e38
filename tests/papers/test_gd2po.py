"""GD²PO: who conflicts, who is dropped, what a prompt then counts, and that rounding makes no conflicts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import laws
import reference
from postrl.advantages import credit_per_reward
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.papers.gd2po import gd2po, judged
from postrl.papers.gdpo import gdpo

OPTIONS = [
    {"filter": "snr", "threshold": 0.5, "query_weight": "pre_whiten", "whiten": "token", "missing": "zero"},
    {"filter": "snr", "threshold": 0.2, "query_weight": "loss", "whiten": "token", "shift_mean": False},
    {"filter": "hard", "query_weight": "pre_whiten", "singleton": "raw", "eps": 1e-4},
    {"filter": "hard", "query_weight": None, "whiten": None, "ddof": 0, "dual": 3.0, "sign_eps": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(gd2po(**options), case, **options), examples=12)


@pytest.mark.parametrize("law", laws.LAWS)
def test_laws(law):
    laws.hold(law, gd2po(**OPTIONS[0]), examples=5)


def batch_of(vectors: list[list[float]], groups: list[int], weights: list[float] | None = None) -> Batch:
    case = laws.by_hand(groups, [0.0] * len(groups), [[0.5]] * len(groups), [[0.5]] * len(groups))
    rewards = torch.tensor(vectors, dtype=torch.float64)
    return replace(
        case.batch,
        rewards=rewards,
        reward_weights=torch.tensor(weights or [1.0] * rewards.shape[1], dtype=torch.float64),
        reward_names=tuple(f"r{k}" for k in range(rewards.shape[1])),
    )


def credit(batch: Batch, **options) -> Tensor:
    return gd2po(**options).advantage(batch)[:, 0]


FOUR = [[3.0, 0.0], [1.0, 1.0], [0.0, 3.0], [0.0, 0.0]]  # both means 1, both deviations √2: A = (r − 1)/√2


def test_by_hand():
    """A·√2 = (2, −1), (0, 0), (−1, 2), (−1, −1): the first and third conflict, half the prompt is kept, S·√2 = 0, −2.

    Whitened over the kept two: ±1/√2 times the deviation of 2 answers, ρ = 1/2 on the loss; nothing is left of it
    before whitening. A second prompt without conflict has ρ = 1.
    """
    batch = batch_of(FOUR, [0] * 4)
    exact = {"eps": 0.0, "whiten_eps": 0.0}
    half = 2**-0.5
    laws.equal(credit(batch, whiten=None, **exact), [0, 0, 0, -half])
    laws.equal(credit(batch, whiten=None, query_weight=None, **exact), [0, 0, 0, -2 * half])
    laws.equal(credit(batch, **exact), [0, half / 2, 0, -half / 2])
    laws.equal(credit(batch, query_weight="pre_whiten", **exact), [0, half, 0, -half])

    both = batch_of([*FOUR, [1.0, 1.0], [0.0, 0.0]], [0] * 4 + [1] * 2)
    got = credit(both, whiten=None, **exact)
    laws.equal(got[4:], [2**0.5, -(2**0.5)])
    verdict = judged(credit_per_reward(both), both)
    assert verdict.query_weight.tolist() == [0.5] * 4 + [1.0] * 2


def test_before_whitening_the_query_weight_moves_the_other_prompts_too():
    """S = 0, −√2 | √2, −√2 with ρ = ½ | 1: on the loss the second prompt stays as it was, before whitening not."""
    both = batch_of([*FOUR, [1.0, 1.0], [0.0, 0.0]], [0] * 4 + [1] * 2)
    plain, loss, before = (credit(both, query_weight=q) for q in (None, "loss", "pre_whiten"))
    assert torch.equal(plain[4:], loss[4:]) and float((before - plain)[4:].abs().max()) > 0.2
    laws.near(loss[:4], plain[:4] / 2, "the prompt that counts half")


@pytest.mark.parametrize("value", [0.1, 0.7, 2.2])
@pytest.mark.parametrize("size", range(7, 17))
def test_a_constant_reward_makes_no_conflict(value: float, size: int):
    """In float32 the mean of seven and more equal rewards is off by up to 2e-7, a z-score of up to 0.19: a sign, to the
    released threshold. Nobody may be dropped, and the credit is that of the other reward alone."""
    varied = torch.arange(size) % 3 + 0.0
    rewards = torch.stack([torch.full((size,), value), varied], 1)
    batch = batch_of(rewards.tolist(), [0] * size).to(dtype=torch.float32)
    alone = batch_of(varied[:, None].tolist(), [0] * size).to(dtype=torch.float32)
    for options in ({"filter": "hard"}, {"filter": "snr", "threshold": 1.0}, {"filter": "hard", "sign_eps": 1e-8}):
        verdict = judged(credit_per_reward(batch), batch, options["filter"], 1.0, options.get("sign_eps", 1e-3))
        assert verdict.kept.all() and not verdict.conflict.any() and (verdict.query_weight == 1).all()
        assert torch.equal(credit(batch, **options), credit(alone, **options))
        assert torch.equal(credit(batch, **options), gdpo().advantage(alone)[:, 0])


def test_the_control_is_wrong_on_constant_rewards():
    """The same statistics without the rule for constant groups do make conflicts at the released threshold."""
    wrong = 0
    for size in range(7, 17):
        x = torch.full((size,), 0.7)
        total = torch.zeros(())
        for reward in x:
            total += reward
        mean = total / size
        a = (x - mean) / ((x - mean).square().sum().div(size - 1).sqrt() + 1e-6)
        parts = torch.stack([a, torch.arange(size) % 3 - 1.0], 1)
        batch = batch_of(parts.tolist(), [0] * size).to(dtype=torch.float32)
        wrong += bool(judged(parts, batch, "hard", sign_eps=1e-8).conflict.any())
    assert wrong > 0


@pytest.mark.parametrize(("tau", "bound"), [(0.8, 1 / 9), (0.5, 1 / 3), (0.2, 2 / 3)])
def test_threshold_of_two_rewards(tau: float, bound: float):
    """Dropped iff min(|a|, |b|)/max > (1 − τ)/(1 + τ), for either sign and order."""
    batch = batch_of([[0.0, 0.0]] * 4, [0] * 4)
    assert bound == pytest.approx((1 - tau) / (1 + tau))
    for ratio, kept in ((bound - 1e-6, True), (bound + 1e-6, False)):
        parts = torch.tensor([[2, -2 * ratio], [-2, 2 * ratio], [ratio, -1], [-ratio, 1]], dtype=torch.float64)
        assert judged(parts, batch, "snr", tau).kept.tolist() == [kept] * 4
        assert not judged(parts, batch, "hard").kept.any()


def test_agreeing_and_silent_rewards_are_never_dropped():
    parts = torch.tensor([[1, 2], [-1, -2], [0, -1], [1e-4, -1], [0, 0]], dtype=torch.float64)
    batch = batch_of([[0.0, 0.0]] * 5, [0] * 5)
    for kind in ("hard", "snr", None):
        assert judged(parts, batch, kind, 1.0).kept.all()
    assert judged(parts, batch, "hard", sign_eps=1e-8).kept.tolist() == [True, True, True, False, True]


def test_limits():
    """τ = 1 is hard, τ = 0 drops nobody; without filter and query weight it is GDPO."""

    def check(case):
        batch, now = case.batch, case.now
        laws.same(*(laws.update(m, batch, now) for m in (gd2po(), gd2po("snr", 1.0))))
        plain = laws.update(gdpo(), batch, now)
        laws.same(laws.update(gd2po("snr", 0.0), batch, now), plain)
        laws.same(laws.update(gd2po(None, query_weight=None), batch, now), plain)

    laws.over_cases(check, examples=10)


def test_everybody_in_conflict_trains_nothing():
    batch = batch_of([[1.0, 0.0], [0.0, 1.0]], [0, 0])
    for whiten in ("response", "token", None):
        for query_weight in ("loss", "pre_whiten", None):
            assert (credit(batch, whiten=whiten, query_weight=query_weight) == 0).all()


def test_few_answers_left_stay_bounded():
    """Kept alone, an answer is its own mean; scaled only, its size is 1. Two nearly equal ones do not blow up."""
    batch = batch_of([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [0] * 3)
    assert (credit(batch, query_weight=None) == 0).all()
    scaled = credit(batch, query_weight=None, shift_mean=False, eps=0.0, whiten_eps=0.0)
    laws.equal(scaled, [0, 0, -1])
    near = batch_of([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1e-5, 0.0]], [0] * 4)
    assert credit(near, whiten_eps=0.0, query_weight=None, shift_mean=False).abs().max() < 2


def test_a_penalty_turns_the_sign():
    """Reward ½ of weight 1 and cost of weight −1: who is better and costs more conflicts; better and cheaper agrees."""
    costly, cheap, free = [[1.0, 5.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 5.0]], [[1.0, 5.0], [0.0, 5.0]]
    for vectors, kept in ((costly, False), (cheap, True), (free, True)):
        batch = batch_of(vectors, [0, 0], weights=[1.0, -1.0])
        assert judged(credit_per_reward(batch), batch).kept.tolist() == [kept] * 2


def test_a_small_weight_silences_no_reward():
    """The sign is that of A, so a weight of 0.0001 does not hide a conflict; the agreement is that of w·A, and high."""
    batch = batch_of([[1.0, 0.0], [0.0, 1.0]], [0, 0], weights=[1.0, 1e-4])
    parts = credit_per_reward(batch)
    assert judged(parts, batch, "hard").conflict.all() and judged(parts, batch, "snr", 0.8).kept.all()


def test_missing_answers_count_neither_as_kept_nor_as_dropped():
    vectors = [*FOUR, [torch.nan, 1.0]]
    verdict = judged(credit_per_reward(batch_of(vectors, [0] * 5)), batch_of(vectors, [0] * 5))
    assert verdict.scored.tolist() == [True] * 4 + [False]
    assert verdict.kept.tolist() == [False, True, False, True, False]
    assert verdict.query_weight.tolist() == [0.5] * 5


def test_dropped_answers_get_no_gradient_but_stay_in_the_count():
    case = laws.by_hand([0] * 4, [0.0] * 4, [[0.5]] * 4, [[0.5]] * 4)
    batch = batch_of(FOUR, [0] * 4)
    got = laws.update(gd2po(), batch, case.now)
    assert (got.gradient["logp"][[0, 2]] == 0).all() and (got.gradient["logp"][[1, 3]] != 0).all()
    assert torch.equal(got.weights[0], torch.full((4, 1), 0.25, dtype=torch.float64))


def test_figures():
    """Prompt 0: two of four conflict, τ = 0.2 drops none of them ((2 − 1)/3 = ⅓ ≥ 0.2), hard both. Prompt 1: nobody.
    Prompt 2 is not scored at all."""
    vectors = [*FOUR, [1.0, 1.0], [0.0, 0.0], [torch.nan, 0.0]]
    batch = batch_of(vectors, [0] * 4 + [1] * 2 + [2])

    def figures(**options):
        method = gd2po(**options)
        assert method.figures is not None
        return method.figures(batch, batch.logp_old)

    hard = {"conflict": 1 / 3, "dropped": 1 / 3, "kept": 2 / 3, "query_weight": 0.75}
    assert figures() == pytest.approx(hard)
    assert figures(filter="snr", threshold=0.2) == pytest.approx(hard | {"dropped": 0, "kept": 1, "query_weight": 1})


@pytest.mark.parametrize("threshold", [-0.1, 1.5, 80.0])
def test_bad_threshold_is_named(threshold: float):
    with pytest.raises(UserError, match="gd2po: threshold is"):
        gd2po(threshold=threshold)
