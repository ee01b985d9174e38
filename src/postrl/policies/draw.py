"""One token per row from logits and one uniform number per row, by the inverse of the cumulative distribution."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 128


def draw(
    logits: Float[Tensor, "n V"],
    uniform: Float[Tensor, "n"],
    temperature: Float[Tensor, "n"],
    top_p: Float[Tensor, "n"],
    top_k: Int[Tensor, "n"],
) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
    """Tokens and their log-probabilities (nats) at the temperature, before top-p and top-k.

    Tokens are ordered by id, and the first whose cumulative probability exceeds `uniform` (float64, in [0, 1)) is
    drawn. top_k = 0 and top_p = 1 keep all; both: top-p of what top-k left. Temperature 0 takes the most probable
    token, with its log-probability at temperature 1. `logits` (float32 at least) are overwritten.
    """
    greedy = temperature == 0
    logits.div_(torch.where(greedy, torch.ones_like(temperature), temperature)[:, None])
    logits.sub_(logits.amax(1, keepdim=True))
    best = logits.argmax(1) if greedy.any() else None
    weights = logits.exp()
    total = weights.sum(1)
    filtered = ((top_p < 1) | (top_k > 0)).nonzero()[:, 0]
    if len(filtered):
        weights[filtered] = _filter(weights[filtered], top_p[filtered], top_k[filtered])
    tokens = _invert(weights, uniform)
    if best is not None:
        tokens = torch.where(greedy, best, tokens)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - total.log()


def _filter(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero outside the top_k heaviest and outside the fewest of those that reach top_p of their sum."""
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), 0)
    before = ordered.double().cumsum(1) - ordered
    ordered = ordered.masked_fill((before >= top_p[:, None] * ordered.sum(1, keepdim=True)) & (rank > 0), 0)
    return torch.zeros_like(weights).scatter(1, order, ordered)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds uniform · total: first its block, then its place in the block, so
    that no long sum of small numbers is made in float32 and only one block is summed up step by step."""
    size = weights.shape[1]
    whole = size // BLOCK * BLOCK
    sums = [weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(2)] if whole else []
    sums += [weights[:, whole:].sum(1, keepdim=True)] if whole < size else []
    blocks = torch.cat(sums, 1).double().cumsum(1)
    target = uniform.double() * blocks[:, -1]
    block = _first_above(blocks, target)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    place = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inner = torch.where(place < size, weights.gather(1, place.clamp(max=size - 1)), 0.0)
    within = _first_above(inner.double().cumsum(1), target - before)
    last = ((inner > 0) * torch.arange(BLOCK, device=weights.device)).amax(1)  # rounding never leaves the support
    return block * BLOCK + torch.minimum(within, last)


def _first_above(rising: Tensor, target: Tensor) -> Tensor:
    return torch.searchsorted(rising, target[:, None], right=True)[:, 0].clamp(max=rising.shape[1] - 1)
