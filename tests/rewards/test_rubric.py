"""Scores: what is missing, what is legal, and what stops a run."""

import asyncio
import decimal
import gc
import math
import os
import signal
import sys
import threading
import time
import weakref
from fractions import Fraction

import numpy as np
import pytest

from builders import rollout
from postrl.batch import Stop
from postrl.errors import UserError
from postrl.rewards.foreign import background_loop
from postrl.rewards.rubric import Reward, RewardError, Rubric, score


def scored(*rewards: Reward, count: int = 2):
    group = [rollout(group=4, sample=i) for i in range(count)]
    asyncio.run(score(Rubric(rewards), group))
    return group


def test_components_keep_their_order_names_and_weights():
    group = scored(
        Reward("late", lambda r: time.sleep(0.05) or 1),
        Reward("group", lambda g: [r.sample for r in g], weight=0.0, per="group"),
        Reward("early", lambda r: -2.5, weight=0.5),
    )
    assert [list(r.rewards.items()) for r in group] == [
        [("late", 1.0), ("group", 0.0), ("early", -2.5)],
        [("late", 1.0), ("group", 1.0), ("early", -2.5)],
    ]
    assert group[0].reward_weights == {"late": 1.0, "group": 0.0, "early": 0.5}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int64(3), 3.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_every_kind_become_floats(value, expected):
    for result in (scored(Reward("x", lambda r: value)), scored(Reward("x", lambda g: [value] * 2, per="group"))):
        assert result[0].rewards == {"x": expected} and type(result[0].rewards["x"]) is float


def test_none_is_missing():
    group = scored(
        Reward("some", lambda r: None if r.sample else 1.0),
        Reward("group", lambda g: [None, 2.0], per="group"),
        Reward("all", lambda r: None),
    )
    assert [r.rewards for r in group] == [
        {"some": 1.0, "group": None, "all": None},
        {"some": None, "group": 2.0, "all": None},
    ]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, np.float32("nan"), "1", [1.0], 1j, 3e38, 1e39, 10**400]
)
def test_what_is_no_finite_number_stops_the_run(value):
    for reward in (Reward("x", lambda r: value), Reward("x", lambda g: [0.0, value], per="group")):
        with pytest.raises(RewardError, match=r"reward 'x' returned .* on item 'item4'"):
            scored(reward)


@pytest.mark.parametrize(
    ("answer", "what"), [([1.0], "1 scores"), ([], "0 scores"), (None, "NoneType"), (1.0, "float"), ("ab", "2 scores")]
)
def test_a_group_reward_of_the_wrong_length_stops_the_run(answer, what):
    with pytest.raises(RewardError, match=f"reward 'x' returned {what} for a group of 2 rollouts on item 'item4'"):
        scored(Reward("x", lambda g: answer, per="group"))


def raises(r):
    raise KeyError("gold")


async def raises_later(r):
    raise KeyError("gold")


def stops_iteration(r):
    return next(iter([]))


def own_timeout(r):
    raise TimeoutError("the judge's connection")


@pytest.mark.parametrize("fn", [raises, raises_later, stops_iteration, own_timeout], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("per", ["rollout", "group"])
def test_a_reward_that_raises_stops_the_run_with_item_name_and_traceback(fn, per):
    """Also with a time-out of its own: only running out of our limit is a missing score."""
    with pytest.raises(RewardError) as caught:
        scored(Reward("ok", lambda r: 1.0), Reward("x", fn, per=per))
    error = caught.value
    assert isinstance(error, UserError) and (error.component, error.item) == ("x", "item4")
    sentence, *details = str(error).splitlines()
    assert sentence.startswith("reward 'x' raised ") and "item 'item4'" in sentence
    assert any(fn.__name__ in line for line in details), "the traceback leads to the function"


def test_the_traceback_names_the_line():
    with pytest.raises(RewardError) as caught:
        scored(Reward("x", raises))
    assert 'raise KeyError("gold")' in caught.value.details


@pytest.mark.parametrize("per", ["rollout", "group"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_out_of_time_is_missing_and_the_others_count(per, asynchronous, caplog):
    release = threading.Event()

    async def later(r):
        await asyncio.sleep(60)

    slow = later if asynchronous else lambda r: release.wait(60)
    group = scored(Reward("slow", slow, per=per, timeout=0.2), Reward("fast", lambda r: 1.0))
    release.set()
    assert [r.rewards for r in group] == [{"slow": None, "fast": 1.0}] * 2
    assert "reward 'slow' took more than 0.2 s on item 'item4'" in caplog.text


def test_calls_share_threads_and_one_that_hangs_keeps_only_its_own():
    """A new thread for every call took most of a small model's step."""
    names, release = set(), threading.Event()

    def once(r):
        names.add(threading.get_ident())
        return 1.0

    async def rounds():
        slots = asyncio.Semaphore(2)
        for _ in range(50):
            await score(Rubric((Reward("x", once),)), [rollout(0), rollout(1)], slots)

    hangs = scored(*(Reward(f"slow{i}", lambda r: release.wait(60), timeout=0.1) for i in range(3)))
    try:
        asyncio.run(rounds())
    finally:
        release.set()
    assert [set(r.rewards.values()) for r in hangs] == [{None}] * 2
    assert len(names) < 20  # of 100 calls


def test_a_thread_at_rest_holds_neither_its_last_subject_nor_its_answer():
    kept = []

    def fn(r):
        kept.append(weakref.ref(r))
        return 1.0

    scored(Reward("x", fn))
    end = time.monotonic() + 10
    while any(ref() is not None for ref in kept) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert len(kept) == 2 and all(ref() is None for ref in kept)


def test_time_starts_with_the_call_not_with_waiting_for_a_slot():
    group = [rollout(sample=i) for i in range(6)]

    async def one_at_a_time():
        await score(Rubric((Reward("x", lambda r: time.sleep(0.1) or 1, timeout=0.4),)), group, asyncio.Semaphore(1))

    asyncio.run(one_at_a_time())
    assert [r.rewards["x"] for r in group] == [1.0] * 6


def test_asynchronous_callables_of_every_shape():
    class Judge:
        async def __call__(self, r):
            await asyncio.sleep(0)
            return 3.0

    async def plain(r):
        return 4.0

    group = scored(Reward("object", Judge()), Reward("plain", plain), Reward("lambda", lambda r: plain(r)))
    assert group[0].rewards == {"object": 3.0, "plain": 4.0, "lambda": 4.0}


def test_a_rollout_whose_world_failed_has_no_score():
    group = [rollout(sample=0), rollout(sample=1, stop=Stop.ERROR), rollout(sample=2)]
    asyncio.run(
        score(Rubric((Reward("one", lambda r: 1.0), Reward("n", lambda g: [len(g)] * len(g), per="group"))), group)
    )
    assert [r.rewards for r in group] == [{"one": 1, "n": 2}, {"one": None, "n": None}, {"one": 1, "n": 2}]


def test_two_components_of_one_name_and_an_empty_rubric_are_refused():
    with pytest.raises(UserError, match="more than one reward named 'x'"):
        Rubric((Reward("x", lambda r: 0.0), Reward("y", lambda r: 0.0), Reward("x", lambda r: 0.0)))
    with pytest.raises(UserError, match="empty"):
        Rubric(())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_settings_that_a_call_changes_are_its_own():
    def careless(r):
        decimal.getcontext().prec = 3
        np.seterr(all="raise")
        return 1.0

    def careful(r):
        assert np.isnan(np.float64(0) / np.float64(0))
        return float(len(str(decimal.Decimal(1) / 3)) > 20)

    for _ in range(5):
        scored(Reward("careless", careless))
        assert scored(Reward("careful", careful))[0].rewards == {"careful": 1.0}


def test_a_child_that_a_call_forks_may_leave_by_sys_exit():
    def fork(r):
        child = os.fork()
        if child == 0:
            sys.exit(0)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if os.waitpid(child, os.WNOHANG)[0]:
                return 1.0
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return 0.0

    assert scored(Reward("fork", fork), count=1)[0].rewards == {"fork": 1.0}


def leaves(r):
    raise SystemExit(3)


async def leaves_later(r):
    await asyncio.sleep(0)
    raise SystemExit(3)


def interrupts(r):
    raise KeyboardInterrupt


async def cancels(r):
    raise asyncio.CancelledError


@pytest.mark.parametrize("fn", [leaves, leaves_later, interrupts, cancels])
def test_a_reward_that_would_end_the_process_stops_the_run_like_any_other_error(fn):
    """Through the background loop, as in a run: SystemExit in one of its tasks would end it, and the run would hang."""

    async def attempt():
        await score(Rubric((Reward("format", fn),)), [rollout(0)])

    future = asyncio.run_coroutine_threadsafe(attempt(), background_loop())
    with pytest.raises(RewardError, match="'format' raised RuntimeError"):
        future.result(timeout=10)


@pytest.mark.parametrize("option", [{"weight": math.nan}, {"weight": math.inf}, {"timeout": 0}, {"timeout": math.nan}])
def test_impossible_weight_or_timeout_is_refused(option):
    """A weight of NaN would turn every score into a missing one, and a timeout of 0 too."""
    with pytest.raises(UserError, match=f"reward 'x' has the {next(iter(option))} "):
        Reward("x", lambda r: 1.0, **option)
