"""Where the tokens of a batch stand when they are laid end to end, without padding and with shared prefixes once.

Order of the packed tokens: the shared prefixes, the rows that follow one (prefix by prefix), the other rows. A prefix
is shared if at least two rows with sampled tokens begin with it. Tokens after a row's last prediction are left out.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from postrl.batch import Batch
from postrl.policies.interventions import Places, apart, prompt_ends


@dataclass(frozen=True, eq=False)
class Block:
    """`tokens` packed tokens in a right-padded grid [count, length]; `slot` is each one's flat place in the grid, None
    if the grid has no holes."""

    tokens: int
    count: int
    length: int
    slot: Tensor | None

    def pad(self, x: Tensor) -> Tensor:
        """[tokens, ...] -> [count, length, ...] with zeros in the holes."""
        if self.slot is not None:
            x = x.new_zeros(self.count * self.length, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (self.count, self.length))

    def unpad(self, x: Tensor) -> Tensor:
        """[count, length, ...] -> [tokens, ...]."""
        x = x.flatten(0, 1)
        return x if self.slot is None else x.index_select(0, self.slot)


@dataclass(frozen=True, eq=False)
class Packed:
    """P packed tokens of a batch, and for each of the n tokens asked for a packed position: of the token before it,
    which predicts it, if the masked ones were asked for, else its own."""

    tokens: Tensor  # int64 [P]
    positions: Tensor  # int64 [P], place in the row
    prefixes: Block
    rows: Block
    cross: Block  # the tokens after a shared prefix as [prefixes, most tokens after one]
    hole: Tensor | None  # bool [prefixes, 1, 1, longest prefix]; None if prefixes are equally long
    source: Tensor  # int64 [n]
    row: Tensor  # int64 [n]
    column: Tensor  # int64 [n]
    places: Places | None = None  # of the packed tokens, for interventions

    @property
    def prefix_part(self) -> slice:
        return slice(0, self.prefixes.tokens)

    @property
    def row_part(self) -> slice:
        return slice(self.prefixes.tokens, None)

    @property
    def cross_part(self) -> slice:
        return slice(self.prefixes.tokens, self.prefixes.tokens + self.cross.tokens)

    @cached_property
    def _bias(self) -> dict[torch.dtype, Tensor]:
        return {}

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """0 where a prefix has a key and −inf where it has none; None if there is nothing to hide."""
        if self.hole is None:
            return None
        if dtype not in self._bias:
            zeros = torch.zeros(self.hole.shape, dtype=dtype, device=self.hole.device)
            self._bias[dtype] = zeros.masked_fill_(self.hole, -torch.inf)
        return self._bias[dtype]

    def grid(self, x: Tensor, batch: Batch) -> Tensor:
        """[n, ...] for the masked tokens -> [B, T, ...], zeros elsewhere."""
        return x.new_zeros(*batch.tokens.shape, *x.shape[1:]).index_put((self.row, self.column), x)


def pack(batch: Batch, at: Bool[Tensor, "B T"] | None = None, places: bool = False) -> Packed:
    """Everything that the prediction of the masked tokens needs; with `at`, that those tokens' own states need.

    places: fill `Packed.places`, and share a prefix only where they agree.
    Raises ValueError if a row's first token is masked (nothing predicts it), if a token asked for is padding, or if
    rows with one prefix_id do not begin with the same prefix_length tokens."""
    batch = apart(batch) if places else batch
    device, ahead = batch.tokens.device, int(at is None)
    tokens, mask = batch.tokens.cpu().numpy(), (batch.mask if at is None else at).cpu().numpy()
    row, column = np.nonzero(mask)
    _check(batch, mask, ahead)
    used = np.where(mask.any(1), mask.shape[1] - ahead - mask[:, ::-1].argmax(1), 0) if mask.size else np.zeros(0, int)
    if mask.size and not used.any():
        used[0] = 1  # one token for nothing, so that every weight still has a gradient, as data parallelism wants
    groups = _shared(batch, tokens, used)
    alone = sorted(set(np.flatnonzero(used)) - {b for _, members in groups for b in members})
    order = np.array([b for _, members in groups for b in members] + alone, dtype=int)
    heads = np.array([length for length, _ in groups], dtype=int)
    first = np.zeros(len(used), dtype=int)  # tokens of each row that are packed with its prefix
    prefix_start, base = np.zeros(len(used), dtype=int), _starts(heads)
    for r, (length, members) in enumerate(groups):
        first[members], prefix_start[members] = length, base[r]
    lengths = (used - first)[order]
    row_start = np.zeros(len(used), dtype=int)
    row_start[order] = heads.sum() + _starts(lengths)
    where = [(members[0], 0, length) for length, members in groups]
    where += [(int(b), int(first[b]), int(used[b])) for b in order]
    place = column - ahead
    source = np.where(place < first[row], prefix_start[row] + place, row_start[row] + place - first[row])
    prefixes, rows = _block(heads), _block(lengths)
    after = [int((used[members] - length).sum()) for length, members in groups]
    hole = np.arange(prefixes.length) >= heads[:, None] if prefixes.slot is not None else None
    on = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device)  # noqa: E731
    line = lambda grid: on(np.concatenate([grid[b, i:j] for b, i, j in where] or [grid[:0].ravel()]))  # noqa: E731
    ids, positions = line(tokens), line(np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape))
    known = (line(x.cpu().numpy()) for x in (batch.mask, prompt_ends(batch))) if places else None
    return Packed(
        tokens=ids,
        positions=positions,
        prefixes=_on(prefixes, device),
        rows=_on(rows, device),
        cross=_on(_block(np.array(after, dtype=int)), device),
        hole=None if hole is None else on(hole[:, None, None]),
        source=on(source),
        row=on(row),
        column=on(column),
        places=None if known is None else Places(ids, positions, *known),
    )


def _check(batch: Batch, mask: np.ndarray, ahead: int) -> None:
    if ahead and mask.shape[1] and mask[:, 0].any():
        b = int(mask[:, 0].argmax())
        raise ValueError(f"row {b} begins with a sampled token, which nothing predicts: give it a token of context")
    if (mask & ~batch.valid.cpu().numpy()).any():
        name = "mask" if ahead else "at"
        raise ValueError(f"a masked token is padding: `{name}` must lie within `valid`")


def _shared(batch: Batch, tokens: np.ndarray, used: np.ndarray) -> list[tuple[int, list[int]]]:
    """(packed length, rows) of every prefix that at least two rows with sampled tokens begin with."""
    ids, lengths = batch.prefix_id.tolist(), batch.prefix_length.tolist()
    members: dict[int, list[int]] = {}
    for b in np.flatnonzero(used):
        members.setdefault(ids[b], []).append(int(b))
    groups = []
    for number, rows in members.items():
        if len(rows) < 2 or not lengths[rows[0]]:
            continue
        length, head = lengths[rows[0]], tokens[rows[0], : lengths[rows[0]]]
        for b in rows:
            if lengths[b] != length or (tokens[b, :length] != head).any():
                raise ValueError(f"rows {rows[0]} and {b} have prefix_id {number} but do not begin alike")
        length = min(length, *(int(used[b]) for b in rows))
        groups.append((length, rows))
    return groups


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _block(lengths: np.ndarray) -> Block:
    lengths = lengths.astype(np.int64)
    count, length, tokens = len(lengths), int(lengths.max(initial=0)), int(lengths.sum())
    if tokens == count * length:
        return Block(tokens, count, length, None)
    within = np.arange(tokens) - np.repeat(_starts(lengths), lengths)
    return Block(tokens, count, length, torch.from_numpy(np.repeat(np.arange(count) * length, lengths) + within))


def _on(block: Block, device: torch.device) -> Block:
    return Block(block.tokens, block.count, block.length, None if block.slot is None else block.slot.to(device))
