"""Our methods against inputs and outputs of the functions that verl and TRL released: values and gradients.

The arrays come from POSTRL_VECTORS (see the README there). A case is compared in full where our definition is theirs;
where ours differs on purpose the test says by how much, and checks that too.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import laws
from postrl import losses
from postrl.advantages import Groups, centred, discounted_returns, gae, total_reward, whitened
from postrl.batch import Batch, spread, unit_sum
from postrl.method import Method, Term
from postrl.papers import methods
from postrl.papers.cispo import cispo
from postrl.papers.dapo import dapo
from postrl.papers.dr_grpo import dr_grpo
from postrl.papers.gmpo import gmpo
from postrl.papers.grpo import grpo
from postrl.papers.gspo import gspo
from postrl.papers.rloo import rloo
from postrl.terms import reference_kl
from postrl.weights import fixed_length, sequence_mean, sequence_sum, token_mean


@dataclass(frozen=True)
class Vectors:
    """One method's arrays; `case` gives a case's hyper-parameters."""

    cases: dict[str, dict]
    roles: dict[str, dict]
    arrays: dict[str, np.ndarray]

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def check(self, name: str, got: Tensor, where: Tensor | None = None) -> None:
        """`got` is the released output `name`, to the tolerance recorded with it, where `where` is True."""
        about = self.roles[name]
        assert about["role"] == "output", f"{name} is no target"
        wanted, bound = self.tensor(name), max(about.get("tolerance") or 0.0, 1e-9)
        where = torch.ones_like(wanted, dtype=torch.bool) if where is None else where
        assert torch.isfinite(got[where]).all()
        torch.testing.assert_close(got[where], wanted[where], rtol=bound, atol=bound, equal_nan=False)


@pytest.fixture(scope="module")
def load(vectors: Path):
    index = json.loads((vectors / "vectors.json").read_text())["methods"]

    def of(method: str) -> Vectors:
        with np.load(vectors / f"{method}.npz", allow_pickle=False) as arrays:
            stored = {name: arrays[name] for name in arrays.files}
        return Vectors(
            {c["case"]: c["hyper_parameters"] for c in index[method]["cases"]}, index[method]["arrays"], stored
        )

    return of


def record(mask: Tensor, old: Tensor | None = None, **fields) -> Batch:
    """One row per unit in float64; every unit in one group unless `groups` says otherwise."""
    case = laws.make_case(0, units=len(mask), length=mask.shape[1])
    index, zero = torch.arange(len(mask)), torch.zeros(mask.shape, dtype=torch.float64)
    rewards = fields.pop("rewards", torch.zeros(len(mask), 1, dtype=torch.float64))
    groups = fields.pop("groups", torch.zeros(len(mask), dtype=torch.int64))
    weights = fields.pop("reward_weights", torch.ones(rewards.shape[1], dtype=torch.float64))
    rows = {n: zero for n in ("logp_sampler", "logp_ref", "values", "returns")}
    return replace(
        case.batch,
        **{**rows, **fields},
        tokens=zero.long(),
        valid=mask > 0,
        mask=mask > 0,
        segment=torch.where(mask > 0, 0, -1).to(torch.int32),
        logp_old=zero if old is None else old,
        prefix_id=index,
        prefix_length=torch.zeros_like(index),
        temperature=torch.ones(len(mask), dtype=torch.float64),
        unit=index,
        groups=groups[:, None],
        group_names=("task",),
        rewards=rewards,
        reward_weights=weights,
        reward_names=("correct", "style", "length")[: rewards.shape[1]],
        step_rewards=None,
        step_groups=None,
        teacher_logp=None,
        value_after=None,
    )


def run(method: Method, batch: Batch, logp: Tensor, advantage: Tensor) -> laws.Update:
    """Loss and gradient under the given advantage; `advantage` is [N] or [B, T]."""
    advantage = spread(advantage, batch) if advantage.dim() == 1 else torch.where(batch.mask, advantage, 0)
    return laws.accumulate(method, batch, {"logp": logp}, advantage, tuple(t.weight(batch) for t in method.terms))


def weighed(method: Method, weight) -> Method:
    return replace(method, terms=(replace(method.terms[0], weight=weight), *method.terms[1:]))


def over(total: float):
    """A weight that gives every token 1/total: the normaliser belongs to more than these rows."""
    return lambda batch: batch.mask.to(batch.logp_old.dtype) / total


# ---------------------------------------------------------------- advantages


def outcome(v: Vectors) -> Batch:
    return record(v.tensor("mask"), groups=v.tensor("index"), rewards=v.tensor("reward")[:, None])


def test_grpo_verl(load):
    v = load("grpo_verl")
    batch = outcome(v)
    mine = grpo(eps=v.cases["loop_std"]["epsilon"], singleton="raw").advantage(batch)
    lone = spread(Groups(batch.rewards[:, 0], batch.group()).count, batch) == 1
    assert lone.any()
    mine = torch.where(lone, mine / (1 + 1e-6), mine)  # verl divides the raw reward of a lone answer by 1 + eps
    plain = dr_grpo(singleton="raw").advantage(batch)
    for name, got in {"adv_std": mine, "adv_vec_std": mine, "adv_nostd": plain, "adv_vec_nostd": plain}.items():
        v.check(name, got)


def test_rloo_verl(load):
    """verl's two versions disagree on lone answers; `singleton` names both."""
    v = load("rloo_verl")
    batch = outcome(v)
    v.check("adv_loop", rloo(singleton="raw").advantage(batch))
    v.check("adv_vec", rloo().advantage(batch))
    apart = (rloo().advantage(batch) - v.tensor("adv_loop")).abs().max()
    assert float(apart) == pytest.approx(v.roles["adv_vec"]["paper_formula_max_abs_diff"], abs=1e-9)


@pytest.mark.parametrize("missing", ["full", "missing"])
def test_grpo_trl(load, missing):
    v = load("grpo_trl")
    rewards = v.tensor("rewards" if missing == "full" else "rewards_missing")
    size = int(v.tensor("num_generations"))
    batch = record(
        torch.ones(len(rewards), 1),
        rewards=rewards,
        groups=torch.arange(len(rewards)) // size,
        reward_weights=v.tensor("weights"),
    )
    total = total_reward(batch, missing="zero")
    known = total[~total.isnan()]
    v.check(f"adv_group_{missing}", grpo(eps=1e-4, missing="zero").advantage(batch)[:, 0])
    v.check(f"adv_none_{missing}", dr_grpo(missing="zero").advantage(batch)[:, 0])
    v.check(f"adv_batch_{missing}", centred(total, batch.group()) / (known.std() + 1e-4))


def test_grpo_trl_single(load):
    v = load("grpo_trl")
    rewards = v.tensor("rewards_single")
    batch = record(torch.ones(len(rewards), 1), rewards=rewards, groups=torch.arange(len(rewards)))
    v.check("adv_group_single", grpo(eps=1e-4, missing="zero").advantage(batch)[:, 0])


def test_zero_variance_in_float32(load):
    """Sixty constant groups on which the released float32 code gives up to 0.19: exactly 0, for every group method that
    needs nothing but rewards."""
    v = load("zero_variance_fp32")
    plain = {n: m for n, m in methods().items() if not m().needs - {"logp_old"}}
    constructors = {n: m for n, m in plain.items() if "reward shift" not in m().exempt}
    assert {"grpo", "rloo", "gdpo", "gd2po"} <= set(constructors)
    assert v.arrays["absadv_loop"].max() > 0.1
    for constant, size, ideal in zip(*(v.arrays[n].tolist() for n in ("constant", "size", "ideal")), strict=True):
        batch = record(torch.ones(size, 1), rewards=torch.full((size, 1), constant, dtype=torch.float64))
        single = batch.to(dtype=torch.float32)
        for name, constructor in constructors.items():
            assert (constructor().advantage(single) == ideal).all(), (name, constant, size)


def test_opo_verl(load):
    """Length-weighted group mean, from the kernel's parts."""
    v = load("opo_verl")
    batch = outcome(v)
    reward, length = batch.rewards[:, 0], batch.lengths().double()
    groups = Groups(reward, batch.group())
    baseline = groups.sum(length * reward) / groups.sum(length)
    v.check("adv", spread(reward - torch.where(groups.count == 1, 0, baseline), batch))


def test_reinforce_pp_verl(load):
    v = load("reinforce_pp_verl")
    batch = outcome(v)
    for kind in ("dense", "obs"):
        for gamma, tag in ((1.0, "g1"), (0.95, "g95")):
            returns = discounted_returns(v.tensor(f"{kind}_rewards"), batch, gamma)
            v.check(f"returns_{kind}_{tag}", returns, batch.mask)
            v.check(f"adv_{kind}_{tag}", whitened(returns, batch), batch.mask)
    a = centred(batch.rewards[:, 0], batch.group(), singleton="raw")
    v.check("adv_baseline", whitened(spread(a, batch), batch), batch.mask)


@pytest.mark.parametrize("case", ["g1_l1", "g1_l95", "g99_l90"])
def test_gae_verl(load, case):
    v = load("gae_verl")
    batch = record(v.tensor("mask"))
    options = v.cases[case]
    a = gae(v.tensor("dense_rewards"), v.tensor("values"), batch, options["gamma"], options["lam"])
    v.check(f"returns_{case}", a + v.tensor("values"), batch.mask)
    v.check(f"adv_{case}", whitened(a, batch), batch.mask)


# ---------------------------------------------------------------- token losses of verl


def verl(v: Vectors) -> tuple[Batch, Tensor, Tensor]:
    return record(v.tensor("mask"), v.tensor("old_log_prob")), v.tensor("log_prob"), v.tensor("adv")


def weight_of(mode: str, batch: Batch):
    return {
        "token-mean": token_mean,
        "token-sum": over(1.0),
        "seq-mean-token-sum": sequence_sum,
        "seq-mean-token-mean": sequence_mean,
        "seq-mean-token-sum-norm": lambda b: fixed_length(b, batch.mask.shape[1]),
    }[mode]


@pytest.mark.parametrize("clip", ["sym", "higher"])
def test_ppo_clip_verl(load, clip):
    v = load("ppo_clip_verl")
    batch, logp, advantage = verl(v)
    chosen = {n: c for n, c in v.cases.items() if n.startswith(clip) and n != "sym_is"}
    assert len(chosen) == 5
    for name, c in chosen.items():
        method = grpo(c["clip_ratio_low"], c["clip_ratio_high"], dual=c["clip_ratio_c"])
        got = run(weighed(method, weight_of(c["loss_agg_mode"], batch)), batch, logp, advantage)
        v.check(f"loss_{name}", got.loss)
        v.check(f"grad_{name}", got.gradient["logp"])
        token = method.terms[0].loss(batch, advantage, laws.Forward(logp=logp))
        v.check(f"mat_{clip}", token, batch.mask)
        gap = logp - batch.logp_old
        clipped = losses.outside(gap.exp(), advantage, c["clip_ratio_low"], c["clip_ratio_high"])
        measured = [float(x[batch.mask].double().mean()) for x in (clipped, -gap)]
        assert measured == pytest.approx(v.arrays[f"metrics_{clip}"][:2].tolist(), abs=1e-9)


def test_ppo_clip_verl_with_global_counts(load):
    """These rows are one of two ranks of a batch of 131 tokens and 20 rows; verl then multiplies by the world size."""
    v = load("ppo_clip_verl")
    batch, logp, advantage = verl(v)
    c = v.cases["global_token_mean"]
    scale, rows, tokens = c["dp_size"], c["global_batch_size"], c["batch_num_tokens"]
    counted = sum(int(n) > 0 for n in batch.lengths())
    weights = {
        "token_mean": over(tokens / scale),
        "seq_mean_token_mean": lambda b: sequence_mean(b) * counted * scale / rows,
        "seq_mean_token_sum_norm": over(rows * c["loss_scale_factor"] / scale),
    }
    for mode, weight in weights.items():
        got = run(weighed(grpo(0.2, 0.28, dual=10.0), weight), batch, logp, advantage)
        v.check(f"loss_global_{mode}", got.loss)
        v.check(f"grad_global_{mode}", got.gradient["logp"])


def test_sampler_correction_multiplies_the_advantage(load):
    """verl multiplies the token loss by a rollout weight; we put it on A. The losses are linear in A, so both agree."""
    for name, method, tag in (
        ("ppo_clip_verl", weighed(grpo(dual=3.0), token_mean), "sym_is"),
        ("cispo_verl", cispo(0.28, 0.2, "delta"), "is"),
        ("gspo_verl", gspo(0.02, 0.03), "is"),
    ):
        v = load(name)
        batch, logp, advantage = verl(v)
        got = run(method, batch, logp, advantage * v.tensor("rollout_is_weights"))
        v.check(f"loss_{tag}", got.loss)
        v.check(f"grad_{tag}", got.gradient["logp"])


@pytest.mark.parametrize("bounds", ["default", "paper_like", "mixed"])
def test_cispo_verl(load, bounds):
    v = load("cispo_verl")
    batch, logp, advantage = verl(v)
    c = v.cases[f"{bounds}_token_mean"]
    method = cispo(c["clip_ratio_high"], c["clip_ratio_low"], bound="delta")
    for mode, weight in (("token_mean", token_mean), ("seq_mean_token_mean", sequence_mean)):
        got = run(weighed(method, weight), batch, logp, advantage)
        v.check(f"loss_{bounds}_{mode}", got.loss)
        v.check(f"grad_{bounds}_{mode}", got.gradient["logp"])
    token = method.terms[0].loss(batch, advantage, laws.Forward(logp=logp))
    v.check(f"mat_{bounds}", token, batch.mask)


@pytest.mark.parametrize("case", ["paper", "wide"])
def test_gspo_verl(load, case):
    v = load("gspo_verl")
    batch, logp, advantage = verl(v)
    c = v.cases[case]
    method = gspo(c["clip_ratio_low"], c["clip_ratio_high"])
    got = run(method, batch, logp, advantage)
    v.check(f"loss_{case}", got.loss)
    v.check(f"grad_{case}", got.gradient["logp"])
    v.check(f"mat_{case}", method.terms[0].loss(batch, advantage, laws.Forward(logp=logp)), batch.mask)


@pytest.mark.parametrize("case", ["c04", "c02", "is"])
def test_gmpo_verl(load, case):
    """verl counts rows without sampled tokens; a rollout weight enters as its geometric mean per row."""
    v = load("gmpo_verl")
    batch, logp, advantage = verl(v)
    c = v.cases["c02_is" if case == "is" else case]
    if case == "is":
        mean = unit_sum(v.tensor("rollout_is_weights").log(), batch) / batch.lengths().clamp(min=1)
        advantage = advantage * mean.exp()[:, None]
    got = run(gmpo(c["clip_ratio_low"], c["clip_ratio_high"], count_empty=True), batch, logp, advantage)
    v.check(f"loss_{case}", got.loss)
    v.check(f"grad_{case}", got.gradient["logp"])


# ---------------------------------------------------------------- token losses of TRL


def sequence_kl(coef: float, weight) -> Term:
    """TRL's KL term under sequence-level ratios: k3 times the answer's live ratio."""

    def loss(batch, advantage, forward):
        gap = losses.log_ratio(batch.mask, forward.logp, batch.logp_old)
        ratio = (unit_sum(gap, batch) / batch.lengths().clamp(min=1)).exp()[batch.unit][:, None]
        return losses.kl_k3(batch.mask, forward.logp, batch.logp_ref) * ratio

    return Term("reference_kl", loss, weight, coef)


def trl_method(name: str, c: dict, v: Vectors) -> Method:
    items = float(v.tensor("num_items_in_batch")) * c["gradient_accumulation_steps"] / c["steps_per_generation"]
    everything, rows = over(items), lambda batch: sequence_mean(batch, count_empty=True)
    low, high = c["epsilon_low"], c["epsilon_high"]
    if c["importance_sampling_level"] == "sequence":
        method = gspo(low, high, count_empty=True)
        method = weighed(method, everything) if c["loss_type"] == "dapo" else method
    else:
        method = {
            "grpo": lambda: grpo(low, high, dual=c["delta"], count_empty=True),
            "bnpo": lambda: weighed(grpo(low, high), token_mean),
            "dr_grpo": lambda: dr_grpo(int(v.tensor("max_completion_length")), low, high, count_empty=True),
            "dapo": lambda: weighed(dapo(low, high), everything),
            "cispo": lambda: weighed(cispo(high, bound="absolute"), everything),
        }[c["loss_type"]]()
    if c["beta"]:
        weight = everything if c["loss_type"] == "dapo" else rows
        if c["importance_sampling_level"] == "sequence":
            method = method.plus(sequence_kl(c["beta"], weight))
        else:
            method = method.plus(reference_kl(c["beta"], "k3", weight, c["use_bias_correction_kl"]))
    if name == "grpo_acc":  # TRL divides this type by the accumulation steps, the others by a count of tokens
        method = replace(method, terms=(replace(method.terms[0], coef=1 / c["gradient_accumulation_steps"]),))
    return method


TRL_CASES = [
    *(
        "grpo",
        "bnpo",
        "dr_grpo",
        "dapo",
        "dapo_higher",
        "cispo",
        "cispo_tight",
        "grpo_delta",
        "grpo_kl",
        "grpo_kl_nobias",
    ),
    *("dapo_kl", "dapo_acc", "grpo_acc", "gspo", "gspo_wide", "gspo_dapo_kl", "grpo_tokenadv", "dapo_onpolicy"),
]


@pytest.mark.parametrize("name", TRL_CASES)
def test_trl_losses(load, name):
    v = load("trl_losses")
    assert set(TRL_CASES) == set(v.cases)
    c = v.cases[name]
    logp = v.tensor("log_prob_near" if c["importance_sampling_level"] == "sequence" else "log_prob")
    old = logp if name == "dapo_onpolicy" else v.tensor("old_log_prob")
    mask = v.tensor("completion_mask") * v.tensor("tool_mask")
    batch = record(mask, old, logp_ref=v.tensor("ref_log_prob"))
    method = trl_method(name, c, v)
    got = run(method, batch, logp, v.tensor("adv_token" if name == "grpo_tokenadv" else "adv"))
    v.check(f"loss_{name}", got.loss)
    v.check(f"grad_{name}", got.gradient["logp"])
    forward = laws.Forward(logp=logp)
    scales = (1.0, *(term.coef for term in method.terms[1:]))
    token = sum(s * term.loss(batch, got.advantage, forward) for s, term in zip(scales, method.terms, strict=True))
    v.check(f"mat_{name}", token, batch.mask)


# ---------------------------------------------------------------- KL estimators


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1_plus", "k2_plus", "k3_plus", "k3_trl"])
def test_kl_estimators(load, name):
    """verl clamps d to ±20 and k3 to ±10, where its gradient vanishes; we do not, and TRL does not."""
    v = load("kl_estimators")
    reference = v.tensor("ref_log_prob")
    logp = v.tensor("log_prob").clone().requires_grad_()
    mask = torch.ones(logp.shape, dtype=torch.bool)
    k1, k2, k3 = (f(mask, logp, reference) for f in (losses.kl_k1, losses.kl_k2, losses.kl_k3))
    value = {
        "k1": k1, "k2": k2, "k3": k3, "k3_trl": k3,
        "k1_plus": losses.straight_through(k1, k2), "k2_plus": losses.straight_through(k2, k2),
        "k3_plus": losses.straight_through(k3, k2),
    }[name]  # fmt: skip
    value.sum().backward()
    d = (reference - logp).detach()
    free = (d.abs() < 20) & ((k3.detach() < 10) | ~torch.tensor(name.startswith("k3")))
    where = mask if name == "k3_trl" else free
    assert where.sum() > 0.8 * mask.sum()
    v.check(f"value_{name}", value.detach(), where)
    v.check(f"grad_{name}", logp.grad, where)
    if name == "k3":
        assert (v.tensor("grad_k3")[~free] == 0).all() and (logp.grad[~free] != 0).all()
