"""The least time a piece of work can take on a machine: its bare matrix products and the bytes it must move.

Counted from the model's shapes; rates are measured in the same run (sides/bare_products.py). Not counted: norms,
activation functions, the draw itself and everything in Python, so the limit is below what can be reached.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.work import TOKEN_BUDGET, Work
from postrl.policies.decoder_config import DecoderConfig

Pass = Literal["forward", "input", "weight"]  # x·Wᵀ, the gradient at x, the gradient at W
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Product:
    """[rows, inner] times [inner, outer], or one of the two products of its backward pass."""

    rows: int
    inner: int
    outer: int
    which: Pass = "forward"

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inner * self.outer


@dataclass(frozen=True)
class Cost:
    """products: how often each happens. attention: operations of attention's own products. bytes: of memory traffic
    beyond the weights that the products read."""

    products: Mapping[Product, int]
    attention: int
    bytes: int


def cost(work: Work, shape: DecoderConfig, parameters: int, size: int) -> Cost:
    """Of a row of kind "sample", "train" or "step"; size: bytes of one number in the products' type."""
    return {"sample": sampling, "train": training, "step": step}[work.kind](work, shape, parameters, size)


def sampling(work: Work, shape: DecoderConfig, parameters: int, size: int) -> Cost:
    """Prompts once, in passes of at most TOKEN_BUDGET tokens; then one step per token after the first.

    Bytes: keys and values are read at each step (and written once), a prompt's once for all its completions; logits are
    written and read once per token.
    """
    n, prompt, new = work.rows, work.prompt_tokens, work.new_tokens
    products: dict[Product, int] = {}
    for rows in _parts(work.prompts * prompt):
        _add(products, _layer(shape, rows), shape.layers)
    _add(products, _layer(shape, n), shape.layers * (new - 1))
    _add(products, [_head(shape, work.prompts)], 1)
    _add(products, [_head(shape, n)], new - 1)
    token = 2 * shape.layers * shape.kv_heads * shape.head_size * size  # bytes of one token's keys and values
    read = sum(work.prompts * prompt + n * step for step in range(1, new)) * token
    written = (work.prompts * prompt + n * (new - 1)) * token
    return Cost(
        products, work.prompts * _causal(shape, prompt), read + written + 2 * n * new * shape.vocabulary * FLOAT
    )


def training(work: Work, shape: DecoderConfig, parameters: int, size: int) -> Cost:
    """Every token of the rows but the first is predicted; the last one of a row predicts nothing and need not run."""
    tokens = work.prompts * (work.prompt_tokens - 1)
    return _trained(tokens, tokens, work.prompts * _causal(shape, work.prompt_tokens - 1), shape, parameters)


def step(work: Work, shape: DecoderConfig, parameters: int, size: int) -> Cost:
    """Sampling and one update on what was sampled, in which a prompt runs once for all its completions."""
    own = work.new_tokens - 1
    across = 4 * shape.layers * shape.heads * shape.head_size * own * work.prompt_tokens
    attention = work.prompts * _causal(shape, work.prompt_tokens) + work.rows * (_causal(shape, own) + across)
    tokens = work.prompts * work.prompt_tokens + work.rows * own
    drawn = sampling(work, shape, parameters, size)
    trained = _trained(tokens, work.rows * work.new_tokens, attention, shape, parameters)
    products = dict(drawn.products)
    for product, times in trained.products.items():
        _add(products, [product], times)
    return Cost(products, drawn.attention + trained.attention, drawn.bytes + trained.bytes)


def _trained(tokens: int, predicted: int, attention: int, shape: DecoderConfig, parameters: int) -> Cost:
    """Forward once, backward twice that. attention: its operations, forward.

    Bytes: AdamW reads and writes weights and two moments and reads gradients (7 numbers a parameter); gradients are
    written once and read once more for their norm (2).
    """
    products: dict[Product, int] = {}
    for rows in _parts(tokens):
        for product in _layer(shape, rows):
            _add(products, _threefold(product), shape.layers)
    for rows in _parts(predicted):
        _add(products, _threefold(_head(shape, rows)), 1)
    return Cost(products, 3 * attention, 9 * parameters * FLOAT)


def seconds(cost: Cost, rate: Callable[[Product], float], bandwidth: float) -> float:
    """rate: operations per second of a product; attention is taken at the best of them. bandwidth: bytes per second."""
    rates = {product: rate(product) for product in cost.products}
    products = sum(times * product.operations / rates[product] for product, times in cost.products.items())
    return products + cost.attention / max(rates.values()) + cost.bytes / bandwidth


def _layer(shape: DecoderConfig, rows: int) -> list[Product]:
    wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    return [
        Product(rows, shape.hidden, wide + 2 * narrow),
        Product(rows, wide, shape.hidden),
        Product(rows, shape.hidden, 2 * shape.intermediate),
        Product(rows, shape.intermediate, shape.hidden),
    ]


def _head(shape: DecoderConfig, rows: int) -> Product:
    return Product(rows, shape.hidden, shape.vocabulary)


def _threefold(product: Product) -> list[Product]:
    return [Product(product.rows, product.inner, product.outer, which) for which in ("forward", "input", "weight")]


def _causal(shape: DecoderConfig, tokens: int) -> int:
    """Operations of a row's attention, forward: queries times keys and weights times values, the past only."""
    return 4 * shape.layers * shape.heads * shape.head_size * (tokens * (tokens + 1) // 2)


def _parts(tokens: int) -> list[int]:
    return [min(TOKEN_BUDGET, tokens - start) for start in range(0, tokens, TOKEN_BUDGET)]


def _add(products: dict[Product, int], more: list[Product], times: int) -> None:
    for product in more:
        products[product] = products.get(product, 0) + times
