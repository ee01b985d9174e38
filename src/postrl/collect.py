"""Rollouts from a sampler and worlds: the policy samples in the calling thread, worlds and rewards work meanwhile.

Each rollout is a coroutine on the background event loop that asks the calling thread for completions; nobody waits for
the slowest. Which rollout finishes first changes neither the random numbers (they follow from the keys) nor the order
of the result. A turn that exists as tokens is never tokenised again: a context only ever grows.
"""

import asyncio
import json
import logging
import math
import numbers
import queue
import traceback
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby

from postrl.batch import Stop
from postrl.envs.base import Environment, Step
from postrl.errors import UserError
from postrl.policies.base import Completion, Key, Renderer, Sampler, Sampling
from postrl.rewards.foreign import TimedOut, background_loop, call
from postrl.rewards.rubric import CALLS, Rubric, gather, score_group, score_rollout
from postrl.rollout import Message, Rollout, Turn

log = logging.getLogger(__name__)


class WorldError(UserError):
    """An environment raised or answered with something that is no `Step`. The run stops; this is never reward 0."""


@dataclass(frozen=True)
class Limits:
    """What a rollout may cost. Each limit that is hit shows: TRUNCATED for turns and context, ERROR for the world."""

    max_turns: int = 1  # of the policy
    max_context: int = 2048  # tokens of prompt, turns and answers of the world together
    step_timeout: float = 60.0  # seconds for one step of a world; running out of them leaves the rewards missing
    calls: int = CALLS  # steps and reward functions at work at the same time

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_context, self.calls) < 1 or self.step_timeout <= 0:
            raise UserError(f"{self}: every limit must be positive")


@dataclass(frozen=True)
class _Request:
    """A wish for a completion, sent to the thread that owns the sampler."""

    tokens: list[int]
    key: Key
    max_tokens: int
    session: int | None
    keep: bool
    answer: "asyncio.Future[Completion]"


@dataclass(frozen=True)
class _Close:
    session: int


@dataclass
class _Episode:
    environment: Environment
    key: Key
    rollout: Rollout
    context: list[int] = field(default_factory=list)  # every token so far


_Mail = queue.SimpleQueue["_Request | _Close | None"]  # None: everything has ended


def collect(
    sampler: Sampler,
    renderer: Renderer,
    environments: Sequence[Environment],
    keys: Sequence[Key],
    sampling: Sampling,
    rubric: Rubric,
    limits: Limits = Limits(),
    version: int = 0,
    answer: Callable[[Rollout], Hashable] | None = None,
) -> list[Rollout]:
    """One scored rollout per environment, in the order given.

    keys: (seed, step, group, sample) per environment. Neighbours of one group are the group that group rewards see;
    turn t of a rollout is sampled with random numbers of (*key, t). version: of the policy, written into the rollouts.
    The tokens that end a turn are those of `sampling` and of the renderer together.
    answer: what a scored rollout answered, for methods that count equal answers; it fills the grouping "answer", see
    `group_answers`.
    Raises UserError (a prompt does not fit, `answer` raised), WorldError (an environment raised) or RewardError (a
    reward did); then sessions the sampler still keeps are closed.
    """
    if len(environments) != len(keys):
        raise ValueError(f"{len(environments)} environments but {len(keys)} keys")
    if not environments:
        return []
    rendered: dict[str, list[int]] = {}  # a group has one prompt, and a template takes its time
    episodes = [
        _open(environment, key, renderer, rendered, sampling, limits, version)
        for environment, key in zip(environments, keys, strict=True)
    ]
    sampling = replace(sampling, stop=sampling.stop | renderer.stop)
    mail: _Mail = queue.SimpleQueue()
    work = _collect(episodes, renderer, sampling, rubric, limits, mail)
    future = asyncio.run_coroutine_threadsafe(work, background_loop())
    future.add_done_callback(lambda _: mail.put(None))
    _serve(sampler, sampling, mail, future, first=len(episodes))
    rollouts = [episode.rollout for episode in episodes]
    if answer is not None:
        group_answers(rollouts, answer)
    return rollouts


def group_answers(rollouts: Sequence[Rollout], answer: Callable[[Rollout], Hashable]) -> None:
    """Fill groups["answer"]: 0, 1, … per distinct value of `answer`, in the order of first appearance.

    None (nothing could be extracted) is a value like another. Ids speak of these rollouts alone and do not look at the
    problem: combine them with the rollouts' `group`. Raises UserError naming the item if `answer` raises or its value
    cannot be hashed.
    """
    numbers: dict[Hashable, int] = {}
    for rollout in rollouts:
        try:
            rollout.groups["answer"] = numbers.setdefault(answer(rollout), len(numbers))
        except Exception as error:
            raise UserError(
                f"option answer: no hashable value for a rollout of item {rollout.item!r} ({error!r}); repair it"
            ) from error


def _serve(sampler: Sampler, sampling: Sampling, mail: _Mail, future: "Future[None]", first: int) -> None:
    """Answer requests until the coroutines have ended; raise what they raised.

    The `first` requests are all taken before any sampling, so that batches do not depend on who was scheduled first.
    """
    waiting: dict[int, _Request] = {}  # by session
    kept: set[int] = set()
    taken = 0
    try:
        while not future.done():
            while taken < first or not waiting or not mail.empty():
                wish = mail.get()
                if wish is None:
                    break
                if isinstance(wish, _Close):
                    sampler.close(wish.session)
                    kept.discard(wish.session)
                    continue
                limited = replace(sampling, max_tokens=wish.max_tokens)
                session = sampler.submit(wish.tokens, wish.key, limited, wish.session, wish.keep)
                kept.discard(session)
                waiting[session] = wish
                taken += 1
            else:
                done = sampler.poll()
                answers = [(waiting.pop(completion.session), completion) for completion in done]
                kept.update(completion.session for wish, completion in answers if wish.keep)
                background_loop().call_soon_threadsafe(_deliver, answers)
        future.result()
    finally:
        future.cancel()
        for session in kept:
            sampler.close(session)


def _deliver(answers: Sequence[tuple[_Request, Completion]]) -> None:
    for wish, completion in answers:
        if not wish.answer.done():  # cancelled: another rollout has failed
            wish.answer.set_result(completion)


async def _collect(
    episodes: list[_Episode], renderer: Renderer, sampling: Sampling, rubric: Rubric, limits: Limits, mail: _Mail
) -> None:
    slots = asyncio.Semaphore(limits.calls)

    async def play_and_score(episode: _Episode) -> None:
        await _play(episode, renderer, sampling.max_tokens, limits, mail, slots)
        await score_rollout(rubric, episode.rollout, slots)

    async def group(members: list[_Episode]) -> None:
        await gather(*(play_and_score(episode) for episode in members))
        await score_group(rubric, [episode.rollout for episode in members], slots)

    groups = [list(members) for _, members in groupby(episodes, lambda episode: episode.rollout.group)]
    await gather(*(group(members) for members in groups))


def _open(
    environment: Environment,
    key: Key,
    renderer: Renderer,
    rendered: dict[str, list[int]],
    sampling: Sampling,
    limits: Limits,
    version: int,
) -> _Episode:
    item = environment.item
    try:
        messages, info = environment.prompt(), dict(environment.info)
    except Exception as error:
        raise _broken(item, "prompt", error) from error
    text = json.dumps(messages)
    if text not in rendered:
        rendered[text] = renderer.prompt(messages)
    tokens = list(rendered[text])
    if len(tokens) >= limits.max_context:
        raise UserError(
            f"the prompt of item {item!r} has {len(tokens)} tokens, but the context holds {limits.max_context} with at "
            "least one for the answer; leave the item out, shorten its prompt or raise max_context"
        )
    rollout = Rollout(
        item=item,
        group=key[2],
        sample=key[3],
        contexts=[[Turn(tokens, sampled=False, text=_text(messages))]],
        version=version,
        temperature=sampling.temperature,
        messages=list(messages),
        info=info,
    )
    return _Episode(environment, key, rollout, list(tokens))


async def _play(
    episode: _Episode, renderer: Renderer, max_tokens: int, limits: Limits, mail: _Mail, slots: asyncio.Semaphore
) -> None:
    """Turns of the policy and steps of the world until one of them, or a limit, ends the rollout."""
    rollout, turns = episode.rollout, episode.rollout.contexts[0]
    new, session, keep = turns[0].tokens, None, False
    for number in range(limits.max_turns):
        keep = number + 1 < limits.max_turns
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        room = min(max_tokens, limits.max_context - len(episode.context))
        mail.put(_Request(new, (*episode.key, number), room, session, keep, answer))
        completion = await answer
        session = completion.session
        text = renderer.text(completion.tokens)
        turns.append(Turn(completion.tokens, sampled=True, text=text, logp=completion.logp))
        episode.context.extend(completion.tokens)
        rollout.messages.append({"role": "assistant", "content": text})
        rollout.stop = completion.stop
        if completion.stop != Stop.FINISHED:
            break
        step = await _step(episode, text, limits.step_timeout, slots)
        if step is None:
            rollout.stop = Stop.ERROR
            break
        if step.done:
            break
        rollout.stop = Stop.TRUNCATED  # unless another turn follows
        rollout.messages.extend(step.messages)
        new = renderer.extend(episode.context, step.messages)
        if len(episode.context) + len(new) >= limits.max_context:
            break
        if keep:
            turns.append(Turn(new, sampled=False, text=_text(step.messages)))
            episode.context.extend(new)
    if session is not None and keep:
        mail.put(_Close(session))
    if all(math.isnan(reward) for reward in rollout.step_rewards):
        rollout.step_rewards = []  # a world without step rewards


async def _step(episode: _Episode, text: str, timeout: float, slots: asyncio.Semaphore) -> Step | None:
    """The world's answer, checked; None if it took too long."""
    rollout = episode.rollout
    try:
        step = await call(episode.environment.step, text, timeout, slots)
    except TimedOut:
        log.warning("the environment of item %r took more than %g s for a step: rewards missing", rollout.item, timeout)
        return None
    except Exception as error:
        raise _broken(rollout.item, "step", error) from error
    if not isinstance(step, Step):
        raise WorldError(f"the environment of item {rollout.item!r} answered {step!r:.80}; step() must return a Step")
    if step.reward is not None and not (isinstance(step.reward, numbers.Real) and math.isfinite(step.reward)):
        raise WorldError(f"the environment of item {rollout.item!r} gave the step reward {step.reward!r}; repair it")
    rollout.step_rewards.append(math.nan if step.reward is None else float(step.reward))
    return step


def _broken(item: str, method: str, error: Exception) -> WorldError:
    details = "".join(traceback.format_exception(error))
    return WorldError(
        f"the environment of item {item!r} raised {type(error).__name__} in {method}(); repair it\n{details}"
    )


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
