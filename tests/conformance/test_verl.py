"""The same answers through our loop and through verl: losses and gradients of every update, in float32.

Runs in the environment that `make verl-env` builds (`make test-verl`).
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("verl", reason="verl is not here: make verl-env, make test-verl")

from conformance import verl_side
from conformance.cases import GROUPS, SIZE, Case, make_case, near, our_updates, stopping
from postrl.adapters import verl_settings, verl_trainer
from postrl.adapters.support import Full, Refused, Variant
from postrl.adapters.verl import matrix
from postrl.adapters.verl_rows import updates
from postrl.adapters.verl_settings import Settings
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.method import Method
from postrl.papers import method
from tiny_models import save_model

FULL = [name for name, found in matrix().items() if isinstance(found, Full)]
SUMS = {"reinforce", "rft", "rloo"}  # their loss is a sum over tokens: the same step would go much further


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    """verl loads the plugin by itself; its trainers only where POSTRL_VERL is set."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    if "postrl_sync" not in TRAINER_REGISTRY:
        importlib.import_module("postrl.adapters.verl_trainer").register()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case() -> Case:
    return stopping(make_case(1, missing=0.15), verl_side.LONGEST)


def check(subject: Method, run: verl_side.Run, model: Path, case: Case) -> None:
    ours = our_updates(subject, model, case, run.minis, run.weights)
    assert len(ours) >= 2 and any(g.any() for done in ours for g in done.gradient.values())
    for got, right in zip(run.updates, ours, strict=True):
        near(got.gradient, right.gradient)
        assert got.loss == pytest.approx(right.loss, rel=1e-5, abs=2e-6)


def rate(name: str) -> float:
    return 0.1 if name in SUMS else 1.0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FULL)
def test_every_full_method_has_the_gradients_of_our_loop(
    name: str, ranks: int, model: Path, case: Case, monkeypatch: pytest.MonkeyPatch
):
    run = verl_side.train(case, model, f"postrl_{name}", monkeypatch, ranks=ranks, rate=rate(name))
    check(method(name), run, model, case)


OPTIONS = {
    "weights of answers": {"reco": {"cap": 1e9}},
    "weights of clusters": {"reco": {"typical": "empirical", "rescale": False}},
    "missing as zero": {"grpo": {"missing": "zero", "eps": 1e-4}},
    "steps without rewards": {"gigpo": {"steps": "outcome", "norm": "mean_std_norm"}},
    "outcome of cut answers": {"exprl": {"credit": "outcome"}},
    "no filter": {"dapo": {"correct": None}},
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options_of_methods(what: str, model: Path, case: Case, monkeypatch: pytest.MonkeyPatch):
    [(name, values)] = OPTIONS[what].items()
    settings = Settings(OPTIONS[what], verl_side.DATA)
    run = verl_side.train(case, model, f"postrl_{name}", monkeypatch, settings)
    check(method(name, **values), run, model, case)


PLAIN = [name for name, found in matrix().items() if found == Full()]


@pytest.mark.parametrize("name", PLAIN)
def test_on_verls_own_trainer(name: str, model: Path, monkeypatch: pytest.MonkeyPatch):
    case = stopping(make_case(2, missing=0), verl_side.LONGEST)
    run = verl_side.train(
        case, model, f"postrl_{name}", monkeypatch, ranks=2, rate=rate(name), trainer__v1__trainer_mode="sync"
    )
    check(method(name), run, model, case)


@pytest.mark.parametrize("name", [name for name in FULL if name not in PLAIN])
def test_what_needs_more_is_refused_on_verls_own_trainer(
    name: str, model: Path, case: Case, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(UserError, match=f"method {name} reads more.*trainer_mode=postrl_sync"):
        verl_side.train(case, model, f"postrl_{name}", monkeypatch, trainer__v1__trainer_mode="sync")


# ---------------------------------------------------------------- updates as verl cuts them


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "gdpo", "rft"])
def test_rows_that_verl_adds_and_silent_answers_count_for_nothing(
    name: str, model: Path, case: Case, monkeypatch: pytest.MonkeyPatch
):
    silent = replace(case.answers[9], sampled=[0] * len(case.answers[9].tokens))
    case = Case(case.prompts, [*case.answers[:9], silent, *case.answers[10:]])
    order = [*range(10), 16, *range(10, 16), 17]
    run = verl_side.train(case, model, f"postrl_{name}", monkeypatch, order=order, mini=9, rate=rate(name))
    assert [len(mini) for mini in run.minis] == [9, 7]
    check(method(name), run, model, case)


@pytest.mark.parametrize("name", ["cispo", "gd2po", "gmpo", "rft"])
def test_updates_that_cut_groups(name: str, model: Path, case: Case, monkeypatch: pytest.MonkeyPatch):
    """As verl's balancing of lengths leaves them."""
    order = [5, 0, 12, 3, 9, 14, 7, 2, 15, 1, 11, 4, 8, 13, 6, 10]
    run = verl_side.train(case, model, f"postrl_{name}", monkeypatch, order=order, ranks=2)
    check(method(name), run, model, case)


def test_weights_of_siblings_are_those_of_the_whole_group(model: Path, case: Case, monkeypatch: pytest.MonkeyPatch):
    """ReCo's weights compare siblings. Where updates cut groups, halves add up to the gradient of the whole batch."""
    order = [5, 0, 12, 3, 9, 14, 7, 2, 15, 1, 11, 4, 8, 13, 6, 10]
    run = verl_side.train(case, model, "postrl_reco", monkeypatch, order=order, rate=0.0)
    [whole] = our_updates(method("reco"), model, case, [range(16)], run.weights[:1])
    first, second = (update.gradient for update in run.updates)
    near({name: (first[name] + second[name]) / 2 for name in first}, whole.gradient)


# ---------------------------------------------------------------- variants


def test_acpo_observes_a_micro_batch(model: Path, case: Case, monkeypatch: pytest.MonkeyPatch):
    """Where a pass is the whole update it is our loop's; where it is not, it is another."""
    assert isinstance(matrix()["acpo"], Variant)
    settings = Settings({"acpo": {"base": 0.01, "alpha": 1.0}}, verl_side.DATA)
    run = verl_side.train(case, model, "postrl_acpo", monkeypatch, settings, micro=8)
    check(method("acpo", base=0.01, alpha=1.0), run, model, case)
    run = verl_side.train(case, model, "postrl_acpo", monkeypatch, settings, micro=2)
    with pytest.raises(AssertionError, match=r"gradient of|comparison failed"):
        check(method("acpo", base=0.01, alpha=1.0), run, model, case)


def test_dapo_is_our_loop_without_refill(model: Path, case: Case, monkeypatch: pytest.MonkeyPatch):
    assert matrix()["dapo"] == Variant("refill=0", matrix()["dapo"].difference)
    run = verl_side.train(case, model, "postrl_dapo", monkeypatch)
    assert run.metrics["units/dropped"] >= SIZE  # group 1 is right throughout
    check(method("dapo"), run, model, case)


@pytest.mark.parametrize("name", [name for name, found in matrix().items() if isinstance(found, Refused)])
def test_refused_methods_say_why(name: str, model: Path, case: Case, monkeypatch: pytest.MonkeyPatch):
    reason = re.escape(matrix()[name].reason)
    for mode in ("sync", "postrl_sync"):
        with pytest.raises(UserError, match=f"method {name} cannot run in verl: {reason}"):
            verl_side.train(case, model, f"postrl_{name}", monkeypatch, trainer__v1__trainer_mode=mode)


# ---------------------------------------------------------------- verl's own, by naming the convention

ACTOR = "actor_rollout_ref__actor__"


def own(adv: str, loss: str, mode: str, **actor: object) -> dict:
    """Arguments of a run by verl's own code."""
    changes = {f"{ACTOR}{name}": value for name, value in actor.items()}
    plain = {"trainer__v1__trainer_mode": "sync", f"{ACTOR}loss_agg_mode": mode}
    return {"name": adv, "loss": loss, **plain, **changes}


RAW = {"singleton": "raw"}
UNSCALED = {"algorithm__norm_adv_by_std_in_grpo": False}
KEYS = {"algorithm__gdpo_reward_keys": ["correct", "form"], "algorithm__gdpo_reward_weights": [1.0, 0.5]}
OWN = {
    "grpo": (method("grpo", dual=3.0, **RAW), own("grpo", "vanilla", "seq-mean-token-mean")),
    "grpo, clip-higher, dual": (
        method("grpo", low=0.1, high=0.3, dual=1.2, **RAW),
        own("grpo", "vanilla", "seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.2),
    ),
    "dr_grpo": (
        method("dr_grpo", length=8, **RAW),
        own("grpo", "vanilla", "seq-mean-token-sum-norm", loss_scale_factor=8, clip_ratio_c=1e9) | UNSCALED,
    ),
    "dapo": (
        method("dapo", correct=None, penalty=0.0, dual=10.0, **RAW),
        own("grpo", "vanilla", "token-mean", clip_ratio_high=0.28, clip_ratio_c=10.0),
    ),
    "cispo": (
        method("cispo", low=0.2, high=0.3, bound="delta", **RAW),
        own("grpo", "cispo", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.3),
    ),
    "gspo": (
        method("gspo", low=0.01, high=0.02, **RAW),
        own("grpo", "gspo", "seq-mean-token-mean", clip_ratio_low=0.01, clip_ratio_high=0.02),
    ),
    "gdpo": (
        method("gdpo", whiten="token", whiten_eps=1e-4, dual=3.0, **RAW),
        own("gdpo", "vanilla", "seq-mean-token-mean") | KEYS | {"legacy": True},
    ),
    "rloo": (method("rloo", **RAW), own("rloo", "gpg", "seq-mean-token-sum")),
}
DISAGREEMENTS = {
    "no dual clip": (method("grpo", **RAW), OWN["grpo, clip-higher, dual"][1] | {f"{ACTOR}clip_ratio_low": 0.2}),
    "eps 1e-4 instead of 1e-6": (method("grpo", eps=1e-4, dual=3.0, **RAW), OWN["grpo"][1]),
    "ddof 0 instead of 1": (method("grpo", ddof=0, dual=3.0, **RAW), OWN["grpo"][1]),
    "verl's default mean": (method("grpo", dual=3.0, **RAW), own("grpo", "vanilla", "token-mean")),
    "CISPO's bound as a ratio": (method("cispo", high=1.2, **RAW), OWN["cispo"][1]),
    "Dr. GRPO still divided by the deviation": (
        method("dr_grpo", length=8, **RAW),
        OWN["dr_grpo"][1] | {"algorithm__norm_adv_by_std_in_grpo": True},
    ),
    "Dr. GRPO without loss_scale_factor": (
        method("dr_grpo", length=verl_side.LONGEST, **RAW),
        OWN["dr_grpo"][1] | {f"{ACTOR}loss_scale_factor": None},
    ),
    "GDPO whitened over answers": (method("gdpo", dual=3.0, **RAW), OWN["gdpo"][1]),
}


def compare(subject: Method, flags: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(3, missing=0)
    rest = {key: value for key, value in flags.items() if key != "name"}
    run = verl_side.train(case, model, flags["name"], monkeypatch, rate=rate(subject.name), **rest)
    check(subject, run, model, case)


@pytest.mark.parametrize("name", OWN)
def test_our_method_under_verls_conventions_is_verls_own(name: str, model: Path, monkeypatch: pytest.MonkeyPatch):
    compare(*OWN[name], model, monkeypatch)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_another_convention_is_another_gradient(what: str, model: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AssertionError, match="gradient of"):
        compare(*DISAGREEMENTS[what], model, monkeypatch)


ALONE = (5, 10)


def apart(subject: Method) -> Method:
    """The method where the units of `ALONE` have no siblings."""

    def advantage(batch: Batch) -> torch.Tensor:
        groups = batch.groups.clone()
        groups[list(ALONE), 0] = GROUPS + torch.arange(len(ALONE))
        return subject.advantage(replace(batch, groups=groups))

    return replace(subject, advantage=advantage)


SINGLE = {
    "grpo": {"dual": 3.0},
    "gdpo": {"whiten": "token", "whiten_eps": 1e-4, "dual": 3.0},
    "rloo": {},
}


@pytest.mark.parametrize("name", SINGLE)
def test_an_answer_without_siblings_has_its_raw_reward_in_verl(name: str, model: Path, monkeypatch: pytest.MonkeyPatch):
    flags = OWN[name][1] | {"alone": ALONE}
    compare(apart(method(name, singleton="raw", **SINGLE[name])), flags, model, monkeypatch)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(apart(method(name, singleton="zero", **SINGLE[name])), flags, model, monkeypatch)


def test_verls_gdpo_lacks_its_rewards_on_the_default_trainer(model: Path, case: Case, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KeyError, match="prompts"):
        verl_side.train(case, model, **own("gdpo", "vanilla", "token-mean") | KEYS, monkeypatch=monkeypatch)


# ---------------------------------------------------------------- whole processes

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reco", "gd2po"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_verls_engine_on_processors(name: str, ranks: int, model: Path, case: Case, tmp_path: Path):
    """TrainingWorker.train_mini_batch: verl's iterator, FSDP2 engine, micro-batches, all-reduces and optimiser step."""
    script = str(Path(__file__).with_name("verl_ranks.py"))
    launch = (sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone")
    done = run(*launch, script, str(model), str(tmp_path), name, "2")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["updates"] == 2
    minis = [sorted(mini.tolist()) for mini in updates(16, ranks, 8)]
    weights = [load_file(tmp_path / f"weights_{number}.safetensors") for number in range(2)]
    for number, right in enumerate(our_updates(method(name), model, case, minis, weights)):
        near(load_file(tmp_path / f"gradient_{number}.safetensors"), right.gradient)
        assert found["losses"][number] == pytest.approx(right.loss, rel=1e-5, abs=2e-6)


LOAD = """
import verl
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import get_trainer_cls
print(get_trainer_cls("postrl_sync").__mro__[1].__name__)
print(get_ppo_ray_runtime_env()["env_vars"]["POSTRL_VERL_TEXT"])
"""
FAIL = """
import verl
from verl.trainer.ppo.core_algos import get_policy_loss_fn
get_policy_loss_fn("postrl_grpo")(advantages=1)
"""


@pytest.mark.slow
def test_verl_loads_the_plugin_by_itself(tmp_path: Path):
    """And passes the options on to all of its processes."""
    (tmp_path / "options.toml").write_text("[reco]\ncap = 7\n")
    done = run(sys.executable, "-c", LOAD, POSTRL_VERL=str(tmp_path / "options.toml"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["MethodCredit", '{"reco": {"cap": 7}}']


@pytest.mark.slow
def test_a_mistake_is_loud_although_verl_hides_what_plugins_raise():
    done = run(sys.executable, "-c", FAIL, POSTRL_VERL='{"reco": {"capp": 7}}')
    assert done.returncode != 0
    assert "postrl: method 'reco' has no option 'capp'" in done.stderr
    assert "UserError: method 'reco' has no option 'capp'" in done.stderr.splitlines()[-1]


def test_the_example_names_options_that_verl_has(monkeypatch: pytest.MonkeyPatch):
    from hydra import compose, initialize_config_module

    done = run("bash", str(ROOT / "examples" / "verl_acpo.sh"), PATH="/usr/bin:/bin", POSTRL_VERL="{}")
    assert done.returncode == 0 and "There is no GPU here" in done.stdout
    [command] = [line for line in done.stdout.splitlines() if line.startswith("python")]
    options = shlex.split(command)[3:]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=options)
    monkeypatch.setattr(verl_settings, "settings", Settings)
    monkeypatch.setattr(verl_trainer, "settings", Settings)
    assert verl_trainer.check_config(config)[0].name == "acpo"
