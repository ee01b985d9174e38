"""What the verl adapter does without verl: what it carries and reads, and A' against the kernel's A and W.

`tests/conformance/test_verl.py` holds it to verl itself.
"""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from laws import make_case
from postrl.adapters import verl, verl_plugin, verl_rows, verl_settings, verl_trainer
from postrl.adapters.arrays import Answers
from postrl.adapters.support import Full, Refused, Variant
from postrl.adapters.verl_rows import Given, Known, advantages, token_losses, updates
from postrl.adapters.verl_settings import Data, parse
from postrl.adapters.verl_traits import Traits, traits
from postrl.batch import spread
from postrl.errors import UserError
from postrl.method import Forward, Method, objective
from postrl.papers import method, methods
from postrl.papers.grpo import grpo
from postrl.terms import entropy_bonus, reference_kl
from postrl.weights import sequence_mean

CARRIED = [name for name, found in verl.matrix().items() if not isinstance(found, Refused)]


# ---------------------------------------------------------------- which methods


def test_every_method_of_the_shelf_has_an_answer():
    assert set(verl.matrix()) == set(methods())


def test_what_one_micro_batch_cannot_know_is_no_full_method():
    found = verl.matrix()
    assert isinstance(found["acpo"], Variant) and isinstance(verl.support(method("acpo", variant="released")), Variant)
    assert isinstance(found["dapo"], Variant) and verl.support(method("dapo", correct=None)) == Full()
    assert isinstance(found["ppo"], Refused) and "critic" in found["ppo"].reason
    assert isinstance(found["dpo"], Refused) and "group" in found["dpo"].reason


@pytest.mark.parametrize("term", [reference_kl(0.1), entropy_bonus(0.1)])
def test_further_terms_are_verls(term):
    found = verl.support(grpo().plus(term))
    assert isinstance(found, Refused) and term.name in found.reason


def test_traits_of_methods():
    """tokens or answers, whole groups or not, the total reward alone or more."""
    found = {name: traits(method(name)) for name in CARRIED}
    assert all(x.proportional for x in found.values())
    assert found["cispo"] == Traits(True, "tokens", alone=True, plain=True)
    assert found["dr_grpo"] == Traits(True, "answers", alone=True, plain=True)
    assert found["reco"] == Traits(True, "answers", alone=False, plain=False)  # weights of siblings; log π_old
    assert found["rft"].base is None and found["rft"].alone  # the number of successes in an update
    assert (
        not found["gdpo"].plain and not found["gd2po"].plain and not found["exprl"].plain and not found["gigpo"].plain
    )
    assert not found["dapo"].plain and traits(method("dapo", correct=None)).plain
    assert not traits(method("exprl", credit="outcome")).plain  # whether an answer was cut


def test_a_loss_that_is_not_proportional_to_the_advantage_is_refused():
    plain = grpo()
    [term] = plain.terms

    def loss(batch, advantage, forward):
        return term.loss(batch, advantage, forward) * advantage.abs()

    found = verl.support(replace(plain, terms=(replace(term, loss=loss),)))
    assert isinstance(found, Refused) and "proportional" in found.reason


# ---------------------------------------------------------------- A' against A and W


def arrays_of(batch) -> tuple[Given, Known]:
    """A batch as verl would know it: one row per unit, no prompt."""
    kept = [(name, k) for k, name in enumerate(batch.reward_names)]
    info = [{n: None if math.isnan(r[k]) else r[k] for n, k in kept} for r in batch.rewards.tolist()]
    rewards = torch.zeros(batch.mask.shape)
    rewards[:, 0] = (batch.rewards.nan_to_num(nan=0.0) * batch.reward_weights).sum(1)
    answers = Answers(
        prompt_ids=torch.ones(len(batch.mask), 1, dtype=torch.int64),
        prompt_mask=torch.ones(len(batch.mask), 1, dtype=torch.bool),
        completion_ids=batch.tokens,
        completion_mask=batch.valid,
        sampled=batch.mask,
        logp_old=batch.logp_old,
    )
    sessions = [(str(i), 0) for i in range(len(batch.mask))]
    known = Known(answers, sessions, info, (batch.stop == 1).tolist(), None, batch.mask.sum(1))
    return Given(rewards, batch.mask, [f"p{g}" for g in batch.group().tolist()]), known


def single_rows(seed: int):
    """A float32 batch of the laws with one row per unit."""
    batch = make_case(seed, units=12, groups=3, length=5, dtype=torch.float32).batch
    first = torch.zeros(len(batch.unit), dtype=torch.bool)
    seen: set[int] = set()
    for row, unit in enumerate(batch.unit.tolist()):
        first[row] = unit not in seen
        seen.add(unit)
    rows = batch.rows(first.nonzero().squeeze(1))
    keep = torch.zeros(batch.size, dtype=torch.bool).index_fill(0, rows.unit, True)
    order = rows.unit.argsort()
    rows = rows.rows(order)
    units = {name: getattr(batch, name)[keep] for name in ("groups", "rewards", "kind", "version", "stop")}
    return replace(rows, **units, unit=torch.arange(len(order)), step_rewards=None, step_groups=None)


@pytest.mark.parametrize("name", ["grpo", "cispo", "gspo", "gdpo", "gd2po", "reco", "rft", "dr_grpo"])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_loss_of_scaled_advantages_is_the_objective(name: str, seed: int):
    """Σ l(A') / count over micro-batches of single rows, against the objective of the whole batch; some rows empty."""
    batch, subject = single_rows(seed), method(name)
    found = traits(subject)
    given, known = arrays_of(batch)
    data = Data(dict(zip(batch.reward_names, batch.reward_weights.tolist(), strict=True)))
    credit = advantages(subject, found, given, known, data)
    leaf = (
        batch.logp_old + 0.1 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed))
    ).double()
    now = [leaf.float().requires_grad_() for _ in range(2)]
    total = torch.zeros(())
    for row in range(len(batch.mask)):
        one = slice(row, row + 1)
        losses, figures = token_losses(subject, batch.logp_old[one], now[0][one], credit.scaled[one], batch.mask[one])
        assert set(figures) == {"actor/pg_clipfrac", "actor/ppo_kl"}
        total = total + losses.sum() / (int(batch.mask.sum()) if found.base == "tokens" else len(batch.mask))
    right = objective(
        subject, batch, Forward(now[1]), (subject.terms[0].weight(batch),), subject.advantage(batch).float()
    )
    torch.testing.assert_close(total, right, rtol=1e-4, atol=1e-6)
    got, wanted = (torch.autograd.grad(x, leaf)[0] for x, leaf in ((total, now[0]), (right, now[1])))
    assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()) and wanted.any()


def test_rows_of_one_session_are_one_unit():
    """Its reward counts once in the group, and its tokens share its weight."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    answers = Answers(
        prompt_ids=torch.ones(4, 1, dtype=torch.int64),
        prompt_mask=torch.ones(4, 1, dtype=torch.bool),
        completion_ids=torch.ones(4, 3, dtype=torch.int64),
        completion_mask=mask,
        sampled=mask,
    )
    sessions = [("a", 1), ("b", 0), ("a", 0), ("c", 0)]  # balancing has put the end of a before its beginning
    rewards = torch.tensor([[1.0], [0.0], [9.0], [0.5]]).expand(4, 3) / 3
    known = Known(answers, sessions, [{}] * 4, [False] * 4, None, mask.sum(1))
    credit = advantages(grpo(), traits(grpo()), Given(rewards, mask, ["p"] * 4), known, Data())
    batch = credit.batch
    assert batch.size == 3 and batch.unit.tolist() == [0, 1, 0, 2]
    assert batch.rewards[:, 0].tolist() == pytest.approx([1.0, 0.0, 0.5])
    torch.testing.assert_close(credit.plain, spread(torch.tensor([1.0, -1.0, 0.0]), batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(credit.scaled, credit.plain * sequence_mean(batch) * 4)


def test_an_answer_that_updates_cut_has_its_weight_in_the_rollout_batch():
    """Where a weight depends on more of the update than its count, there is no right one."""
    mask = torch.ones(4, 2, dtype=torch.bool)
    ones = torch.ones(4, 2, dtype=torch.int64)
    answers = Answers(ones[:, :1], mask[:, :1], ones, mask, mask)
    minis = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    known = Known(answers, [("a", 0), ("b", 0), ("a", 1), ("c", 0)], [{}] * 4, [False] * 4, minis, mask.sum(1))
    given = Given(torch.tensor([[1.0, 0], [0, 0], [1, 0], [0.5, 0]]), mask, ["p"] * 4)
    credit = advantages(grpo(), traits(grpo()), given, known, Data())
    weight = credit.scaled[:, 0] / credit.plain[:, 0]
    assert weight[[0, 1]].tolist() == pytest.approx([2 / (2 * 4), 2 / (2 * 2)], rel=1e-4)  # rows / (answers · tokens)
    with pytest.raises(UserError, match="rft depend on all that an update holds"):
        advantages(method("rft"), traits(method("rft")), given, known, Data())


def test_rows_that_verl_adds_are_left_out():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    given = Given(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), mask, ["p", "p", "pad" + 32 * "a"])
    credit = advantages(grpo(), traits(grpo()), given, None, Data())
    assert credit.batch.size == 2
    assert (
        credit.plain[:2, 0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-4) and not credit.plain[2].any()
    )


@pytest.mark.parametrize("score", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["grpo", "reinforce"])
def test_a_score_that_is_no_number_is_no_missing_reward(name: str, score: float):
    given = Given(torch.tensor([[1.0], [0.0], [score]]), torch.ones(3, 1, dtype=torch.bool), ["p"] * 3)
    with pytest.raises(UserError, match="no finite number"):
        advantages(method(name), traits(method(name)), given, None, Data())


def test_updates_are_dealt_side_by_side():
    assert [mini.tolist() for mini in updates(12, 2, 4)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    with pytest.raises(UserError, match="whole updates of 5 rows"):
        updates(12, 1, 5)


def test_nothing_off_the_mask_is_read():
    batch = single_rows(0)
    given, known = arrays_of(batch)
    credit = advantages(grpo(), traits(grpo()), given, known, Data())
    hole = torch.where(batch.mask, batch.logp_old, torch.nan)
    now = hole.clone().requires_grad_()
    losses, figures = token_losses(grpo(), hole, now, torch.where(batch.mask, credit.scaled, torch.nan), batch.mask)
    losses.sum().backward()
    assert bool(torch.isfinite(losses).all()) and all(math.isfinite(x) for x in figures.values())
    assert now.grad is not None and not now.grad[~batch.mask].any() and bool(torch.isfinite(now.grad).all())


def test_rewards_by_name():
    batch = single_rows(0)
    given, known = arrays_of(batch)
    found = verl_rows.batch_of(given, known, Data(), torch.arange(len(batch.mask)))
    assert found.reward_names == ("reward", *sorted(batch.reward_names))  # numbers beside the score, of no weight
    assert found.reward_weights.tolist() == [1.0] + [0.0] * len(batch.reward_names)
    numpy = [{**info, "right": np.bool_(True), "length": np.float32(3)} for info in known.info]
    some = replace(known, info=[{**numpy[0], "once": 1.0}, *numpy[1:]])
    found = verl_rows.batch_of(given, some, Data(), torch.arange(len(batch.mask)))
    assert {"right", "length"} <= set(found.reward_names) and "once" not in found.reward_names
    assert set(found.reward("length").tolist()) == {3.0}
    with pytest.raises(UserError, match=r"no reward 'taste'.*this answer has"):
        advantages(grpo(), traits(grpo()), given, known, Data({"taste": 1.0}))
    name = batch.reward_names[0]
    spoilt = replace(known, info=[{**known.info[0], name: math.nan}, *known.info[1:]])
    with pytest.raises(UserError, match=f"reward '{name}' of an answer is nan"):
        advantages(grpo(), traits(grpo()), given, spoilt, Data({name: 1.0}))


# ---------------------------------------------------------------- options


def test_settings_are_text_or_a_file(tmp_path):
    table = {"reco": {"cap": 7}, "data": {"rewards": {"correct": 1, "form": 0.5}, "steps": "cut"}}
    text = json.dumps(table)
    (tmp_path / "options.json").write_text(text)
    toml = '[reco]\ncap = 7\n[data]\nsteps = "cut"\nrewards = {correct = 1, form = 0.5}\n'
    (tmp_path / "options.toml").write_text(toml)
    for source in (text, str(tmp_path / "options.json"), str(tmp_path / "options.toml")):
        found = parse(source)
        assert found.options == {"reco": {"cap": 7}}
        assert found.data == Data(rewards={"correct": 1, "form": 0.5}, steps="cut")


WRONG = {
    '{"data": {"rewards": {"a": NaN}}}': "each reward's name a number",
    '{"data": {"groupings": {"a": 3}}}': "data.groupings has 'a': 3",
    '{"data": {"groupings": {"task": "x"}}}': "the prompt's own group",
    '{"recoo": {}}': "'recoo', which is neither 'data' nor a method: acpo",
    '{"reco": {"capp": 1}}': "method 'reco' has no option 'capp'",
    '{"reco": {"cap": -1}}': "option cap=-1 of method 'reco'",
    '{"reco": 3}': "'reco' must be a table",
    '{"data": {"reward": "x"}}': "'data' has no 'reward'; it has: rewards",
    '{"data": {"rewards": ["x"]}}': "data.rewards is .*give a table",
    '{"data": {"rewards": {"x": "1"}}}': "give each reward's name a number",
    '{"data": {"steps": 3}}': "data.steps is 3; give the name",
    '{"reco"': "cannot be read",
    "reco": "neither a .toml or .json file nor JSON text",
    "/nowhere/options.toml": "cannot be read: give an absolute path",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings_are_named(text: str):
    with pytest.raises(UserError, match=WRONG[text]):
        parse(text)


def test_what_the_driver_read_is_forwarded_as_text(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "options.toml"
    path.write_text("[reco]\ncap = 7\n")
    monkeypatch.setenv(verl_settings.VARIABLE, str(path))
    environment: dict[str, str] = {}
    verl_settings.forward(environment)
    assert parse(environment[verl_settings.FORWARDED]).options == {"reco": {"cap": 7}}


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(verl_settings.VARIABLE, "")
    environment: dict[str, str] = {}
    verl_settings.forward(environment)
    assert environment == {}


# ---------------------------------------------------------------- registering


def algorithms(**changes):
    """A stand-in for verl's module of algorithms."""
    estimators, losses = {}, {}

    def register_adv_est(name_or_enum):
        return lambda function: estimators.setdefault(name_or_enum, function)

    def register_policy_loss(name):
        return lambda function: losses.setdefault(name, function)

    def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None):
        return loss_mat.sum() * dp_size / (batch_num_tokens or global_batch_size)

    parts = {"register_adv_est": register_adv_est, "register_policy_loss": register_policy_loss, "agg_loss": agg_loss}
    return SimpleNamespace(**{**parts, "estimators": estimators, "losses": losses, **changes})


def test_a_verl_whose_seams_moved_is_named():
    verl_plugin.check_seams(algorithms(), "0.9.1")
    with pytest.raises(UserError, match=r"verl 1\.0 does not fit.*agg_loss now takes \(losses\).*pip install 'verl==0"):
        verl_plugin.check_seams(algorithms(agg_loss=lambda losses: losses), "1.0")
    gone = algorithms()
    del gone.register_adv_est
    with pytest.raises(UserError, match="register_adv_est is gone"):
        verl_plugin.check_seams(gone, "1.0")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """No settings, whatever the surrounding; `register` meets a stand-in for verl."""
    monkeypatch.delenv(verl_settings.VARIABLE, raising=False)
    monkeypatch.delenv(verl_settings.FORWARDED, raising=False)
    verl_settings.settings.cache_clear()
    yield monkeypatch
    verl_settings.settings.cache_clear()


def registered(monkeypatch: pytest.MonkeyPatch, module) -> None:
    real = verl_plugin.importlib.import_module

    def load(name: str):
        parts = {verl_plugin.ALGORITHMS: module, "importlib.metadata": SimpleNamespace(version=lambda _: "0.9.1")}
        return parts[name] if name in parts else real(name)

    monkeypatch.setattr(verl_plugin.importlib, "import_module", load)
    verl_plugin.register()


def test_the_whole_shelf_is_registered(fresh: pytest.MonkeyPatch):
    module = algorithms()
    registered(fresh, module)
    assert set(module.estimators) == set(module.losses) == {f"postrl_{name}" for name in methods()}
    mask = torch.tensor([[1, 1], [1, 0]])
    scaled, plain = module.estimators["postrl_grpo"](
        token_level_rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0]]), response_mask=mask, index=["p", "p"], config=None
    )
    assert plain[0, 0] > 0 > plain[1, 0]
    logp = torch.full((2, 2), -1.0, requires_grad=True)
    counts = {"dp_size": 2, "batch_num_tokens": 3, "global_batch_size": 2, "loss_scale_factor": None}
    arguments = {"old_log_prob": logp.detach(), "log_prob": logp, "advantages": scaled, "response_mask": mask}
    loss, figures = module.losses["postrl_grpo"](**arguments, config=SimpleNamespace(global_batch_info=counts))
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6) and isinstance(figures["actor/ppo_kl"], float)
    with pytest.raises(UserError, match="postrl_grpo needs global_batch_size of the whole update"):
        module.losses["postrl_grpo"](**arguments, config=SimpleNamespace(global_batch_info={"dp_size": 1}))
    with pytest.raises(UserError, match="method dpo cannot run in verl"):
        module.estimators["postrl_dpo"](token_level_rewards=torch.zeros(2, 2), response_mask=mask, index=["p", "p"])


def test_wrong_settings_are_printed_and_raised_when_used(fresh: pytest.MonkeyPatch, capsys):
    fresh.setenv(verl_settings.VARIABLE, '{"reco": {"capp": 1}}')
    module = algorithms()
    registered(fresh, module)
    assert "postrl: method 'reco' has no option 'capp'" in capsys.readouterr().err
    for function in (module.estimators["postrl_grpo"], module.losses["postrl_grpo"]):
        with pytest.raises(UserError, match="no option 'capp'"):
            function(anything=1)


def configuration(adv="postrl_grpo", loss="postrl_grpo", kl=False, shuffle=False):
    actor = SimpleNamespace(policy_loss=SimpleNamespace(loss_mode=loss), shuffle=shuffle)
    return SimpleNamespace(
        algorithm=SimpleNamespace(adv_estimator=adv, use_kl_in_reward=kl),
        actor_rollout_ref=SimpleNamespace(actor=actor),
        trainer=SimpleNamespace(v1=SimpleNamespace(trainer_mode="postrl_sync")),
    )


def test_where_verl_puts_its_own_loss_in_place_of_ours_it_is_refused(fresh: pytest.MonkeyPatch):
    """Its legacy trainer, in bypass mode; our trainer says what it knows, and verl's new ones keep the loss."""
    estimate = verl_plugin.estimator("grpo")
    given = {"token_level_rewards": torch.eye(2), "response_mask": torch.ones(2, 2), "index": ["p", "p"]}
    estimate(**given, config={"rollout_correction": {"bypass_mode": False}})
    estimate(**given, config={})
    with pytest.raises(UserError, match=r"bypass_mode.*own loss in place of postrl_grpo.*postrl_sync"):
        estimate(**given, config={"rollout_correction": {"bypass_mode": True}})


def test_whatever_goes_wrong_while_verl_loads_us_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """verl logs what a plugin raises at a level that nobody sees."""

    def fail() -> None:
        raise TypeError("a seam moved")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(verl_plugin, "register", fail)
    monkeypatch.delitem(sys.modules, "postrl.adapters.verl_entry", raising=False)
    with pytest.raises(TypeError):
        importlib.import_module("postrl.adapters.verl_entry")
    assert "TypeError: a seam moved" in capsys.readouterr().err


def test_the_trainer_checks_its_configuration_first(fresh: pytest.MonkeyPatch):
    assert isinstance(verl_trainer.check_config(configuration())[0], Method)
    for adv, loss in (("postrl_grpo", "vanilla"), ("grpo", "postrl_grpo"), ("grpo", "grpo")):
        with pytest.raises(
            UserError, match=f"adv_estimator={adv} and actor.policy_loss.loss_mode={loss} must name one"
        ):
            verl_trainer.check_config(configuration(adv, loss))
    with pytest.raises(UserError, match=r"rft weighs by what an update holds: set actor\.shuffle=False"):
        verl_trainer.check_config(configuration("postrl_rft", "postrl_rft", shuffle=True))
    with pytest.raises(UserError, match=r"exprl needs rewards of steps: name them in data\.step_rewards"):
        verl_trainer.check_config(configuration("postrl_exprl", "postrl_exprl"))
    fresh.setenv(verl_settings.VARIABLE, '{"data": {"rewards": {"correct": 1}}}')
    verl_settings.settings.cache_clear()
    with pytest.raises(UserError, match="use_kl_in_reward changes verl's score"):
        verl_trainer.check_config(configuration(kl=True))
