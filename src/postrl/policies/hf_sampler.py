"""Sampling from any Hugging Face causal language model, by its own key-value cache."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from postrl.batch import Stop
from postrl.errors import UserError
from postrl.policies.base import Completion, Key, Sampling
from postrl.policies.draw import draw
from postrl.policies.hf_blocks import hooked
from postrl.policies.interventions import NONE, Changes, Places

if TYPE_CHECKING:
    from postrl.policies.hf import HuggingFacePolicy


@dataclass
class _Context:
    """What was read before a completion, and which of it the policy drew in earlier turns."""

    tokens: list[int]
    sampled: list[bool]

    def plus(self, tokens: Sequence[int], sampled: bool) -> "_Context":
        return _Context([*self.tokens, *tokens], self.sampled + [sampled] * len(tokens))


@dataclass
class _Request:
    session: int
    key: Key
    context: _Context
    sampling: Sampling
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    @property
    def whole(self) -> _Context:
        return self.context.plus(self.tokens, True)

    def stop(self, context_length: int) -> Stop | None:
        if self.tokens and self.tokens[-1] in self.sampling.stop:
            return Stop.FINISHED
        full = (
            len(self.tokens) >= self.sampling.max_tokens
            or len(self.context.tokens) + len(self.tokens) >= context_length
        )
        return Stop.TRUNCATED if full else None


CACHE_NAMES = ("cache", "past_key_values")  # what transformers calls it now, and what it called it before


class HuggingFaceSampler:
    """A `Sampler` over the model's own key-value cache.

    Up to `slots` waiting completions start together and leave one by one; sessions keep tokens, not keys and values,
    and are read again on the next turn. A model without a cache, or whose predictions change with padding on the left,
    is sampled one completion at a time and read from the start for every token.
    """

    def __init__(self, policy: "HuggingFacePolicy", slots: int = 64) -> None:
        self.policy = policy
        self.vocabulary, self.context_length = policy.causal.config.get_text_config().vocab_size, policy.context_length
        batches = _batches(policy, self.vocabulary)
        self.slots, self._caches = (slots, CACHE_NAMES) if batches else (1, ())
        self._waiting: deque[_Request] = deque()
        self._running: _Running | None = None
        self._kept: dict[int, _Context | None] = {}  # open sessions; None while a completion is under way
        self._next = 0
        self._changes: Changes = policy.interventions  # those under which the open sessions began

    def submit(
        self, tokens: Sequence[int], key: Key, sampling: Sampling, session: int | None = None, keep: bool = False
    ) -> int:
        """See `Sampler`. Raises UserError for a prompt that leaves no room in the context, ValueError for tokens
        outside the vocabulary, an empty prompt, or a session that is unknown or not finished. An extension that leaves
        no room gives an empty TRUNCATED completion."""
        self._check_scope()
        tokens = [int(token) for token in tokens]
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise ValueError(f"a token is outside the vocabulary of {self.vocabulary}")
        if sampling.max_tokens < 1:
            raise UserError(f"max_tokens={sampling.max_tokens}: a completion needs at least one")
        if session is None and len(tokens) >= self.context_length:
            room = self.context_length
            raise UserError(f"a prompt of {len(tokens)} tokens leaves no room in the model's context of {room}")
        before: _Context | None = _Context([], [])
        if session is None:
            session, self._next = self._next, self._next + 1
        else:
            before = self._kept.get(session)
            if before is None:
                raise ValueError(f"session {session} is closed, unknown or still being sampled")
        context = before.plus(tokens, False)
        if not context.tokens:
            raise ValueError("an empty prompt: nothing predicts the first token")
        if keep:
            self._kept[session] = None
        else:
            self._kept.pop(session, None)
        uniforms = np.random.default_rng(key).random(sampling.max_tokens)
        self._waiting.append(_Request(session, key, context, sampling, uniforms))
        return session

    def poll(self) -> list[Completion]:
        """See `Sampler`. Raises ValueError if the interventions are others than when the open sessions began."""
        self._check_scope()
        with _evaluating(self.policy):
            return self._work()

    def _work(self) -> list[Completion]:
        finished: list[Completion] = []
        while not finished and (self._running is not None or self._waiting):
            if self._running is None:
                fresh = [self._waiting.popleft() for _ in range(min(self.slots, len(self._waiting)))]
                finished += [self._finish(r, s) for r in fresh if (s := r.stop(self.context_length)) is not None]
                fresh = [request for request in fresh if request.stop(self.context_length) is None]
                self._running = self._start(fresh) if fresh else None
            else:
                done = self._running.advance()
                finished += [self._finish(request, stop) for request, stop in done]
                if not self._running.requests:
                    self._running = None
        return finished

    def close(self, session: int) -> None:
        """See `Sampler`. Raises ValueError for a session that is unknown or not finished."""
        if self._kept.get(session) is None:
            raise ValueError(f"session {session} is closed, unknown or still being sampled")
        del self._kept[session]

    def refresh(self) -> None:
        """See `Sampler`; nothing is derived from the weights here. Raises ValueError if something is under way."""
        if self._busy:
            raise ValueError("the weights changed while completions or sessions were open; poll and close them first")

    def _start(self, fresh: list[_Request]) -> "_Running":
        return _Running(self.policy, fresh, self._caches, self.context_length, self._changes)

    @property
    def _busy(self) -> bool:
        return bool(self._kept or self._waiting or self._running is not None)

    def _check_scope(self) -> None:
        if not self._busy:
            self._changes = self.policy.interventions
        elif self._changes is not self.policy.interventions:
            raise ValueError(
                "completions or sessions are open that began under other interventions: poll and close them inside "
                "the scope they began in"
            )

    def _finish(self, request: _Request, stop: Stop) -> Completion:
        if request.session in self._kept:
            self._kept[request.session] = request.whole
        return Completion(request.session, request.key, request.tokens, request.logp, stop)


class _Running:
    """Completions that were started together, padded on the left."""

    def __init__(
        self, policy: "HuggingFacePolicy", requests: list[_Request], caches: Sequence[str], room: int, changes: Changes
    ) -> None:
        self.policy, self.requests, self.room, self.changes = policy, requests, room, changes
        self.cache_name = next((name for name in caches if name in policy.accepts), None)
        device = next(policy.parameters()).device
        contexts = [request.context.tokens for request in requests]
        length = max(map(len, contexts))
        tokens = torch.zeros(len(requests), length, dtype=torch.int64, device=device)
        self.visible = torch.zeros_like(tokens)
        for b, context in enumerate(contexts):
            tokens[b, length - len(context) :] = torch.tensor(context, device=device)
            self.visible[b, length - len(context) :] = 1
        self.cache: Any = None
        self.logits = self._read(tokens)

    def advance(self) -> list[tuple[_Request, Stop]]:
        """One token for every completion; those that are finished leave."""
        for request, token, logp in zip(self.requests, *self._draw(), strict=True):
            request.tokens.append(token)
            request.logp.append(logp)
        stops = [request.stop(self.room) for request in self.requests]
        done = [(request, stop) for request, stop in zip(self.requests, stops, strict=True) if stop is not None]
        stay = [b for b, stop in enumerate(stops) if stop is None]
        if stay:
            self.keep(stay)
        else:
            self.requests = []
        return done

    def keep(self, stay: list[int]) -> None:
        """Go on with some of the completions: their last tokens are read."""
        device = self.visible.device
        if len(stay) < len(self.requests):
            index = torch.tensor(stay, device=device)
            self.visible = self.visible[index]
            if self.cache is not None:
                self.cache.reorder_cache(index)
            self.requests = [self.requests[b] for b in stay]
        self.visible = torch.cat([self.visible, self.visible.new_ones(len(stay), 1)], 1)
        whole = [request.whole.tokens for request in self.requests]
        unread = whole if self.cache_name is None else [tokens[-1:] for tokens in whole]
        self.logits = self._read(torch.tensor(unread, device=device))

    def _draw(self) -> tuple[list[int], list[float]]:
        """The next token of each row and its log-probability."""
        logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        settings = [(r.sampling.temperature, r.sampling.top_p) for r in self.requests]
        temperature, top_p = torch.tensor(settings, dtype=logits.dtype, device=logits.device).unbind(1)
        top_k = torch.tensor([r.sampling.top_k for r in self.requests], device=logits.device)
        uniforms = [r.uniforms[len(r.tokens)] for r in self.requests]
        uniform = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
        tokens, logp = draw(logits.contiguous(), uniform, temperature, top_p, top_k)
        return tokens.tolist(), logp.tolist()

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> Tensor:
        """Logits [b, V] that follow `tokens`, which extend what the cache holds."""
        options: dict[str, Any] = {"attention_mask": self.visible, "use_cache": self.cache_name is not None}
        if self.cache_name:
            options[self.cache_name] = self.cache
        positions = (self.visible.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if "position_ids" in self.policy.accepts:
            options["position_ids"] = positions
        if "logits_to_keep" in self.policy.accepts:
            options["logits_to_keep"] = 1
        with self._hooked(tokens, positions) if self.changes else nullcontext(), self.policy.products():
            out = self.policy.causal(input_ids=tokens, **options)
        self.cache = out[self.cache_name] if self.cache_name else None
        return out.logits[:, -1]

    def _hooked(self, tokens: Tensor, positions: Tensor) -> AbstractContextManager[None]:
        """The interventions in force around a pass over `tokens` [b, t]."""
        real = self.visible[:, -tokens.shape[1] :].bool()
        sampled, prompt_end = torch.zeros_like(real), torch.zeros_like(real)
        for b, request in enumerate(self.requests):
            drawn = request.whole.sampled
            ends = torch.arange(len(drawn)) == (drawn.index(True) if True in drawn else len(drawn)) - 1
            n = min(len(drawn), real.shape[1])
            sampled[b, real.shape[1] - n :] = torch.tensor(drawn[-n:])
            prompt_end[b, real.shape[1] - n :] = ends[-n:]
        grids = (tokens, positions, sampled, prompt_end)
        return hooked(self.policy.causal, self.changes, Places(*(x[real] for x in grids)), real)


def _batches(policy: "HuggingFacePolicy", vocabulary: int) -> bool:
    """Whether a row padded on the left and continued from the cache is predicted as without both, found by trying."""
    contexts = [[n % vocabulary for n in range(1, length)] for length in (4, 9)]
    empty = _Context([], [])
    requests = [
        _Request(n, (), empty.plus(context, False), Sampling(), np.zeros(0)) for n, context in enumerate(contexts)
    ]
    with _evaluating(policy), torch.no_grad():
        trial = _Running(policy, requests, CACHE_NAMES, 0, NONE)
        if trial.cache_name is None:
            return False
        trial.requests[0].tokens.append(contexts[0][-1])
        trial.keep([0])
        whole = torch.tensor([[*contexts[0], contexts[0][-1]]], device=trial.visible.device)
        expected = policy.causal(input_ids=whole, use_cache=False).logits[0, -1].double()
    error = (trial.logits[0].double() - expected).abs().max()
    return bool(error <= 64 * torch.finfo(trial.logits.dtype).eps * expected.abs().max())


@contextmanager
def _evaluating(policy: "HuggingFacePolicy") -> Iterator[None]:
    """No dropout inside; the mode before it afterwards."""
    training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(training)
