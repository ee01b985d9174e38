"""Enrichers: Batch -> Batch, filling optional fields by no-grad forward passes.

The token budget bounds the tokens of one forward pass (see `packing.micro_batches`) and changes no result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from postrl.batch import Batch
from postrl.method import Forward
from postrl.ranks import here

Reader = Callable[[Batch, frozenset[str]], Forward]  # of a policy, all that is needed here


@contextmanager
def mode(policy: Reader, training: bool) -> Iterator[None]:
    """Inside, the policy is in training mode (dropout on) or not; then again as before. What is no module has none."""
    if not isinstance(policy, nn.Module) or policy.training == training:
        yield
        return
    policy.train(training)
    try:
        yield
    finally:
        policy.train(not training)


def forward_all(policy: Reader, batch: Batch, token_budget: int, want: frozenset[str] = frozenset()) -> Forward:
    """The policy's forward pass over every row, without gradients and in eval mode; [B, T, ...] in the batch's order.

    It runs in micro-batches, each process its share. `want` names further parts of `Forward`; "logits" and "hidden" are
    kept for all rows at once, so ask for them only on small batches. Raises ValueError if the policy leaves out a
    wanted part, or the batch has no rows.
    """
    whole: dict[str, Tensor] = {}
    ranks = here()
    with torch.no_grad(), mode(policy, False):
        for micro in ranks.passes(batch, token_budget) if len(batch.unit) else ():
            part = policy(batch.rows(micro.rows), want)
            for name in ("logp", *sorted(want)):
                value = _part(part, name)
                if name not in whole:
                    whole[name] = value.new_zeros(len(batch.unit), *value.shape[1:])
                if micro.counts:
                    whole[name][micro.rows] = value
    for value in whole.values():
        ranks.total(value)
    if "logp" not in whole:
        raise ValueError("a forward pass over a batch without rows")
    return Forward(**whole)


def old_logp(policy: Reader, batch: Batch, token_budget: int) -> Batch:
    """`logp_old` by the training forward at the policy's present weights (the sampler's stay in `logp_sampler`)."""
    return replace(batch, logp_old=forward_all(policy, batch, token_budget).logp)


def reference_logp(policy: Reader, batch: Batch, token_budget: int) -> Batch:
    """`logp_ref`: the log-probabilities of the sampled tokens under a frozen reference policy."""
    return replace(batch, logp_ref=forward_all(policy, batch, token_budget).logp)


def _part(forward: Forward, name: str) -> Tensor:
    parts = {f.name: getattr(forward, f.name) for f in fields(forward)}
    if parts.get(name) is None:
        raise ValueError(f"the policy's forward pass gave no {name!r}; wanted parts are among: {', '.join(parts)}")
    return parts[name]
