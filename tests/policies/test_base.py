"""Sampling options that cannot be right are named; a policy's layers are found."""

import math

import pytest
from torch import nn

from postrl.errors import UserError
from postrl.policies.base import Sampling, layers_of


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


def nested(*lengths: int) -> nn.Module:
    """A list of layers for each length, each layer with a longer list of experts."""
    layers = [[nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)] * 9)}) for _ in range(n)] for n in lengths]
    return nn.ModuleDict({f"part{number}": nn.ModuleList(each) for number, each in enumerate(layers)})


def test_layers_are_the_longest_outermost_list_or_the_one_of_the_length_asked_for():
    model = nested(2, 4, 3)
    parts = dict(model.named_children())
    assert layers_of(model) is parts["part1"] and layers_of(model, 3) is parts["part2"]
    for missing, count in ((nn.Linear(1, 1), None), (nn.ModuleList(), None), (model, 9)):
        with pytest.raises(UserError, match="no list of"):
            layers_of(missing, count)
