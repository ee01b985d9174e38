"""What the sides of a row do. Standard library only: this module also runs where a peer has its own environment."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

Kind = Literal["step", "agreement", "sample", "train", "statistics"]
LEARNING_RATE = 1e-6
TOKEN_BUDGET = 4096  # of one forward and backward pass, on every side


@dataclass(frozen=True)
class Work:
    """One piece of work, the same on every side.

    step: `prompts` x `completions` are sampled, rewarded and trained on by GRPO, one AdamW update. agreement: the same
    with given completions of ragged lengths, so that the gradients of the sides can be compared. sample: `prompts`
    different prompts, no training. train: forward, backward and AdamW on `prompts` rows of `prompt_tokens`, every token
    but the first predicted. statistics: advantages of `prompts` rewards.
    natural: chat prompts, and completions end where the model ends them; else each has exactly `new_tokens`.
    """

    kind: Kind
    model: str = ""
    prompts: int = 8
    completions: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 64
    natural: bool = False

    @property
    def rows(self) -> int:
        return self.prompts * self.completions

    @property
    def pass_rows(self) -> int:
        """Rows of one forward and backward pass on a side that pads: the most that divide the rows within the budget"""
        fitting = max(1, TOKEN_BUDGET // (self.prompt_tokens + self.new_tokens))
        return max(n for n in range(1, self.rows + 1) if self.rows % n == 0 and n <= max(1, fitting))


@dataclass(frozen=True)
class Conditions:
    """How every side of a run computes. compute: the type of the matrix products; weights and sums are float32."""

    threads: int = 2
    compute: Literal["float32", "bfloat16"] = "float32"
    wait_policy: str = "default"  # of OpenMP's waiting threads: "default" leaves OMP_WAIT_POLICY unset


@dataclass(frozen=True)
class Job:
    """All that a worker is told. texts and tokens: the prompts; given: completions per prompt, for kind "agreement"."""

    work: Work
    conditions: Conditions
    model: str = ""  # a Hugging Face folder
    scratch: str = ""  # a folder for what the worker writes
    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    given: list[list[list[int]]] = field(default_factory=list)
    variant: str = ""  # of a peer: see the side

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        fields = json.loads(path.read_text(encoding="utf-8"))
        work, conditions = Work(**fields.pop("work")), Conditions(**fields.pop("conditions"))
        return cls(work=work, conditions=conditions, **fields)

    def as_variant(self, variant: str, scratch: Path) -> Self:
        return replace(self, variant=variant, scratch=str(scratch))


def reward(tokens: Sequence[int]) -> float:
    """Share of even token ids: it varies within a group, costs nothing, and is the same on every side."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))
