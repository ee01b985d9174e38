"""ACPO: widths on a hand-made batch, whose statistics they are, and PPO's clip at one update per step."""

import math
from dataclasses import replace

import pytest
import torch

import laws
import reference
from postrl.errors import UserError
from postrl.papers.acpo import acpo, classes, widths
from postrl.papers.grpo import grpo

OPTIONS = [
    {"bin_by": "current", "alpha": 1.0, "least": 0.05, "most": 0.5},
    {"sigma": "robust", "bins": 3, "dual": None},
    {"variant": "released"},
    {
        "variant": "released",
        "bin_by": "behaviour",
        "sigma": "robust",
        "bins": 8,
        "count_empty": True,
        "missing": "zero",
    },
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(acpo(**options), case, **options), examples=10)


@pytest.mark.parametrize("law", laws.LAWS)
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[2]])
def test_laws(options, law):
    laws.hold(law, acpo(**options), examples=5 if law not in acpo(**options).exempt else 100)


def by_hand() -> laws.Case:
    """Behaviour class 0: ratios 1.5, 0.5 (σ = 0.5) · class 2: ratios 1.2, 1.0, 0.8 (σ = √(0.08/3)) · class 4: 1.0."""
    old, new = [[0.1, 0.1, 0.5], [0.5, 0.5, 0.9]], [[0.15, 0.05, 0.6], [0.5, 0.4, 0.9]]
    return laws.by_hand([0, 0], [1.0, 0.0], old=old, new=new)


def width(sigma: float, alpha: float = 3.0, base: float = 0.2) -> float:
    return base + alpha * math.sqrt(sigma**2 + 1e-8)


def test_widths_by_hand():
    case = by_hand()
    got = widths(case.batch, case.now["logp"])
    rare, middle, sure = width(0.5), width(math.sqrt(0.08 / 3)), width(0.0)
    assert sure == pytest.approx(0.2003)
    laws.equal(got, [[rare, rare, middle], [middle, middle, sure]])
    laws.equal(widths(case.batch, case.now["logp"], most=0.6, least=0.5), [[0.6, 0.6, 0.6], [0.6, 0.6, 0.5]])


def test_class_by_the_current_policy():
    """0.6 now belongs to class 3, alone; 0.5 and 0.4 stay in class 2 with ratios 1 and 0.8."""
    case = by_hand()
    got = widths(case.batch, case.now["logp"], bin_by="current")
    laws.equal(got[0], [width(0.5), width(0.5), width(0.0)])
    laws.equal(got[1], [width(0.1), width(0.1), width(0.0)])


def test_certain_tokens_are_of_the_last_class():
    case = laws.by_hand([0], [1.0], old=[[1.0, 0.79, 0.81, 1e-30]], new=[[0.5] * 4])
    assert classes(case.batch, case.now["logp"], 5, "behaviour").tolist() == [[4, 3, 4, 0]]


def test_gradient_by_hand():
    """A = ±1/√2, W = 1/6. ε of the rare class is 1.7: no ratio is past it, and below it the clip is open. In the middle
    class ε = 0.69. GRPO, at 0.2, silences 1.5 of the good answer."""
    case, a = by_hand(), 2**-0.5 / 6
    got, plain = (laws.update(m, case.batch, case.now).gradient["logp"] for m in (acpo(eps=0.0), grpo(eps=0.0)))
    laws.equal(got, [[-1.5 * a, -0.5 * a, -1.2 * a], [a, 0.8 * a, a]])
    assert plain[0, 0] == 0


def test_a_width_holds_on_both_sides():
    """σ = 0.1 in each class (ratios 1.2 and 1.0, 0.8 and 1.0) and α = 0: ε = 0.1 clips 1.2 up and 0.8 down."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.3, 0.3], [0.5, 0.5]], new=[[0.36, 0.3], [0.4, 0.5]])
    got = laws.update(acpo(alpha=0.0, base=0.1, eps=0.0), case.batch, case.now).gradient["logp"]
    a = 2**-0.5 / 4
    laws.equal(got, [[0.0, -a], [0.0, a]])
    open_ = laws.update(acpo(alpha=3.0, base=0.1, eps=0.0), case.batch, case.now).gradient["logp"]
    laws.equal(open_, [[-1.2 * a, -a], [0.8 * a, a]])


def test_a_width_over_one_leaves_the_lower_side_open():
    case = laws.by_hand([0, 0], [0.0, 1.0], old=[[0.1, 0.1], [0.5, 0.5]], new=[[0.19, 1e-4], [0.5, 0.5]])
    epsilon = widths(case.batch, case.now["logp"])
    assert (epsilon[0] > 1).all()
    got = laws.update(acpo(eps=0.0, dual=None), case.batch, case.now).gradient["logp"]
    assert (got[0] != 0).all()


@pytest.mark.parametrize("options", [{}, {"sigma": "robust"}, {"variant": "released"}, {"bin_by": "current"}])
def test_one_update_per_step_is_ppos_clip(options):
    """r = 1: σ = 1e-4, ε = 0.2003, and the update is that of GRPO with dual clip, loss and gradient."""

    def check(case):
        now = {**case.now, "logp": torch.where(case.batch.mask, case.batch.logp_old, 0)}
        laws.same(laws.update(acpo(**options), case.batch, now), laws.update(grpo(dual=3.0), case.batch, now))
        wanted = torch.full_like(case.batch.logp_old, 0.2).masked_fill(case.batch.mask, 0.2003)
        laws.near(widths(case.batch, now["logp"]), wanted, "width")

    laws.over_cases(check, examples=6)


def test_without_alpha_it_is_ppos_clip_everywhere():
    def check(case):
        laws.same(laws.update(acpo(alpha=0.0), case.batch, case.now), laws.update(grpo(dual=3.0), case.batch, case.now))

    laws.over_cases(check, examples=8)


def test_one_ratio_far_out_widens_its_own_bound_unless_the_spread_is_robust():
    """Nine ratios of 1 ± 0.1 and one of 4: σ is 0.9 by squares, 0.15 by the median distance."""
    new = [0.1 * r for r in (0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 1.0, 4.0)]
    case = laws.by_hand([0], [1.0], old=[[0.1] * 10], new=[new])
    square, robust = (widths(case.batch, case.now["logp"], sigma=s)[0, 0] for s in ("std", "robust"))
    assert square > 2.5 and float(robust) == pytest.approx(width(1.4826 * 0.1), rel=1e-6)
    assert 1 + float(square) > 3.5 and 1 + float(robust) < 1.7, "4 is nearly inside the one, far outside the other"


def test_normal_ratios_have_the_same_spread_by_either():
    noise = torch.randn(1, 20001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = laws.by_hand([0], [1.0], old=[[0.5] * 20001], new=[(0.5 * (1 + 0.05 * noise[0])).tolist()])
    square, robust = (float(widths(case.batch, case.now["logp"], sigma=s)[0, 0]) for s in ("std", "robust"))
    assert square == pytest.approx(width(0.05), rel=0.02) and robust == pytest.approx(square, rel=0.02)


def test_the_released_width_is_that_of_a_micro_batch():
    """Ratios 1.5, 1.4 | 0.5, 0.4: a row alone has ε = 0.35 and silences all, both have ε = 1.7 and silence none. The
    update changes with its cut, and the paper's does not."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.1, 0.1]] * 2, new=[[0.15, 0.14], [0.05, 0.04]])
    rows = [torch.tensor([0]), torch.tensor([1])]

    def difference(method) -> float:
        whole, cut = (laws.update(method, case.batch, case.now, pieces) for pieces in (None, rows))
        return float((whole.gradient["logp"] - cut.gradient["logp"]).abs().max())

    assert difference(acpo(variant="released")) > 0.1
    assert difference(acpo()) == 0


def test_ratios_out_of_float32s_reach_give_the_widest_clip():
    """log r = 99: r and its square are infinite in float32; the width is the largest, and everything stays finite."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.1, 0.1, 0.5], [0.5]], new=[[0.1, 0.1, 0.5], [0.5]])
    batch, now = case.batch.to(dtype=torch.float32), case.now["logp"].float().clone()
    batch.logp_old[0, 0] = -101.0
    got = widths(batch, now)
    assert got[0].tolist() == pytest.approx([3.0, 3.0, 0.2003])
    assert torch.isfinite(laws.update(acpo(), batch, {"logp": now}).gradient["logp"]).all()


def test_figures():
    """The widths of the classes that have tokens, as observed at the last update."""
    case, method = by_hand(), acpo()
    assert method.figures is not None and method.observe is not None
    now = case.now["logp"]
    got = method.figures(replace(case.batch, observed=method.observe(case.batch, now)), now)
    wanted = {"epsilon/0": width(0.5), "epsilon/2": width(math.sqrt(0.08 / 3)), "epsilon/4": width(0.0)}
    assert got == pytest.approx(wanted)
    assert method.figures(case.batch, now) == {} and acpo(variant="released").figures is None


def test_bad_options_and_a_missing_observation_are_named():
    with pytest.raises(UserError, match="acpo: bins is 0"):
        acpo(bins=0)
    with pytest.raises(UserError, match=r"acpo: least=0\.5 is over most=0\.3"):
        acpo(least=0.5, most=0.3)
    case = by_hand()
    with pytest.raises(ValueError, match="observed"):
        acpo().terms[0].loss(case.batch, torch.zeros_like(case.batch.logp_old), laws.Forward(logp=case.now["logp"]))
