"""Does PPO learn faster with a critic that was regressed before, and for how long does that last?"""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from torch import nn

from postrl.batch import Batch
from postrl.papers.ipe import diverse, ipe
from postrl.papers.ppo import ppo
from postrl.policies.critic import ActorCritic, DecoderCritic, Values, parameter_groups
from postrl.policies.decoder import Decoder
from postrl.rollout import Rollout, collate
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
from postrl.study.mirror import Pretraining, Words, pretrain
from postrl.study.rewriting import settings
from postrl.study.tiny import CHUNK
from postrl.train import train
from postrl.values import explained_variance, regress, with_values

QUESTION = (
    "PPO on words to be written backwards: does it solve more held-out words after 50 policy steps, and after 150, if "
    "its critic was regressed on the base's rollouts before, and more still if on those of several policies (IPE)?"
)
HYPOTHESIS = (
    "Written before the first full run, after one pilot run of the random arm. A critic regressed on the base's "
    "rollouts raises the share of held-out words solved after 50 policy steps by 0.03 or more over a random one, and "
    "still after 150 (an article says that pretraining helps only below 50); one regressed on the pooled rollouts of "
    "four policies raises it further after 50. A critic that knows the task sees a wrong letter at once, so there is "
    "something to gain; but a random one learns fast, too, and small effects, or none, would not surprise. A critic "
    "regressed on rewards dealt anew explains no more of the returns than a random one."
)
POINTS = (25, 50, 100, 150)  # policy steps; the quick variant measures earlier under the same names
WORTH = 0.03  # of held-out words
EVERY = 5  # steps between looks at the first critic


@dataclass(frozen=True)
class Sizes:
    words: Words = field(default_factory=lambda: Words(Pretraining()))
    points: tuple[int, ...] = POINTS
    learning_rate: float = 1e-3
    batches: int = 8  # of rollouts, for the regressions or the warm-up
    regression: int = 80  # steps
    members: int = 4
    member_steps: int = 20
    problems: int = 60  # held out
    samples: int = 16


# ---------------------------------------------------------------- where the critic starts


def fresh(context: Context[Sizes], policy: Decoder) -> DecoderCritic:
    """Nothing learnt: the start of every other critic, too."""
    return DecoderCritic.random(policy.config, context.seed)


def regressed(context: Context[Sizes], policy: Decoder, dealt: bool = False) -> DecoderCritic:
    """Fitted to the base's rollouts. dealt: with one another's rewards, so that their mean is all there is to learn."""
    critic = fresh(context, policy)
    rollouts = drawn(context, policy, 0, context.config.batches)
    if dealt:
        rollouts = [replace(rollout, group=0) for rollout in rollouts]
        deal(rollouts, (context.seed, 1))
    regress(critic, collate(rollouts), steps=context.config.regression, token_budget=CHUNK, seed=context.seed)
    return critic


def pooled(context: Context[Sizes], policy: Decoder) -> DecoderCritic:
    """Fitted to as many rollouts of several policies, each the base after imitating another bootstrap."""
    config, options = context.config, context.config.words.pretraining
    shown = collate(options.demonstrations(2000, context.seed + 50))
    members = diverse(policy, shown, config.members, steps=config.member_steps, learning_rate=1e-3, seed=context.seed)

    def roll(member: nn.Module, number: int) -> list[Rollout]:
        assert isinstance(member, Decoder)
        return drawn(context, member, number, config.batches // config.members)

    critic = fresh(context, policy)
    ipe(critic, members, roll, steps=config.regression, token_budget=CHUNK, seed=context.seed)
    return critic


def drawn(context: Context[Sizes], policy: Decoder, number: int, batches: int) -> list[Rollout]:
    """Rollouts of training words, by chance of their own: PPO's first batches are others."""
    source = context.config.words.source(policy, 1000 * (context.seed + 1) + number)
    return [rollout for step in range(batches) for rollout in source(step)]


def copied(context: Context[Sizes], policy: Decoder) -> DecoderCritic:
    """The base's trunk under a head of zeros."""
    return DecoderCritic.copied(policy)


# ---------------------------------------------------------------- one run


class Watch:
    """An enricher that changes nothing: it measures the policy at some of its steps, and the first critic, as it was
    when the policy's training began, on the batches of the policy that moves away from it."""

    def __init__(self, context: Context[Sizes], model: ActorCritic, policy: Decoder, warmup: int) -> None:
        self.context, self.model, self.policy, self.step = context, model, policy, -warmup
        self.first = copy.deepcopy(model.critic)
        self.solved: list[Measured] = []
        self.looks: list[tuple[int, float]] = []

    def __call__(self, batch: Batch) -> Batch:
        if self.step == 0:
            self.first = copy.deepcopy(self.model.critic)
        if self.step in self.context.config.points:
            self.measure()
        if self.step >= 0 and self.step % EVERY == 0:
            self.looks.append((self.step, explained_variance(with_values(self.first, batch, CHUNK))))
        self.step += 1
        return batch

    def measure(self) -> None:
        """The share of right answers to each held-out word."""
        config, label = self.context.config, POINTS[len(self.solved)]
        groups = config.words.answers(self.policy, config.problems, config.samples, self.context.seed)
        share = [fmean(rollout.rewards["correct"] == 1 for rollout in group) for group in groups]
        self.solved.append(per_problem(f"solved@{label}", [group[0].item for group in groups], share))

    def explained(self, low: int, high: int) -> float:
        """Of the first critic, mean over looks at policy steps low … high."""
        return fmean(value for step, value in self.looks if low <= step <= high)


Start = Callable[[Context[Sizes], Decoder], DecoderCritic]


def run(context: Context[Sizes], start: Start, warm: bool = False) -> Figures:
    """PPO from this critic. warm: as many batches as the regressions have come first, in which the critic alone
    learns."""
    config = context.config
    policy = Decoder.load(context.base)
    model = ActorCritic(policy, start(context, policy))
    warmup = config.batches if warm else 0
    watch = Watch(context, model, policy, warmup)
    folder = context.folder / "run"
    train(
        ppo(),
        model,
        config.words.source(policy, context.seed),
        settings(config.points[-1] + warmup, 4, config.learning_rate, context.seed, warmup=0),
        folder,
        enrich=[Values(model, CHUNK, warmup), watch],
        parameters=parameter_groups(),
    )
    watch.measure()
    for large in ("rollouts", "checkpoints"):
        shutil.rmtree(folder / large)
    return Figures((*watch.solved, *explained(config.points, watch)), (course(watch.looks),))


def explained(points: Sequence[int], watch: Watch) -> tuple[Measured, ...]:
    """Of the first critic: at the start, around the second point and at the end."""
    reach = 2 * EVERY
    middle, end = points[1], points[-1]
    return (
        scalar("explained@0", watch.explained(0, 0)),
        scalar("explained@50", watch.explained(middle - reach, middle + reach)),
        scalar("explained@150", watch.explained(end - 2 * reach, end)),
    )


def course(looks: Sequence[tuple[int, float]]) -> Curve:
    steps, values = zip(*looks, strict=True)
    return Curve("explained variance of the first critic", tuple(map(float, steps)), values, "policy steps")


BASE = Base("noisy", pretrain, options=lambda sizes: sizes.words.pretraining)

STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        Arm("random", partial(run, start=fresh), (BASE,)),
        Arm("regressed", partial(run, start=regressed), (BASE,)),
        Arm("pooled", partial(run, start=pooled), (BASE,)),
        Arm("warmup", partial(run, start=fresh, warm=True), (BASE,)),
        Arm("dealt", partial(run, start=partial(regressed, dealt=True)), (BASE,)),
        Arm("copied", partial(run, start=copied), (BASE,), exploratory=True),
        Arm("copied-warmup", partial(run, start=copied, warm=True), (BASE,), exploratory=True),
    ),
    seeds=(0, 1, 2, 3, 4, 5),
    metrics=(
        *(Metric(f"solved@{k}", f"share of right answers to held-out words after {k} policy steps") for k in POINTS),
        Metric("explained@0", "variance of returns that the first critic explains, on the base's rollouts"),
        Metric("explained@50", "the same first critic on the policy around its step 50"),
        Metric("explained@150", "the same first critic on the policy around its step 150"),
    ),
    contrasts=(
        Contrast("regressed", "random", "solved@50", "higher", WORTH),
        Contrast("regressed", "random", "solved@150", "higher", WORTH),
        Contrast("pooled", "regressed", "solved@50", "higher", WORTH),
    ),
    must_fail=(Contrast("dealt", "random", "explained@0", "higher", 0.1),),
    papers=("ipe", "ppo"),
    budget=Budget(minutes=50, run_minutes=40),
    quick=Quick(
        Sizes(
            Words(
                Pretraining(letters="abcd", length=4, shown=2000, hidden=32, steps=120, batch=32, learning_rate=5e-3),
                words=200,
                groups=32,
            ),
            points=(2, 4, 6, 8),
            batches=2,
            regression=10,
            members=2,
            member_steps=3,
            problems=8,
            samples=8,
        )
    ),
    exploratory=(
        Contrast("warmup", "random", "solved@50", "higher", WORTH),
        Contrast("warmup", "regressed", "solved@50", "higher", WORTH),
        Contrast("regressed", "dealt", "solved@50", "higher", WORTH),
        Contrast("pooled", "regressed", "solved@150", "higher", WORTH),
        Contrast("regressed", "random", "explained@0", "higher", 0.1),
        Contrast("pooled", "regressed", "explained@50", "higher", 0.1),
        Contrast("copied", "random", "solved@50", "higher", WORTH),
        Contrast("copied-warmup", "copied", "solved@50", "higher", WORTH),
    ),
)
