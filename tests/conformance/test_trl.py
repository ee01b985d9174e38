"""The same answers through our loop and through TRL: losses and gradients of every update, in float32.

TRL's fused head computes in float32 whatever the model's type, so the bound is that of float32: 1e-5 of a tensor's
largest entry. Each generation is trained on in two mini-batches of two passes, twice.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from postrl.adapters.support import Refused, Variant
from postrl.adapters.trl_checks import matrix
from postrl.conformance import trl_side
from postrl.conformance.cases import SIZE, Case, agree, make_case, near, our_updates
from postrl.conformance.run import SUMS
from postrl.conformance.tiny import save_model
from postrl.method import Method
from postrl.papers import method, methods
from postrl.papers.grpo import grpo
from postrl.terms import entropy_bonus, reference_kl
from postrl.weights import sequence_mean

pytest.importorskip("trl", reason="pip install 'postrl[trl]'")

CARRIED = [name for name, found in matrix().items() if not isinstance(found, Refused)]


def later(*values: object) -> list:
    """Parameters for the slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(scope="module", autouse=True)
def trl() -> Iterator[None]:
    """TRL, loaded once; what it brings is not searched for garbage after every run."""
    importlib.import_module("trl.trainer.grpo_trainer")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(1, missing=0.15)


def check(subject: Method, model: Path, case: Case, tmp_path: Path, wanted: Method | None = None, **changes) -> None:
    rate = 0.1 if subject.name in SUMS else 1.0
    run = trl_side.train(case, model, trl_side.options(tmp_path, learning_rate=rate, **changes), subject)
    ours = our_updates(wanted or subject, model, case, run.minis, run.weights)
    for mini in run.minis:
        assert mini == [group * SIZE + place for group in sorted({u // SIZE for u in mini}) for place in range(SIZE)]
    assert sorted(run.minis[0] + run.minis[1]) == list(range(len(case.answers))), "an iteration takes each answer once"
    assert len(ours) == 4
    agree(run.updates, ours)


@pytest.mark.parametrize("name", CARRIED)
def test_every_method_has_the_gradients_of_our_loop(name: str, model: Path, case: Case, tmp_path: Path):
    check(method(name), model, case, tmp_path)


OPTIONS = {
    "weights of answers": method("reco", cap=1e9),
    "weights of clusters": method("reco", typical="empirical", rescale=False),
    "missing as zero": method("grpo", missing="zero", count_empty=True, eps=1e-4),
    "steps without rewards": method("gigpo", steps="outcome", norm="mean_std_norm"),
    "further terms": grpo().plus(
        reference_kl(0.1, "k2", off_policy_correction=True),
        entropy_bonus(0.3),
        needs=frozenset({"logp_ref", "entropy"}),
    ),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options_of_methods(what: str, model: Path, case: Case, tmp_path: Path):
    check(OPTIONS[what], model, case, tmp_path)


@pytest.mark.parametrize("corrected", [True, *later(False)])
def test_beta_is_our_penalty(corrected: bool, model: Path, case: Case, tmp_path: Path):
    penalty = reference_kl(0.1, off_policy_correction=corrected)
    wanted = grpo().plus(penalty, needs=frozenset({"logp_ref"}))
    check(grpo(), model, case, tmp_path, wanted, beta=0.1, use_bias_correction_kl=corrected)


@pytest.mark.parametrize("name", ["acpo", *later("reco", "gspo")])
def test_the_cut_into_passes_changes_nothing(name: str, model: Path, case: Case, tmp_path: Path):
    """Also where a pass holds parts of groups, and single answers."""
    runs = []
    for size, passes in ((4, 2), (1, 8), (8, 1)):
        args = trl_side.options(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=passes,
            steps_per_generation=2 * passes,
        )
        runs.append(trl_side.train(case, model, args, method(name)))
    for other in runs[1:]:
        assert other.minis == runs[0].minis
        for got, wanted in zip(other.updates, runs[0].updates, strict=True):
            near(got.gradient, wanted.gradient, 3e-5)  # the runs' weights drift apart by rounding


@pytest.mark.parametrize("name", ["reco", *later("grpo", "acpo")])
def test_one_update_per_generation(name: str, model: Path, case: Case, tmp_path: Path):
    """Then TRL knows no old log-probabilities: they are those of the update's own forward, or made before it."""
    runs = []
    for size, passes in ((16, 1), (1, 16), (8, 2)):
        args = trl_side.options(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=passes,
            steps_per_generation=passes,
            num_iterations=1,
            max_steps=1,
        )
        runs.append(trl_side.train(case, model, args, method(name)))
    [ours] = our_updates(method(name), model, case, [range(len(case.answers))], runs[0].weights)
    for run in runs:
        [got] = run.updates
        near(got.gradient, ours.gradient)


# ---------------------------------------------------------------- TRL's own losses, by naming the convention

TRLS = {"eps": 1e-4, "missing": "zero"}
COUNTED = {**TRLS, "count_empty": True}
OWN = {
    "grpo": (method("grpo", **COUNTED), {"loss_type": "grpo"}),
    "grpo, clip-higher, two-sided": (
        method("grpo", high=0.3, dual=1.5, **COUNTED),
        {"loss_type": "grpo", "epsilon_high": 0.3, "delta": 1.5},
    ),
    "grpo with its penalty": (
        method("grpo", **COUNTED).plus(
            reference_kl(0.1, weight=lambda batch: sequence_mean(batch, count_empty=True), off_policy_correction=True),
            needs=frozenset({"logp_ref"}),
        ),
        {"loss_type": "grpo", "beta": 0.1},
    ),
    "dr_grpo": (
        method("dr_grpo", length=8, missing="zero", count_empty=True),
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "dapo": (
        method("dapo", correct=None, penalty=0.0, **TRLS),
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "cispo": (method("cispo", high=2.0, **TRLS), {"loss_type": "cispo", "epsilon_high": 2.0}),
    "gspo": (
        method("gspo", low=0.2, high=0.3, **COUNTED),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.3},
    ),
}
if "gdpo" in methods():
    OWN["gdpo"] = (
        method("gdpo", whiten="response", whiten_eps=1e-4, **COUNTED),
        {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
    )


def both(subject: Method, flags: dict, model: Path, case: Case, tmp_path: Path) -> list[tuple]:
    """Gradients of three updates on all answers at once, by our method and by TRL's own loss at the same weights."""
    shape = {"steps_per_generation": 2, "num_iterations": 3, "max_steps": 3, "per_device_train_batch_size": 8}
    theirs = trl_side.train(case, model, trl_side.options(tmp_path, **shape, **flags), None)
    everything = [range(len(case.answers))] * 3
    ours = our_updates(subject, model, case, everything, theirs.weights)
    return [(got.gradient, wanted.gradient) for got, wanted in zip(ours, theirs.updates, strict=True)]


@pytest.mark.parametrize("name", OWN)
def test_our_method_under_trls_conventions_is_trls_own(name: str, model: Path, case: Case, tmp_path: Path):
    subject, flags = OWN[name]
    for got, wanted in both(subject, flags, model, case, tmp_path):
        near(got, wanted)


DISAGREEMENTS = {
    "eps 1e-6 instead of 1e-4": (method("grpo", missing="zero", count_empty=True), {"loss_type": "grpo"}),
    "ddof 0 instead of 1": (method("grpo", ddof=0, **COUNTED), {"loss_type": "grpo"}),
    "a missing reward leaves the group": (method("grpo", eps=1e-4, count_empty=True), {"loss_type": "grpo"}),
    "CISPO's bound as an offset": (
        method("cispo", high=2.0, low=1.0, bound="delta", **TRLS),
        {"loss_type": "cispo", "epsilon_high": 2.0},
    ),
    "Dr. GRPO still divided by the deviation": (
        method("dr_grpo", length=8, missing="zero", count_empty=True),
        {"loss_type": "dr_grpo"},
    ),
}


@pytest.mark.parametrize("what", [*list(DISAGREEMENTS)[:2], *later(*list(DISAGREEMENTS)[2:])])
def test_another_convention_is_another_gradient(what: str, model: Path, case: Case, tmp_path: Path):
    subject, flags = DISAGREEMENTS[what]
    with pytest.raises(AssertionError, match="gradient of"):
        for got, wanted in both(subject, flags, model, case, tmp_path):
            near(got, wanted)


def test_units_without_sampled_tokens_are_counted_by_trl(model: Path, case: Case, tmp_path: Path):
    """An answer of tool output alone: TRL's mean over sequences counts it, ours does only if told to."""
    silent = replace(case.answers[0], sampled=[0] * len(case.answers[0].tokens))
    case = Case(case.prompts, [silent, *case.answers[1:]])
    flags = {"loss_type": "grpo"}
    for got, wanted in both(method("grpo", **COUNTED), flags, model, case, tmp_path):
        near(got, wanted)
    with pytest.raises(AssertionError, match="gradient of"):
        for got, wanted in both(method("grpo", **TRLS), flags, model, case, tmp_path):
            near(got, wanted)


def test_an_answer_whose_siblings_have_no_reward_has_no_credit_in_trl(model: Path, case: Case, tmp_path: Path):
    """A group of one: TRL's deviation is then not a number, and the credit 0; verl would give the raw reward."""
    lost = [replace(a, rewards=dict.fromkeys(a.rewards)) if 4 < u < 8 else a for u, a in enumerate(case.answers)]
    case, flags = Case(case.prompts, lost), {"loss_type": "grpo"}
    for got, wanted in both(method("grpo", **COUNTED), flags, model, case, tmp_path):
        near(got, wanted)
    with pytest.raises(AssertionError, match="gradient of"):
        for got, wanted in both(method("grpo", singleton="raw", **COUNTED), flags, model, case, tmp_path):
            near(got, wanted)


def with_ratios(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """TRL as if vLLM had sampled: made-up ratios per token or answer in its record, and its own loss reads them."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    collect, loss = GRPOTrainer._generate_and_score_completions, GRPOTrainer._compute_loss

    def collected(self, inputs):
        self.use_vllm = False
        found = collect(self, inputs)
        ratio = 0.5 + (found["completion_ids"] % 5) / 4
        return {**found, "importance_sampling_ratio": ratio if level == "token" else ratio[:, :1]}

    def corrected(self, model, inputs):
        self.use_vllm = True
        return loss(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", collected)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", corrected)


@pytest.mark.parametrize(
    ("name", "level"), [("grpo", "sequence"), pytest.param("cispo", "token", marks=pytest.mark.slow)]
)
def test_the_importance_ratio_of_vllm_is_multiplied_onto_credit(
    name: str, level: str, model: Path, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As TRL multiplies it onto its own loss."""
    (subject, flags), shape = OWN[name], {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 2}
    shape["per_device_train_batch_size"] = 8
    plain = trl_side.train(case, model, trl_side.options(tmp_path, **shape), subject)
    with_ratios(monkeypatch, level)
    ours = trl_side.train(case, model, trl_side.options(tmp_path, **shape), subject)
    theirs = trl_side.train(case, model, trl_side.options(tmp_path, **shape, **flags), None)
    for got, wanted in zip(ours.updates, theirs.updates, strict=True):
        near(got.gradient, wanted.gradient, 3e-5)  # the runs' weights drift apart by rounding
    with pytest.raises(AssertionError, match="gradient of"):
        near(plain.updates[0].gradient, theirs.updates[0].gradient, 1e-3)


def test_dapo_in_trl_is_our_loop_without_refill(model: Path, case: Case, tmp_path: Path):
    """The named variant: groups of one outcome are left out of A and of the normaliser, and not replaced."""
    assert matrix()["dapo"] == Variant("refill=0", matrix()["dapo"].difference)
    run = trl_side.train(case, model, trl_side.options(tmp_path), method("dapo"))
    dropped = [x for x in run.trainer.state.log_history if "units/dropped" in x]
    assert dropped[0]["units/dropped"] >= SIZE  # group 1 is right throughout


SHAPES = {
    "two updates per generation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4},
    "a group on two processes": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 3,
        "num_iterations": 2,
        "max_steps": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["reco", "acpo"])
def test_two_processes(name: str, shape: str, model: Path, case: Case, tmp_path: Path):
    """Each holds half of the answers; A, W and what a method observes are those of all of them."""
    changes = {"steps_per_generation": 2, **SHAPES[shape]}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
        *(str(Path(__file__).with_name("trl_ranks.py")), str(model), str(tmp_path), name),
        *(f"{key}={value}" for key, value in changes.items()),
    ]
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent / "src")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    here = changes["per_device_train_batch_size"] * changes["steps_per_generation"]
    minis = [[*mini, *(unit + here for unit in mini)] for mini in found["minis"]]
    weights = [load_file(tmp_path / f"weights_{number}.safetensors") for number in range(len(minis))]
    for number, right in enumerate(our_updates(method(name), model, case, minis, weights)):
        near(load_file(tmp_path / f"gradient_{number}.safetensors"), right.gradient)
        assert found["losses"][number] == pytest.approx(right.loss, rel=1e-5, abs=2e-6)
