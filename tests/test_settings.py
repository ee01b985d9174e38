"""Options that cannot be right are named; learning rates by hand."""

import math
from itertools import pairwise

import pytest

from postrl.errors import UserError
from postrl.settings import Settings, learning_rate


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("steps", -1),
        ("updates", 0),
        ("epochs", 0),
        ("learning_rate", -1e-5),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("warmup", -1),
        ("schedule", "cosin"),
        ("weight_decay", -0.1),
        ("max_gradient_norm", math.nan),
        ("max_gradient_norm", 0.0),
        ("token_budget", 0),
        ("importance_cap", 0.0),
        ("importance_cap", -2.0),
        ("kl_coef", -0.1),
        ("refill", -1),
        ("checkpoint_every", 0),
        ("evaluate_every", -1),
        ("warn_constant", 0),
        ("seed", -1),
    ],
)
def test_impossible_option_is_named(option: str, value: object):
    with pytest.raises(UserError, match=f"option {option}="):
        settings = Settings()
        object.__setattr__(settings, option, value)  # past the type checker of the tests, as a user's script would be
        settings.check()


@pytest.mark.parametrize("options", [{}, {"importance_cap": None}, {"steps": 0}, {"max_gradient_norm": math.inf}])
def test_possible_options(options: dict):
    Settings(**options).check()


def rates(total: int, **options) -> list[float]:
    settings = Settings(learning_rate=1.0, **options)
    return [learning_rate(settings, update, total) for update in range(total)]


def test_warmup_then_constant():
    assert rates(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_after_the_last_update():
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", warmup=2) == [0.5, 1.0, 1.0, 0.5]


def test_cosine():
    assert rates(4, schedule="cosine") == pytest.approx([(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_never_negative_and_never_rising_again_past_the_end(schedule: str):
    settings = Settings(learning_rate=1.0, schedule=schedule)
    later = [learning_rate(settings, update, 4) for update in range(12)]
    assert all(a >= b >= 0 for a, b in pairwise(later))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_longer_than_the_run(schedule: str):
    assert rates(3, schedule=schedule, warmup=10) == pytest.approx([0.1, 0.2, 0.3])
