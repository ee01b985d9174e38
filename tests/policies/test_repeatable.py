"""The same numbers again on two threads: no sum of the training pass may depend on which thread came first."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from builders import rollout
from postrl.rollout import collate
from tiny import tiny_decoder


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_gradients_repeat_bit_for_bit_on_two_threads(two_threads: None) -> None:
    # The last token of a shared prompt predicts the first token of every completion, so its hidden state collects as
    # many gradients. Above some size torch adds the gradients of `x[index]` in the order in which threads arrive.
    policy = tiny_decoder(hidden=128, layers=1)
    batch = collate([rollout(0, unit, range(6), (unit % 32, 1)) for unit in range(800)])

    def gradients() -> list[Tensor]:
        policy.zero_grad()
        policy(batch).logp.sum().backward()
        return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]

    first = gradients()
    assert first and all(bool(gradient.any()) for gradient in first)
    for _ in range(10):
        assert all(map(torch.equal, gradients(), first))
