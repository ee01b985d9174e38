"""How a rollout batch is cut: units into mini-batches (one update each), rows into micro-batches (one forward each).

Neither changes what is computed: weights are made per mini-batch before it is cut into micro-batches.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from postrl.batch import Batch
from postrl.method import Atom


def mini_batches(batch: Batch, count: int, seed_sequence: Sequence[int]) -> list[Bool[Tensor, "N"]]:
    """Units -> `count` disjoint sets of whole groups (the first grouping), shuffled, near equal in number of units.

    Fewer groups than `count` give one mini-batch per group; none is ever empty. The same seed sequence (seed, step,
    epoch, …) gives the same sets. Raises ValueError if count < 1.
    """
    if count < 1:
        raise ValueError(f"mini-batches: the count must be at least 1, not {count}")
    _, group, size = torch.unique(batch.group(), return_inverse=True, return_counts=True)
    rng = np.random.default_rng(list(seed_sequence))
    sizes = size.cpu().numpy()
    shuffled = rng.permutation(len(sizes))
    # Largest group first, each to the mini-batch with the fewest units: equal sizes keep their shuffled order.
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    count = min(count, len(sizes))
    number = rng.permutation(count)  # ties go to the first place, which would favour mini-batch 0
    heap = [(0, place) for place in range(count)]
    assigned = np.zeros(len(sizes), dtype=np.int64)
    for index in order:
        units, place = heap[0]
        assigned[index] = number[place]
        heapq.heapreplace(heap, (units + int(sizes[index]), place))
    home = torch.from_numpy(assigned).to(group.device)[group]
    return [home == mini_batch for mini_batch in range(count)]


def micro_batches(batch: Batch, token_budget: int, atom: Atom = "row") -> list[Int[Tensor, "..."]]:
    """Rows -> row indices per micro-batch, each row once, longest first.

    Cost of a micro-batch in tokens: what each row adds after its prefix, and each distinct prefix once. It stays within
    `token_budget`, except that an atom (row, unit or group: never cut) above it goes alone. Atoms that share a prefix
    stay together while the budget allows; a family that exceeds it is split and its prefix computed once per piece.
    Families of like length are neighbours, so that padding is small. Raises ValueError if token_budget < 1.
    """
    if token_budget < 1:
        raise ValueError(f"micro-batches: the token budget must be at least 1, not {token_budget}")
    pieces, current = [], _Piece()
    for family in _families(batch, atom):
        if current.rows and current.cost_with(_together(family)) > token_budget:
            pieces.append(current)
            current = _Piece()
        for part in family:
            if current.rows and current.cost_with(part) > token_budget:
                pieces.append(current)
                current = _Piece()
            current.add(part)
    pieces += [current] if current.rows else []
    return [torch.tensor(piece.rows, dtype=torch.int64, device=batch.tokens.device) for piece in pieces]


def shares(batch: Batch, world: int, atom: Atom = "row") -> list[Int[Tensor, "..."]]:
    """Rows -> row indices for each of `world` processes, near equal in tokens; every row once, some maybe empty.

    Rows that share a prefix stay together if there are families enough for every process; atoms always do.
    """
    families = _families(batch, atom)
    whole = [_together(family) for family in families]
    pieces = whole if len(whole) >= world else [piece for family in families for piece in family]
    heap: list[tuple[int, int]] = [(0, rank) for rank in range(world)]
    mine: list[list[int]] = [[] for _ in range(world)]
    for piece in sorted(pieces, key=lambda piece: -(piece.own + piece.shared)):
        tokens, rank = heap[0]
        mine[rank] += piece.rows
        heapq.heapreplace(heap, (tokens + piece.own + piece.shared, rank))
    return [torch.tensor(sorted(rows), dtype=torch.int64, device=batch.tokens.device) for rows in mine]


@dataclass
class _Piece:
    """Rows, the tokens they add after their prefixes, the length of each distinct prefix, and of the longest row."""

    rows: list[int] = field(default_factory=list)
    own: int = 0
    prefixes: dict[int, int] = field(default_factory=dict)
    longest: int = 0
    shared: int = 0  # sum of the prefixes, kept so that adding a piece costs its own size only

    def cost_with(self, other: Self) -> int:
        return self.own + self.shared + other.own + self._new(other)

    def add(self, other: Self) -> None:
        self.shared += self._new(other)
        self.rows += other.rows
        self.own += other.own
        self.prefixes |= other.prefixes
        self.longest = max(self.longest, other.longest)

    def _new(self, other: Self) -> int:
        return sum(length for prefix, length in other.prefixes.items() if prefix not in self.prefixes)


def _together(pieces: Iterable[_Piece]) -> _Piece:
    total = _Piece()
    for piece in pieces:
        total.add(piece)
    return total


def _families(batch: Batch, atom: Atom) -> list[list[_Piece]]:
    """Atoms, longest first, under the prefix of their first row; families by their longest row, ties by row number."""
    names = {"row": torch.arange(len(batch.unit)), "unit": batch.unit, "group": batch.group()[batch.unit]}[atom]
    length = batch.valid.sum(1).tolist()
    prefixes, prefix_lengths = batch.prefix_id.tolist(), batch.prefix_length.tolist()
    atoms: dict[int, list[_Piece]] = {}
    for row, name in enumerate(names.tolist()):
        own = length[row] - prefix_lengths[row]
        piece = _Piece([row], own, {prefixes[row]: prefix_lengths[row]}, length[row], prefix_lengths[row])
        atoms.setdefault(name, []).append(piece)
    families: dict[int, list[_Piece]] = {}
    for pieces in atoms.values():
        families.setdefault(prefixes[pieces[0].rows[0]], []).append(_together(pieces))
    ordered = [sorted(family, key=lambda piece: -piece.longest) for family in families.values()]
    return sorted(ordered, key=lambda family: -family[0].longest)
