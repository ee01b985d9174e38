"""What a training run is told, besides its method, policy and source."""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from postrl.errors import UserError

Schedule = Literal["constant", "linear", "cosine"]
Parallel = Literal["replicate", "shard"]


@dataclass(frozen=True)
class Settings:
    """Options of the loop.

    An *update* is one optimiser step on one mini-batch; a *step* is one rollout batch and all its updates.
    """

    steps: int = 50
    """Rollout batches to train on."""
    updates: int = 4
    """Mini-batches (whole groups) a rollout batch is cut into; one update each."""
    epochs: int = 1
    """Passes over each rollout batch."""
    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    warmup: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    schedule: Schedule = "constant"
    """How the learning rate falls to 0 after warm-up."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_gradient_norm: float = 1.0
    """The gradient of each parameter group (a critic is one) is scaled down to this 2-norm; inf leaves it as it is."""
    token_budget: int = 4096
    """Tokens per forward and backward pass; lower it if memory runs out. It does not change the update."""
    importance_cap: float | None = 2.0
    """Cap of π_train/π_sampler, multiplied onto each token's advantage; None switches the correction off.
    It is 1 but for rounding in float32; in bfloat16 it makes A vary within an answer, also for GSPO and GMPO."""
    kl_coef: float = 0.0
    """Weight of a KL penalty to the reference, in recipes the untrained model.
    It is k3, mean over tokens, whatever the method's own mean."""
    refill: int = 0
    """How many further rollout batches a step may draw to replace units the method does not keep."""
    checkpoint_every: int = 10
    """Steps between checkpoints; one is always written at the end."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 = only before and after."""
    parallel: Parallel = "replicate"
    """With several processes: every one holds the whole training state, or a shard of it (torch's `fully_shard`)."""
    warn_constant: int = 10
    """Steps in a row without any reward variance after which a warning is printed."""
    seed: int = 0
    """Decides the shuffles, the items and every sampled token."""

    def check(self) -> None:
        """Raises UserError naming the option that cannot be right."""
        least = {"steps": 0, "updates": 1, "epochs": 1, "token_budget": 1, "checkpoint_every": 1, "warn_constant": 1}
        for field in fields(self):
            value = getattr(self, field.name)
            low = least.get(field.name, 0)
            if isinstance(value, int | float) and not value >= low:
                raise UserError(f"option {field.name}={value} must be at least {low}")
        for name, kind in (("schedule", Schedule), ("parallel", Parallel)):
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"option {name}={getattr(self, name)!r} must be one of: {', '.join(get_args(kind))}")
        if not math.isfinite(self.learning_rate):
            raise UserError(f"option learning_rate={self.learning_rate} must be a finite number")
        if self.max_gradient_norm == 0:
            raise UserError("option max_gradient_norm=0 would scale every gradient to nothing; inf switches it off")
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise UserError(f"option importance_cap={self.importance_cap} must be above 0, or None to switch it off")


def learning_rate(settings: Settings, update: int, total: int) -> float:
    """Learning rate of an update (from 0) among `total`: linear warm-up, then constant, linear or cosine to 0."""
    if update < settings.warmup:
        return settings.learning_rate * (update + 1) / settings.warmup
    progress = (update - settings.warmup) / max(1, total - settings.warmup)
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * min(progress, 1.0))) / 2}
    return settings.learning_rate * max(0.0, factor[settings.schedule])
