"""What studies on the rewrite grammar share: a base pretrained on chains, collection, and answers to held-out words."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from postrl.collect import collect
from postrl.envs.grammar_rules import Grammar
from postrl.envs.rewrite_grammar import chains, characters, demonstrations, rewrite_task, unchained
from postrl.envs.single_turn import Problems
from postrl.evaluate import EVALUATION
from postrl.papers.rft import rft
from postrl.policies.base import Sampling
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig
from postrl.rollout import Rollout
from postrl.settings import Settings
from postrl.source import Dataset, OnPolicy
from postrl.study.definition import BaseContext
from postrl.train import train

SLOTS = 512  # of the sampler: a decoder this small is fastest when many completions run together
CHUNK = 8192  # tokens of a pass
NEVER = 10**6  # steps between checkpoints: a run that breaks off begins anew


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
        tasks = [self.task((length,)) for length in lengths]
        places = [(task, index) for task in tasks for index in range(min(problems, task.size("test")))]
        rollouts = collect(
            policy.sampler(SLOTS),
            characters(self.pretraining.grammar),
            [task.environment("test", index) for task, index in places for _ in range(samples)],
            [(seed, EVALUATION, group, sample) for group in range(len(places)) for sample in range(samples)],
            Sampling(max_tokens=self.budget),
            tasks[0].rubric,
        )
        return [rollouts[start : start + samples] for start in range(0, len(rollouts), samples)]


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
    config = DecoderConfig(
        vocabulary=renderer.size,
        hidden=options.hidden,
        layers=options.layers,
        heads=4,
        kv_heads=4,
        head_size=options.hidden // 4,
        intermediate=8 * options.hidden // 3,
        context=128,
    )
    policy = Decoder.random(config, context.seed)
    how = Settings(
        steps=options.steps,
        updates=1,
        learning_rate=options.learning_rate,
        warmup=options.steps // 20,
        schedule="cosine",
        token_budget=CHUNK,
        importance_cap=None,
        checkpoint_every=NEVER,
        seed=context.seed,
    )
    with tempfile.TemporaryDirectory() as scratch:
        train(rft(), policy, Dataset(shown, options.batch, context.seed), how, Path(scratch) / "run")
    policy.save(context.folder)
