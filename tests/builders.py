"""Small rollouts and batches for tests: ragged, interleaved, several contexts and turns, empty completions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from postrl.batch import Batch
from postrl.rollout import Rollout, Turn, collate


def rollout(
    group: int = 0,
    sample: int = 0,
    prompt: Sequence[int] = (1, 2),
    completion: Sequence[int] = (3, 4),
    rewards: dict[str, float | None] | None = None,
    **rest,
) -> Rollout:
    """One turn after one prompt; its sampler's log-probabilities are −0.1, −0.2, …"""
    logp = [-0.1 * (t + 1) for t in range(len(completion))]
    contexts = [[Turn(list(prompt), False), Turn(list(completion), True, logp=logp)]]
    rewards = {"score": 0.0} if rewards is None else rewards
    return Rollout(f"item{group}", group, sample, contexts, rewards=rewards, **rest)


def ragged_rollouts(seed: int, groups: int = 4, vocabulary: int = 7) -> list[Rollout]:
    """Groups of 1 to 5 units, interleaved; 1 or 2 contexts, 1 to 3 turns with tool tokens between, some turns empty;
    two reward components of which about a fifth is missing, and one with weight 0."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, vocabulary, rng.integers(low, high)).tolist()

    def context(prompt: list[int]) -> list[Turn]:
        turns = [Turn(prompt, False)]
        for turn in range(rng.integers(1, 4)):
            turns += [Turn(tokens(1, 4), False)] if turn else []
            sampled = tokens(0, 6)
            turns.append(Turn(sampled, True, logp=(-rng.random(len(sampled))).tolist()))
        return turns

    def score() -> float | None:
        return None if rng.random() < 0.2 else float(rng.choice([0.0, 0.5, 1.0]))

    rollouts = []
    for group in rng.permutation(100)[:groups].tolist():
        prompt = tokens(1, 5)
        for sample in range(rng.integers(1, 6)):
            contexts = [context(prompt) for _ in range(rng.integers(1, 3))]
            rewards = {"correct": score(), "form": score(), "logged": score()}
            weights = {"form": 0.5, "logged": 0.0}
            item = f"item{group}"
            rollouts.append(Rollout(item, group, sample, contexts, rewards=rewards, reward_weights=weights))
    return [rollouts[index] for index in rng.permutation(len(rollouts))]


def ragged_batch(seed: int, groups: int = 4, dtype: torch.dtype = torch.float64) -> Batch:
    """`ragged_rollouts` as a batch, with a training forward and a reference that differ from the sampler."""
    batch = collate(ragged_rollouts(seed, groups)).to(dtype=dtype)
    generator = torch.Generator().manual_seed(seed)

    def near() -> torch.Tensor:
        return batch.logp_sampler + 0.3 * torch.randn(batch.mask.shape, generator=generator, dtype=dtype)

    return replace(batch, logp_old=near(), logp_ref=near())


def units(batch: Batch, x: torch.Tensor) -> list[list[float]]:
    """x [B, T] -> for each unit, the list of its values on sampled tokens; a Python loop."""
    lists: list[list[float]] = [[] for _ in range(batch.size)]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if batch.mask[b, t]:
                lists[int(batch.unit[b])].append(float(x[b, t]))
    return lists


def poisoned(mask: torch.Tensor, x: torch.Tensor, poison: float = float("nan")) -> torch.Tensor:
    """x on the mask, `poison` off it."""
    return torch.where(mask, x, torch.full_like(x, poison))


class Operations(TorchDispatchMode):
    """Records the torch operations run inside, and the floating-point casts among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.casts: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        if "_to_copy" in str(function) and args[0].is_floating_point() and out.dtype != args[0].dtype:
            self.casts.append(f"{args[0].dtype} -> {out.dtype}")
        return out


@contextmanager
def no_float_casts() -> Iterator[Operations]:
    """Fails if anything inside casts a floating-point tensor."""
    with Operations() as operations:
        yield operations
    assert not operations.casts, operations.casts
