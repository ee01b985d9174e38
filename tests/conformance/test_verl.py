"""The same answers through our loop and through verl: losses and gradients of every update, in float32.

Runs in the environment that `make verl-env` builds (`make test-verl`).
"""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not here: make verl-env, make test-verl")

from conformance import verl_side  # noqa: E402
from conformance.cases import EOS, Case, make_case, near, our_updates  # noqa: E402
from postrl.adapters.support import Full, Refused, Variant  # noqa: E402
from postrl.adapters.verl import matrix  # noqa: E402
from postrl.method import Method  # noqa: E402
from postrl.papers import method  # noqa: E402
from tiny_models import save_model  # noqa: E402

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
    return ending(make_case(1, missing=0.15))


def ending(case: Case) -> Case:
    """Answers end with the end token unless they are as long as verl allows, which is what it calls cut."""
    return Case(
        case.prompts,
        [replace(a, tokens=[*a.tokens[:-1], EOS if len(a.tokens) < verl_side.LONGEST else 1]) for a in case.answers],
    )


def check(subject: Method, run: verl_side.Run, model: Path, case: Case) -> None:
    ours = our_updates(subject, model, case, run.minis, run.weights)
    assert sum(any(g.any() for g in done.gradient.values()) for done in ours) == len(ours) >= 2
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
