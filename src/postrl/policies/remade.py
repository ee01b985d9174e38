"""Tensors that the backward pass makes again from others it keeps anyway, instead of keeping them too."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def remade(value: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[object]:
    """Inside the `with` block, operations that would keep `value` for their gradients keep `make` in its place.

    make() must give the same numbers, from tensors without gradients; it runs once per backward pass. Not to be used
    under `torch.utils.checkpoint`, which would see neither.
    """
    keeper = _Keeper(value, make)
    return torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack)


class _Keeper:
    def __init__(self, value: Tensor, make: Callable[[], Tensor]) -> None:
        self._place, self._make = (value.data_ptr(), value.shape, value.dtype), make
        self._kept = self._given = 0
        self._value: Tensor | None = None  # between the first and the last operation that asks for it

    def pack(self, x: Tensor) -> "Tensor | _Keeper":
        if (x.data_ptr(), x.shape, x.dtype) != self._place:
            return x
        self._kept += 1
        return self

    def unpack(self, x: "Tensor | _Keeper") -> Tensor:
        if isinstance(x, Tensor):
            return x
        value = self._make() if self._value is None else self._value
        self._given += 1
        self._value = None if self._given % self._kept == 0 else value
        return value
