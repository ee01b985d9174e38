"""A world for credit along an answer: write a word backwards, from a base that was shown it with letters wrong.

An answer is right if all its letters are, so a critic can see, in the middle of one, that it will not be.
"""

from dataclasses import dataclass

import numpy as np

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

ASK = "<"  # after the word


@dataclass(frozen=True)
class Pretraining:
    """Words of `length` letters; every letter of their mirror images is another one with probability `noise`."""

    letters: str = "abcdefgh"
    length: int = 8
    noise: float = 0.2
    shown: int = 20_000
    hidden: int = 64
    layers: int = 2
    steps: int = 600
    batch: int = 64
    learning_rate: float = 3e-3

    @property
    def renderer(self) -> Characters:
        return Characters(self.letters + ASK)

    def demonstrations(self, count: int, seed: int) -> list[Rollout]:
        """`count` of them; they follow from the seed."""
        rng, renderer = np.random.default_rng([seed, 9]), self.renderer
        made = []
        for number in range(count):
            word, other = self.word(rng), self.word(rng)
            wrong = rng.random(self.length) < self.noise
            answer = "".join(np.where(wrong, list(other), list(word[::-1])))
            made.append(demonstration([{"role": "user", "content": word + ASK}], answer, number, renderer))
        return made

    def word(self, rng: np.random.Generator) -> str:
        return "".join(rng.choice(list(self.letters), self.length))


@dataclass(frozen=True)
class Words:
    """The task, the same whatever the seed, and how it is collected."""

    pretraining: Pretraining
    words: int = 2000  # a tenth of them held out
    groups: int = 128
    group_size: int = 1

    def task(self) -> Problems:
        """`correct` is 1 for the whole word backwards, else 0."""
        rng = np.random.default_rng(8)
        words = {self.pretraining.word(rng): None for _ in range(self.words)}
        correct = Reward("correct", lambda rollout: float(rollout.completion == rollout.info["answer"]))
        problems = [Problem(word + ASK, {"answer": word[::-1]}) for word in words]
        return Problems(f"mirror {self.pretraining.length}", problems, Rubric((correct,)))

    @property
    def max_tokens(self) -> int:
        return self.pretraining.length + 1  # and the end

    def source(self, policy: Decoder, seed: int) -> OnPolicy:
        """On-policy collection of training words."""
        return OnPolicy(
            self.task(),
            policy,
            self.pretraining.renderer,
            groups_per_step=self.groups,
            group_size=self.group_size,
            sampling=Sampling(max_tokens=self.max_tokens),
            seed=seed,
            make_sampler=lambda: policy.sampler(SLOTS),
        )

    def answers(self, policy: Decoder, problems: int, samples: int, seed: int) -> list[list[Rollout]]:
        """`samples` scored answers to each of the first `problems` held-out words."""
        renderer, task = self.pretraining.renderer, self.task()
        return held_out(
            policy, renderer, [task], problems=problems, samples=samples, max_tokens=self.max_tokens, seed=seed
        )


def pretrain(context: BaseContext[Pretraining]) -> None:
    """Imitate the demonstrations; the weights alone are kept."""
    options = context.options
    imitate(
        options.demonstrations(options.shown, context.seed),
        options.renderer,
        context.folder,
        hidden=options.hidden,
        layers=options.layers,
        steps=options.steps,
        batch=options.batch,
        learning_rate=options.learning_rate,
        seed=context.seed,
    )
