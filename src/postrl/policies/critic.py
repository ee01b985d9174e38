"""Critics beside a policy: V(state before token t) for every sampled token, with weights of their own.

A critic is a module, batch -> values [B, T] (see `values.py`); where it starts from is the caller's choice: `random`,
`copied`, either of them after `values.regress`, or pooled by `papers/ipe.py`. `ActorCritic` is policy and critic as one
module, so that the loop trains and saves both without knowing the word.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postrl.batch import Batch, Stop
from postrl.errors import UserError
from postrl.method import Forward
from postrl.policies import checkpoint_io as files
from postrl.policies.base import Policy, Sampler
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig
from postrl.policies.lora import LoRADecoder
from postrl.policies.packing import pack
from postrl.policies.tabular import Tabular, contexts
from postrl.values import with_value_after, with_values

HEAD = "value_head.safetensors"


class DecoderCritic(nn.Module):
    """A decoder's trunk, all of it trained, and a linear head on the last hidden state.

    Shares nothing with the policy: the policy's gradient cannot bend the values, nor theirs the policy.
    """

    def __init__(self, trunk: Decoder, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    @classmethod
    def random(cls, config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> Self:
        """Nothing learnt: a trunk as of `Decoder.random` and a random head whose values are small."""
        trunk = Decoder.random(replace(config, tied=True), seed, dtype)
        return cls(trunk, _head(config.hidden, seed, trunk))

    @classmethod
    def copied(cls, policy: nn.Module, head_seed: int | None = None) -> Self:
        """The policy's trunk as it is now, under a head of zeros (values start at 0), or a random one with `head_seed`.

        Raises UserError for a policy that is no decoder of ours.
        """
        decoder = policy.merged() if isinstance(policy, LoRADecoder) else policy
        if not isinstance(decoder, Decoder):
            raise UserError(f"a critic copies the trunk of a decoder, not of a {type(policy).__name__}: use its engine")
        config = replace(decoder.config, tied=True)  # values need no language-model head
        trunk = Decoder(config, decoder.compute_dtype, decoder.recompute).to(decoder.head_weight.device)
        trunk.model = copy.deepcopy(decoder.model).requires_grad_(True)
        return cls(trunk, _head(config.hidden, head_seed, trunk))

    def forward(self, batch: Batch) -> Float[Tensor, "b t"]:
        packed = pack(batch)
        hidden = self.trunk.hidden(packed).index_select(0, packed.source)
        return packed.grid(self.head(hidden).squeeze(-1), batch)

    def save(self, folder: Path) -> None:
        """The trunk as a Hugging Face folder, the head beside it in value_head.safetensors."""
        self.trunk.save(folder)
        head = {name: p.detach().contiguous() for name, p in self.head.named_parameters()}
        files.write_file(folder / HEAD, lambda path: save_file(head, path))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `save` wrote. Raises UserError naming the file that is missing or damaged."""
        trunk = Decoder.load(folder)
        head = _head(trunk.config.hidden, None, trunk)
        try:
            head.load_state_dict(load_file(folder / HEAD))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{folder / HEAD} is damaged or missing ({error}); save the critic again") from error
        return cls(trunk, head)


def _head(width: int, seed: int | None, trunk: Decoder) -> nn.Linear:
    like = trunk.head_weight
    head = nn.Linear(width, 1, dtype=like.dtype)
    nn.init.zeros_(head.bias)
    if seed is None:
        nn.init.zeros_(head.weight)
    else:  # hidden states have unit mean square, so values start near ±0.1
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(head.weight, std=0.1 * width**-0.5, generator=generator)
    return head.to(like.device)


class TabularCritic(nn.Module):
    """A value for every context of a tabular policy: exact, and the control of everything a network does."""

    def __init__(self, values: Float[Tensor, " states"], vocabulary: int, memory: int) -> None:
        super().__init__()
        self.table, self.vocabulary, self.memory = nn.Parameter(values), vocabulary, memory

    @classmethod
    def zeros(cls, policy: Tabular) -> Self:
        """A value of 0 for every context the policy tells apart."""
        states, vocabulary = policy.table.shape
        return cls(policy.table.detach().new_zeros(states), vocabulary, policy.memory)

    def forward(self, batch: Batch) -> Float[Tensor, "b t"]:
        values = self.table[contexts(batch, self.vocabulary, self.memory)]
        return torch.where(batch.mask, values, torch.zeros_like(values))


class ActorCritic(nn.Module):
    """A policy and its critic as one module for `train`; to samplers and savers it is the policy alone.

    critic: where it starts from is up to whoever made it (`critic_init`). While held (`Values` does it during a
    warm-up) only the critic trains.
    """

    def __init__(self, policy: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.policy, self.critic, self.held = policy, critic, False

    @property
    def context_length(self) -> int:
        return self._policy.context_length

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
        """As the policy's, and "values" [B, T] if wanted."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.held):
            out = self.policy(batch, want - {"values"})
        return replace(out, values=self.critic(batch)) if "values" in want else out

    def hold(self, still: bool) -> None:
        """Whether the policy stays as it is. Its gradients are then absent, not zero: to AdamW zeros would be steps,
        after which the first real ones come out several times too large."""
        self.held = still
        for parameter in self.policy.parameters():
            if still:
                parameter.grad = None
            elif parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def sampler(self) -> Sampler:
        return self._policy.sampler()

    def save(self, folder: Path) -> None:
        """The policy, without the critic."""
        self._policy.save(folder)

    @property
    def _policy(self) -> Policy:
        assert isinstance(self.policy, Policy)
        return self.policy


def parameter_groups(critic_scale: float = 1.0) -> Callable[[nn.Module], list[dict]]:
    """For `train(parameters=…)`: policy and critic as two groups, the critic's learning rate `critic_scale` times the
    policy's. Each group's gradient is clipped by its own norm."""
    if not 0 < critic_scale < float("inf"):
        raise UserError(f"option critic_scale={critic_scale} must be a number above 0")

    def groups(model: nn.Module) -> list[dict]:
        if not isinstance(model, ActorCritic):
            raise UserError("parameter groups of policy and critic need an ActorCritic: wrap the policy in one")
        policy, critic = ([p for p in part.parameters() if p.requires_grad] for part in (model.policy, model.critic))
        return [{"params": policy}, {"params": critic, "scale": critic_scale}]

    return groups


class Values:
    """The enricher of an ActorCritic: `values` once a step, before its first update. Its count of steps belongs to the
    checkpoint, where `train` puts it.

    token_budget: of one pass. warmup: steps in which only the critic trains; further terms (a penalty, an entropy
    bonus) rest as well. truncated: an answer that ran into its length limit is over ("end": the limit is part of the
    task, as in most language-model work), or goes on unseen and is worth what the critic says ("bootstrap", which fills
    `value_after`).
    """

    def __init__(
        self,
        model: ActorCritic,
        token_budget: int = 4096,
        warmup: int = 0,
        truncated: Literal["end", "bootstrap"] = "end",
    ) -> None:
        if warmup < 0 or token_budget < 1:
            raise UserError(f"options warmup={warmup} and token_budget={token_budget} must be at least 0 and 1")
        self.model, self.token_budget, self.warmup, self.truncated = model, token_budget, warmup, truncated
        self.steps = 0

    def __call__(self, batch: Batch) -> Batch:
        self.model.hold(self.steps < self.warmup)
        self.steps += 1
        batch = with_values(self.model.critic, batch, self.token_budget)
        if self.truncated == "end":
            return batch
        return with_value_after(self.model.critic, batch, batch.stop == Stop.TRUNCATED, self.token_budget)

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise UserError(f"the checkpoint's count of a critic's steps is {steps!r}; it is damaged, use another one")
        self.steps = steps
