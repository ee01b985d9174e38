"""Does a critic regressed before fine-tuning help off-policy control, and more if several policies' rollouts pool?"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from postrl.envs import control
from postrl.study import Arm, Budget, Context, Contrast, Figures, Metric, Quick, Study, scalar
from postrl.study import Curve as Course

QUESTION = (
    "A pendulum's policy is imitated, then fine-tuned by TD3. Is it better to start from a critic Q that was regressed "
    "on rollouts of this policy, and better still from one regressed on the pooled rollouts of several policies (IPE)?"
)
HYPOTHESIS = (
    "Written before the first full run, after pilot runs of the random arm and the pooled one on one seed. Over the "
    "same number of online steps the mean return of the policy is higher, by 50 or more, with a critic regressed on "
    "one policy's rollouts than with a random one; higher with the pooled critic than with the single one; and the "
    "pooled one gains by its critic, not by its data alone: it is above the arm that has the same replay and a random "
    "critic. The paper expects little of the first, and 1.26 times as much of the second; an article expects the "
    "random critic to win. A random critic of another seed does no better."
)
AGAIN = 10_000  # is added to the seed of a learner that must make no difference
WORTH = 50.0  # of return: a random pendulum has about −1200, the best about −140


@dataclass(frozen=True)
class Sizes:
    problem: control.Sizes = field(
        default_factory=lambda: control.Sizes(
            rollouts=10, critic_steps=2000, online_steps=6000, evaluate_every=500, evaluation_episodes=10
        )
    )


def run(context: Context[Sizes], arm: control.Arm, other: bool = False) -> Figures:
    """One fine-tuning, measured on the way."""
    sizes = context.config.problem
    curve = control.compare(arm, context.seed, sizes, context.seed + AGAIN if other else None)
    charged = tuple(map(float, curve.steps))
    return Figures(
        (
            scalar("return", fmean(curve.returns[1:])),
            scalar("worst", min(curve.returns)),
            scalar("last", curve.returns[-1]),
            scalar("charged", at(curve.steps, curve.returns, sizes.online_steps)),
            scalar("gap_start", curve.gap[0]),
            scalar("gap_end", curve.gap[-1]),
        ),
        (
            Course("return", charged, tuple(curve.returns), "environment steps, rollouts for the critic included"),
            Course("gap of the first critic", charged, tuple(curve.gap), "environment steps"),
        ),
    )


def at(steps: Sequence[int], values: Sequence[float], budget: int) -> float:
    """The last value that was reached within so many environment steps; the first if even that came later."""
    return values[max(0, bisect_right(steps, budget) - 1)]


STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        Arm("random", partial(run, arm="random")),
        Arm("single", partial(run, arm="single")),
        Arm("pooled", partial(run, arm="pooled")),
        Arm("buffer", partial(run, arm="pooled buffer")),
        Arm("again", partial(run, arm="random", other=True)),
        Arm("dealt", partial(run, arm="dealt"), exploratory=True),
    ),
    seeds=(0, 1, 2, 3, 4, 5, 6, 7),
    metrics=(
        Metric("return", "undiscounted, without noise; mean over evaluations during fine-tuning"),
        Metric("worst", "lowest return of an evaluation"),
        Metric("last", "return after the last online step"),
        Metric("charged", "return within the same number of environment steps, those for the critic's data included"),
        Metric("gap_start", "mean |Q_first − Q of the policy| before fine-tuning"),
        Metric("gap_end", "the same first critic against the policy after fine-tuning"),
    ),
    contrasts=(
        Contrast("single", "random", "return", "higher", WORTH),
        Contrast("pooled", "single", "return", "higher", WORTH),
        Contrast("pooled", "buffer", "return", "higher", WORTH),
    ),
    must_fail=(Contrast("again", "random", "return", "higher", WORTH),),
    papers=("ipe",),
    budget=Budget(minutes=45, run_minutes=30),
    quick=Quick(
        Sizes(
            control.Sizes(
                demonstrations=10,
                policies=2,
                rollouts=4,
                imitation_steps=300,
                critic_steps=300,
                online_steps=1000,
                evaluate_every=250,
                evaluation_episodes=2,
            )
        )
    ),
    exploratory=(
        Contrast("single", "random", "charged", "higher", WORTH),
        Contrast("pooled", "random", "charged", "higher", WORTH),
        Contrast("pooled", "single", "last", "higher", WORTH),
        Contrast("dealt", "buffer", "return", "higher", WORTH),
        Contrast("pooled", "dealt", "return", "higher", WORTH),
    ),
)
