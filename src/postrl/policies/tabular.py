"""An exact policy: a table of logits, one row per context of at most `memory` tokens.

With `memory` ≥ the longest context every prefix has a row of its own, so every sequence can be enumerated and every
expectation, and its gradient, is exact. With a shorter memory the table is an n-gram model, small enough to learn a
copy task in a second (copying k tokens needs a memory of k).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Self

import numpy as np
import safetensors
import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor

from postrl.batch import Batch, Stop, unit_sum
from postrl.errors import UserError
from postrl.method import Forward
from postrl.policies.base import Completion, Key, Sampling
from postrl.policies.draw import draw
from postrl.rollout import Rollout, Turn, collate

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PARTS = frozenset({"entropy", "logits"})


class Tabular(torch.nn.Module):
    """π(a | last `memory` tokens) = softmax(table[context] / temperature), over tokens 0 … vocabulary − 1.

    The table has (vocabulary + 1)^memory rows: a context is a number in that base, its digits 0 before the row's first
    token. Everything is computed in the table's dtype. At temperature 0 (greedy, evaluation only) log-probabilities are
    those of temperature 1.
    """

    def __init__(self, table: Float[Tensor, "states V"], memory: int, context_length: int):
        super().__init__()
        if table.shape[0] != (table.shape[1] + 1) ** memory:
            raise ValueError(f"a memory of {memory} over {table.shape[1]} tokens is no table of {table.shape[0]} rows")
        self.table = torch.nn.Parameter(table)
        self.memory = memory
        self.context_length = context_length

    @classmethod
    def uniform(cls, vocabulary: int, memory: int, context_length: int, dtype: torch.dtype = torch.float32) -> Self:
        """Every token equally likely in every context."""
        return cls(torch.zeros((vocabulary + 1) ** memory, vocabulary, dtype=dtype), memory, context_length)

    @classmethod
    def random(
        cls, vocabulary: int, memory: int, context_length: int, key: Sequence[int], dtype: torch.dtype = torch.float64
    ) -> Self:
        """Standard normal logits drawn by `default_rng(key)`."""
        logits = np.random.default_rng(list(key)).standard_normal(((vocabulary + 1) ** memory, vocabulary))
        return cls(torch.from_numpy(logits).to(dtype), memory, context_length)

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
        """Log-probabilities [b, t] of the sampled tokens; `want` may name "entropy" and "logits".

        Raises ValueError if a token lies outside the vocabulary or `want` names another part.
        """
        if want - PARTS:
            raise ValueError(f"the tabular policy has no {', '.join(sorted(want - PARTS))}; it has entropy and logits")
        temperature = torch.where(batch.temperature > 0, batch.temperature, torch.ones_like(batch.temperature))
        rows = contexts(batch, self.table.shape[1], self.memory)
        logits = self.table[rows] / temperature[:, None, None].to(self.table.dtype)
        logps = logits.log_softmax(-1)
        mask = batch.mask[:, :, None]
        sampled = torch.where(mask, batch.tokens[:, :, None], torch.zeros_like(batch.tokens[:, :, None]))
        logp = torch.where(mask, logps.gather(-1, sampled), torch.zeros_like(logps[:, :, :1])).squeeze(-1)
        entropy = torch.where(batch.mask, -(logps.exp() * logps).sum(-1), torch.zeros_like(logp))
        return Forward(
            logp,
            entropy=entropy if "entropy" in want else None,
            logits=torch.where(mask, logits, torch.zeros_like(logits)) if "logits" in want else None,
        )

    def state(self, tokens: Sequence[int]) -> int:
        """Row of the table that the token after `tokens` is drawn from."""
        base = self.table.shape[1] + 1
        recent = reversed(tokens[-self.memory :] if self.memory else [])
        return sum((token + 1) * base**back for back, token in enumerate(recent))

    def sampler(self) -> "TabularSampler":
        return TabularSampler(self)

    def save(self, folder: Path) -> None:
        """The table (safetensors) and its shape (JSON), in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file({"table": self.table.detach().contiguous()}, folder / WEIGHTS)
        config = {"model_type": "postrl_tabular", "memory": self.memory, "context_length": self.context_length}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `save` wrote. Raises UserError naming the folder if that is not what lies there."""
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            table = safetensors.torch.load_file(folder / WEIGHTS)["table"]
            return cls(table, int(config["memory"]), int(config["context_length"]))
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
            raise UserError(f"{folder} holds no tabular policy ({error})") from error

    def enumerate_sequences(
        self,
        prompt: Sequence[int],
        horizon: int,
        stop: frozenset[int] = frozenset(),
        temperature: float = 1.0,
    ) -> Batch:
        """Every completion of `prompt`, once: units of one group that end at a stop token or after `horizon` tokens.

        Log-probabilities of sampler and old policy are this policy's. Rewards are for the caller to put in.
        """
        rollouts = []
        for sample, tokens in enumerate(_completions(self.table.shape[1], horizon, stop)):
            turns = [Turn(list(prompt), False), Turn(tokens, True, logp=[0.0] * len(tokens))]
            rollouts.append(Rollout("enumerated", 0, sample, [turns], temperature=temperature))
        batch = collate(rollouts).to(dtype=self.table.dtype, device=self.table.device)
        with torch.no_grad():
            logp = self(batch).logp
        return replace(batch, logp_sampler=logp, logp_old=logp.clone())

    def probability(self, batch: Batch) -> Float[Tensor, "N"]:
        """Probability of each unit's sampled tokens given the others; differentiable."""
        return unit_sum(self(batch).logp, batch).exp()

    def expectation(self, batch: Batch, value: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        """E[value] under this policy over the units of `enumerate_sequences`; differentiable."""
        return (self.probability(batch) * value).sum()


def contexts(batch: Batch, vocabulary: int, memory: int) -> Int[Tensor, "b t"]:
    """Row of the table that column t is drawn from; 0 in padding. Raises ValueError for an unknown token."""
    T = batch.tokens.shape[1]
    if torch.any(batch.valid & ((batch.tokens < 0) | (batch.tokens >= vocabulary))):
        raise ValueError(f"a token outside the vocabulary of {vocabulary}: {batch.tokens[batch.valid].max()}")
    digits = torch.where(batch.valid, batch.tokens + 1, torch.zeros_like(batch.tokens))
    state = torch.zeros_like(digits)
    for back in range(1, min(memory, T - 1) + 1):
        state[:, back:] += digits[:, : T - back] * (vocabulary + 1) ** (back - 1)
    return torch.where(batch.valid, state, torch.zeros_like(state))


@dataclass
class _Session:
    context: list[int]
    key: Key = ()
    sampling: Sampling = field(default_factory=Sampling)
    keep: bool = False


@dataclass
class _Draft:
    """A completion under way. `uniform` holds a number for every token it may still have; `state` a table row."""

    session: int
    state: int
    uniform: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    stop: Stop = Stop.TRUNCATED


class TabularSampler:
    """Draws from the policy's weights as they are when polled; all queued completions advance together."""

    def __init__(self, policy: Tabular):
        self.policy = policy
        self.sessions: dict[int, _Session] = {}
        self.queue: list[int] = []
        self.numbers = count()

    def submit(
        self, tokens: Sequence[int], key: Key, sampling: Sampling, session: int | None = None, keep: bool = False
    ) -> int:
        """Queue a completion. Raises UserError if a new prompt is longer than the context or has unknown tokens, and
        KeyError if the session is not open."""
        vocabulary = self.policy.table.shape[1]
        if any(not 0 <= token < vocabulary for token in tokens):
            raise UserError(f"the prompt {list(tokens)} has a token outside the vocabulary of {vocabulary}")
        if session is None:
            if len(tokens) > self.policy.context_length:
                raise UserError(
                    f"the prompt has {len(tokens)} tokens but the context is {self.policy.context_length}: shorten it"
                )
            session = next(self.numbers)
            self.sessions[session] = _Session([])
        here = self.sessions[session]
        here.context += tokens
        here.key, here.sampling, here.keep = key, sampling, keep
        self.queue.append(session)
        return session

    def poll(self) -> list[Completion]:
        """Every queued completion, in the order of submission."""
        queue, self.queue = self.queue, []
        table = self.policy.table.detach().cpu().double()
        drafts = [self._draft(session) for session in queue]
        going = [draft for draft in drafts if len(draft.uniform)]
        while going:
            self._advance(table, going)
            going = [d for d in going if d.stop == Stop.TRUNCATED and len(d.tokens) < len(d.uniform)]
        done = []
        for draft in drafts:
            here = self.sessions[draft.session]
            here.context += draft.tokens
            done.append(Completion(draft.session, here.key, draft.tokens, draft.logp, draft.stop))
            if not here.keep:
                self.close(draft.session)
        return done

    def close(self, session: int) -> None:
        del self.sessions[session]

    def refresh(self) -> None:
        """Nothing is derived from the weights. Raises RuntimeError if a session is open."""
        if self.sessions:
            raise RuntimeError(f"{len(self.sessions)} sessions are open while the weights change; close them first")

    def _draft(self, session: int) -> _Draft:
        here = self.sessions[session]
        room = min(here.sampling.max_tokens, self.policy.context_length - len(here.context))
        uniform = np.random.default_rng(list(here.key)).random(max(room, 0))
        return _Draft(session, self.policy.state(here.context), uniform)

    def _advance(self, table: Float[Tensor, "states V"], going: list[_Draft]) -> None:
        """One more token for each."""
        sampling = [self.sessions[draft.session].sampling for draft in going]
        base = table.shape[1] + 1
        tokens, logp = draw(
            table[[draft.state for draft in going]],
            torch.tensor([draft.uniform[len(draft.tokens)] for draft in going], dtype=torch.float64),
            torch.tensor([s.temperature for s in sampling], dtype=torch.float64),
            torch.tensor([s.top_p for s in sampling], dtype=torch.float64),
            torch.tensor([s.top_k for s in sampling]),
        )
        for draft, token, chance, s in zip(going, tokens.tolist(), logp.tolist(), sampling, strict=True):
            draft.tokens.append(token)
            draft.logp.append(chance)
            draft.state = (draft.state * base + token + 1) % base**self.policy.memory
            if token in s.stop:
                draft.stop = Stop.FINISHED


def _completions(vocabulary: int, horizon: int, stop: frozenset[int]) -> list[list[int]]:
    """Every token sequence that ends at its first stop token or at the horizon."""
    done: list[list[int]] = []
    unfinished: list[list[int]] = [[]]
    for _ in range(horizon):
        longer = [[*tokens, token] for tokens in unfinished for token in range(vocabulary)]
        done += [tokens for tokens in longer if tokens[-1] in stop]
        unfinished = [tokens for tokens in longer if tokens[-1] not in stop]
    return done + unfinished
