"""Does ReCo keep pass@64 where GRPO loses it, and does its weighting do it, not the mere spread of weights?"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from postrl.batch import Batch, unit_sum
from postrl.enrich import forward_all
from postrl.envs.grammar_audit import Auditor, Trace, covered, distinct_traces
from postrl.envs.rewrite_grammar import audit
from postrl.method import Method
from postrl.papers.dapo import dapo
from postrl.papers.grpo import grpo
from postrl.papers.reco import reco, response_weight
from postrl.papers.rft import rft
from postrl.policies.decoder import Decoder
from postrl.probes.diversity import rarefied
from postrl.probes.passk import pass_at_k
from postrl.rollout import Rollout, collate
from postrl.study import (
    Arm,
    Base,
    Budget,
    Context,
    Contrast,
    Figures,
    Metric,
    Quick,
    Study,
    per_problem,
    scalar,
)
from postrl.study.rewriting import CHUNK, Pretraining, Words, pretrain, settings
from postrl.terms import entropy_bonus
from postrl.train import train
from postrl.weights import sequence_mean

QUESTION = (
    "On words that the base solves sometimes, by one of many derivations: does ReCo keep pass@64 and the variety of "
    "right derivations where GRPO gives them up, at the same pass@1?"
)
HYPOTHESIS = (
    "Written before the first run. With four updates per rollout batch, ReCo's pass@64 is above GRPO's by 0.03 or "
    "more, and above that of ReCo with its weights permuted within the group; the permuted weights do no better than "
    "GRPO. Within a group the weights differ little (geometric means of 0.6 to 0.95 a token), so a small effect, or "
    "none, would not surprise. With one update per batch the token level changes nothing at all."
)
KS = (1, 4, 16, 64)
RIGHT = 8  # right answers of a problem, among which derivations are counted


@dataclass(frozen=True)
class Sizes:
    words: Words = field(default_factory=lambda: Words(Pretraining(), lengths=(3, 4, 5)))
    tested: tuple[int, ...] = (4, 5)  # lengths
    steps: int = 400
    updates: int = 4
    learning_rate: float = 1e-4
    problems: int = 24  # held out, per length
    samples: int = 128


# ---------------------------------------------------------------- methods


def permuted() -> Method:
    """The control: ReCo whose response weights go to other members of the group."""
    method = reco()

    def weight(batch: Batch) -> Tensor:
        weights = response_weight(batch)
        for group in batch.group().unique().tolist():
            members = (batch.group() == group).nonzero()[:, 0]
            order = np.random.default_rng([int(group), len(members)]).permutation(len(members))
            weights[members] = weights[members[torch.from_numpy(order)]]
        return sequence_mean(batch) * weights[batch.unit][:, None]

    policy = replace(method.terms[0], weight=weight)
    return replace(method, name="reco_permuted", terms=(policy,))


def dapo_here() -> Method:
    """DAPO without its penalty on length: the budget is the task's own. Nothing is refilled."""
    return dapo(correct="valid", penalty=0.0)


def with_entropy_bonus() -> Method:
    return grpo().plus(entropy_bonus(0.01), needs=frozenset({"entropy"}))


# ---------------------------------------------------------------- arms


def run(context: Context[Sizes], make: Callable[[], Method], updates: int | None = None) -> Figures:
    """Train on the audited reward (a right root by invalid steps is none), and measure."""
    config = context.config
    policy = Decoder.load(context.base)
    source = config.words.source(policy, context.seed, audited=True)
    how = settings(config.steps, updates or config.updates, config.learning_rate, context.seed)
    folder = context.folder / "run"
    train(make(), policy, source, how, folder)
    for large in ("rollouts", "checkpoints"):
        shutil.rmtree(folder / large)
    return measure(context, policy)


def untrained(context: Context[Sizes]) -> Figures:
    return measure(context, Decoder.load(context.base))


def measure(context: Context[Sizes], policy: Decoder) -> Figures:
    """Figures of answers to held-out words, and how likely the base's own right answers still are."""
    config = context.config
    groups = answers(context, policy)
    traces = audited(config, groups)
    items = [group[0].item for group in groups]
    counts = [list(distinct_traces(found).values()) for found in traces]  # of each right derivation, per problem
    n, right = np.full(len(groups), config.samples), np.array([sum(count) for count in counts])
    wrong = [[1] * (config.samples - sum(count)) for count in counts]  # as if each were of a kind of its own
    drawn = [rarefied([*c, *w], 64) - 64 * len(w) / config.samples for c, w in zip(counts, wrong, strict=True)]
    varied = [rarefied(count, RIGHT) for count in counts if sum(count) >= RIGHT]
    return Figures(
        (
            *(per_problem(f"pass@{k}", items, pass_at_k(n, right, k).tolist()) for k in KS),
            per_problem("distinct@64", items, drawn),
            scalar("distinct_of_8", float(np.mean(varied)) if varied else np.nan),
            scalar("kept@1024", kept(context, policy)),
        )
    )


def kept(context: Context[Sizes], policy: Decoder) -> float:
    """Share of the base's distinct right answers that the policy has among 1024 samples, by its probabilities."""
    groups = answers(context, Decoder.load(context.base))
    pairs = [pair for group, found in zip(groups, audited(context.config, groups), strict=True)
             for pair in zip(group, found, strict=True)]  # fmt: skip
    distinct = list({(r.item, r.completion): r for r, trace in pairs if trace.valid}.values())
    if not distinct:
        return float("nan")
    batch = collate(distinct)
    return covered(unit_sum(forward_all(policy, batch, CHUNK).logp, batch).double().numpy(), 1024)


def answers(context: Context[Sizes], policy: Decoder) -> list[list[Rollout]]:
    config = context.config
    return config.words.answers(policy, config.tested, config.problems, config.samples, context.seed)


def audited(config: Sizes, groups: Sequence[Sequence[Rollout]]) -> list[list[Trace]]:
    auditor = Auditor(config.words.pretraining.grammar)
    return [[audit(auditor, rollout, config.words.budget) for rollout in group] for group in groups]


BASE = Base("chained", pretrain, options=lambda sizes: sizes.words.pretraining)


def arm(name: str, make: Callable[[], Method], updates: int | None = None, exploratory: bool = True) -> Arm:
    return Arm(name, partial(run, make=make, updates=updates), (BASE,), exploratory)


STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        Arm("base", untrained, (BASE,)),
        arm("grpo", grpo, exploratory=False),
        arm("reco", reco, exploratory=False),
        arm("permuted", permuted, exploratory=False),
        arm("reco-response", partial(reco, token_level=False)),
        arm("reco-token", partial(reco, response_level=False)),
        arm("reco-answers", partial(reco, typical="empirical")),
        arm("dapo", dapo_here),
        arm("grpo-entropy", with_entropy_bonus),
        arm("rft", partial(rft, "valid")),
        arm("grpo-one", grpo, updates=1),
        arm("reco-token-one", partial(reco, response_level=False), updates=1),
    ),
    seeds=(0, 1, 2, 3, 4, 5),
    metrics=(
        *(Metric(f"pass@{k}", f"share of held-out words solved by allowed steps in {k}") for k in KS),
        Metric("distinct@64", "different right derivations expected among 64 answers to a word"),
        Metric("distinct_of_8", "different derivations among 8 right answers, mean over words with so many"),
        Metric("kept@1024", "share of the base's right answers likely among 1024 of the policy, by its probabilities"),
    ),
    contrasts=(
        Contrast("reco", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco", "permuted", "pass@64", "higher", worth=0.03),
        Contrast("grpo", "base", "pass@64", "lower", worth=0.03),
    ),
    must_fail=(Contrast("permuted", "grpo", "pass@64", "higher", worth=0.03),),
    budget=Budget(minutes=200, run_minutes=60),
    quick=Quick(
        Sizes(
            Words(
                Pretraining(symbols=8, hidden=64, layers=2, chains=6000, steps=250, batch=32, learning_rate=3e-3),
                lengths=(3, 4),
                per_length=200,
                groups=8,
                group_size=8,
            ),
            tested=(3, 4),
            steps=30,
            learning_rate=5e-4,
            problems=12,
            samples=64,
        )
    ),
    exploratory=(
        Contrast("reco-response", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco-token", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco-answers", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("dapo", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("grpo-entropy", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("rft", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco-token-one", "grpo-one", "pass@64", "higher", worth=0.03),
    ),
)
