"""Does RL compose rewrites that pretraining never showed, by valid steps, where imitating one's successes does not?"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from postrl.batch import unit_sum
from postrl.enrich import forward_all
from postrl.envs.grammar_audit import Auditor, Repertoire, StepKind, Summary, covered, summarise
from postrl.envs.rewrite_grammar import audit
from postrl.method import Method
from postrl.papers.grpo import grpo
from postrl.papers.rft import Iterated, rft
from postrl.papers.rft import demonstrations as successes
from postrl.policies.decoder import Decoder
from postrl.probes.passk import pass_at_k
from postrl.rollout import Rollout, Source, collate
from postrl.source import Dataset
from postrl.study import (
    Arm,
    Base,
    Budget,
    Context,
    Contrast,
    Curve,
    Figures,
    Measured,
    Metric,
    Quick,
    Study,
    per_problem,
    scalar,
)
from postrl.study.dealt import deal
from postrl.study.rewriting import CHUNK, Pretraining, Words, pretrain, settings
from postrl.train import train

QUESTION = (
    "Words that single rewrites cannot bring to their root within the token budget: does RL with an outcome reward "
    "solve them by valid composed steps, more selectively than fine-tuning on one's own successes (RFT)?"
)
HYPOTHESIS = (
    "Written before the first full run, after a single-seed prototype. GRPO raises the audited success on over-budget "
    "words above the base's by more than 0.02. The paper's claim that RL is more selective than RFT (the share of "
    "valid steps among the novel ones) is tested as it stands; the prototype did not show it against on-policy RFT. "
    "Rewards dealt out anew within each group teach nothing."
)
KS = (1, 64)
Alter = Callable[[Sequence[Rollout], tuple[int, int]], None]  # rollouts, (seed, step)


@dataclass(frozen=True)
class Sizes:
    words: Words = field(default_factory=lambda: Words(Pretraining()))
    over: tuple[int, ...] = (6, 7, 8)  # lengths beyond the budget
    steps: int = 1200
    learning_rate: float = 2e-4
    problems: int = 16  # held out, per length
    samples: int = 128
    base_samples: int = 1024  # of the untrained policy


# ---------------------------------------------------------------- what the arms train on


class Watched:
    """A source that passes rollouts on and counts their steps and macros; `alter` may change their rewards in place."""

    def __init__(self, source: Source, config: Sizes, seed: int, alter: Alter | None) -> None:
        self.source, self.seed, self.alter, self.budget = source, seed, alter, config.words.budget
        self.auditor, self.repertoire = Auditor(config.words.pretraining.grammar), Repertoire()
        self.seen: list[Summary] = []

    def __call__(self, step: int) -> list[Rollout]:
        rollouts = self.source(step)
        traces = [audit(self.auditor, rollout, self.budget) for rollout in rollouts]
        self.repertoire.add(step, traces)
        self.seen.append(summarise(traces))
        if self.alter is not None:
            self.alter(rollouts, (self.seed, step))
        return rollouts

    def state_dict(self) -> dict[str, object]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.source.load_state_dict(state)

    def curves(self) -> tuple[Curve, ...]:
        """Shares of steps over training; without steps, 0."""
        steps = tuple(float(step) for step in range(len(self.seen)))
        figures = {
            "invalid steps": [s.kinds[StepKind.INVALID] / max(1, s.steps) for s in self.seen],
            "composed steps": [s.composed / max(1, s.steps) for s in self.seen],
            "valid success": [s.valid_success for s in self.seen],
        }
        return tuple(Curve(name, steps, tuple(values)) for name, values in figures.items())


def offline(context: Context[Sizes], source: Source) -> Source:
    """As many rollouts as the other arms see, all of the base; its distinct successes, in shuffled epochs."""
    rollouts = [rollout for step in range(context.config.steps) for rollout in source(step)]
    return Dataset(successes(rollouts, "correct"), 64, context.seed)


def iterated(context: Context[Sizes], source: Source) -> Source:
    """A tenth of the rollouts at a time, then imitation of their successes for as many steps."""
    every = max(1, context.config.steps // 10)
    return Iterated(source, every, every, 64, context.seed, partial(successes, correct="correct"))


# ---------------------------------------------------------------- arms


def run(
    context: Context[Sizes],
    method: Method,
    feed: Callable[[Context[Sizes], Source], Source] | None = None,
    audited: bool = False,
    alter: Alter | None = None,
) -> Figures:
    """Train from the base and measure. feed: what the method trains on, made from on-policy collection."""
    config = context.config
    policy = Decoder.load(context.base)
    watched = Watched(config.words.source(policy, context.seed, audited), config, context.seed, alter)
    source = watched if feed is None else feed(context, watched)
    folder = context.folder / "run"
    train(method, policy, source, settings(config.steps, 1, config.learning_rate, context.seed), folder)
    for large in ("rollouts", "checkpoints"):  # hundreds of megabytes; the metrics stay
        shutil.rmtree(folder / large)
    repertoire = watched.repertoire
    known = repertoire.established(max(1, config.steps // 4))
    trained = (scalar("macros", repertoire.effective), scalar("established", known))
    nothing = (scalar("base_correct@all", np.nan), scalar("base_valid@all", np.nan))
    return Figures((*measure(context, policy, config.samples), *trained, *nothing), watched.curves())


def untrained(context: Context[Sizes]) -> Figures:
    """The base itself, sampled many times."""
    figures = measure(context, Decoder.load(context.base), context.config.base_samples)
    reached = {
        m.metric: float(np.mean(np.array(m.values) > 0)) for m in figures if m.metric in ("correct@1", "valid@1")
    }
    whole = (scalar("base_correct@all", reached["correct@1"]), scalar("base_valid@all", reached["valid@1"]))
    return Figures((*figures, scalar("macros", np.nan), scalar("established", np.nan), *whole))


def positive_only() -> Method:
    """GRPO that never pushes an answer down."""
    whole = grpo()
    return replace(whole, name="grpo_positive", advantage=lambda batch: whole.advantage(batch).clamp(min=0))


def measure(context: Context[Sizes], policy: Decoder, samples: int) -> tuple[Measured, ...]:
    """Figures of the policy's answers to held-out words beyond the budget."""
    config = context.config
    groups = config.words.answers(policy, config.over, config.problems, samples, context.seed)
    auditor = Auditor(config.words.pretraining.grammar)
    traces = [[audit(auditor, rollout, config.words.budget) for rollout in group] for group in groups]
    items = [group[0].item for group in groups]
    n = np.full(len(groups), samples)
    counts = {
        "correct": np.array([sum(trace.solved for trace in group) for group in traces]),
        "valid": np.array([sum(trace.valid for trace in group) for group in traces]),
    }
    passed = [
        per_problem(f"{name}@{k}", items, pass_at_k(n, count, k).tolist()) for name, count in counts.items() for k in KS
    ]
    summary = summarise(trace for group in traces for trace in group)
    pairs = [pair for group, found in zip(groups, traces, strict=True) for pair in zip(group, found, strict=True)]
    return (
        *passed,
        scalar("selectivity", summary.selectivity),
        scalar("invalid_steps", summary.shares[StepKind.INVALID]),
        scalar("composed_steps", summary.composed / summary.steps if summary.steps else np.nan),
        scalar("covered@1024", covered(base_logp(context, [r for r, trace in pairs if trace.valid]), 1024)),
    )


def base_logp(context: Context[Sizes], rollouts: Sequence[Rollout]) -> np.ndarray:
    """[n] log-probability (nats) of each distinct answer under the base."""
    distinct = list({(r.item, r.completion): r for r in rollouts}.values())
    if not distinct:
        return np.zeros(0)
    batch = collate(distinct)
    return unit_sum(forward_all(Decoder.load(context.base), batch, CHUNK).logp, batch).double().numpy()


def base(name: str, **changes: Any) -> Base:
    return Base(name, pretrain, options=lambda sizes: replace(sizes.words.pretraining, **changes))


CHAINED, UNCHAINED, NEUTRAL = base("chained"), base("unchained", chained=False), base("neutral", contraction_weight=1.0)

STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        Arm("base", untrained, (CHAINED,)),
        Arm("grpo", partial(run, method=grpo()), (CHAINED,)),
        Arm("rft", partial(run, method=rft("correct")), (CHAINED,)),
        Arm("dealt", partial(run, method=grpo(), alter=deal), (CHAINED,)),
        Arm("rft-offline", partial(run, method=rft("correct"), feed=offline), (CHAINED,), exploratory=True),
        Arm("rft-iterated", partial(run, method=rft("correct"), feed=iterated), (CHAINED,), exploratory=True),
        Arm("grpo-audited", partial(run, method=grpo(), audited=True), (CHAINED,), exploratory=True),
        Arm("grpo-positive", partial(run, method=positive_only()), (CHAINED,), exploratory=True),
        Arm("grpo-unchained", partial(run, method=grpo()), (UNCHAINED,), exploratory=True),
        Arm("grpo-neutral", partial(run, method=grpo()), (NEUTRAL,), exploratory=True),
        Arm("rft-neutral", partial(run, method=rft("correct")), (NEUTRAL,), exploratory=True),
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        *(Metric(f"correct@{k}", f"share of over-budget words whose root is among {k}") for k in KS),
        *(Metric(f"valid@{k}", f"the same, with no invalid step on the way, among {k}") for k in KS),
        Metric("selectivity", "share of the novel steps that the grammar allows"),
        Metric("invalid_steps", "share of all steps"),
        Metric("composed_steps", "share of all steps: valid, and more than one contraction"),
        Metric("covered@1024", "share of distinct valid successes likely among 1024 of the base, by its probabilities"),
        Metric("macros", "Hill number D2 of the macros used in training"),
        Metric("established", "share of macro uses by macros known for a quarter of the training"),
        Metric("base_correct@all", "untrained policy: share of words solved by any of its samples"),
        Metric("base_valid@all", "the same by valid steps"),
    ),
    contrasts=(
        Contrast("grpo", "base", "valid@1", "higher", worth=0.02),
        Contrast("grpo", "rft", "selectivity", "higher", worth=0.05),
        Contrast("grpo", "rft", "valid@1", "higher", worth=0.02),
    ),
    must_fail=(Contrast("dealt", "base", "valid@1", "higher", worth=0.02),),
    papers=("rft",),
    budget=Budget(minutes=240, run_minutes=90),
    quick=Quick(
        Sizes(
            Words(
                Pretraining(symbols=8, hidden=64, layers=2, chains=6000, steps=250, batch=32, learning_rate=3e-3),
                budget=9,
                lengths=(3, 4, 5),
                per_length=300,
                groups=8,
                group_size=8,
            ),
            over=(5,),
            steps=40,
            learning_rate=1e-3,
            samples=64,
            base_samples=64,
        )
    ),
    exploratory=(
        Contrast("rft-offline", "rft", "valid@1", "lower", worth=0.02),
        Contrast("rft-iterated", "rft", "valid@1", "lower", worth=0.02),
        Contrast("grpo-audited", "grpo", "valid@1", "higher", worth=0.02),
        Contrast("grpo-positive", "grpo", "selectivity", "lower", worth=0.05),
        Contrast("grpo-unchained", "grpo", "valid@1", "lower", worth=0.02),
        Contrast("grpo-neutral", "grpo", "valid@1", "lower", worth=0.02),
        Contrast("grpo-neutral", "rft-neutral", "valid@1", "higher", worth=0.02),
    ),
)
