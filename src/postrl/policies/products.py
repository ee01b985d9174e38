"""Products of a sampler: x Wᵀ + b with weights that stay as they are until the next refresh.

A matrix library rearranges the weights in every call; for few rows and large matrices that takes longer than the
product. Where the machine's oneDNN can keep them rearranged, and a measurement on this shape finds that to be at least
5 % faster, they are rearranged once. Everywhere else, and on accelerators, F.linear does the product.

The two differ by rounding, and a measurement by chance: so its answer is kept in a file, and runs with one seed on one
machine stay equal bit for bit. Where nothing can be kept, nothing is packed.
"""

import platform
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from postrl.errors import UserError
from postrl.files import read_json, write_json
from postrl.policies.checkpoint_io import cache

GAIN = 1.05
LEAST_BYTES = 2**19  # of a matrix; smaller ones are rearranged in no time
PAIRS = 16
SLACK = 4  # rounding errors of two ways to add k products: at most SLACK · √k · ε · Σ|x||w|


@runtime_checkable
class Product(Protocol):
    """[n, in] -> [n, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Plain:
    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Packed:
    """Keeps only the rearranged weights."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, rows: int) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows), bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def product(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, rows: int) -> Product:
    """The faster way to multiply about `rows` rows by this matrix."""
    large = weight.numel() * weight.element_size() >= LEAST_BYTES
    if large and can_pack(weight.device, weight.dtype):
        out, size = weight.shape
        if gain(out, size, rows, weight.dtype, torch.get_num_threads()) > GAIN:
            return Packed(weight, bias, rows)
    return Plain(weight, bias)


@lru_cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN keeps weights of this type here, and gives the same products with them."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 96), (200, 96), (200,)))
    try:
        found = Packed(weight, bias, 5)(x)
    except (AttributeError, RuntimeError):  # another build of torch, or a type this processor has no products of
        return False
    return agree(found, x, Plain(weight, bias))


def agree(found: Float[Tensor, "n out"], x: Float[Tensor, "n in"], plain: Plain) -> bool:
    """Whether `found` is the plain product of x but for rounding."""
    weight = plain.weight.float().abs()
    bound = x.float().abs() @ weight.T + (0 if plain.bias is None else plain.bias.float().abs())
    bound *= SLACK * x.shape[1] ** 0.5 * torch.finfo(x.dtype).eps
    return bool(((found.float() - plain(x).float()).abs() <= bound).all())


@lru_cache
def gain(out: int, size: int, rows: int, dtype: torch.dtype, threads: int) -> float:
    """How many times faster the packed product is: as measured on this machine once, 0 where that cannot be kept."""
    processor = f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    about = [processor, torch.__version__, str(dtype), f"{out}x{size}", f"{rows} rows", f"{threads} threads"]
    path = cache() / "products" / ("_".join(about).replace(" ", "-").replace("/", "-") + ".json")
    try:
        return float(read_json(path, "a measurement")["gain"])
    except (UserError, KeyError, TypeError, ValueError):  # none yet, or a damaged one
        found = measure(out, size, rows, dtype)
    try:
        write_json(path, {"gain": found})
    except UserError:
        return 0.0
    return found


def measure(out: int, size: int, rows: int, dtype: torch.dtype) -> float:
    """Seconds of the plain product over seconds of the packed one: what three of four pairs exceed; 0 if they differ by
    more than rounding."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, size), (out, size)))
    plain, packed = Plain(weight, None), Packed(weight, None, rows)
    if not agree(packed(x), x, plain):
        return 0.0
    clock = (
        time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    )  # another program's share is not ours
    ratios = []
    for _ in range(PAIRS):  # one after the other, so that another program's load falls on both
        seconds = {}
        for way in (plain, packed):
            start = clock()
            way(x)
            seconds[way] = clock() - start
        ratios.append(seconds[plain] / seconds[packed])
    return sorted(ratios)[PAIRS // 4]
