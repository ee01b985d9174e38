"""The rows of the benchmark: what is compared with whom, and what it must reach."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.work import Work

Figure = Literal["speed", "memory", "share", "milliseconds"]


@dataclass(frozen=True)
class Side:
    """Who does the work. needs: the package that must be installed. variant: see the side's module."""

    name: str
    module: str
    needs: str = ""
    variant: str = ""
    own_environment: bool = False
    only_bfloat16: bool = False


@dataclass(frozen=True)
class Goal:
    """speed: times as fast as the peer, at least. memory: share of the peer's peak, at most. share: of the limit, at
    least. milliseconds: of the slowest estimator, at most."""

    figure: Figure
    bound: float
    peer: str = ""


@dataclass(frozen=True)
class Row:
    """peers run in every round, `once` only after the first (for figures beside the comparison). warm: laps of every
    side that are not counted. minutes: no further round begins after that; a rerun goes on up to `pairs`. axis: what a
    scaling row varies, and its value."""

    name: str
    title: str
    work: Work
    peers: tuple[Side, ...] = ()
    once: tuple[Side, ...] = ()
    goals: tuple[Goal, ...] = ()
    pairs: int = 5
    warm: int = 1
    minutes: float = 12.0
    axis: tuple[str, int] | None = None


OURS = Side("postrl", "benchmarks.sides.with_postrl")
STATISTICS = Side("postrl", "benchmarks.sides.group_statistics")
TRL = Side("TRL", "benchmarks.sides.with_trl", "trl")
TRL_CHECKPOINTING = Side("TRL, activation checkpointing", TRL.module, "trl", "checkpointing")
TRL_BFLOAT16 = Side("TRL, bfloat16 weights", TRL.module, "trl", "bfloat16", only_bfloat16=True)
TRANSFORMERS = Side("transformers", "benchmarks.sides.with_transformers", "transformers")
VLLM = Side("vLLM", "benchmarks.sides.with_vllm", "vllm", own_environment=True)
LIMIT = Side("limit", "benchmarks.sides.bare_products")


def rows() -> list[Row]:
    """Those of `make bench`: sizes such that they take about 40 minutes on two cores."""
    step = Work("step", "smollm2", prompts=8, completions=8, prompt_tokens=64, new_tokens=64)
    beside = (TRL_CHECKPOINTING, TRL_BFLOAT16)
    return [
        *_agreements("smollm2", "characters"),
        Row(
            "step-smollm2",
            "GRPO step, SmolLM2-135M, 8 prompts × 8 completions × 64 tokens",
            step,
            (TRL,),
            (*beside, LIMIT),
            (Goal("speed", 6.0, TRL.name), Goal("memory", 0.5, TRL.name)),
        ),
        Row(
            "step-smollm2-natural",
            "GRPO step, SmolLM2-135M, 8 chat prompts × 8 completions of natural length, at most 64 tokens",
            Work("step", "smollm2", prompts=8, completions=8, prompt_tokens=64, new_tokens=64, natural=True),
            (TRL,),
            goals=(Goal("speed", 6.0, TRL.name), Goal("memory", 0.5, TRL.name)),
            pairs=5,
        ),
        Row(
            "step-smollm2-1024",
            "GRPO step, SmolLM2-135M, 8 prompts of 1,024 tokens × 8 completions × 64 tokens",
            Work("step", "smollm2", prompts=8, completions=8, prompt_tokens=1024, new_tokens=64),
            (TRL,),
            (LIMIT,),
            (Goal("speed", 15.0, TRL.name),),
            warm=0,
            minutes=1.0,  # a pair takes some twenty: one per call
        ),
        Row(
            "step-characters",
            "GRPO step, 3 M character model, 32 prompts × 16 completions × 64 tokens",
            Work("step", "characters", prompts=32, completions=16, prompt_tokens=64, new_tokens=64),
            (TRL,),
            (LIMIT,),
            (Goal("speed", 6.0, TRL.name),),
        ),
        Row(
            "sample-smollm2",
            "sampling, SmolLM2-135M, 64 sequences of 32 + 64 tokens",
            Work("sample", "smollm2", prompts=64, prompt_tokens=32, new_tokens=64),
            (TRANSFORMERS, VLLM, LIMIT),
            goals=(
                Goal("speed", 2.5, TRANSFORMERS.name),
                Goal("speed", 2.3, VLLM.name),
                Goal("share", 0.6, LIMIT.name),
            ),
        ),
        Row(
            "train-smollm2",
            "training, SmolLM2-135M, 32 different rows of 128 tokens",
            Work("train", "smollm2", prompts=32, prompt_tokens=128, new_tokens=0),
            (TRANSFORMERS, LIMIT),
            goals=(Goal("speed", 1.2, TRANSFORMERS.name), Goal("share", 0.6, LIMIT.name)),
        ),
        _statistics(10**6),
        *_scaling(prompts=8, sizes=(4, 16, 64), lengths=(32, 256, 2048), completions=(16, 64, 256), pairs=3),
    ]


def quick_rows() -> list[Row]:
    """Those of `make bench-quick`: the character model, few tokens, few pairs. They show that the harness works and
    roughly where things are; their figures are no evidence."""
    return [
        *_agreements("characters"),
        Row(
            "step-characters",
            "GRPO step, 3 M character model, 8 prompts × 8 completions × 32 tokens",
            Work("step", "characters", prompts=8, completions=8, prompt_tokens=32, new_tokens=32),
            (TRL,),
            pairs=3,
        ),
        Row(
            "sample-characters",
            "sampling, 3 M character model, 64 sequences of 32 + 32 tokens",
            Work("sample", "characters", prompts=64, prompt_tokens=32, new_tokens=32),
            (TRANSFORMERS,),
            (LIMIT,),
            pairs=2,
        ),
        Row(
            "train-characters",
            "training, 3 M character model, 32 different rows of 64 tokens",
            Work("train", "characters", prompts=32, prompt_tokens=64, new_tokens=0),
            (TRANSFORMERS,),
            (LIMIT,),
            pairs=2,
        ),
        _statistics(10**5),
        *_scaling(prompts=4, sizes=(4, 16), lengths=(), completions=(), pairs=2),
    ]


def _agreements(*models: str) -> list[Row]:
    """Both trainers on the same given completions: their gradients must be the same before anything is timed."""
    return [
        Row(
            f"agreement-{model}",
            f"{model}: one GRPO update on the same completions of ragged lengths",
            Work("agreement", model, prompts=2, completions=4, prompt_tokens=24, new_tokens=16),
            (TRL,),
            pairs=1,
            warm=0,
        )
        for model in models
    ]


def _statistics(count: int) -> Row:
    title = f"group statistics, {count:,} rewards in ragged groups of 2 to 16"
    return Row("statistics", title, Work("statistics", prompts=count), goals=(Goal("milliseconds", 50.0),), pairs=7)


def _scaling(
    prompts: int, sizes: tuple[int, ...], lengths: tuple[int, ...], completions: tuple[int, ...], pairs: int
) -> list[Row]:
    """Steps of the character model that vary one size each."""
    works = [
        *(("group size", g, Work("step", "characters", prompts, g, 64, 64)) for g in sizes),
        *(("prompt tokens", p, Work("step", "characters", 4, 8, p, 32)) for p in lengths),
        *(("completion tokens", c, Work("step", "characters", prompts, 8, 64, c)) for c in completions),
    ]
    return [
        Row(
            f"scale-{axis.split()[0]}-{value}",
            f"{axis} {value}: {work.prompts} × {work.completions} × {work.new_tokens}, prompts of {work.prompt_tokens}",
            work,
            (TRL,),
            (LIMIT,),
            pairs=pairs,
            minutes=2.0,
            axis=(axis, value),
        )
        for axis, value, work in works
    ]
