"""pass@k of a policy on held-out problems, with intervals and figures of diversity."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from postrl.batch import Stop
from postrl.collect import Limits, collect
from postrl.envs.base import Split, Task
from postrl.errors import UserError
from postrl.policies.base import Policy, Renderer, Sampler, Sampling
from postrl.probes.diversity import answer_entropy, distinct, distinct_n
from postrl.probes.passk import bootstrap_interval, pass_at_k
from postrl.ranks import here
from postrl.rollout import Rollout
from postrl.source import fit

EVALUATION = 2**31 - 1  # stands for the step in the keys: the same random numbers before, during and after training


@dataclass(frozen=True)
class Sample:
    """One rollout, as people read it."""

    item: str
    prompt: str
    completion: str
    rewards: dict[str, float | None]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found; every field is plain JSON.

    Lists over problems have one entry per problem, in the order of the split. An interval is a 95 % bootstrap over
    problems. `pass_at` and `intervals` leave out problems with fewer scored samples than the largest k (`left_out`).
    """

    task: str
    split: str
    seed: int
    samples: int  # per problem
    items: list[str]
    scored: list[int]  # samples with a score
    correct: list[int]  # samples whose score is 1
    pass_at: dict[str, float]  # k -> mean over problems
    intervals: dict[str, tuple[float, float]]
    left_out: int  # problems without enough scored samples
    missing: int  # samples without a score
    truncated: int  # samples that hit a length or turn limit
    mean_tokens: float  # sampled tokens per rollout
    distinct_correct: float  # different correct completions per problem, mean
    distinct_answers: float  # different answers per problem, mean
    distinct_2: float  # Distinct-2 of a problem's completions, mean over problems that have bigrams
    answer_entropy: float  # nats, mean over problems
    examples: list[Sample]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN (a figure that is not defined) becomes None."""
        return _plain(asdict(self))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        values = {name: _number(value) for name, value in fields.items()}
        values["pass_at"] = {k: _number(value) for k, value in fields["pass_at"].items()}
        values["intervals"] = {k: (_number(low), _number(high)) for k, (low, high) in fields["intervals"].items()}
        values["examples"] = [Sample(**sample) for sample in fields["examples"]]
        return cls(**values)


def evaluate(
    policy: Policy,
    renderer: Renderer,
    task: Task,
    *,
    items: int,
    n: int,
    ks: Sequence[int],
    sampling: Sampling,
    seed: int = 0,
    split: Split = "test",
    correct: str = "correct",
    answer: Callable[[Rollout], str] = lambda rollout: rollout.completion.strip(),
    limits: Limits | None = None,
    sampler: Sampler | None = None,
    examples: int = 3,
) -> Evaluation:
    """Sample n rollouts for each of the first `items` problems of a split and estimate pass@k for every k.

    correct: the reward component that is 1 for a solved problem. answer: what counts as the answer for the figures of
    diversity. sampler: of this policy, if there is one already (it is refreshed); else a new one. Random numbers depend
    on seed, problem and sample only, so two policies are compared with the same ones. A split with fewer problems is
    used whole.
    Where torch.distributed is in use, every process calls this and samples its share of the problems. Raises UserError
    for a k above n, an empty split or a component that the task does not have.
    """
    if not ks or min(ks) < 1 or max(ks) > n:
        raise UserError(f"ks={list(ks)} must lie between 1 and n={n}, the samples per problem; raise n or drop some k")
    if correct not in task.rubric.names:
        raise UserError(f"task {task.name!r} has no reward {correct!r}; it has: {', '.join(task.rubric.names)}")
    if items < 1:
        raise UserError(f"items is {items}; it must be at least 1")
    count = len({task.environment(split, index).item for index in range(items)})  # then the split begins again
    if sampler is None:
        sampler = policy.sampler()
    else:
        sampler.refresh()
    ranks = here()
    places = [(index, sample) for index in range(count)[ranks.rank :: ranks.world] for sample in range(n)]
    mine = collect(
        sampler,
        renderer,
        [task.environment(split, index) for index, _ in places],
        [(seed, EVALUATION, index, sample) for index, sample in places],
        sampling,
        task.rubric,
        fit(Limits(max_turns=task.max_turns) if limits is None else limits, policy),
    )
    rollouts = ranks.share(mine)
    groups = [rollouts[i : i + n] for i in range(0, len(rollouts), n)]
    return _summary(groups, task.name, split, seed, ks, correct, answer, examples)


def _summary(
    groups: list[list[Rollout]],
    task: str,
    split: str,
    seed: int,
    ks: Sequence[int],
    correct: str,
    answer: Callable[[Rollout], str],
    examples: int,
) -> Evaluation:
    right = [[rollout for rollout in group if rollout.rewards[correct] == 1] for group in groups]
    scored = np.array([sum(rollout.rewards[correct] is not None for rollout in group) for group in groups])
    solved = np.array([len(group) for group in right])
    enough = scored >= max(ks)
    values = {str(k): pass_at_k(scored[enough], solved[enough], k) for k in sorted(set(ks))}
    everyone = [rollout for group in groups for rollout in group]
    answers = [[answer(rollout) for rollout in group] for group in groups]
    bigrams = [distinct_n([rollout.completion for rollout in group]) for group in groups]
    return Evaluation(
        task=task,
        split=split,
        seed=seed,
        samples=len(groups[0]),
        items=[group[0].item for group in groups],
        scored=scored.tolist(),
        correct=solved.tolist(),
        pass_at={k: _mean(value.tolist()) for k, value in values.items()},
        intervals={k: bootstrap_interval(value, seed=seed) for k, value in values.items()},
        left_out=int((~enough).sum()),
        missing=len(everyone) - int(scored.sum()),
        truncated=sum(rollout.stop == Stop.TRUNCATED for rollout in everyone),
        mean_tokens=_mean([rollout.sampled_tokens() for rollout in everyone]),
        distinct_correct=_mean([distinct([rollout.completion.strip() for rollout in group]) for group in right]),
        distinct_answers=_mean([distinct(group) for group in answers]),
        distinct_2=_mean([value for value in bigrams if not math.isnan(value)]),
        answer_entropy=_mean([answer_entropy(group) for group in answers]),
        examples=[_sample(group[0]) for group in groups[:examples]],
    )


def _sample(rollout: Rollout) -> Sample:
    prompt = "\n".join(f"{message['role']}: {message['content']}" for message in rollout.messages[:-1])
    return Sample(rollout.item, prompt, rollout.completion, dict(rollout.rewards))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _number(value: Any) -> Any:
    return math.nan if value is None else value
