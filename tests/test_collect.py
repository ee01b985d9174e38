"""Collection: who may wait for whom, what ends a rollout and how, what stops a run, and that no token is made twice."""

import asyncio
import math
import threading
import time

import pytest
import torch

from postrl import collect as collect_module
from postrl.batch import Stop
from postrl.collect import Limits, WorldError, collect
from postrl.envs.base import Step
from postrl.envs.two_turn import TwoTurn
from postrl.errors import UserError
from postrl.policies.base import Sampling
from postrl.policies.tabular import Tabular
from postrl.rewards.rubric import Reward, RewardError, Rubric
from postrl.rollout import collate
from scripted import CHARACTERS, END, Scripted, World, ids
from tiny import tiny_decoder

ZERO = Rubric((Reward("zero", lambda rollout: 0.0),))
TWO = Limits(max_turns=2)


def keys(count: int, group_size: int = 2) -> list[tuple[int, ...]]:
    return [(7, 3, i // group_size, i % group_size) for i in range(count)]


def run(sampler, worlds, rubric=ZERO, limits=TWO, sampling=Sampling(), places=None):  # noqa: B008 - frozen
    return collect(sampler, CHARACTERS, worlds, places or keys(len(worlds)), sampling, rubric, limits, version=5)


def say(text: str, **fields) -> Step:
    return Step(messages=({"role": "user", "content": text},), done=False, **fields)


def test_the_result_is_in_the_order_given_whoever_finishes_first():
    sampler = Scripted(lambda context, key: "abcdef"[key[2] * 2 + key[3]])
    worlds = [World(item=f"item{i // 2}") for i in range(6)]
    rollouts = run(sampler, worlds)
    assert [(r.group, r.sample, r.completion) for r in rollouts] == [
        (0, 0, "a"), (0, 1, "b"), (1, 0, "c"), (1, 1, "d"), (2, 0, "e"), (2, 1, "f"),
    ]  # fmt: skip
    assert [r.item for r in rollouts] == ["item0", "item0", "item1", "item1", "item2", "item2"]
    assert {r.version for r in rollouts} == {5}
    assert sampler.queue == [] and sampler.waiting == set()


def test_all_first_turns_are_submitted_in_order_before_any_sampling(monkeypatch):
    """Else the batches, and with them the last bits of every number, would depend on the scheduling of threads."""
    request = collect_module._Request
    monkeypatch.setattr(collect_module, "_Request", lambda *fields: (time.sleep(0.005), request(*fields))[1])
    sampler = Scripted(lambda context, key: "a")
    seen = []
    poll = sampler.poll
    sampler.poll = lambda: (seen.append(len(sampler.submitted)), poll())[1]
    run(sampler, [World() for _ in range(16)], limits=Limits())
    assert seen[0] == 16
    assert [key for _, key, _, _ in sampler.submitted] == [(*key, 0) for key in keys(16)]


def test_two_turns_share_one_session_and_one_growing_context():
    sampler = Scripted(lambda context, key: "x" if key[-1] == 0 else context[-1])
    task = TwoTurn(length=1, alphabet="abcd", test_share=0)
    [rollout] = run(sampler, [task.environment("train", 0)], task.rubric)
    secret = rollout.info["answer"]
    [turns] = rollout.contexts
    assert [turn.sampled for turn in turns] == [False, True, False, True]
    assert [turn.text for turn in turns] == ["?", "x", secret, secret]
    first, second = sampler.submitted
    assert first == (ids("?", end=False), (7, 3, 0, 0, 0), 0, True)
    assert second == (ids(secret, end=False), (7, 3, 0, 0, 1), 0, False), "only the new tokens are submitted"
    assert [token for turn in turns for token in turn.tokens] == sampler.contexts[0]
    assert rollout.rewards == {"correct": 1.0} and rollout.step_rewards == [0.0, 1.0]
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "user", "assistant"]
    batch = collate([rollout])
    assert batch.mask[0].tolist() == [False, True, True, False, True, True], "the world's tokens are not trained"
    assert batch.segment[0].tolist() == [-1, 0, 0, -1, 1, 1]
    assert batch.step_rewards is not None and batch.step_rewards.tolist() == [[0.0, 1.0]]


def test_nobody_waits_for_the_slowest_world():
    """The first world answers only after the others' second turns were sampled."""
    others_done = threading.Event()

    def script(context, key):
        if key[-1] == 1 and key[3] == 2:
            others_done.set()
        return "a"

    def slow(text):
        assert others_done.wait(20)
        return say("b")

    worlds = [World(slow), World(lambda text: say("b")), World(lambda text: say("b"))]
    rollouts = run(Scripted(script), worlds, places=keys(3, group_size=3), limits=Limits(2, step_timeout=30))
    assert [len(r.contexts[0]) for r in rollouts] == [4, 4, 4]


def test_rewards_run_while_sampling_goes_on():
    """The first rollout's reward returns only when the last one of its own group has been sampled."""
    sampled = threading.Event()

    def script(context, key):
        if key[3] == 3:
            sampled.set()
        return "a"

    def wait(rollout):
        return float(rollout.sample != 0 or sampled.wait(20))

    rollouts = run(Scripted(script, newest_first=False), [World() for _ in range(4)], Rubric((Reward("wait", wait),)),
                   places=keys(4, group_size=4), limits=Limits())  # fmt: skip
    assert [r.rewards["wait"] for r in rollouts] == [1, 1, 1, 1]


def test_worlds_and_rewards_work_at_the_same_time_up_to_the_limit():
    together = threading.Barrier(4, timeout=20)
    peak, now, lock = [0], [0], threading.Lock()

    def step(text):
        with lock:
            now[0] += 1
            peak[0] = max(peak[0], now[0])
        together.wait()
        with lock:
            now[0] -= 1
        return Step()

    run(Scripted(lambda context, key: "a"), [World(step) for _ in range(8)], limits=Limits(calls=4))
    assert peak[0] == 4


def test_asynchronous_worlds_and_rewards():
    async def step(text):
        await asyncio.sleep(0.01)
        return say("b") if text == "a" else Step()

    async def reward(rollout):
        await asyncio.sleep(0.01)
        return len(rollout.completion)

    sampler = Scripted(lambda context, key: "a" if key[-1] == 0 else "cc")
    rollouts = run(sampler, [World(step) for _ in range(2)], Rubric((Reward("length", reward),)))
    assert [r.rewards for r in rollouts] == [{"length": 2.0}] * 2


def test_a_session_is_closed_as_soon_as_its_rollout_ends():
    """The last world waits until the sampler keeps its own session only: memory must not wait for the slowest."""
    sampler = Scripted(lambda context, key: "a", newest_first=False)
    alone = []

    def wait(text):
        until = time.monotonic() + 20
        while len(sampler.waiting) > 1 and time.monotonic() < until:
            time.sleep(0.005)
        alone.append(len(sampler.waiting))
        return Step()

    run(sampler, [*(World() for _ in range(5)), World(wait)], limits=Limits(2, step_timeout=60))
    assert alone == [1] and sampler.waiting == set()


def test_collect_inside_a_running_event_loop():
    async def notebook():
        return run(Scripted(lambda context, key: "a"), [World()])

    assert len(asyncio.run(notebook())) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_world_that_raises_stops_the_run_and_names_the_item(asynchronous):
    def step(text):
        raise ZeroDivisionError("seventeen")

    async def step_later(text):
        raise ZeroDivisionError("seventeen")

    sampler = Scripted(lambda context, key: "a")
    worlds = [World(), World(step_later if asynchronous else step, item="bad-item")]
    with pytest.raises(WorldError, match=r"'bad-item' raised ZeroDivisionError in step\(\)(.|\n)*seventeen"):
        run(sampler, worlds)
    assert sampler.waiting == set(), "sessions are closed"


def test_a_prompt_that_raises_names_the_item():
    class Broken(World):
        def prompt(self):
            raise KeyError("question")

    with pytest.raises(WorldError, match=r"'bad-item' raised KeyError in prompt\(\)"):
        run(Scripted(lambda context, key: "a"), [Broken(item="bad-item")])


def test_an_answer_of_the_world_that_is_no_step():
    with pytest.raises(WorldError, match="'item' answered 'done'; step\\(\\) must return a Step"):
        run(Scripted(lambda context, key: "a"), [World(lambda text: "done")])
    words = Step()
    object.__setattr__(words, "reward", "1")  # past the type checker of the tests, as a user's script would be
    with pytest.raises(WorldError, match="step reward '1'"):
        run(Scripted(lambda context, key: "a"), [World(lambda text: words)])
    with pytest.raises(WorldError, match="step reward nan"):
        run(Scripted(lambda context, key: "a"), [World(lambda text: Step(reward=math.nan))])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_world_out_of_time_is_an_error_with_missing_rewards_and_never_zero(asynchronous, caplog):
    release = threading.Event()

    async def later(text):
        await asyncio.sleep(60)

    seen = []

    def rank(group):
        seen.append([r.sample for r in group])
        return [1.0] * len(group)

    rubric = Rubric((Reward("one", lambda r: 1.0), Reward("rank", rank, per="group")))
    worlds = [World(), World(later if asynchronous else lambda text: release.wait(60), item="slow")]
    sampler = Scripted(lambda context, key: "a")
    good, bad = run(sampler, worlds, rubric, Limits(2, step_timeout=0.2))
    release.set()
    assert (good.stop, good.rewards) == (Stop.FINISHED, {"one": 1.0, "rank": 1.0})
    assert (bad.stop, bad.rewards) == (Stop.ERROR, {"one": None, "rank": None})
    assert seen == [[0]], "a group reward sees whole rollouts only"
    assert "'slow' took more than 0.2 s" in caplog.text
    assert sampler.waiting == set()
    assert torch.isnan(collate([good, bad]).rewards[1]).all()


def test_a_truncated_turn_ends_the_rollout_and_is_scored():
    world = World(lambda text: say("more"))
    rubric = Rubric((Reward("length", lambda r: len(r.completion)),))
    [rollout] = run(Scripted(lambda context, key: "abcdef"), [world], rubric, sampling=Sampling(max_tokens=3))
    assert (rollout.stop, rollout.completion, world.steps) == (Stop.TRUNCATED, "abc", 0)
    assert rollout.rewards == {"length": 3.0}


def test_turns_and_context_are_limited():
    forever = Scripted(lambda context, key: "a")
    [rollout] = run(forever, [World(lambda text: say("b"))], limits=Limits(max_turns=3))
    assert (rollout.stop, [t.sampled for t in rollout.contexts[0]]) == (Stop.TRUNCATED, [False, True] * 3)
    assert forever.waiting == set()
    # prompt 5 + turn 2 + answer 1 + turn 2 = 10; the next answer would leave no room for a turn
    [rollout] = run(forever, [World(lambda text: say("b"))], limits=Limits(max_turns=9, max_context=11))
    assert (rollout.stop, [t.sampled for t in rollout.contexts[0]]) == (Stop.TRUNCATED, [False, True] * 2)
    assert forever.waiting == set()
    [rollout] = run(Scripted(lambda context, key: "a" * 50), [World()], limits=Limits(max_context=12))
    assert (rollout.stop, len(rollout.contexts[0][1].tokens)) == (Stop.TRUNCATED, 7)


def test_a_prompt_that_leaves_no_room_names_item_and_lengths_before_anything_is_sampled():
    sampler = Scripted(lambda context, key: "a")
    worlds = [World(), World(item="long-item", opening="abcdefgh")]
    with pytest.raises(UserError, match=r"'long-item' has 8 tokens, but the context holds 8"):
        run(sampler, worlds, limits=Limits(max_context=8))
    assert sampler.submitted == []
    run(sampler, worlds, limits=Limits(max_context=9))


def test_limits_must_be_positive():
    for bad in ({"max_turns": 0}, {"max_context": 0}, {"calls": 0}, {"step_timeout": 0.0}):
        with pytest.raises(UserError, match="every limit must be positive"):
            Limits(**bad)


def test_empty_completions_are_legal():
    sampler = Scripted(lambda context, key: "")
    [rollout] = run(sampler, [World()], Rubric((Reward("length", lambda r: len(r.completion)),)))
    assert rollout.contexts[0][1].tokens == [END] and rollout.rewards == {"length": 0.0}
    sampler = Scripted(lambda context, key: "a")
    [rollout] = run(sampler, [World()], sampling=Sampling(max_tokens=0))
    assert (rollout.contexts[0][1].tokens, rollout.stop, rollout.completion) == ([], Stop.TRUNCATED, "")
    assert collate([rollout]).mask.sum() == 0


def test_a_world_without_step_rewards_has_none_and_a_gap_is_missing():
    [rollout] = run(Scripted(lambda context, key: "a"), [World()])
    assert rollout.step_rewards == []
    turns = iter([say("b"), Step(reward=1.0)])
    [rollout] = run(Scripted(lambda context, key: "a"), [World(lambda text: next(turns))])
    assert math.isnan(rollout.step_rewards[0]) and rollout.step_rewards[1] == 1.0


def test_a_reward_that_raises_stops_the_run_without_waiting_for_the_rest():
    def bad(rollout):
        if rollout.sample == 1:
            raise ValueError("eighteen")
        time.sleep(30)

    started = time.monotonic()
    with pytest.raises(RewardError, match=r"reward 'bad' raised ValueError on item 'item'(.|\n)*eighteen"):
        run(Scripted(lambda context, key: "a"), [World(), World()], Rubric((Reward("bad", bad),)))
    assert time.monotonic() - started < 20


def test_a_sampler_that_raises_stops_the_run():
    def script(context, key):
        raise MemoryError("the cache")

    with pytest.raises(MemoryError, match="the cache"):
        run(Scripted(script), [World()])


def test_results_do_not_depend_on_what_else_is_sampled():
    policy = Tabular.random(CHARACTERS.size, memory=1, context_length=64, key=[1])
    task = TwoTurn(length=1, alphabet="abcd", test_share=0)

    def play(places):
        worlds = [task.environment("train", key[2]) for key in places]
        sampling = Sampling(max_tokens=3)
        return collect(policy.sampler(), CHARACTERS, worlds, places, sampling, task.rubric, TWO)

    together = play(keys(12))
    assert together == play(keys(12))
    assert together[4:6] == play(keys(12)[4:6])
    assert len({r.completion for r in together}) > 3


def test_a_transformer_keeps_its_session_through_both_turns():
    """What the sampler reports over two turns is what a fresh forward pass over the whole context says."""
    policy = tiny_decoder(CHARACTERS.size)
    task = TwoTurn(length=2, alphabet="abcd", test_share=0)
    places = keys(8, group_size=4)
    worlds = [task.environment("train", key[2]) for key in places]
    rollouts = collect(policy.sampler(), CHARACTERS, worlds, places, Sampling(max_tokens=40), task.rubric, TWO)
    assert max(len(r.contexts[0]) for r in rollouts) == 4, "some first turn ended by itself"
    batch = collate(rollouts)
    with torch.no_grad():
        logp = policy(batch).logp
    assert (logp - batch.logp_sampler)[batch.mask].abs().max() < 1e-4
