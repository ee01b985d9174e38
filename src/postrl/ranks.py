"""Several processes that train one policy: who does what, and what they tell one another.

Every process holds the step's whole rollout batch and computes the same advantages and weights on it; then it runs its
share of the forward and backward passes. So groups may span processes, and the number of processes changes an update
by no more than float rounding. Processes share a file system; the first one alone writes.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from postrl.batch import Batch
from postrl.errors import UserError
from postrl.files import as_fields
from postrl.method import Atom
from postrl.packing import micro_batches, shares
from postrl.rollout import Rollout, from_json


@runtime_checkable
class Divisible(Protocol):
    """A source that can make one process's part of a step: whole groups, each at exactly one process."""

    def part(self, step: int, rank: int, world: int) -> list[Rollout]: ...


@dataclass(frozen=True)
class Pass:
    """One micro-batch of this process. A pass that does not count runs beside the others' last ones, with weight 0."""

    rows: Int[Tensor, "b"]
    counts: bool
    last: bool


@dataclass(frozen=True)
class Ranks:
    """This process among `world`; alone, every method here does nothing but its plain work."""

    rank: int = 0
    world: int = 1
    device: torch.device | str = "cpu"  # where a collective's tensors must lie

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes, in `x` itself."""
        if self.world > 1:
            with connected():
                dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        return bool(self.total(torch.tensor(int(flag), device=self.device)) > 0)

    def gather(self, text: str) -> list[str]:
        """One text of every process, in their order."""
        if self.world == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(data)
        sizes = self.total(sizes).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in sizes]
        with connected():
            dist.all_gather(parts, padded)
        texts = [bytes(part[:size].cpu().numpy()).decode() for part, size in zip(parts, sizes, strict=True)]
        return ["" if part == " " else part for part in texts]

    def once(self, act: Callable[[], None]) -> None:
        """The first process acts, the others wait. What it raises as UserError, all raise."""
        problem = ""
        if self.first:
            try:
                act()
            except UserError as error:
                if self.world == 1:
                    raise
                problem = str(error)
        if problem := self.gather(problem)[0]:
            raise UserError(problem)

    def draw(self, source: Callable[[int], list[Rollout]], step: int) -> list[Rollout]:
        """The step's rollouts, the same in every process. A source that is not `Divisible` works in the first one."""
        if self.world == 1:
            return source(step)
        if isinstance(source, Divisible):
            return self.share(source.part(step, self.rank, self.world))
        return self.share(source(step) if self.first else [])

    def share(self, mine: list[Rollout]) -> list[Rollout]:
        """Everyone's rollouts, in the order of their groups; a group must be whole at one process."""
        if self.world == 1:
            return mine
        texts = self.gather("\n".join(json.dumps(rollout, default=as_fields) for rollout in mine))
        everyone = [from_json(json.loads(line)) for text in texts for line in text.splitlines()]
        return sorted(everyone, key=lambda rollout: rollout.group)  # stable: a group's members keep their order

    def passes(self, batch: Batch, token_budget: int, atom: Atom = "row") -> list[Pass]:
        """This process's micro-batches of a batch; the same number in every process, at least one."""
        if self.world == 1:
            cut = micro_batches(batch, token_budget, atom)
            return [Pass(rows, True, number == len(cut)) for number, rows in enumerate(cut, 1)]
        mine = shares(batch, self.world, atom)[self.rank]
        cut = [mine[rows] for rows in micro_batches(batch.rows(mine), token_budget, atom)] if len(mine) else []
        counts = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        counts[self.rank] = len(cut)
        most = int(self.total(counts).max())
        shortest = batch.valid.sum(1).where(batch.mask.any(1), batch.valid.shape[1] + 1).argmin()[None]
        passes = [*cut, *[shortest] * (most - len(cut))]
        return [Pass(rows, number <= len(cut), number == most) for number, rows in enumerate(passes, 1)]


ALONE = Ranks()


def here() -> Ranks:
    """This process's place, from torch.distributed; `ALONE` where that is not in use."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    device = "cpu" if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def launched_first() -> bool:
    """Whether this process is the first of those that a launcher started, also before they talk to one another."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def connected() -> Iterator[None]:
    """Turns the end of another process into a sentence. Raises UserError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise UserError(
                "another process of this run has ended or cannot be reached (its own message says why): start all of "
                f"them again with --resume ({str(error).splitlines()[0]})"
            ) from error
        raise
