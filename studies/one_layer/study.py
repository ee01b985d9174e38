"""Does training one middle layer give what training all gives, and more than as many weights anywhere?"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

import numpy as np

from postrl.envs.grammar_rules import Grammar
from postrl.envs.rewrite_grammar import SEPARATOR, chain, primitive_cost, rewrite_task
from postrl.envs.single_turn import Problem, Problems
from postrl.envs.written import demonstration
from postrl.papers.dr_grpo import dr_grpo
from postrl.papers.grpo import grpo
from postrl.papers.one_layer import Groups, middle, only, random_subset
from postrl.policies.base import Sampling, layers_of
from postrl.policies.chat import Characters
from postrl.policies.decoder import Decoder
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Source
from postrl.source import OnPolicy
from postrl.study import Arm, Base, BaseContext, Budget, Context, Contrast, Figures, Metric, Quick, Study, per_problem
from postrl.study.dealt import Dealt
from postrl.study.rewriting import settings
from postrl.study.tiny import SLOTS, held_out, imitate
from postrl.train import train

QUESTION = (
    "A decoder of six layers is trained by GRPO on words of the rewrite grammar. Does training its middle layer alone "
    "give what training all of it gives, and more than training as many single weights drawn from all layers?"
)
HYPOTHESIS = (
    "Written before the first full run, after a pilot of one seed. The middle layer alone gains over the base by 0.03 "
    "or more of the held-out words; training everything gains more than that by 0.03 or more (the paper's best layers "
    "match or pass full training, after the maximum over many was taken; this is one layer named in advance); and the "
    "middle layer gains more than a random subset of as many weights of all layers. A middle layer trained on rewards "
    "dealt anew within each group gains nothing. What the ranking of layers does over tasks and methods is exploratory."
)
DEPTH = 6
MIDDLE = middle(DEPTH, 1)[0]
MIRROR = "<"  # after a word: write it backwards
WORTH = 0.03  # of held-out problems
Task = Literal["root", "mirror"]
Which = Literal["all", "subset"] | int  # what is trained: a number is a layer


@dataclass(frozen=True)
class Pretraining:
    """The base: chains of single rewrites, and words backwards with `noise` of their letters wrong."""

    symbols: int = 8
    length: int = 4  # of the longest word
    contraction_weight: float = 4.0
    noise: float = 0.2
    shown: int = 10_000  # of each kind
    hidden: int = 64
    steps: int = 700
    batch: int = 64
    learning_rate: float = 4e-3

    @property
    def grammar(self) -> Grammar:
        return Grammar.random(self.symbols, 3)

    @property
    def renderer(self) -> Characters:
        return Characters(self.grammar.symbols + SEPARATOR + MIRROR)


@dataclass(frozen=True)
class Sizes:
    pretraining: Pretraining = Pretraining()
    groups: int = 16
    group_size: int = 8
    steps: int = 100
    updates: int = 2
    learning_rate: float = 1e-3
    problems: int = 100  # held out
    samples: int = 16


# ---------------------------------------------------------------- the base and its two tasks


def pretrain(context: BaseContext[Pretraining]) -> None:
    """One model that has met both skills and masters neither."""
    options, rng = context.options, np.random.default_rng([context.seed, 7])
    shown = []
    for _ in range(options.shown):
        first, *rest = chain(options.grammar, rng, options.contraction_weight, options.length)
        shown.append((first + SEPARATOR, SEPARATOR.join(rest)))
        word = letters(options.grammar, int(rng.integers(2, options.length + 1)), rng)
        other = letters(options.grammar, len(word), rng)
        wrong = rng.random(len(word)) < options.noise
        shown.append((word + MIRROR, "".join(np.where(wrong, list(other), list(word[::-1])))))
    renderer = options.renderer
    imitate(
        [demonstration([{"role": "user", "content": q}], a, n, renderer) for n, (q, a) in enumerate(shown)],
        renderer,
        context.folder,
        hidden=options.hidden,
        layers=DEPTH,
        steps=options.steps,
        batch=options.batch,
        learning_rate=options.learning_rate,
        seed=context.seed,
    )


def letters(grammar: Grammar, length: int, rng: np.random.Generator) -> str:
    return "".join(rng.choice(list(grammar.symbols), length))


def make_task(options: Pretraining, task: Task) -> Problems:
    """Words of the two greatest lengths, three tenths of them held out; the same ones whatever the seed."""
    lengths = (options.length - 1, options.length)
    if task == "root":
        budget = primitive_cost(options.length)
        return rewrite_task(options.grammar, lengths, budget=budget, words_per_length=400, audited=True, test_share=0.3)
    rng = np.random.default_rng(8)
    words = {letters(options.grammar, length, rng): None for length in lengths for _ in range(400)}
    problems = [Problem(word + MIRROR, {"answer": word[::-1]}) for word in words]
    right = Reward("right", lambda rollout: float(rollout.completion == rollout.info["answer"]))
    return Problems("mirror", problems, Rubric((right,)), test_share=0.3)


SCORE = {"root": "valid", "mirror": "right"}  # the reward that counts
METHODS = {"grpo": grpo, "dr-grpo": partial(dr_grpo, length=10)}  # answers have at most 10 tokens


# ---------------------------------------------------------------- arms


def run(
    context: Context[Sizes], which: Which, task: Task = "root", method: str = "grpo", deal: bool = False
) -> Figures:
    """Train what is named, everything else alike, and measure."""
    config, options = context.config, context.config.pretraining
    policy = Decoder.load(context.base)
    source: Source = OnPolicy(
        make_task(options, task),
        policy,
        options.renderer,
        groups_per_step=config.groups,
        group_size=config.group_size,
        sampling=Sampling(max_tokens=primitive_cost(options.length)),
        seed=context.seed,
        make_sampler=lambda: policy.sampler(SLOTS),
    )
    folder = context.folder / "run"
    train(
        METHODS[method](),
        policy,
        Dealt(source, context.seed) if deal else source,
        settings(config.steps, config.updates, config.learning_rate, context.seed, warmup=10),
        folder,
        parameters=trained(policy, which, context.seed),
    )
    for large in ("rollouts", "checkpoints"):
        shutil.rmtree(folder / large)
    return measure(context, policy, task)


def trained(policy: Decoder, which: Which, seed: int) -> Groups | None:
    """The subset has as many weights as a layer."""
    if which == "all":
        return None
    if which == "subset":
        return random_subset(sum(p.numel() for p in layers_of(policy)[MIDDLE].parameters()), seed)
    return only([which])


def untrained(context: Context[Sizes], task: Task = "root") -> Figures:
    return measure(context, Decoder.load(context.base), task)


def measure(context: Context[Sizes], policy: Decoder, task: Task) -> Figures:
    """The share of right answers to each held-out problem."""
    config, options = context.config, context.config.pretraining
    groups = held_out(
        policy,
        options.renderer,
        [make_task(options, task)],
        problems=config.problems,
        samples=config.samples,
        max_tokens=primitive_cost(options.length),
        seed=context.seed,
    )
    share = [fmean(rollout.rewards[SCORE[task]] == 1 for rollout in group) for group in groups]
    return Figures((per_problem("solved", [group[0].item for group in groups], share),))


BASE = Base("two-skills", pretrain, options=lambda sizes: sizes.pretraining)


def profile(task: Task, method: str, layers: Sequence[int]) -> list[Arm]:
    """Exploratory arms, each with one layer trained."""
    return [
        Arm(f"{task}-{method}-{k}", partial(run, which=k, task=task, method=method), (BASE,), exploratory=True)
        for k in layers
    ]


def whole(task: Task, method: str) -> Arm:
    return Arm(f"{task}-{method}-all", partial(run, which="all", task=task, method=method), (BASE,), exploratory=True)


EVERY = tuple(range(DEPTH))

STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        Arm("base", untrained, (BASE,)),
        Arm("all", partial(run, which="all"), (BASE,)),
        Arm("middle", partial(run, which=MIDDLE), (BASE,)),
        Arm("subset", partial(run, which="subset"), (BASE,)),
        Arm("dealt", partial(run, which=MIDDLE, deal=True), (BASE,)),
        *profile("root", "grpo", [k for k in EVERY if k != MIDDLE]),
        *profile("root", "dr-grpo", EVERY),
        whole("root", "dr-grpo"),
        *profile("mirror", "grpo", EVERY),
        whole("mirror", "grpo"),
        Arm("mirror-base", partial(untrained, task="mirror"), (BASE,), exploratory=True),
    ),
    seeds=(0, 1, 2, 3, 4, 5),
    metrics=(Metric("solved", "share of right answers to held-out problems (pass@1)"),),
    contrasts=(
        Contrast("middle", "base", "solved", "higher", WORTH),
        Contrast("all", "middle", "solved", "higher", WORTH),
        Contrast("middle", "subset", "solved", "higher", WORTH),
    ),
    must_fail=(Contrast("dealt", "base", "solved", "higher", WORTH),),
    papers=("one_layer",),
    budget=Budget(minutes=50, run_minutes=30),
    quick=Quick(
        Sizes(
            Pretraining(symbols=6, length=3, shown=1000, hidden=32, steps=150, batch=32, learning_rate=6e-3),
            groups=8,
            steps=20,
            problems=20,
            samples=8,
        )
    ),
    exploratory=(
        Contrast(f"root-grpo-{DEPTH - 1}", "middle", "solved", "lower", WORTH),
        Contrast("root-grpo-0", "middle", "solved", "lower", WORTH),
    ),
)
