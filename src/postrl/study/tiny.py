"""What studies on tiny decoders share: a base that imitates demonstrations, and answers to held-out problems."""

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from postrl.collect import collect
from postrl.envs.single_turn import Problems
from postrl.evaluate import EVALUATION
from postrl.method import Method
from postrl.papers.rft import rft
from postrl.policies.base import Renderer, Sampling
from postrl.policies.chat import Characters
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig
from postrl.record import read_metrics
from postrl.rollout import Rollout, Source
from postrl.settings import Settings
from postrl.source import Dataset
from postrl.study.definition import Curve
from postrl.train import train

SLOTS = 512  # of the sampler: a decoder this small is fastest when many completions run together
CHUNK = 8192  # tokens of a pass
NEVER = 10**6  # steps between checkpoints: a run that breaks off begins anew


def imitate(
    shown: Sequence[Rollout],
    renderer: Characters,
    folder: Path,
    *,
    hidden: int,
    layers: int,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
) -> None:
    """A decoder of four heads that learns the demonstrations, `batch` a step; the weights alone are kept, in `folder`.

    The learning rate rises over a twentieth of the steps and falls as a cosine.
    """
    config = DecoderConfig(
        vocabulary=renderer.size,
        hidden=hidden,
        layers=layers,
        heads=4,
        kv_heads=4,
        head_size=hidden // 4,
        intermediate=8 * hidden // 3,
        context=128,
    )
    policy = Decoder.random(config, seed)
    how = Settings(
        steps=steps,
        updates=1,
        learning_rate=learning_rate,
        warmup=steps // 20,
        schedule="cosine",
        token_budget=CHUNK,
        importance_cap=None,
        checkpoint_every=NEVER,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as scratch:
        train(rft(), policy, Dataset(shown, batch, seed), how, Path(scratch) / "run")
    policy.save(folder)


def held_out(
    policy: Decoder,
    renderer: Renderer,
    tasks: Sequence[Problems],
    *,
    problems: int,
    samples: int,
    max_tokens: int,
    seed: int,
) -> list[list[Rollout]]:
    """`samples` answers, scored by the first task's rubric, to each of the first `problems` held-out problems of every
    task; fewer problems if a task has no more. Random numbers depend on the seed, problem and sample alone."""
    places = [(task, index) for task in tasks for index in range(min(problems, task.size("test")))]
    rollouts = collect(
        policy.sampler(SLOTS),
        renderer,
        [task.environment("test", index) for task, index in places for _ in range(samples)],
        [(seed, EVALUATION, group, sample) for group in range(len(places)) for sample in range(samples)],
        Sampling(max_tokens=max_tokens),
        tasks[0].rubric,
    )
    return [rollouts[start : start + samples] for start in range(0, len(rollouts), samples)]


def trained(method: Method, policy: Decoder, source: Source, settings: Settings, folder: Path) -> list[dict]:
    """Train the policy in place; gives the metrics of each step. Rollouts and checkpoints are deleted."""
    train(method, policy, source, settings, folder)
    for large in ("rollouts", "checkpoints"):  # tens of megabytes a run; the metrics stay
        shutil.rmtree(folder / large)
    return read_metrics(folder / "metrics.jsonl")


def mean_of(lines: Sequence[Mapping[str, float]], name: str) -> float:
    """Of a figure over the steps that have it; NaN if none has."""
    values = [line[name] for line in lines if name in line]
    return math.fsum(values) / len(values) if values else math.nan


def course(lines: Sequence[Mapping[str, float]], name: str, label: str) -> Curve:
    """A figure over training."""
    points = [(float(line["step"]), float(line[name])) for line in lines if name in line]
    return Curve(label, tuple(x for x, _ in points), tuple(y for _, y in points))
