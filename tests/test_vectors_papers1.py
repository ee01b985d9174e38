"""GDPO, GD²PO, ACPO and masked CISPO against what their authors and the libraries released: values and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import laws
from postrl.advantages import Groups, centred, credit_per_reward, spread_whitened, total_reward
from postrl.batch import Batch, spread
from postrl.papers.acpo import acpo, classes, widths
from postrl.papers.gd2po import gd2po, judged
from postrl.papers.gdpo import gdpo
from postrl.papers.masked_cispo import masked_cispo
from postrl.weights import token_mean
from test_vectors import Vectors, load, over, record, run, weighed

__all__ = ["load"]  # the fixture


# ---------------------------------------------------------------- GDPO


def gdpo_batch(v: Vectors, rewards: Tensor | None = None) -> Batch:
    """TRL's arrays: groups are consecutive, one value per response."""
    rewards = v.tensor("rewards") if rewards is None else rewards
    groups = torch.arange(len(rewards)) // int(v.tensor("num_generations"))
    mask = torch.ones(len(rewards), 1)
    return record(mask, rewards=rewards, groups=groups, reward_weights=v.tensor("weights"))


def test_gdpo_trl(load):
    v = load("gdpo_trl")
    method = gdpo(eps=1e-4, missing="zero")
    v.check("adv_full", method.advantage(gdpo_batch(v))[:, 0])
    v.check("adv_missing", method.advantage(gdpo_batch(v, v.tensor("rewards_missing")))[:, 0])


def test_gdpo_of_its_authors_for_trl(load):
    """Their patch takes a missing reward for one of 0, which we do not offer: the rewards are filled in here."""
    v = load("gdpo_nvlabs")
    filled = v.tensor("rewards_missing").nan_to_num(nan=0.0)
    v.check("adv_trl018_full", gdpo(eps=1e-4).advantage(gdpo_batch(v))[:, 0])
    v.check("adv_trl018_missing", gdpo(eps=1e-4).advantage(gdpo_batch(v, filled))[:, 0])
    ours = gdpo(eps=1e-4, missing="zero").advantage(gdpo_batch(v, v.tensor("rewards_missing")))[:, 0]
    apart = float((ours - v.tensor("adv_trl018_missing")).abs().max())
    assert apart == pytest.approx(v.roles["adv_trl018_missing"]["paper_formula_max_abs_diff"], abs=1e-9)


def test_gdpo_of_its_authors_for_verl(load):
    v = load("gdpo_nvlabs")
    rewards = torch.stack([v.tensor("reward_correctness"), v.tensor("reward_format")], 1)
    lone = Groups(rewards[:, 0], v.tensor("index")).count == 1
    assert lone.any()
    rewards[lone] /= 1 + 1e-6  # verl divides the raw reward of a lone answer by 1 + eps
    batch = record(v.tensor("mask"), rewards=rewards, groups=v.tensor("index"))
    v.check("adv_verl", gdpo(whiten="token", singleton="raw").advantage(batch), batch.mask)
    apart = float((gdpo(singleton="raw", whiten_eps=1e-8).advantage(batch) - v.tensor("adv_verl")).abs().max())
    assert apart == pytest.approx(v.roles["adv_verl"]["paper_formula_max_abs_diff"], rel=1e-3)


@pytest.mark.parametrize("case", ["w1", "w3"])
def test_gdpo_verl(load, case):
    v = load("gdpo_verl")
    weights = torch.tensor(v.cases[case]["gdpo_reward_weights"], dtype=torch.float64)
    batch = record(v.tensor("mask"), rewards=v.tensor("rewards"), groups=v.tensor("index"), reward_weights=weights)
    v.check(f"adv_{case}", gdpo(whiten="token", singleton="raw").advantage(batch), batch.mask)


def test_gdpo_verl_without_deviations(load):
    """verl's switch that only centres each reward: centring is linear, so this is the centred sum, whitened."""
    v = load("gdpo_verl")
    weights = torch.tensor(v.cases["w3_nostd"]["gdpo_reward_weights"], dtype=torch.float64)
    batch = record(v.tensor("mask"), rewards=v.tensor("rewards"), groups=v.tensor("index"), reward_weights=weights)
    credit = centred(total_reward(batch), batch.group(), singleton="raw")
    v.check("adv_w3_nostd", spread_whitened(credit, batch, "token"), batch.mask)


# ---------------------------------------------------------------- GD²PO

RELEASED = {"whiten": "token", "query_weight": "pre_whiten", "singleton": "raw", "sign_eps": 1e-8}
GD2PO_CASES = [
    *(f"{folder}_{mode}" for folder in ("tool_k2", "tool_k3", "safe_k2") for mode in ("gdpo", "hard", "snr08", "snr02"))
]


def gd2po_case(v: Vectors, name: str) -> tuple[Batch, dict]:
    c = v.cases[name]
    rewards = v.tensor("rewards")[:, : c["num_rewards"]]
    batch = record(v.tensor("mask"), rewards=rewards, groups=v.tensor("index"))
    if c["mode"] == "gdpo":
        return batch, {**RELEASED, "filter": None, "query_weight": None}
    tau = {} if c["tau"] is None else {"threshold": c["tau"]}
    return batch, {**RELEASED, "filter": c["mode"], **tau}


@pytest.mark.parametrize("name", GD2PO_CASES)
def test_gd2po(load, name):
    v = load("gd2po")
    assert set(GD2PO_CASES) == set(v.cases)
    batch, options = gd2po_case(v, name)
    v.check(f"adv_{name}", gd2po(**options).advantage(batch), batch.mask)
    stated = v.roles[f"adv_{name}"].get("paper_formula_max_abs_diff")
    assert (stated is None) == name.endswith("gdpo")
    if stated is not None:
        paper = gd2po(**{**options, "query_weight": "loss"}).advantage(batch)
        assert float((paper - v.tensor(f"adv_{name}")).abs().max()) == pytest.approx(stated, rel=1e-4)


@pytest.mark.parametrize("case", ["k2_hard", "k2_snr08", "k2_snr02", "k3_hard", "k3_snr08", "k3_snr02"])
def test_gd2po_filter(load, case):
    """Who is kept, and the share of each group that is."""
    v = load("gd2po")
    batch, options = gd2po_case(v, f"tool_{case}")
    credit = credit_per_reward(batch, singleton="raw")
    verdict = judged(credit, batch, options["filter"], options.get("threshold", 0.8), 1e-8)
    v.check(f"keep_{case}", verdict.kept.double())
    torch.testing.assert_close(verdict.query_weight, v.tensor(f"rho_{case}"), rtol=1e-7, atol=1e-7)


# ---------------------------------------------------------------- ACPO and its baseline


def acpo_batch(v: Vectors, case: str) -> tuple[Batch, Tensor, dict]:
    logp = v.tensor("log_prob")
    old = logp if case == "on_policy" else v.tensor("old_log_prob")
    c = v.cases[f"bins_{case}"]
    options = {
        "alpha": c["variance_alpha"], "base": c["variance_base_clip"], "least": c["variance_clip_min"],
        "most": c["variance_clip_max"], "bins": c["num_bins"],
    }  # fmt: skip
    return record(v.tensor("mask"), old), logp, options


@pytest.mark.parametrize("case", ["released", "yaml_default", "bins8", "on_policy"])
def test_acpo(load, case):
    """The released variant as it is, and the paper's with the code's bins on a batch that is one micro-batch."""
    v = load("acpo")
    batch, logp, options = acpo_batch(v, case)
    v.check(f"eps_{case}", widths(batch, logp, bin_by="current", **options))
    whole = replace(batch, observed=widths(batch, logp, bin_by="current", **options))
    items = float(batch.mask.sum()) + 1e-8  # their token mean
    for built, rows in ((acpo(variant="released", **options), batch), (acpo(bin_by="current", **options), whole)):
        got = run(built, rows, logp, v.tensor("adv"))
        v.check(f"loss_{case}_seq_mean_token_mean", got.loss)
        v.check(f"grad_{case}_seq_mean_token_mean", got.gradient["logp"])
        token = built.terms[0].loss(rows, v.tensor("adv"), laws.Forward(logp=logp))
        v.check(f"mat_{case}", token, batch.mask)
        if case == "released":
            got = run(weighed(built, over(items)), rows, logp, v.tensor("adv"))
            v.check("loss_released_token_mean", got.loss)
            v.check("grad_released_token_mean", got.gradient["logp"])


def test_acpo_statistics_of_the_classes(load):
    v = load("acpo")
    batch, logp, _ = acpo_batch(v, "released")
    place = classes(batch, logp, 5, "current")[batch.mask]
    inside = Groups((logp - batch.logp_old).exp()[batch.mask], place)
    counts = v.tensor("bin_count_released")
    assert inside.sizes.tolist() == counts[: inside.number].tolist() and (counts > 0).all()
    v.check("ratio_mean_released", inside.means())


def test_acpo_by_the_behaviour_policy(load):
    """No released code bins so; the formula's widths differ from the released ones by as much as recorded."""
    v = load("acpo")
    batch, logp, options = acpo_batch(v, "released")
    got = widths(batch, logp, bin_by="behaviour", **options)
    torch.testing.assert_close(got, v.tensor("eps_behaviour_bins"), rtol=1e-9, atol=1e-9)
    assert float((got - v.tensor("eps_released")).abs().max()) == pytest.approx(2.56, abs=0.01)


def test_masked_cispo(load):
    v = load("acpo")
    c = v.cases["cispo_masked"]
    batch = record(v.tensor("mask"), v.tensor("old_log_prob"))
    built = masked_cispo(
        c["cliprange_low"], c["cliprange_high"], 1 - c["clip_ratio_is_low"], 1 + c["clip_ratio_is_high"]
    )
    got = run(built, batch, v.tensor("log_prob"), v.tensor("adv"))
    v.check("loss_cispo_masked", got.loss)
    v.check("grad_cispo_masked", got.gradient["logp"])
    other = run(weighed(built, token_mean), batch, v.tensor("log_prob"), v.tensor("adv"))
    assert abs(float(other.loss - v.tensor("loss_cispo_masked"))) > 1e-3, "the vector no longer tells the means apart"


def test_a_lone_answer_is_treated_as_recorded(load):
    """The vectors hold a group of one; singleton="zero", our default, differs there, and (unwhitened) only there."""
    v = load("gdpo_verl")
    batch = record(v.tensor("mask"), rewards=v.tensor("rewards"), groups=v.tensor("index"))
    raw, zero = (gdpo(whiten=None, singleton=s).advantage(batch) for s in ("raw", "zero"))
    lone = spread(Groups(batch.rewards[:, 0], batch.group()).count, batch) == 1
    assert lone.any() and (zero[lone] == 0).all() and not torch.equal(raw, zero)
    assert torch.equal(raw[~lone], zero[~lone])
