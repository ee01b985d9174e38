"""Does leaving out answers whose rewards disagree (GD²PO) train several rewards faster, and is there no downside?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from postrl.advantages import credit_per_reward, spread_whitened
from postrl.batch import Batch
from postrl.envs.conflict import (
    characters,
    conflict_task,
    correct,
    demonstrations,
    formatted,
    marked,
    short,
    shown,
    telling_conflict_task,
)
from postrl.envs.single_turn import Problems
from postrl.method import Method
from postrl.papers.gd2po import gd2po, judged
from postrl.papers.gdpo import gdpo
from postrl.papers.grpo import grpo
from postrl.policies.base import Sampling
from postrl.policies.decoder import Decoder
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Rollout
from postrl.source import OnPolicy
from postrl.study import (
    Arm,
    Base,
    BaseContext,
    Budget,
    Context,
    Contrast,
    Figures,
    Measured,
    Metric,
    Quick,
    Study,
    against,
    per_problem,
    scalar,
)
from postrl.study.rewriting import settings
from postrl.study.tiny import SLOTS, course, held_out, imitate, mean_of, trained

QUESTION = (
    "Four rewards, one of which half opposes the others: does GD²PO, which leaves out answers whose rewards disagree, "
    "reach more answers that have everything than GDPO, and sooner; and GDPO more than the sum of the rewards?"
)
HYPOTHESIS = (
    "Written before the first full run, after pilots of one seed of GDPO alone. The papers' claims are tested as they "
    "stand. GD²PO with the filter meant for three and more rewards (SNR, τ = 0.8 as released) has a joint success "
    "above GDPO's by 0.03 or more, at the end and on the mean over training; GDPO is above GRPO on the sum by 0.03 or "
    "more. Leaving out as many answers of each group, but any of them, does not gain on GDPO. Where the conflict is "
    "the information (exploratory), the hard filter and SNR with a large τ lose 0.1 or more of joint success to GDPO, "
    "against the popular claim of no downside."
)
TAU = 0.8  # of the released scripts
ANSWER = 20  # tokens; the longest demonstration has 18


@dataclass(frozen=True)
class Pretraining:
    """Demonstrations of every habit: mark, working, filler, brackets, right and wrong letters."""

    length: int = 4  # letters of a question: 256 questions
    test_share: float = 0.25
    shown: int = 8000
    right: float = 0.5
    working: float = 0.3
    hidden: int = 64
    layers: int = 2
    steps: int = 600
    batch: int = 64
    learning_rate: float = 3e-3


@dataclass(frozen=True)
class Sizes:
    pretraining: Pretraining = Pretraining()
    steps: int = 40
    updates: int = 4
    groups: int = 16
    group_size: int = 8
    learning_rate: float = 1e-4
    problems: int = 48  # held out
    samples: int = 32


# ---------------------------------------------------------------- worlds


def agreed(rollout: Rollout) -> float:
    """1 if the text is right, short and in brackets."""
    return float(correct(rollout) * short(rollout) * formatted(rollout) == 1)


def joint(rollout: Rollout) -> float:
    """1 if everything is had that can be had together: the same, and the mark."""
    return agreed(rollout) * marked(rollout)


def opposed(options: Pretraining, conflict: float) -> Problems:
    """The task of the knob; `agreed` and `joint` are logged."""
    return _logged(conflict_task(conflict, options.length, test_share=options.test_share), agreed=agreed, joint=joint)


def telling(options: Pretraining) -> Problems:
    """The task whose good answers all disagree: right *and* with its working (`joint`), which no short text can be."""
    return _logged(telling_conflict_task(options.length, test_share=options.test_share), joint=shown)


def _logged(task: Problems, **rewards: Callable[[Rollout], float]) -> Problems:
    task.rubric = Rubric((*task.rubric.rewards, *(Reward(name, fn, 0.0) for name, fn in rewards.items())))
    return task


def pretrain(context: BaseContext[Pretraining]) -> None:
    options = context.options
    task = conflict_task(0.0, options.length, test_share=options.test_share)
    habits = demonstrations(
        task, characters(), options.shown, right=options.right, working=options.working, seed=context.seed
    )
    imitate(
        habits,
        characters(),
        context.folder,
        hidden=options.hidden,
        layers=options.layers,
        steps=options.steps,
        batch=options.batch,
        learning_rate=options.learning_rate,
        seed=context.seed,
    )


# ---------------------------------------------------------------- methods


def dealt() -> Method:
    """The control: as many answers of each group are left out as GD²PO would leave out, but any of them."""
    method = gd2po("snr", TAU)

    def advantage(batch: Batch) -> Tensor:
        credit = credit_per_reward(batch)
        verdict = judged(credit, batch, "snr", TAU)
        kept = verdict.kept.clone()
        for group in batch.group().unique().tolist():
            members = (batch.group() == group).nonzero()[:, 0]
            order = np.random.default_rng([int(group), len(members)]).permutation(len(members))
            kept[members] = kept[members[torch.from_numpy(order)]]
        a = spread_whitened(credit.sum(1).masked_fill(~kept, torch.nan), batch)
        return a * verdict.query_weight[batch.unit][:, None]

    return Method("gd2po_dealt", advantage, method.terms, figures=method.figures)


METHODS: Mapping[str, Callable[[], Method]] = {
    "sum": grpo,
    "gdpo": gdpo,
    "hard": gd2po,
    "snr": partial(gd2po, "snr", TAU),
    "snr.5": partial(gd2po, "snr", 0.5),
    "snr.2": partial(gd2po, "snr", 0.2),
    "dealt": dealt,
}


# ---------------------------------------------------------------- arms

World = Callable[[Pretraining], Problems]


def run(context: Context[Sizes], make: Callable[[], Method], world: World) -> Figures:
    """Train on the world's rewards and measure."""
    config = context.config
    policy, task = Decoder.load(context.base), world(config.pretraining)
    source = OnPolicy(
        task,
        policy,
        characters(),
        groups_per_step=config.groups,
        group_size=config.group_size,
        sampling=Sampling(max_tokens=ANSWER),
        seed=context.seed,
        make_sampler=lambda: policy.sampler(SLOTS),
    )
    how = settings(config.steps, config.updates, config.learning_rate, context.seed, warmup=config.updates)
    lines = trained(make(), policy, source, how, context.folder / "run")
    seen = {"training": "reward/joint", "conflict": "method/conflict", "dropped": "method/dropped"}
    figures = (scalar(name, mean_of(lines, key)) for name, key in seen.items())
    curves = tuple(course(lines, f"reward/{name}", name) for name in task.rubric.names)
    return Figures((*measured(context, policy, task), *figures), curves)


def untrained(context: Context[Sizes], world: World) -> Figures:
    nothing = (scalar(name, np.nan) for name in ("training", "conflict", "dropped"))
    return Figures((*measured(context, Decoder.load(context.base), world(context.config.pretraining)), *nothing))


def measured(context: Context[Sizes], policy: Decoder, task: Problems) -> tuple[Measured, ...]:
    """Each reward of held-out answers apart, their weighted sum, and the joint success; NaN where a world lacks one."""
    config = context.config
    groups = held_out(
        policy,
        characters(),
        [task],
        problems=config.problems,
        samples=config.samples,
        max_tokens=ANSWER,
        seed=context.seed,
    )
    items = [group[0].item for group in groups]
    weight = {reward.name: reward.weight for reward in task.rubric.rewards}
    raw = np.array([[[r.rewards[name] for name in weight] for r in group] for group in groups], dtype=float).mean(1)
    found = {**dict(zip(weight, raw.T, strict=True)), "total": raw @ np.array(list(weight.values()))}
    lost = np.full(len(items), np.nan)
    return tuple(per_problem(name, items, found.get(name, lost).tolist()) for name in RAW)


def arm(name: str, world: World, where: str = "", exploratory: bool = True) -> Arm:
    return Arm(f"{name}{where}", partial(run, make=METHODS[name], world=world), (BASE,), exploratory)


NONE, HALF, WHOLE = (partial(opposed, conflict=conflict) for conflict in (0.0, 0.5, 1.0))
MASKS = ("hard", "snr", "snr.5", "snr.2")
BASE = Base("habits", pretrain, options=lambda sizes: sizes.pretraining)
RAW = {
    "joint": "share of answers that have everything that can be had together",
    "agreed": "share that is right, short and in brackets",
    "total": "sum of the trained rewards",
    "correct": "share of right answers (telling world: with working)",
    "short": "reward for length",
    "formatted": "share in brackets",
    "marked": "share with the mark",
    "rival": "the reward that opposes the others",
    "worked": "telling world: share with working",
    "brief": "telling world: share of short answers",
    "answered": "telling world: share of right answers with or without working",
}
STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        *(arm(name, HALF, exploratory=False) for name in ("sum", "gdpo", "snr", "dealt")),
        *(arm(name, HALF) for name in ("hard", "snr.5", "snr.2")),
        *(arm(name, NONE, "@0") for name in ("sum", "gdpo", "hard", "snr")),
        *(arm(name, WHOLE, "@1") for name in ("sum", "gdpo", "hard", "snr")),
        *(arm(name, telling, "@telling") for name in ("sum", "gdpo", *MASKS)),
        Arm("base", partial(untrained, world=HALF), (BASE,), exploratory=True),
        Arm("base@telling", partial(untrained, world=telling), (BASE,), exploratory=True),
    ),
    seeds=(0, 1, 2, 3, 4, 5, 6, 7),
    metrics=(
        *(Metric(name, caption) for name, caption in RAW.items()),
        Metric("training", "joint success in training, mean over its steps"),
        Metric("conflict", "share of answers whose rewards disagree, mean over steps"),
        Metric("dropped", "share of answers left out, mean over steps"),
    ),
    contrasts=(
        Contrast("snr", "gdpo", "joint", "higher", worth=0.03),
        Contrast("snr", "gdpo", "training", "higher", worth=0.03),
        Contrast("gdpo", "sum", "joint", "higher", worth=0.03),
    ),
    must_fail=(Contrast("dealt", "gdpo", "joint", "higher", worth=0.03),),
    papers=("gdpo", "gd2po"),
    budget=Budget(minutes=60, run_minutes=60),
    quick=Quick(
        Sizes(Pretraining(length=3, shown=4000, steps=200, batch=32), steps=8, groups=8, problems=12, samples=16)
    ),
    exploratory=(
        *against("gdpo", ("hard", "snr.5", "snr.2"), "joint", "higher", worth=0.03),
        *against("gdpo@0", ("sum@0", "hard@0", "snr@0"), "joint", "higher", worth=0.03),
        *against("gdpo@1", ("sum@1", "hard@1", "snr@1"), "agreed", "higher", worth=0.03),
        *against("gdpo@telling", [f"{name}@telling" for name in MASKS], "joint", "lower", worth=0.1),
        Contrast("gdpo@telling", "base@telling", "joint", "higher", worth=0.1),
    ),
)
