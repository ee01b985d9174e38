"""Countdown of reasoning-gym for a decoder of characters: reach a number with three others, in one of several ways."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import permutations, product
from typing import Any

import numpy as np

from postrl.envs.evaluated import harmless
from postrl.envs.single_turn import Problem, Problems
from postrl.envs.written import demonstration
from postrl.policies.base import Sampling
from postrl.policies.chat import Characters
from postrl.policies.decoder import Decoder
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Rollout
from postrl.source import OnPolicy
from postrl.study.definition import BaseContext
from postrl.study.tiny import SLOTS, held_out, imitate

RENDERER = Characters("0123456789+-*/() =:")
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LIMIT = 13  # tokens: the longest expression of three numbers up to 12, and the end


@dataclass(frozen=True)
class Countdown:
    """The problems, the base and how the task is collected."""

    problems: int = 1500  # draws; those met twice count once, and a tenth of the rest is held out
    largest: int = 12
    target: int = 99
    shown: int = 40_000  # demonstrations
    right: float = 0.25  # share of them that reach the number; the others are any expression of the three numbers
    hidden: int = 96
    layers: int = 3
    steps: int = 1200  # of the base
    batch: int = 64
    learning_rate: float = 2e-3
    groups: int = 16
    group_size: int = 16

    def task(self) -> Problems:
        """The same problems whatever the seed, scored by reasoning-gym's own scorer."""
        dataset, entries = _entries(self.problems, self.largest, self.target)

        @lru_cache(maxsize=100_000)  # a small model writes the same answers again and again
        def solved(question: str, answer: str) -> float:
            return float(harmless("countdown", answer) and dataset.score_answer(answer, entries[question]) == 1)

        def correct(rollout: Rollout) -> float:
            return solved(str(rollout.info["question"]), rollout.completion)

        problems = [Problem(question, {"question": question}) for question in entries]
        return Problems("countdown", problems, Rubric((Reward("correct", correct),)))

    def source(self, policy: Decoder, seed: int) -> OnPolicy:
        """On-policy collection."""
        return OnPolicy(
            self.task(),
            policy,
            RENDERER,
            groups_per_step=self.groups,
            group_size=self.group_size,
            sampling=Sampling(max_tokens=LIMIT),
            seed=seed,
            answer=lambda rollout: rollout.completion,
            make_sampler=lambda: policy.sampler(SLOTS),
        )

    def answers(self, policy: Decoder, problems: int, samples: int, seed: int) -> list[list[Rollout]]:
        """`samples` scored answers to each of the first `problems` held-out problems."""
        how = {"problems": problems, "samples": samples, "max_tokens": LIMIT, "seed": seed}
        return held_out(policy, RENDERER, [self.task()], **how)

    def ways(self, rollouts: Sequence[Rollout]) -> list[str | None]:
        """What tells each right answer from another, its text; None for a wrong one."""
        return [rollout.completion if rollout.rewards["correct"] == 1 else None for rollout in rollouts]


@cache
def _entries(problems: int, largest: int, target: int) -> tuple[Any, dict[str, dict[str, Any]]]:
    """reasoning-gym's data set, and its problems by a short text for them."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        "countdown",
        min_numbers=3,
        max_numbers=3,
        min_value=1,
        max_value=largest,
        min_target=1,
        max_target=target,
        seed=0,
        size=problems,
    )
    entries = (dataset[number] for number in range(problems))
    return dataset, {asked(entry["metadata"]): entry for entry in entries}


def asked(metadata: Mapping[str, Any]) -> str:
    """The problem as the decoder reads it: "7 5 1=35:"."""
    return " ".join(map(str, metadata["numbers"])) + f"={metadata['target']}:"


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Every way to write the three numbers with two operations and brackets, and its value."""
    for a, b, c in permutations(numbers):
        for (p, first), (q, second) in product(OPERATIONS.items(), repeat=2):
            yield f"({a}{p}{b}){q}{c}", second(first(a, b), c)
            yield f"{a}{p}({b}{q}{c})", first(a, second(b, c))


def pretrain(context: BaseContext[Countdown]) -> None:
    """Imitate expressions of the right numbers, some of which reach the target; the weights alone are kept."""
    options = context.options
    _, entries = _entries(options.problems, options.largest, options.target)
    task, rng, shown = options.task(), np.random.default_rng(context.seed), []
    ways: dict[str, tuple[list[str], list[str]]] = {}
    for number in range(options.shown):
        environment = task.environment("train", number)
        question = str(environment.info["question"])
        if question not in ways:
            found = list(expressions(entries[question]["metadata"]["numbers"]))
            target = entries[question]["metadata"]["target"]
            ways[question] = [text for text, _ in found], [text for text, value in found if value == target]
        every, right = ways[question]
        chosen = right if right and rng.random() < options.right else every
        answer = chosen[int(rng.integers(len(chosen)))]
        shown.append(demonstration(environment.prompt(), answer, number, RENDERER))
    imitate(
        shown,
        RENDERER,
        context.folder,
        hidden=options.hidden,
        layers=options.layers,
        steps=options.steps,
        batch=options.batch,
        learning_rate=options.learning_rate,
        seed=context.seed,
    )
