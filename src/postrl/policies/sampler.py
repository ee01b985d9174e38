"""Sampling from a decoder with continuous batching.

A number of slots decode together; a finished completion leaves its slot and a waiting one enters. A prompt that
several completions share runs once and, where that pays, its keys and values are read by all of them in place. A kept
session leaves its slot too: its keys and values wait outside until it goes on.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from postrl.batch import Stop
from postrl.errors import UserError
from postrl.policies.base import Completion, Key, Sampler, Sampling
from postrl.policies.cache import SLOTS, Cache, Prefix, slots_for
from postrl.policies.decoder import Decoder
from postrl.policies.draw import draw
from postrl.policies.engine import Engine, Shared, Span
from postrl.policies.interventions import Changes

PREFILL_TOKENS = 4096  # of one pass over new prompts and extensions
SHARE_BYTES = 10**6  # per layer: reading a prompt's keys in place pays if it saves more (measured; one more call costs)


@dataclass(eq=False)
class _Context:
    """One session: what its keys and values stand for, and the completion being drawn."""

    session: int
    prompt: tuple[int, ...]  # tokens the first completion began with, until they have run
    prefix: Prefix | None = None
    own: int = 0  # tokens whose keys and values are in the slot, or outside it in `parked`
    parked: tuple[Tensor, Tensor] | None = None
    unfed: list[int] = field(default_factory=list)  # tokens that follow them and have not run yet
    key: Key = ()
    sampling: Sampling = field(default_factory=Sampling)
    keep: bool = False
    busy: bool = False
    limit: int = 0
    uniforms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return (self.prefix.length if self.prefix else 0) + self.own + len(self.unfed) + len(self.prompt)


class DecoderSampler:
    """A sampler (policies/base.py) of a decoder's weights as they were at the first `poll` after `refresh`.

    slots: completions decoded at a time; None: chosen at that `poll` for what waits then (see `cache.slots_for`).
    """

    def __init__(self, decoder: Decoder, slots: int | None = None) -> None:
        if slots is not None and slots < 1:
            raise UserError(f"slots={slots}: a sampler needs at least one")
        self.decoder, self.slots, self._choose_slots = decoder, slots or SLOTS[0], slots is None
        self._engine: Engine | None = None
        self._cache: Cache | None = None
        self._contexts: dict[int, _Context] = {}
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._users: dict[tuple[int, ...], int] = {}
        self._waiting: deque[_Context] = deque()
        self._active: list[_Context] = []  # place in the list = slot
        self._done: list[Completion] = []
        self._plan: Shared | None = None
        self._planned = False
        self._next = 0
        self._changes: Changes = decoder.interventions  # those under which the open sessions began

    def submit(
        self, tokens: Sequence[int], key: Key, sampling: Sampling, session: int | None = None, keep: bool = False
    ) -> int:
        """See base.Sampler. Raises UserError for a prompt that leaves no room in the context, ValueError for tokens
        outside the vocabulary, an empty prompt, or a session that is unknown or not finished. An extension that leaves
        no room gives an empty TRUNCATED completion."""
        self._check_scope()
        tokens = [int(token) for token in tokens]
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.decoder.config.vocabulary:
            raise ValueError(f"a token is outside the vocabulary of {self.decoder.config.vocabulary}")
        if sampling.max_tokens < 1:
            raise UserError(f"max_tokens={sampling.max_tokens}: a completion needs at least one")
        context = self._open(tuple(tokens)) if session is None else self._reopen(session, tokens)
        context.key, context.sampling, context.keep, context.busy = key, sampling, keep, True
        context.tokens, context.logp = [], []
        context.limit = min(sampling.max_tokens, self.decoder.config.context - context.length)
        if context.limit < 1:
            self._finish(context, Stop.TRUNCATED)
        else:
            if sampling.temperature != 0:
                context.uniforms = np.random.default_rng(key).random(context.limit).tolist()
            self._waiting.append(context)
        return context.session

    def _open(self, prompt: tuple[int, ...]) -> _Context:
        if not prompt:
            raise ValueError("an empty prompt: nothing predicts the first token")
        room = self.decoder.config.context
        if len(prompt) >= room:
            raise UserError(f"a prompt of {len(prompt)} tokens leaves no room in the model's context of {room}")
        context = _Context(self._next, prompt)
        self._next += 1
        self._contexts[context.session] = context
        self._users[prompt] = self._users.get(prompt, 0) + 1
        return context

    def _reopen(self, session: int, tokens: list[int]) -> _Context:
        context = self._idle(session)
        context.unfed += tokens
        return context

    def _idle(self, session: int) -> _Context:
        context = self._contexts.get(session)
        if context is None or context.busy:
            state = "closed or unknown" if context is None else "still being sampled"
            raise ValueError(f"session {session} is {state}")
        return context

    def poll(self) -> list[Completion]:
        """See base.Sampler. Raises ValueError if the interventions are others than when the open sessions began."""
        self._check_scope()
        if self._waiting:
            self._ready()
        together = max(1, self.slots // 8)  # a pass for one prompt costs nearly as much as one for several
        while not self._done and (self._waiting or self._active):
            if self._waiting and self.slots - len(self._active) >= min(len(self._waiting), together):
                self._admit()
            if self._active and not self._done:
                self._step()
        done, self._done = self._done, []
        return done

    def close(self, session: int) -> None:
        """See base.Sampler. Raises ValueError for a session that is unknown or not finished."""
        self._forget(self._idle(session))

    def refresh(self) -> None:
        """See base.Sampler. Raises ValueError if a session is open."""
        if self._contexts:
            raise ValueError(f"{len(self._contexts)} sessions are open; close them before the weights change")
        self._engine = None

    def _check_scope(self) -> None:
        if not self._contexts:
            self._changes = self.decoder.interventions
        elif self._changes is not self.decoder.interventions:
            raise ValueError(
                f"{len(self._contexts)} sessions are open that began under other interventions: poll and close them "
                "inside the scope they began in"
            )

    # ------------------------------------------------------------------------------------------ one pass

    def _ready(self) -> tuple[Engine, Cache]:
        if self._engine is None:
            if self._choose_slots:
                self.slots = self._fitting_slots()
            self._engine = Engine(self.decoder, self.slots)
        if self._cache is None or self._cache.slots != self.slots:  # nothing is in it then
            like = torch.empty(0, dtype=self._engine.dtype, device=self._engine.device)
            self._cache = Cache(self.decoder.config, self.slots, like)
        return self._engine, self._cache

    def _fitting_slots(self) -> int:
        """For what waits; a session that is kept may come to fill the context."""
        config = self.decoder.config
        size = (self.decoder.compute_dtype or self.decoder.head_weight.dtype).itemsize
        token_bytes = 2 * config.layers * config.kv_heads * config.head_size * size
        longest = max((config.context if c.keep else c.length + c.limit for c in self._waiting), default=0)
        return slots_for(len(self._waiting), token_bytes, longest)

    def _admit(self) -> None:
        """Waiting contexts into free slots: their prompts and extensions run, and their first token is drawn."""
        engine, cache = self._ready()
        entering, prompts = self._choose()
        going_on = [context for context in entering if not context.prompt]
        spans = [Span(list(prompt)) for prompt in prompts] + [self._extension(context) for context in going_on]
        logits, made = engine.prefill(spans) if spans else (None, [])
        following: dict[int, Tensor] = {}
        for number, context in enumerate(going_on, len(prompts)):
            assert logits is not None
            following[context.session] = logits[number]
            self._enter_extension(context, made[number], cache)
        for number, prompt in enumerate(prompts):
            assert logits is not None
            self._prefixes[prompt] = self._prefix(prompt, *made[number], logits[number])
        for context in entering:
            if context.prompt:
                following[context.session] = self._prefixes[context.prompt].logits
                self._enter_prompt(context, cache)
        self._plan, self._planned = None, False
        self._accept(entering, torch.stack([following[context.session] for context in entering]))

    def _choose(self) -> tuple[list[_Context], list[tuple[int, ...]]]:
        """Contexts to enter now, first come first served, and the new prompts among them."""
        entering: list[_Context] = []
        prompts: list[tuple[int, ...]] = []
        budget = PREFILL_TOKENS
        while self._waiting and len(self._active) + len(entering) < self.slots:
            context = self._waiting[0]
            new = bool(context.prompt) and context.prompt not in self._prefixes and context.prompt not in prompts
            cost = len(context.prompt) * new + len(context.unfed)
            if entering and cost > budget:
                break
            budget -= cost
            entering.append(self._waiting.popleft())
            if new:
                prompts.append(context.prompt)
        return entering, prompts

    def _extension(self, context: _Context) -> Span:
        assert context.parked is not None
        keys, values = context.parked
        if context.prefix is not None:
            keys = torch.cat([context.prefix.keys, keys], 2)
            values = torch.cat([context.prefix.values, values], 2)
        return Span(context.unfed, (keys, values), sampled=True)  # a kept session's last token has never run

    def _prefix(self, prompt: tuple[int, ...], keys: Tensor, values: Tensor, logits: Tensor) -> Prefix:
        saved = (self._users[prompt] - 1) * 2 * keys[0].numel() * keys.element_size()
        return Prefix(prompt, keys, values, logits.clone(), saved >= SHARE_BYTES)

    def _enter_prompt(self, context: _Context, cache: Cache) -> None:
        prompt, prefix = context.prompt, self._prefixes[context.prompt]
        context.prompt = ()
        if prefix.shared:
            context.prefix = prefix
        else:
            cache.write(len(self._active), 0, prefix.keys, prefix.values)
            context.own = prefix.length
            self._release(prompt)
        self._active.append(context)

    def _enter_extension(self, context: _Context, made: tuple[Tensor, Tensor], cache: Cache) -> None:
        assert context.parked is not None
        slot = len(self._active)
        cache.write(slot, 0, *context.parked)
        cache.write(slot, context.own, *made)
        context.own += len(context.unfed)
        context.parked, context.unfed = None, []
        self._active.append(context)

    def _step(self) -> None:
        """One token in every active slot."""
        engine, cache = self._ready()
        active, device = self._active, engine.device
        cache.reserve(max(context.own for context in active) + 1)
        if not self._planned:
            self._plan, self._planned = self._make_plan(device), True
        numbers = [(c.tokens[-1], c.length - 1, c.own) for c in active]
        tokens, positions, lengths = torch.tensor(numbers, device=device).unbind(1)
        logits = engine.decode(tokens, positions, lengths, cache, self._plan)
        for context in active:
            context.own, context.unfed = context.own + 1, []
        self._accept(list(active), logits)

    def _make_plan(self, device: torch.device) -> Shared | None:
        members: dict[int, list[int]] = {}
        for slot, context in enumerate(self._active):
            if context.prefix is not None:
                members.setdefault(id(context.prefix), []).append(slot)
        parts, order = [], []
        for slots in members.values():
            parts.append((self._active[slots[0]].prefix, len(order), len(order) + len(slots)))
            order += slots
        return Shared(torch.tensor(order, device=device), parts) if order else None

    def _accept(self, contexts: list[_Context], logits: Tensor) -> None:
        """Draw the next token of each context and retire those it finishes."""
        device, wide = logits.device, logits.dtype
        uniforms = [c.uniforms[len(c.tokens)] if c.uniforms else 0.0 for c in contexts]
        settings = [(c.sampling.temperature, c.sampling.top_p) for c in contexts]
        temperature, top_p = torch.tensor(settings, dtype=wide, device=device).unbind(1)
        top_k = torch.tensor([c.sampling.top_k for c in contexts], device=device)
        uniform = torch.tensor(uniforms, dtype=torch.float64, device=device)
        drawn, logp = draw(logits, uniform, temperature, top_p, top_k)
        for context, token, value in zip(contexts, drawn.tolist(), logp.tolist(), strict=True):
            if math.isnan(value):
                raise UserError("the policy's probabilities are no numbers any more: resume with a lower learning rate")
            context.tokens.append(token)
            context.logp.append(value)
            context.unfed = [token]
            if token in context.sampling.stop:
                self._finish(context, Stop.FINISHED)
            elif len(context.tokens) == context.limit:
                self._finish(context, Stop.TRUNCATED)

    # ------------------------------------------------------------------------------------------ leaving

    def _finish(self, context: _Context, stop: Stop) -> None:
        self._done.append(Completion(context.session, context.key, context.tokens, context.logp, stop))
        context.busy = False
        if context in self._active:
            self._leave(context)
        if not context.keep:
            self._forget(context)

    def _leave(self, context: _Context) -> None:
        """Out of the slot; the last active context moves in, so that active slots stay the first ones."""
        _, cache = self._ready()
        slot = self._active.index(context)
        if context.keep:
            context.parked = cache.read(slot, context.own)
        last = self._active.pop()
        if last is not context:
            cache.move(len(self._active), slot, last.own)
            self._active[slot] = last
        self._plan, self._planned = None, False

    def _forget(self, context: _Context) -> None:
        del self._contexts[context.session]
        if context.prefix is not None:
            self._release(context.prefix.prompt)

    def _release(self, prompt: tuple[int, ...]) -> None:
        self._users[prompt] -= 1
        if not self._users[prompt]:
            del self._users[prompt], self._prefixes[prompt]


def sample(
    sampler: Sampler, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int, step: int = 0
) -> list[list[Completion]]:
    """n completions of each prompt, in order; sample i of prompt g draws from `default_rng((seed, step, g, i))`."""
    keys = [[(seed, step, group, number) for number in range(n)] for group in range(len(prompts))]
    for prompt, group in zip(prompts, keys, strict=True):
        for key in group:
            sampler.submit(prompt, key, sampling)
    done: dict[Key, Completion] = {}
    while completions := sampler.poll():
        done.update((completion.key, completion) for completion in completions)
    return [[done[key] for key in group] for group in keys]
