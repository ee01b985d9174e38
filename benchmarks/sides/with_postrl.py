"""postrl's side: a whole step of the loop, sampling alone, training alone."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console

from benchmarks.channel import Laps
from benchmarks.sides.updates import Updates
from benchmarks.work import LEARNING_RATE, TOKEN_BUDGET, Job, reward
from postrl.batch import Stop
from postrl.collect import Limits
from postrl.display import Display
from postrl.envs.single_turn import Problem, Problems
from postrl.memory import keep_memory
from postrl.method import Method, Term
from postrl.optimise import Seen, Trainer, update
from postrl.papers.grpo import grpo
from postrl.policies.base import Renderer, Sampling
from postrl.policies.chat import ChatTemplate, PlainText
from postrl.policies.decoder import Decoder
from postrl.policies.sampler import sample
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Message, Rollout, Turn, collate
from postrl.settings import Settings
from postrl.source import OnPolicy
from postrl.train import Source, train
from postrl.weights import token_mean

STEPS = 10**6  # more than anybody runs: the parent ends the process


def main(job: Job) -> None:
    torch.set_num_threads(job.conditions.threads)
    keep_memory()  # as the recipes do
    work = {"step": step, "agreement": step, "sample": sampling, "train": training}[job.work.kind]
    work(job, load(job), Laps())


def load(job: Job) -> Decoder:
    """Float32 weights; matrix products in the type that the run computes in."""
    compute = getattr(torch, job.conditions.compute)
    return Decoder.load(
        Path(job.model), dtype=torch.float32, compute_dtype=None if compute == torch.float32 else compute
    )


# ---------------------------------------------------------------------------------------------- a whole step


@dataclass(frozen=True)
class Endless:
    """A renderer whose answers no token ends: every completion gets its full length."""

    inner: Renderer
    stop: frozenset[int] = frozenset()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.inner.prompt(messages)

    def extend(self, context: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self.inner.extend(context, messages)

    def answer(self, text: str) -> list[int]:
        return self.inner.answer(text)

    def text(self, tokens: Sequence[int]) -> str:
        return self.inner.text(tokens)


class Paced:
    """A source that lets a lap begin with each of its calls: a lap is everything from one call to the next."""

    def __init__(self, source: Source, laps: Laps, updates: Updates, run: Path) -> None:
        self._source, self._laps, self._updates, self._run = source, laps, updates, run
        self._facts: dict[str, object] = {}

    def __call__(self, step: int) -> list[Rollout]:
        self._laps.lap(**self._facts, **self._updates.facts())
        rollouts = self._source(step)
        lengths = [rollout.sampled_tokens() for rollout in rollouts]
        processed = sum(len(turn.tokens) for r in rollouts for turns in r.contexts for turn in turns)
        self._facts = {"tokens": sum(lengths), "lengths": sorted(lengths), "processed": processed}
        return rollouts


def step(job: Job, policy: Decoder, laps: Laps) -> None:
    """GRPO as TRL computes it by default: ddof 1, eps 1e-4, mean per answer, one update, clipping at 1."""
    work = job.work
    updates = Updates(policy, Path(job.scratch) if work.kind == "agreement" else None)
    run = Path(job.scratch) / "run"
    source = _given(job) if work.kind == "agreement" else _on_policy(job, policy)
    train(
        grpo(eps=1e-4),
        policy,
        Paced(source, laps, updates, run),
        Settings(
            steps=STEPS,
            updates=1,
            learning_rate=LEARNING_RATE,
            token_budget=TOKEN_BUDGET,
            checkpoint_every=STEPS,
            max_gradient_norm=float("inf") if work.kind == "agreement" else 1.0,
            importance_cap=None if work.kind == "agreement" else 2.0,  # given completions had no sampler
        ),
        run,
        display=Display(STEPS, console=Console(file=sys.stderr)),
    )


def _on_policy(job: Job, policy: Decoder) -> OnPolicy:
    work = job.work
    renderer = ChatTemplate.load(Path(job.model)) if work.natural else Endless(PlainText.load(Path(job.model)))
    rubric = Rubric((Reward("even", lambda rollout: reward(_sampled(rollout))),))
    return OnPolicy(
        Problems("benchmark", [Problem(text) for text in job.texts], rubric, test_share=0.0),
        policy,
        renderer,
        groups_per_step=work.prompts,
        group_size=work.completions,
        sampling=Sampling(max_tokens=work.new_tokens),
        limits=Limits(max_context=policy.context_length),
    )


def _sampled(rollout: Rollout) -> list[int]:
    return [token for turns in rollout.contexts for turn in turns if turn.sampled for token in turn.tokens]


def _given(job: Job) -> Source:
    """The job's own completions. Their log-probabilities under a sampler are unknown, and not read."""

    def source(step: int) -> list[Rollout]:
        return [
            Rollout(
                item=str(group),
                group=group,
                sample=number,
                contexts=[[Turn(prompt, sampled=False), Turn(tokens, sampled=True, logp=[0.0] * len(tokens))]],
                rewards={"even": reward(tokens)},
                stop=Stop.TRUNCATED,
            )
            for group, (prompt, members) in enumerate(zip(job.tokens, job.given, strict=True))
            for number, tokens in enumerate(members)
        ]

    return source


# ---------------------------------------------------------------------------------------------- parts of a step


def sampling(job: Job, policy: Decoder, laps: Laps) -> None:
    """With whatever the sampler derives from the weights made anew in each lap, as in training."""
    work, sampler, facts, lap = job.work, policy.sampler(), {}, 0
    how = Sampling(max_tokens=work.new_tokens)
    while True:
        laps.lap(**facts)
        sampler.refresh()
        done = sample(sampler, job.tokens, work.completions, how, seed=0, step=lap)
        lengths = sorted(len(completion.tokens) for group in done for completion in group)
        facts, lap = {"tokens": sum(lengths), "lengths": lengths}, lap + 1


def training(job: Job, policy: Decoder, laps: Laps) -> None:
    """One update on the mean negative log-probability of every token but the first of each row."""
    rollouts = [
        Rollout(
            item=str(row),
            group=row,
            sample=0,
            contexts=[
                [Turn(tokens[:1], sampled=False), Turn(tokens[1:], sampled=True, logp=[0.0] * (len(tokens) - 1))]
            ],
            rewards={"none": 0.0},
        )
        for row, tokens in enumerate(job.tokens)
    ]
    batch = collate(rollouts)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    nll = Method("nll", lambda b: torch.ones_like(b.logp_old), (Term("nll", lambda b, a, f: -f.logp, token_mean),))
    settings = Settings(updates=1, token_budget=TOKEN_BUDGET, importance_cap=None)
    trainer = Trainer(nll, policy, optimizer, Accelerator(), settings, free_old=True)
    batch = replace(batch, prefix_id=torch.arange(len(rollouts)))  # nothing to share, not even a first token
    rows, advantage = torch.arange(len(rollouts)), torch.ones_like(batch.logp_old)
    updates, facts = Updates(policy), {}
    while True:
        laps.lap(**facts, **updates.facts())
        seen = Seen(torch.ones_like(advantage), torch.zeros_like(advantage), batch.logp_old.clone())
        update(trainer, batch, rows, advantage, LEARNING_RATE, seen)
        facts = {
            "tokens": int(batch.valid.sum()),
            "loss": seen.losses[-1],
            "gradient_norm": seen.gradient_norms[-1],
        }


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[1])))
