"""One layer: train one layer, or a few, with all else frozen, and measure how much of full training that gives."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from postrl.errors import UserError
from postrl.method import Paper
from postrl.policies.base import layers_of
from postrl.ranks import here

PAPER = Paper(
    title="Is One Layer Enough? Training A Single Transformer Layer Can Match Full-Parameter RL Training",
    arxiv="2607.01232",
    status="three digests of the text agree on the metric; no official code found",
)
NO_METHOD = "it chooses which weights are trained, under any method: hand `only(layers)` to `train(parameters=…)`"

Groups = Callable[[nn.Module], list[dict]]  # the `parameters` seam of `train`


def only(layers: Sequence[int]) -> Groups:
    """Train these layers (0 is the one after the embeddings) and nothing else: for `train(parameters=only([k]))`.

        θ_k ← θ_k − α·∇_{θ_k} L,   every other weight, embeddings and head included, keeps its value

    arXiv 2607.01232 (learning rate 5e-6 for a single layer, all else as in full training). The frozen weights have
    requires_grad False from then on, before an optimiser is made: they get no gradient, no moments and no place in
    checkpoints, and autograd stops below the lowest layer named. Under an adapter its weights in these layers are
    trained. `policy.requires_grad_(True)` undoes it for a policy without an adapter.

    Raises UserError for no layer, one that is named twice or that the policy has not, and if all of them are frozen
    already.
    """
    layers = _distinct(layers)

    def groups(policy: nn.Module) -> list[dict]:
        chosen = [p for k in layers for p in _layer(policy, k).parameters() if p.requires_grad]
        if not chosen:
            raise UserError(f"one_layer: layers {layers} are frozen already: undo that, or load the policy again")
        policy.requires_grad_(False)
        for parameter in chosen:
            parameter.requires_grad_(True)
        return [{"params": chosen}]

    return groups


def boosted(layers: Sequence[int], scale: float = 2.0) -> Groups:
    """Train everything, these layers at `scale` times the learning rate ("Boost", paper: 1e-5 on the best k layers).

    Raises UserError as `only` does, and for a scale that is not a positive number.
    """
    layers = _distinct(layers)
    if not 0 < scale < math.inf:
        raise UserError(f"one_layer: scale is {scale}; give a positive number, such as 2")

    def groups(policy: nn.Module) -> list[dict]:
        fast = [p for k in layers for p in _layer(policy, k).parameters() if p.requires_grad]
        names = {id(parameter) for parameter in fast}
        rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in names]
        if not fast:
            raise UserError(f"one_layer: layers {layers} are frozen: load the policy again")
        return [{"params": rest}, {"params": fast, "scale": scale}]

    return groups


def random_subset(count: int, seed: int = 0) -> Groups:
    """Train `count` single weights, drawn from the matrices and norms of all layers alike; the rest stays bit for bit.

    The control of `only`, not the paper's: with as many weights as a layer has, it says whether the place matters or
    the number alone. A mask on the gradient holds the others still (AdamW does not move a weight whose gradients were
    all 0), so weight decay is off, and nothing is saved: moments and gradients are those of full training. Embeddings
    and head are frozen. The mask stays on the policy for good: load it again for another training.

    Raises UserError for a count that the layers do not have, a policy of which a weight is frozen already, and several
    processes, whose copies of the policy would lose the mask.
    """

    def groups(policy: nn.Module) -> list[dict]:
        there = list(layers_of(policy).parameters())
        sizes = [parameter.numel() for parameter in there]
        if not 1 <= count <= sum(sizes):
            raise UserError(f"one_layer: count is {count}; choose between 1 and the {sum(sizes)} weights of the layers")
        if not all(parameter.requires_grad for parameter in policy.parameters()):
            raise UserError("one_layer: a random subset needs a policy of which nothing is frozen: load it again")
        if here().world > 1:
            raise UserError("one_layer: a random subset is trained in one process only")
        flat = torch.zeros(sum(sizes), dtype=torch.bool)
        flat[torch.from_numpy(np.random.default_rng(seed).choice(len(flat), count, replace=False))] = True
        policy.requires_grad_(False)
        for parameter, part in zip(there, flat.split(sizes), strict=True):
            mask = part.view_as(parameter).to(parameter.device)
            parameter.requires_grad_(True).register_hook(partial(_masked, mask))
        return [{"params": there, "weight_decay": 0.0}]

    return groups


def middle(depth: int, k: int) -> list[int]:
    """k layers from ⌊L/2 − k/2⌋ on: "Mid-k", which needs no profile. Raises UserError unless 1 ≤ k ≤ L."""
    _within(k, depth)
    first = (depth - k) // 2
    return list(range(first, first + k))


def top(contributions: Sequence[float], k: int) -> list[int]:
    """The k layers of the greatest contribution, in order of depth; of equals the lower one.

    The best of many noisy measurements is overrated: measure it again with other seeds. Raises UserError unless
    1 ≤ k ≤ L, and for a contribution that is NaN.
    """
    _within(k, len(contributions))
    for layer, value in enumerate(contributions):
        if math.isnan(value):
            raise UserError(f"one_layer: the contribution of layer {layer} is NaN; measure it, or leave it out")
    best = sorted(range(len(contributions)), key=lambda layer: (-contributions[layer], layer))[:k]
    return sorted(best)


@dataclass(frozen=True)
class Contribution:
    """C(k), the ends of its interval, and the gap S_full − S_base that it is measured in, with its standard error."""

    value: float
    low: float
    high: float
    gap: float
    error: float


def contribution(
    single: Float[np.ndarray, "_ _"],
    full: Float[np.ndarray, "_ _"],
    base: Float[np.ndarray, "_ _"],
    level: float = 0.95,
    resamples: int = 10_000,
    key: Sequence[int] = (0,),
) -> Contribution:
    """C(k) = (S_k − S_base) / (S_full − S_base): 1 equals full training, 0 is the base, below 0 is harm.

    arXiv 2607.01232. [seeds, problems]: each row holds one seed's score per problem (pass@1, say), the same problems in
    every column; the base has one row, or as many as the others. The interval is a percentile bootstrap, paired: a draw
    takes the same problems, and the same seeds, for all three. Few seeds make it too narrow. key: its random seed.

    Raises UserError where the gap is under two standard errors (of the same draws): the quotient then says nothing. And
    for shapes that do not fit, fewer than two problems, and scores that are not finite.
    """
    seeds, problems = full.shape
    if single.shape != full.shape or base.shape[0] not in (1, seeds) or base.shape[1] != problems:
        raise UserError(f"one_layer: scores of shapes {single.shape}, {full.shape}, {base.shape} are not paired")
    if problems < 2 or not all(np.isfinite(scores).all() for scores in (single, full, base)):
        raise UserError("one_layer: a contribution needs finite scores of at least two problems")
    rng = np.random.default_rng(list(key))
    gain, whole = single - base, full - base  # [seeds, problems], paired
    draws = np.empty((2, resamples))
    for draw in range(resamples):
        some, drawn = rng.integers(0, seeds, seeds), rng.integers(0, problems, problems)
        counts = np.bincount(some, minlength=seeds) / seeds, np.bincount(drawn, minlength=problems) / problems
        draws[:, draw] = counts[0] @ gain @ counts[1], counts[0] @ whole @ counts[1]
    gap, error = float(whole.mean()), float(draws[1].std(ddof=1))
    if not gap > 2 * error:
        raise UserError(
            f"one_layer: full training gains {gap:.4g} over the base, under two standard errors ({error:.4g} each): "
            "a share of it says nothing: evaluate on more problems, or train longer"
        )
    low, high = np.quantile(draws[0] / draws[1], [(1 - level) / 2, (1 + level) / 2])
    return Contribution(float(gain.mean()) / gap, float(low), float(high), gap, error)


def matrix_sizes(policy: nn.Module) -> list[int]:
    """Weights in the matrices of each layer: a token's forward pass takes two operations for each of them."""
    return [sum(p.numel() for p in block.parameters() if p.ndim == 2) for block in layers_of(policy)]


def compute_share(
    sizes: Sequence[int], head: int, layers: Sequence[int], predicted: float = 1.0, kept_logits: bool = False
) -> float:
    """Operations of an update that trains `layers` only, as a share of one that trains everything; rollouts aside.

        full   3·Σ_l ℓ_l + 3h:   a forward pass, gradients of the inputs, gradients of the weights
        some     Σ_l ℓ_l + h     forward through everything
               + Σ_{l ≥ m} ℓ_l + h     gradients of the inputs from the head down to the lowest trained layer m
               + Σ_{l trained} ℓ_l     gradients of the weights

    So a middle layer of a deep model costs about (1 + 1/2)/3 of full training, not 1/L of it; with a head of a few
    layers' size .52 to .55. Matrices only: attention's own products, norms and embeddings are left out.

    sizes: `matrix_sizes(policy)`. head: weights of the head, vocabulary times width. predicted: share of a step's
    tokens that meet the head. kept_logits: False for a head that makes its logits again in the backward pass, as the
    fast decoder's does; True for one that keeps them. Raises UserError for layers that are not there.
    """
    layers = _distinct(layers)
    if max(layers) >= len(sizes):
        raise UserError(f"one_layer: layer {max(layers)} of {len(sizes)} layers (from 0) does not exist")
    h, again = head * predicted, 0 if kept_logits else head * predicted
    everything = sum(sizes)
    some = everything + h + sum(sizes[min(layers) :]) + h + again + sum(sizes[k] for k in layers)
    return some / (3 * everything + 3 * h + again)


def _masked(mask: Bool[Tensor, "..."], gradient: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return torch.where(mask, gradient, torch.zeros_like(gradient))


def _distinct(layers: Sequence[int]) -> list[int]:
    if not layers or len(set(layers)) < len(layers) or min(layers) < 0:
        raise UserError(f"one_layer: layers are {list(layers)}; name at least one, each once, counted from 0")
    return list(layers)


def _layer(policy: nn.Module, k: int) -> nn.Module:
    there = layers_of(policy)
    if k >= len(there):
        raise UserError(f"one_layer: layer {k} does not exist; the policy has {len(there)} layers, counted from 0")
    return there[k]


def _within(k: int, depth: int) -> None:
    if not 1 <= k <= depth:
        raise UserError(f"one_layer: k is {k}; choose between 1 and the {depth} layers there are")
