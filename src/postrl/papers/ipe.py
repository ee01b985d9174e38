"""IPE: a critic that starts from the pooled rollouts of several diverse policies instead of those of one."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from postrl.batch import Batch
from postrl.errors import UserError
from postrl.losses import nll
from postrl.method import Paper
from postrl.packing import micro_batches
from postrl.rollout import Rollout, collate
from postrl.values import Gap, Missing, regress
from postrl.weights import token_mean

PAPER = Paper(
    title="Do You Really Need to Pretrain Q-Functions for Online RL Fine-Tuning?",
    arxiv="2607.27203",
    status="abstract and one digest, no equations, no code; the paper is off-policy continuous control, and a value "
    "function of a language model is our hypothesis, which it neither makes nor tests",
)
NO_METHOD = "it makes the critic that PPO starts from; the gradient is PPO's"


def ipe(
    critic: nn.Module,
    members: Sequence[nn.Module],
    roll: Callable[[nn.Module, int], list[Rollout]],
    *,
    steps: int,
    learning_rate: float = 1e-3,
    units: int = 64,
    gamma: float = 1.0,
    lam: float = 1.0,
    gap: Gap = "carry",
    missing: Missing = "exclude",
    token_budget: int = 4096,
    seed: int = 0,
) -> nn.Module:
    """Initialisation by a policy ensemble: the critic, fitted in place to what N policies from one start met.

        D = ∪_n rollouts(π_n, M/N),   ψ ← argmin Σ_D (V_ψ(s_t) − R_t)²,   R_t the λ-return

    Dong et al., arXiv 2607.27203, off-policy control with a Q-function: one pretrained policy covers few actions, its Q
    is that of a policy which training leaves, and pooling policies that differ covers more. This is *our* transfer to a
    value function V(prompt, answer so far) under PPO. Whether it helps there is open: the value of a mixture of
    policies is no more that of the policy in training than a single one's is. Ensemble size, rollout counts and steps
    of the paper are not known.

    members: the policies, for example of `diverse`, or adapters, seeds or prompt templates of one model.
    roll(member, n): the n-th member's rollouts, scored; at its own temperature if that is to make the difference. Ask
        each for M/N of the M rollouts that a comparison with one policy has: the rest would be more data, not more
        diversity.
    The other options are those of `values.regress`. Raises UserError for fewer than two members.
    """
    regress(
        critic,
        pooled(members, roll),
        steps=steps,
        learning_rate=learning_rate,
        units=units,
        gamma=gamma,
        lam=lam,
        gap=gap,
        missing=missing,
        token_budget=token_budget,
        seed=seed,
    )
    return critic


def pooled(members: Sequence[nn.Module], roll: Callable[[nn.Module, int], list[Rollout]]) -> Batch:
    """Every member's rollouts as one batch. Groups are not compared here, so their numbers may coincide."""
    if len(members) < 2:
        raise UserError(f"ipe pools the rollouts of several policies, but members has {len(members)}: give at least 2")
    return collate([rollout for number, member in enumerate(members) for rollout in roll(member, number)])


def diverse(
    policy: nn.Module,
    demonstrations: Batch,
    count: int,
    *,
    steps: int,
    learning_rate: float = 1e-4,
    units: int = 16,
    token_budget: int = 4096,
    seed: int = 0,
) -> list[nn.Module]:
    """`count` copies of the policy, each fine-tuned for some steps on a bootstrap sample of the demonstrations.

    A sample draws as many units as there are, with replacement; a step takes `units` of it. All samples and orders
    follow from the seed, and the policy itself does not change. Raises UserError for options that cannot be right.
    """
    for name, value in (("count", count), ("steps", steps), ("units", units), ("learning_rate", learning_rate)):
        if not 0 < value < float("inf"):
            raise UserError(f"option {name}={value} of an ensemble must be a number above 0")
    members = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        member = copy.deepcopy(policy)
        sample = rng.integers(0, demonstrations.size, demonstrations.size)
        optimizer = torch.optim.AdamW([p for p in member.parameters() if p.requires_grad], learning_rate)
        for _ in range(steps):
            _imitate(member, optimizer, _drawn(demonstrations, rng.choice(sample, units)), token_budget)
        members.append(member)
    return members


def _drawn(batch: Batch, chosen: np.ndarray) -> Batch:
    """The rows of the chosen units, as often as those were drawn. A unit drawn twice is still one unit with more rows,
    which a mean over tokens does not see."""
    times = torch.from_numpy(np.bincount(chosen, minlength=batch.size)).to(batch.unit.device)
    rows = torch.arange(len(batch.unit), device=batch.unit.device).repeat_interleave(times[batch.unit])
    return batch.rows(rows)


def _imitate(policy: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, token_budget: int) -> None:
    """One step up the likelihood of the sampled tokens."""
    weight = token_mean(batch)
    optimizer.zero_grad()
    for index in micro_batches(batch, token_budget):
        part = batch.rows(index)
        loss = (weight[index] * nll(part.mask, policy(part).logp)).sum()
        if loss.requires_grad:
            loss.backward()
    optimizer.step()
