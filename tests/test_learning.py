"""Every method of the shelf learns the copy task within a stated number of updates, and not from shuffled rewards."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from copy_run import END, LETTERS, SAMPLING, Copying, letters_policy, overlap, run
from postrl.papers import method, methods
from postrl.policies.critic import ActorCritic, TabularCritic, Values
from postrl.policies.tabular import Tabular
from postrl.rollout import Rollout, Turn

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


class Stepped:
    """The same answers, each token a step of its own with the reward 1 at its right place; `shuffle`: that of another
    answer."""

    def __init__(self, source: Copying, shuffle: bool) -> None:
        self.source, self.shuffle = source, shuffle

    def __call__(self, step: int) -> list[Rollout]:
        rollouts = self.source(step)
        for rollout in rollouts:
            [prompt, turn] = rollout.contexts[0]
            tokens = zip(turn.tokens, turn.logp, strict=True)
            rollout.contexts = [[prompt, *(Turn([token], True, logp=[logp]) for token, logp in tokens)]]
            right = [*prompt.tokens, END]
            rollout.step_rewards = [float(token == right[k]) for k, token in enumerate(turn.tokens)]
        if self.shuffle:
            order = np.random.default_rng([step, 2]).permutation(len(rollouts))
            for rollout, steps in zip(rollouts, [rollouts[k].step_rewards for k in order], strict=True):
                rollout.step_rewards = steps
        return rollouts


# ExpRL's process credit gives an answer whose steps are all right nothing: it pushes faults down only, and is at 0.3
# where the others are above 0.9. Its group form is the one that has a baseline.
OPTIONS = {"exprl": {"credit": "group_norm"}}


def learn(name: str, folder: Path, shuffle: bool) -> float:
    policy, subject = letters_policy(), method(name, **OPTIONS.get(name, {}))
    needs = subject.needs
    source = Copying(policy, groups=LETTERS**2, size=8, shuffle=shuffle)
    model = ActorCritic(policy, TabularCritic.zeros(policy)) if "values" in needs else policy
    rest: dict = {"enrich": [Values(model)]} if isinstance(model, ActorCritic) else {}
    rest |= {"reference": letters_policy()} if "logp_ref" in needs else {}
    asked = Stepped(source, shuffle) if "step_rewards" in needs else source
    run(folder, subject, model, asked, rest=rest, steps=STEPS, updates=UPDATES, checkpoint_every=1000)
    return chance_of_right(policy)


def test_start_is_chance():
    assert chance_of_right(letters_policy()) == pytest.approx(CHANCE)


@pytest.mark.parametrize("name", methods())
def test_learns_to_copy(name: str, tmp_path: Path):
    assert learn(name, tmp_path, shuffle=False) > LEARNT


# The control is about the run, not the method: one with group baselines and one with a critic in the fast suite.
@pytest.mark.parametrize(
    "name", [name if name in ("grpo", "ppo") else pytest.param(name, marks=pytest.mark.slow) for name in methods()]
)
def test_shuffled_rewards_teach_nothing(name: str, tmp_path: Path):
    assert learn(name, tmp_path, shuffle=True) < NOT_LEARNT
