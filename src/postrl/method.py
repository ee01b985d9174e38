"""What a policy-gradient paper returns, and the objective it stands for.

An update minimises  Σ_terms coef · Σ_{b,t} W[b,t] · l[b,t]  over one mini-batch, where the advantage A (inside l)
is made once on the whole rollout batch and the weight W once on the mini-batch, *before* it is cut into
micro-batches. How it is cut, or over how many processes it is spread, can then not change the update.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from postrl.batch import Batch
from postrl.errors import UserError

Atom = Literal["row", "unit", "group"]


@dataclass(frozen=True, eq=False)
class Forward:
    """What a policy's forward pass returns for b rows; all at the rows' sampling temperature.

    Positions off the mask hold zeros. Optional parts are there only when asked for.
    """

    logp: Float[Tensor, "b t"]
    entropy: Float[Tensor, "b t"] | None = None
    logits: Float[Tensor, "b t V"] | None = None
    hidden: Float[Tensor, "b t d"] | None = None
    values: Float[Tensor, "b t"] | None = None


@dataclass(frozen=True)
class Term:
    """One summand of the objective: token losses l, never reduced, and the weight matrix that reduces them.

    `total` is what the weights of one mini-batch must sum to (a law checks it): a number or a function of the batch.
    """

    name: str
    loss: Callable[[Batch, Tensor, Forward], Tensor]  # (b rows, A [b, t], forward) -> l [b, t]
    weight: Callable[[Batch], Tensor]  # mini-batch -> W [B, T]
    coef: float = 1.0
    total: float | Callable[[Batch], float] = 1.0


@dataclass(frozen=True)
class Method:
    """A policy-gradient method.

    advantage: whole rollout batch -> A [B, T], constant for the step.
    keep: units worth training on, from named raw reward components; the loop drops (and may refill) the others.
    observe: mini-batch and current log-probabilities -> [B, T], a no-grad pass before each update, delivered as
        `batch.observed`; only for methods that need whole-update statistics.
    figures: rollout batch after its updates and the log-probabilities [B, T] that each row's last update saw -> plain
        numbers for the metrics, where they stand as `method/<name>`; NaN is left out. `batch.observed` is that of each
        row's last update too. Before any update it is None and the log-probabilities are `logp_old`.
    atom: the smallest thing a micro-batch may not cut.
    needs: optional fields of `Batch` or parts of `Forward` ("entropy", "values") that must be there; and "logp_old" if
        `advantage` or a weight reads it. A loss may always read it.
    exempt: law -> reason, for the laws of the shelf this method breaks on purpose.
    """

    name: str
    advantage: Callable[[Batch], Tensor]
    terms: tuple[Term, ...]
    keep: Callable[[Batch], Bool[Tensor, "N"]] | None = None
    observe: Callable[[Batch, Tensor], Tensor] | None = None
    figures: Callable[[Batch, Tensor], Mapping[str, float]] | None = None
    atom: Atom = "row"
    needs: frozenset[str] = frozenset()
    exempt: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def plus(self, *terms: Term, needs: frozenset[str] = frozenset()) -> Self:
        """The same method with further terms, for example a KL penalty to a reference."""
        return replace(self, terms=(*self.terms, *terms), needs=self.needs | needs)


@dataclass(frozen=True)
class Paper:
    """Where a file of the shelf comes from. `status` says what its specification rests on."""

    title: str
    arxiv: str
    status: str


def objective(
    method: Method, batch: Batch, forward: Forward, weights: tuple[Tensor, ...], advantage: Float[Tensor, "b t"]
) -> Float[Tensor, ""]:
    """Σ_terms coef · Σ W·l over the rows of `batch`; add it up over micro-batches for the update's loss.

    `weights` holds one W [b, t] per term, cut from the mini-batch like the rows. Positions of zero weight are
    excluded, not multiplied, so that what stands there (NaN included) cannot leak. Raises UserError for a loss of
    another shape than [b, t], which broadcasting would hide.
    """
    total = forward.logp.new_zeros(())
    for term, weight in zip(method.terms, weights, strict=True):
        loss = term.loss(batch, advantage, forward)
        check_shape(f"loss of term {term.name!r} of method {method.name}", loss, batch)
        total = total + term.coef * (weight * torch.where(weight != 0, loss, torch.zeros_like(loss))).sum()
    return total


def check_shape(what: str, value: Tensor, batch: Batch) -> None:
    """Raises UserError unless `value` has a number for each position of the batch's rows."""
    there, must = tuple(value.shape), tuple(batch.mask.shape)
    if there != must:
        raise UserError(f"the {what} has shape {there}: give one number per token of each row, here {must}")
