"""Every law over every method of the shelf, found by looking at the folder; and that each law can fail."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import laws
import reference
from laws import UnneededExemption, hold
from postrl import papers
from postrl.advantages import total_reward
from postrl.batch import Batch, spread
from postrl.errors import UserError
from postrl.method import Method, Paper, Term
from postrl.papers import method, methods, shelf
from postrl.papers.grpo import grpo
from postrl.papers.rloo import rloo
from postrl.terms import entropy_bonus, reference_kl

METHODS = sorted(methods())


@pytest.mark.parametrize("law", laws.LAWS)
@pytest.mark.parametrize("name", METHODS)
def test_law(name: str, law: str):
    hold(law, method(name))


@pytest.mark.parametrize("law", laws.FLOAT32)
@pytest.mark.parametrize("name", METHODS)
def test_law_in_float32(name: str, law: str):
    hold(law, method(name), examples=15, dtype=torch.float32)


@pytest.mark.parametrize("name", METHODS)
def test_reference(name: str):
    """Equal to plain loops over the equations; more options in tests/papers/test_<name>.py."""
    laws.over_cases(lambda case: reference.agree(method(name), case), examples=30)


@pytest.mark.parametrize("name", ["cispo", "dapo", "gspo", "gmpo", "reco"])
def test_one_update_per_step_is_grpos(name: str):
    """At r = 1 everything that is special about these methods' losses is gone; what is left is GRPO under their W."""
    subject = method("reco", response_level=False) if name == "reco" else method(name)

    def check(case: laws.Case) -> None:
        now = {**case.now, "logp": torch.where(case.batch.mask, case.batch.logp_old, 0)}
        plain = replace(grpo(), terms=(replace(grpo().terms[0], weight=subject.terms[0].weight),))
        got, wanted = (laws.update(m, case.batch, now).gradient["logp"] for m in (subject, plain))
        laws.near(got, wanted, "gradient")

    laws.over_cases(check)


@pytest.mark.parametrize("law", laws.LAWS)
def test_law_with_further_terms(law: str):
    hold(law, grpo().plus(reference_kl(0.1, off_policy_correction=True), entropy_bonus(0.01)))


@pytest.mark.parametrize("name", sorted(shelf()))
def test_file(name: str):
    """A paper file says where it comes from, and either constructs a method of its own name or says why it does not."""
    module = shelf()[name]
    assert isinstance(module.PAPER, Paper) and module.PAPER.title and module.PAPER.status
    assert module.__doc__, "a docstring: one line, NAME: claim"
    if name in METHODS:
        built = method(name)
        assert built.name == name and built.terms
        cited = (module.PAPER.arxiv or "19") in str(methods()[name].__doc__)
        assert cited, "the constructor's docstring cites the paper"
        assert set(built.exempt) <= set(laws.LAWS), "exempt from a law that does not exist"
    else:
        assert module.NO_METHOD


@pytest.mark.parametrize(("text", "lacks"), [("def unfinished(): ...", "PAPER"), ("PAPER = 1", "unfinished")])
def test_a_file_that_lacks_a_part_is_named(text: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "unfinished.py").write_text(text)
    monkeypatch.setattr(papers, "__path__", [str(tmp_path)])
    try:
        with pytest.raises(UserError, match=rf"unfinished\.py defines no {lacks}"):
            papers.methods()
    finally:
        del sys.modules["postrl.papers.unfinished"]
        del papers.unfinished  # import_module has set it


def test_unknown_method_or_option_is_named():
    with pytest.raises(UserError, match=r"no method 'recoo'.*grpo.*reco"):
        method("recoo")
    with pytest.raises(UserError, match=r"'reco' has no option 'capp'.*cap"):
        method("reco", capp=3.0)
    with pytest.raises(UserError, match=r"'ipe' has no method of its own: .*critic"):
        method("ipe")


def test_a_constructor_may_annotate_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(papers, "methods", lambda: {"mine": lambda cap=5.0: replace(grpo(), name=f"cap {cap}")})
    assert method("mine", cap=3).name == "cap 3"
    with pytest.raises(UserError, match=r"cap=-1 .* must be at least 0"):
        method("mine", cap=-1)


# ---------------------------------------------------------------- each law can fail


def _broken_split() -> Method:
    """The token mean of each micro-batch, as in verl #906 and TRL #3021."""
    good = rloo()

    def loss(batch, advantage, forward):
        return good.terms[0].loss(batch, advantage, forward) / batch.mask.sum().clamp(min=1)

    def weight(batch):
        return batch.mask.to(batch.logp_old.dtype)

    return replace(good, terms=(Term("policy", loss, weight),))


def _credit(credit) -> Method:
    def advantage(batch: Batch):
        reward = total_reward(batch).nan_to_num(nan=0.0)
        return spread(credit(reward, batch), batch)

    return replace(grpo(), advantage=advantage)


def _weight(weight, **fields) -> Method:
    return replace(grpo(), terms=(replace(grpo().terms[0], weight=weight, **fields),))


def _loss(loss) -> Method:
    return replace(grpo(), terms=(replace(grpo().terms[0], loss=loss),))


def _raw_zscore(reward, batch):
    return (reward - reward.mean()) / reward.std(correction=0)


def _half_mean(reward, batch):
    half = (len(reward) + 1) // 2  # each "rank" centres its own units
    return torch.cat([part - part.mean() for part in (reward[:half], reward[half:]) if len(part)])


BROKEN = {
    "split": _broken_split(),
    "world size": _credit(_half_mean),
    "poison": _loss(lambda batch, a, forward: -a * (forward.logp - batch.logp_old).exp() * batch.mask),
    "padding": _weight(lambda batch: batch.mask.to(batch.logp_old.dtype) / max(1, batch.mask.numel())),
    "row permutation": _credit(lambda reward, batch: reward - reward.roll(1)),
    "group relabelling": _credit(lambda reward, batch: reward * (batch.group() % 3)),
    "finite": _credit(_raw_zscore),
    "total weight": _weight(grpo().terms[0].weight, total=0.5),
    "reward shift": _credit(lambda reward, batch: reward),
    "on-policy gradient": _loss(lambda batch, a, forward: 2 * grpo().terms[0].loss(batch, a, forward)),
}


@pytest.mark.parametrize("law", laws.LAWS)
def test_law_can_fail(law: str):
    with pytest.raises(AssertionError):
        hold(law, BROKEN[law], examples=100)


def test_exemption_without_need_is_an_error():
    with pytest.raises(UnneededExemption):
        hold("split", replace(grpo(), exempt={"split": "no reason"}))


def test_micro_batches_that_cut_an_answer_do_break_gspo():
    """Why GSPO declares atom="unit"."""
    with pytest.raises(AssertionError):
        hold("split", replace(method("gspo", low=0.2, high=0.2), atom="row"), examples=200)


def test_float32_rounding_of_a_per_pass_mean_is_seen():
    with pytest.raises(AssertionError):
        hold("split", BROKEN["split"], dtype=torch.float32, examples=100)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reco", {"cap": "banana"}),
        ("reco", {"typical": "geometrical"}),  # else taken for another choice
        ("reco", {"rescale": "False"}),  # else true
        ("grpo", {"low": float("nan")}),
        ("grpo", {"low": "0.2"}),
        ("grpo", {"ddof": 1.5}),
        ("grpo", {"ddof": True}),
        ("grpo", {"dual": "none"}),
        ("grpo", {"missing": "drop"}),
        ("dapo", {"max_length": "long"}),
        ("dapo", {"correct": 3}),
        ("grpo", {"low": -3.0}),  # a sign is no width
        ("cispo", {"high": -1}),
    ],
)
def test_option_of_another_type_is_named(name: str, options: dict[str, object]):
    [(option, value)] = options.items()
    with pytest.raises(UserError, match=f"option {option}={value!r} of method '{name}' must be "):
        method(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"low": 1, "dual": None}),
        ("reco", {"rescale": False, "typical": "sequence"}),
        ("dapo", {"correct": None}),
    ],
)
def test_option_of_its_type_is_taken(name: str, options: dict[str, object]):
    assert method(name, **options).name == name
