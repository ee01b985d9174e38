"""Keys and values of the completions under way: one place (slot) each, and one per prompt that several share."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from postrl.policies.decoder_config import DecoderConfig

FIRST_LENGTH = 64
SLOTS = (64, 512)  # at least, at most, where nobody says how many
SLOT_BYTES = 2**30  # of the keys and values in all of more than the least


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prompt that ran once: keys, values [layers, kv, tokens, D] and the `logits` [V] of what follows it. `shared`:
    its samples read them in place; else each copies them into its slot."""

    prompt: tuple[int, ...]
    keys: Tensor
    values: Tensor
    logits: Tensor
    shared: bool

    @property
    def length(self) -> int:
        return self.keys.shape[2]


def slots_for(waiting: int, token_bytes: int, longest: int) -> int:
    """How many of `waiting` completions to decode at a time, each of at most `longest` tokens: a power of two.

    A step's many small calls cost the same for few rows as for many, so a small model gains by more rows as long as
    they find work: 3 M parameters take a quarter less time for 512 rows than for 64. A large one gains little, and its
    keys and values fill the memory: beyond 64 rows they may take 1 GiB (up to twice that while `room` doubles).
    """
    least, most = SLOTS
    count = least
    while count < min(waiting, most) and 2 * count * longest * token_bytes <= SLOT_BYTES:
        count *= 2
    return count


@dataclass(eq=False)
class Cache:
    """keys, values [layers, slots, kv, room, D]. `room` doubles when a context outgrows it; memory is never given back
    before the cache is."""

    config: DecoderConfig
    slots: int
    like: Tensor  # its type and device
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.values = self._empty(0)

    @property
    def room(self) -> int:
        return self.keys.shape[3]

    def reserve(self, length: int) -> None:
        """Room for contexts of `length` tokens."""
        if length <= self.room:
            return
        room = max(self.room, FIRST_LENGTH)
        while room < length:
            room *= 2
        used, room = self.room, min(room, max(length, self.config.context))
        self.keys, self.values = self._grown(self.keys, used, room), self._grown(self.values, used, room)

    def write(self, slot: int, start: int, keys: Tensor, values: Tensor, layer: int | slice = slice(None)) -> None:
        """keys, values [(layers,) kv, n, D] of the tokens from `start` on."""
        self.reserve(start + keys.shape[-2])
        place = slice(start, start + keys.shape[-2])
        self.keys[layer, slot, :, place] = keys
        self.values[layer, slot, :, place] = values

    def read(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies [layers, kv, length, D]."""
        return self.keys[:, slot, :, :length].clone(), self.values[:, slot, :, :length].clone()

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def _empty(self, room: int) -> Tensor:
        shape = (self.config.layers, self.slots, self.config.kv_heads, room, self.config.head_size)
        return torch.zeros(shape, dtype=self.like.dtype, device=self.like.device)

    def _grown(self, old: Tensor, used: int, room: int) -> Tensor:
        new = self._empty(room)
        new[:, :, :, :used] = old
        return new
