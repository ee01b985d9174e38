"""Sampling options that cannot be right are named."""

import math

import pytest

from postrl.errors import UserError
from postrl.policies.base import Sampling


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("max_tokens", -1),
    ],
)
def test_impossible_option_is_named(option: str, value: float):
    with pytest.raises(UserError, match=f"option {option}={value} of sampling must be"):
        Sampling(**{option: value})
