"""Sampling from any Hugging Face causal language model, by its own key-value cache."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from postrl.batch import Stop
from postrl.policies.base import Completion, Key, Sampling

if TYPE_CHECKING:
    from postrl.policies.hf import HuggingFacePolicy


@dataclass
class _Request:
    session: int
    key: Key
    context: list[int]
    sampling: Sampling
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    def stop(self, context_length: int) -> Stop | None:
        if self.tokens and self.tokens[-1] in self.sampling.stop:
            return Stop.FINISHED
        full = len(self.tokens) >= self.sampling.max_tokens or len(self.context) + len(self.tokens) >= context_length
        return Stop.TRUNCATED if full else None


class HuggingFaceSampler:
    """A `Sampler` over the model's own key-value cache.

    Up to `slots` waiting completions start together and leave one by one; sessions keep tokens, not keys and values,
    and are read again on the next turn. Models without a key-value cache are sampled one completion at a time and
    read from the start for every token.
    """

    def __init__(self, policy: "HuggingFacePolicy", slots: int = 64) -> None:
        self.policy = policy
        self._cached = "past_key_values" in policy.accepts
        self.slots = slots if self._cached else 1
        self._waiting: deque[_Request] = deque()
        self._running: _Running | None = None
        self._kept: dict[int, list[int] | None] = {}  # open sessions; None while a completion is under way
        self._next = 0

    def submit(
        self, tokens: Sequence[int], key: Key, sampling: Sampling, session: int | None = None, keep: bool = False
    ) -> int:
        """See `Sampler`. Raises ValueError for a closed or busy session, or a context without a token."""
        context = list(tokens)
        if session is None:
            session, self._next = self._next, self._next + 1
        else:
            before = self._kept.get(session)
            if before is None:
                raise ValueError(f"session {session} is not open, or its completion is not finished")
            context = before + context
        if not context:
            raise ValueError("a completion needs at least one token of context")
        if keep:
            self._kept[session] = None
        else:
            self._kept.pop(session, None)
        uniforms = np.random.default_rng(key).random(sampling.max_tokens)
        self._waiting.append(_Request(session, key, context, sampling, uniforms))
        return session

    def poll(self) -> list[Completion]:
        """See `Sampler`."""
        training = self.policy.training
        self.policy.eval()
        try:
            return self._work()
        finally:
            self.policy.train(training)

    def _work(self) -> list[Completion]:
        finished: list[Completion] = []
        while not finished and (self._running is not None or self._waiting):
            if self._running is None:
                fresh = [self._waiting.popleft() for _ in range(min(self.slots, len(self._waiting)))]
                finished += [self._finish(r, s) for r in fresh if (s := r.stop(self.policy.context_length)) is not None]
                fresh = [request for request in fresh if request.stop(self.policy.context_length) is None]
                self._running = _Running(self.policy, fresh, self._cached) if fresh else None
            else:
                done = self._running.advance()
                finished += [self._finish(request, stop) for request, stop in done]
                if not self._running.requests:
                    self._running = None
        return finished

    def close(self, session: int) -> None:
        """See `Sampler`. Raises ValueError if the session is not open."""
        if session not in self._kept:
            raise ValueError(f"session {session} is not open")
        del self._kept[session]

    def refresh(self) -> None:
        """See `Sampler`; nothing is derived from the weights here. Raises ValueError if something is under way."""
        if self._kept or self._waiting or self._running is not None:
            raise ValueError("the weights changed while completions or sessions were open; poll and close them first")

    def _finish(self, request: _Request, stop: Stop) -> Completion:
        if request.session in self._kept:
            self._kept[request.session] = request.context + request.tokens
        return Completion(request.session, request.key, request.tokens, request.logp, stop)


class _Running:
    """Completions that were started together, padded on the left."""

    def __init__(self, policy: "HuggingFacePolicy", requests: list[_Request], cached: bool) -> None:
        self.policy, self.requests, self.cached = policy, requests, cached
        device = next(policy.parameters()).device
        length = max(len(request.context) for request in requests)
        tokens = torch.zeros(len(requests), length, dtype=torch.int64, device=device)
        self.visible = torch.zeros_like(tokens)
        for b, request in enumerate(requests):
            tokens[b, length - len(request.context) :] = torch.tensor(request.context, device=device)
            self.visible[b, length - len(request.context) :] = 1
        self.past: Any = None
        self.logits = self._read(tokens)

    def advance(self) -> list[tuple[_Request, Stop]]:
        """One token for every completion; those that are finished leave."""
        draws = _draw(self.logits, self.requests)
        for request, (token, logp) in zip(self.requests, draws, strict=True):
            request.tokens.append(token)
            request.logp.append(logp)
        stops = [request.stop(self.policy.context_length) for request in self.requests]
        done = [(request, stop) for request, stop in zip(self.requests, stops, strict=True) if stop is not None]
        stay = [b for b, stop in enumerate(stops) if stop is None]
        if done and stay:
            index = torch.tensor(stay, device=self.visible.device)
            self.visible = self.visible[index]
            if self.past is not None:
                self.past.reorder_cache(index)
        self.requests = [self.requests[b] for b in stay]
        if self.requests:
            new = torch.tensor([[request.tokens[-1]] for request in self.requests], device=self.visible.device)
            self.visible = torch.cat([self.visible, torch.ones_like(new)], 1)
            whole = [[*request.context, *request.tokens] for request in self.requests]
            self.logits = self._read(new if self.cached else torch.tensor(whole, device=new.device))
        return done

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> Tensor:
        """Logits [b, V] that follow `tokens`, which extend what the cache holds."""
        options: dict[str, Any] = {}
        if self.cached:
            options |= {"attention_mask": self.visible, "past_key_values": self.past, "use_cache": True}
            if "position_ids" in self.policy.accepts:
                positions = (self.visible.cumsum(1) - 1).clamp(min=0)
                options["position_ids"] = positions[:, -tokens.shape[1] :]
        else:
            options["use_cache"] = False
        if "logits_to_keep" in self.policy.accepts:
            options["logits_to_keep"] = 1
        out = self.policy.causal(input_ids=tokens, **options)
        if self.cached:
            self.past = out.past_key_values
        return out.logits[:, -1]


def _draw(logits: Float[Tensor, "b V"], requests: Sequence[_Request]) -> list[tuple[int, float]]:
    """The next token of each row and its log-probability (nats) at the sampling temperature, before top-p and top-k.

    By inverse distribution function: the smallest token whose cumulative probability exceeds the row's next uniform
    number. Temperature 0 takes the likeliest token and reports log-probabilities at temperature 1.
    """
    settings = [request.sampling for request in requests]
    heat = torch.tensor([s.temperature or 1.0 for s in settings], dtype=torch.float64)
    logs = torch.log_softmax(logits.double().cpu() / heat[:, None], -1)
    uniform = torch.tensor([request.uniforms[len(request.tokens)] for request in requests], dtype=torch.float64)
    probability = torch.stack([_truncated(row.exp(), s) for row, s in zip(logs, settings, strict=True)])
    cumulative = probability.cumsum(1)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    greedy = torch.tensor([s.temperature == 0 for s in settings])
    token = torch.where(greedy, logs.argmax(1), drawn.clamp(max=logs.shape[1] - 1))
    chosen = logs.gather(1, token[:, None]).squeeze(1)
    return list(zip(token.tolist(), chosen.tolist(), strict=True))


def _truncated(probability: Float[Tensor, "V"], sampling: Sampling) -> Float[Tensor, "V"]:
    """Zeros outside the top-k tokens and outside the smallest set that holds top-p of what is left."""
    if 0 < sampling.top_k < len(probability):
        kept = torch.zeros_like(probability, dtype=torch.bool)
        kept[probability.topk(sampling.top_k).indices] = True
        probability = torch.where(kept, probability, 0.0)
    if sampling.top_p < 1:
        ordered, order = probability.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        ordered = torch.where(before < sampling.top_p * ordered.sum(), ordered, 0.0)
        probability = torch.zeros_like(probability).scatter(0, order, ordered)
    return probability
