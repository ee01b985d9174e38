"""Every method of the shelf learns the copy task within a stated number of updates, and not from shuffled rewards."""

from itertools import product
from pathlib import Path

import pytest
import torch

from copy_run import LETTERS, SAMPLING, Copying, letters_policy, overlap, run
from postrl.papers import method, methods
from postrl.policies.critic import ActorCritic, TabularCritic, Values
from postrl.policies.tabular import Tabular

STEPS, UPDATES = 50, 4  # 200 updates: the stated number
CHANCE = (1 / 3) ** 3  # of two letters and the end, at the start
LEARNT, NOT_LEARNT = 0.9, 0.3  # probability of the right answer


def chance_of_right(policy: Tabular) -> float:
    """Exact, by enumeration; the mean over every prompt."""
    total = 0.0
    for prompt in product(range(LETTERS), repeat=2):
        batch = policy.enumerate_sequences(list(prompt), SAMPLING.max_tokens, SAMPLING.stop)
        answers = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.mask, strict=True)]
        right = torch.tensor([overlap(list(prompt), answer)["correct"] for answer in answers])
        total += float(policy.expectation(batch, right).detach())
    return total / LETTERS**2


def learn(name: str, folder: Path, shuffle: bool) -> float:
    policy = letters_policy()
    source = Copying(policy, groups=LETTERS**2, size=8, shuffle=shuffle)
    model = ActorCritic(policy, TabularCritic.zeros(policy)) if "values" in method(name).needs else policy
    rest = {"enrich": [Values(model)]} if isinstance(model, ActorCritic) else {}
    run(folder, name, model, source, rest=rest, steps=STEPS, updates=UPDATES, checkpoint_every=1000)
    return chance_of_right(policy)


def test_start_is_chance():
    assert chance_of_right(letters_policy()) == pytest.approx(CHANCE)


@pytest.mark.parametrize("name", methods())
def test_learns_to_copy(name: str, tmp_path: Path):
    assert learn(name, tmp_path, shuffle=False) > LEARNT


@pytest.mark.parametrize("name", methods())
def test_shuffled_rewards_teach_nothing(name: str, tmp_path: Path):
    assert learn(name, tmp_path, shuffle=True) < NOT_LEARNT
