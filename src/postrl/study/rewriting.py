"""What studies on the rewrite grammar share: a base pretrained on chains, collection, and answers to held-out words."""

from collections.abc import Sequence
from dataclasses import dataclass

from postrl.envs.grammar_rules import Grammar
from postrl.envs.rewrite_grammar import chains, characters, demonstrations, rewrite_task, unchained
from postrl.envs.single_turn import Problems
from postrl.policies.base import Sampling
from postrl.policies.decoder import Decoder
from postrl.rollout import Rollout
from postrl.settings import Settings
from postrl.source import OnPolicy
from postrl.study.definition import BaseContext
from postrl.study.tiny import CHUNK as CHUNK
from postrl.study.tiny import NEVER, SLOTS, held_out, imitate


@dataclass(frozen=True)
class Pretraining:
    """The grammar, the same for every seed, and the base: a decoder and what it is shown."""

    symbols: int = 24
    expansions: int = 3
    contraction_weight: float = 8.0
    chained: bool = True  # False: the same rewrites, each a chain of its own
    chains: int = 60_000
    hidden: int = 96
    layers: int = 3
    steps: int = 3000
    batch: int = 64
    learning_rate: float = 2e-3

    @property
    def grammar(self) -> Grammar:
        return Grammar.random(self.symbols, self.expansions)


@dataclass(frozen=True)
class Words:
    """The task and how it is collected."""

    pretraining: Pretraining
    budget: int = 14
    lengths: tuple[int, ...] = (3, 4, 5, 6, 7, 8)
    per_length: int = 1500  # a tenth of them held out
    groups: int = 16
    group_size: int = 16

    def task(self, lengths: Sequence[int], audited: bool = False) -> Problems:
        """Words of these lengths; the same ones whatever the seed."""
        grammar = self.pretraining.grammar
        return rewrite_task(grammar, lengths, budget=self.budget, words_per_length=self.per_length, audited=audited)

    def source(self, policy: Decoder, seed: int, audited: bool = False) -> OnPolicy:
        """On-policy collection of words of all lengths."""
        return OnPolicy(
            self.task(self.lengths, audited),
            policy,
            characters(self.pretraining.grammar),
            groups_per_step=self.groups,
            group_size=self.group_size,
            sampling=Sampling(max_tokens=self.budget),
            seed=seed,
            answer=last_word,
            make_sampler=lambda: policy.sampler(SLOTS),
        )

    def answers(
        self, policy: Decoder, lengths: Sequence[int], problems: int, samples: int, seed: int
    ) -> list[list[Rollout]]:
        """`samples` scored answers to each of the first `problems` held-out words of every length."""
        return held_out(
            policy,
            characters(self.pretraining.grammar),
            [self.task((length,)) for length in lengths],
            problems=problems,
            samples=samples,
            max_tokens=self.budget,
            seed=seed,
        )


def last_word(rollout: Rollout) -> str:
    """What a rollout claims to be the root."""
    return rollout.completion.rpartition(">")[2]


def settings(steps: int, updates: int, learning_rate: float, seed: int, warmup: int = 20) -> Settings:
    """Of a run on a decoder this small."""
    return Settings(
        steps=steps,
        updates=updates,
        learning_rate=learning_rate,
        warmup=warmup,
        token_budget=CHUNK,
        checkpoint_every=NEVER,
        seed=seed,
    )


def pretrain(context: BaseContext[Pretraining]) -> None:
    """Imitate the chains; the weights alone are kept."""
    options, grammar = context.options, context.options.grammar
    renderer = characters(grammar)
    walks = chains(grammar, options.chains, options.contraction_weight, context.seed)
    shown = demonstrations(walks if options.chained else unchained(walks), renderer)
    imitate(
        shown,
        renderer,
        context.folder,
        hidden=options.hidden,
        layers=options.layers,
        steps=options.steps,
        batch=options.batch,
        learning_rate=options.learning_rate,
        seed=context.seed,
    )
