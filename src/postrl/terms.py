"""Terms that go with any method: a KL penalty to a reference and an entropy bonus. Use with `Method.plus`."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from postrl import losses
from postrl.batch import Batch
from postrl.method import Forward, Term
from postrl.weights import token_mean

ESTIMATORS = {"k1": losses.kl_k1, "k2": losses.kl_k2, "k3": losses.kl_k3}


def reference_kl(
    coef: float,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    weight: Callable[[Batch], Tensor] = token_mean,
    off_policy_correction: bool = False,
) -> Term:
    """coef · KL(π‖π_ref) by an estimator on sampled tokens; needs `logp_ref`.

    off_policy_correction multiplies by r = π/π_old with its gradient, which makes the gradient of k3 that of the exact
    KL also off-policy (TRL 1.16's default; off here, as in the GRPO paper).
    """

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        if batch.logp_ref is None:
            raise ValueError("the KL term needs reference log-probabilities: give `train` a reference policy")
        kl = ESTIMATORS[estimator](batch.mask, forward.logp, batch.logp_ref)
        if off_policy_correction:
            kl = kl * losses.log_ratio(batch.mask, forward.logp, batch.logp_old).exp()
        return kl

    return Term("reference_kl", loss, weight, coef)


def entropy_bonus(coef: float, weight: Callable[[Batch], Tensor] = token_mean) -> Term:
    """−coef · H(π(·|prefix)) at every sampled position; needs the forward pass to keep entropies."""

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        if forward.entropy is None:
            raise ValueError("the entropy bonus needs `entropy` from the policy's forward pass")
        return -losses.on(batch.mask, forward.entropy)

    return Term("entropy_bonus", loss, weight, coef)
