"""The limit's side: measures the rates that limit.py asks for, and reports the limit as if it were somebody's time."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.channel import Laps
from benchmarks.limit import Product, cost, seconds
from benchmarks.work import Job
from postrl.files import read_json
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig

CACHE_BYTES = 128 * 2**20  # few rows: weights are cycled through more than this, as a model's layers are
MANY_ROWS = 256  # from here on a product is bound by arithmetic, wherever its weights are
MOST_ROWS = 1024  # of a timing; the rate of more rows is the same
COPY_BYTES = 256 * 2**20
LEAST_SECONDS = 0.2  # of one timing


def main(job: Job) -> None:
    torch.set_num_threads(job.conditions.threads)
    folder, dtype = Path(job.model), getattr(torch, job.conditions.compute)
    shape = DecoderConfig.from_huggingface(read_json(folder / "config.json", "a model"))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(shape).parameters())
    whole, laps = cost(job.work, shape, parameters, dtype.itemsize), Laps()
    facts: dict[str, object] = {}
    with torch.inference_mode():
        while True:
            laps.lap(**facts)
            rates = {product: rate(product, dtype) for product in whole.products}
            bandwidth = copy_bandwidth()
            facts = {
                "limit_seconds": seconds(whole, rates.__getitem__, bandwidth),
                "bandwidth": bandwidth,
                "operations": sum(n * p.operations for p, n in whole.products.items()) + whole.attention,
                "bytes": whole.bytes,
            }


def rate(product: Product, dtype: torch.dtype) -> float:
    """Operations per second, by the faster of plain and packed weights; forward weights alone can be packed."""
    rows, inner, outer = min(product.rows, MOST_ROWS), product.inner, product.outer
    copies = 1 if rows >= MANY_ROWS else 1 + CACHE_BYTES // (inner * outer * dtype.itemsize)
    weights = [torch.randn(outer, inner).to(dtype) for _ in range(copies)]
    x, grad = torch.randn(rows, inner).to(dtype), torch.randn(rows, outer).to(dtype)
    operations = 2 * rows * inner * outer
    if product.which == "input":
        return operations / _shortest([lambda w=w: grad @ w for w in weights])
    if product.which == "weight":
        return operations / _shortest([lambda: grad.T @ x])
    plain = _shortest([lambda w=w: F.linear(x, w) for w in weights])
    if not torch.backends.mkldnn.is_available():
        return operations / plain
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]
    fast = [lambda w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in packed]
    return operations / min(plain, _shortest(fast))


def copy_bandwidth() -> float:
    """Bytes per second, read and written together, of a copy that no cache holds."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _shortest([lambda: target.copy_(source)])


def _shortest(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call: of rounds through all of them, the fastest of at least two after a first one."""
    best, spent, rounds = float("inf"), 0.0, 0
    while spent < LEAST_SECONDS or rounds < 3:
        start = time.perf_counter()
        for call in calls:
            call()
        elapsed = time.perf_counter() - start
        best = min(best, elapsed) if rounds else best
        spent, rounds = spent + elapsed, rounds + 1
    return best / len(calls)


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[1])))
