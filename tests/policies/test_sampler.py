"""Drawing tokens, and the decoder's sampler: what it draws, in what order it works, what it keeps."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from postrl.batch import Stop
from postrl.errors import UserError
from postrl.policies import sampler as module
from postrl.policies.base import Completion, Sampling
from postrl.policies.cache import slots_for
from postrl.policies.decoder import Decoder
from postrl.policies.draw import draw
from postrl.policies.engine import Engine
from postrl.policies.sampler import DecoderSampler, sample
from postrl.rollout import Rollout, Turn, collate
from tiny import tiny_decoder

VOCABULARY = 40
STOP = frozenset({3, 7})
PLAIN = Sampling(temperature=0.8, max_tokens=24, stop=STOP)


def decided(dtype: torch.dtype = torch.float32, **changes: object) -> Decoder:
    """A decoder with decided opinions: its matrices are large, so that tokens differ in probability."""
    decoder = tiny_decoder(VOCABULARY, dtype=dtype, **changes)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return decoder


def ragged_prompts(seed: int = 0, count: int = 7) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 30)).tolist() for _ in range(count)]


def fresh(decoder: Decoder, turns: Sequence[Sequence[Turn]], temperature: float) -> float:
    """Largest difference between the sampler's log-probabilities and a training forward's."""
    rollouts = [Rollout("x", i, 0, [list(t)], rewards={"r": 0.0}, temperature=temperature) for i, t in enumerate(turns)]
    batch = collate(rollouts)
    assert batch.mask.any()
    with torch.no_grad():
        return float((decoder(batch).logp - batch.logp_sampler).abs().max())


def as_turns(prompt: Sequence[int], completion: Completion) -> list[Turn]:
    return [Turn(list(prompt), False), Turn(completion.tokens, True, logp=completion.logp)]


@pytest.fixture(params=[0, 10**9], ids=["shared prompts", "copied prompts"])
def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "SHARE_BYTES", request.param)
    return request.param


# ------------------------------------------------------------------------------------------------------------ one token


def drawn(weights: Sequence[float], uniforms: Sequence[float], top_p: float = 1.0, top_k: int = 0) -> Tensor:
    n, table = len(uniforms), torch.tensor(weights, dtype=torch.float64).log().float()
    logits = table.expand(n, -1).clone()
    ones = torch.ones(n)
    uniform = torch.tensor(uniforms, dtype=torch.float64)
    return draw(logits, uniform, ones, ones * top_p, torch.full((n,), top_k))[0]


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 300, 1000])
def test_an_even_grid_of_uniforms_gives_each_token_its_share(size: int) -> None:
    """Inverting a cumulative distribution on M even points gives each token M·p draws, to within one at either end."""
    weights = np.random.default_rng(size).gamma(0.3, size=size)
    points = 20_000
    counts = torch.bincount(
        drawn(weights.tolist(), (np.arange(points) + 0.5).tolist() / np.float64(points)), minlength=size
    )
    expected = torch.tensor(weights / weights.sum() * points)
    assert (counts - expected).abs().max() <= 1.1


def test_the_order_of_tokens_is_that_of_their_ids() -> None:
    tokens = drawn(np.random.default_rng(0).random(500).tolist(), np.linspace(0, 0.9999, 1000).tolist())
    assert torch.equal(tokens, tokens.sort().values)


@pytest.mark.parametrize("size", [5, 128, 301])
def test_the_ends_of_the_unit_interval_stay_in_the_support(size: int) -> None:
    first, last = size // 4, size - 1 - size // 4
    weights = [0.0] * first + [1.0 + i % 3 for i in range(last - first + 1)] + [0.0] * (size - 1 - last)
    tokens = drawn(weights, [0.0, 1 - 2.0**-53]).tolist()
    assert tokens == [first, last]


def test_greedy_takes_the_likeliest_and_reports_it_at_temperature_one() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(6)
    tokens, logp = draw(logits.clone(), zeros.double(), zeros, zeros + 1, zeros.long())
    assert torch.equal(tokens, logits.argmax(1))
    torch.testing.assert_close(logp, logits.log_softmax(1).amax(1))


def test_rows_of_one_call_keep_their_own_settings() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(4, 50, generator=generator), torch.rand(4, generator=generator, dtype=torch.float64)
    temperature, top_p = torch.tensor([0.0, 0.5, 1.0, 2.0]), torch.tensor([1.0, 0.9, 1.0, 0.3])
    top_k = torch.tensor([0, 0, 5, 3])
    together = draw(logits.clone(), uniform, temperature, top_p, top_k)
    for i in range(4):
        s = slice(i, i + 1)
        alone = draw(logits[s].clone(), uniform[s], temperature[s], top_p[s], top_k[s])
        assert torch.equal(alone[0], together[0][s]) and torch.allclose(alone[1], together[1][s])


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, {0, 1, 2, 3}),
        (0.95, 0, {1, 2, 3}),
        (0.75, 0, {1, 3}),
        (0.7, 0, {1, 3}),
        (0.3, 0, {1}),
        (0.0, 0, {1}),
        (1.0, 1, {1}),
        (1.0, 2, {1, 3}),
        (1.0, 99, {0, 1, 2, 3}),
        (0.71, 3, {1, 3}),
        (0.6, 2, {1, 3}),
        (0.5, 2, {1}),
    ],
)
def test_top_p_and_top_k_keep_the_likeliest(top_p: float, top_k: int, kept: set[int]) -> None:
    """p = .05 .4 .2 .35: top-p keeps the fewest that reach it, of what top-k left and renormalised."""
    weights, uniforms = [0.05, 0.4, 0.2, 0.35], ((np.arange(4000) + 0.5) / 4000).tolist()
    tokens = drawn(weights, uniforms, top_p, top_k)
    assert set(tokens.tolist()) == kept
    counts, total = torch.bincount(tokens, minlength=4), sum(weights[v] for v in kept)
    assert all(abs(int(counts[v]) - 4000 * weights[v] / total) <= 1.1 for v in kept)


def test_log_probabilities_are_those_before_top_p_and_top_k() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(3)
    tokens, logp = draw(logits.clone(), ones.double() / 2, ones * 0.7, ones * 0.5, torch.full((3,), 4))
    torch.testing.assert_close(logp, (logits / 0.7).log_softmax(1).gather(1, tokens[:, None])[:, 0])


# -------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"qkv_bias": True, "tied": False}], ids=str)
def test_log_probabilities_equal_a_fresh_forward(temperature: float, changes: dict, sharing: int) -> None:
    """Left contexts of different lengths, early stops, several temperatures."""
    decoder, prompts = decided(**changes), ragged_prompts()
    groups = sample(decoder.sampler(), prompts, 4, replace(PLAIN, temperature=temperature), seed=1)
    turns = [as_turns(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    assert not temperature or {c.stop for group in groups for c in group} == {Stop.FINISHED, Stop.TRUNCATED}
    assert fresh(decoder, turns, temperature) < 1e-4


def test_float64_and_bfloat16_decoders_sample(sharing: int) -> None:
    prompts = ragged_prompts()
    for decoder, tolerance in ((decided(torch.float64), 1e-5), (decided(), 0.3)):
        if tolerance == 0.3:
            decoder.compute_dtype = torch.bfloat16
        groups = sample(decoder.sampler(), prompts, 2, PLAIN, seed=1)
        turns = [as_turns(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
        assert fresh(decoder, turns, 0.8) < tolerance


def test_top_p_and_top_k_restrict_what_is_drawn() -> None:
    decoder, prompts = decided(), ragged_prompts()
    [greedy, one, few] = (
        sample(decoder.sampler(), prompts, 2, replace(PLAIN, **change), seed=1)
        for change in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5})
    )
    assert [[c.tokens for c in g] for g in one] == [[c.tokens for c in g] for g in greedy]
    turns = [as_turns(prompt, c) for prompt, group in zip(prompts, few, strict=True) for c in group]
    assert fresh(decoder, turns, 0.8) < 1e-4
    assert few != sample(decoder.sampler(), prompts, 2, PLAIN, seed=1)


# ------------------------------------------------------------------------------------------------------------- batching


def collected(sampler: DecoderSampler) -> dict[tuple[int, ...], Completion]:
    done = {}
    while completions := sampler.poll():
        assert not done.keys() & {c.key for c in completions}
        done.update((c.key, c) for c in completions)
    return done


def same(one: Completion, other: Completion) -> bool:
    close = all(abs(a - b) < 1e-4 for a, b in zip(one.logp, other.logp, strict=True))
    return one.tokens == other.tokens and one.stop == other.stop and close


def test_samples_depend_on_neither_slots_nor_order_nor_company(sharing: int) -> None:
    decoder, prompts = decided(), ragged_prompts(count=4)
    settings = replace(PLAIN, max_tokens=12)
    keys = [(5, 0, group, number) for group in range(len(prompts)) for number in range(4)]
    alone = {}
    for key in keys:
        sampler = decoder.sampler(1)
        sampler.submit(prompts[key[2]], key, settings)
        alone.update(collected(sampler))
    rng = np.random.default_rng(0)
    for slots in (3, 64):
        sampler, order = decoder.sampler(slots), rng.permutation(len(keys)).tolist()
        for number in order:
            sampler.submit(prompts[keys[number][2]], keys[number], settings)
        together = collected(sampler)
        assert together.keys() == alone.keys() and all(same(together[key], alone[key]) for key in keys)


def test_keys_decide_what_is_drawn() -> None:
    decoder, [prompt, *_] = decided(), ragged_prompts()
    one, other = (sample(decoder.sampler(), [prompt], 6, PLAIN, seed) for seed in (0, 1))
    again = sample(decoder.sampler(), [prompt], 6, PLAIN, 0)
    assert one == again and one != other
    assert len({tuple(c.tokens) for c in one[0]}) > 1
    assert sample(decoder.sampler(), [prompt], 6, PLAIN, 0, step=1) != one


class Work:
    """Counts what an engine was asked for: tokens of prompts and extensions, rows of decode steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompt_tokens, self.rows = 0, []
        prefill, decode = Engine.prefill, Engine.decode

        def counted_prefill(engine, spans):
            self.prompt_tokens += sum(len(span.tokens) for span in spans)
            return prefill(engine, spans)

        def counted_decode(engine, tokens, *rest):
            self.rows.append(len(tokens))
            return decode(engine, tokens, *rest)

        monkeypatch.setattr(Engine, "prefill", counted_prefill)
        monkeypatch.setattr(Engine, "decode", counted_decode)


def test_a_prompt_runs_once_for_all_its_samples(sharing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work, prompts = Work(monkeypatch), ragged_prompts()
    sampler = decided().sampler(4)  # fewer slots than samples: later ones find the prompt still there
    sample(sampler, prompts, 6, PLAIN, seed=0)
    assert work.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert not sampler._prefixes and not sampler._users and not sampler._contexts


def test_finished_completions_leave_and_waiting_ones_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long and many short completions: few rows are idle, and no row is worked on after its end."""
    work, decoder = Work(monkeypatch), decided()
    sampler = decoder.sampler(4)
    lengths = [60, *[5] * 30]
    for number, length in enumerate(lengths):
        sampler.submit([1, 2, number], (0, number), replace(PLAIN, max_tokens=length, stop=frozenset()))
    assert len(collected(sampler)) == len(lengths)
    assert sum(work.rows) == sum(length - 1 for length in lengths)  # the first token comes from the prompt's pass
    assert len(work.rows) <= 1.15 * max(max(lengths), sum(lengths) / 4)


def test_long_tailed_lengths_take_hardly_more_steps_than_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Geometric lengths against equal ones with as many tokens: at most 15 % more slots times decode steps. (Slots that
    never wait cannot take more than total / slots + longest · (slots − 1) / slots, Graham's bound.)"""
    work, decoder, slots, count = Work(monkeypatch), decided(), 8, 240
    tailed = np.minimum(np.random.default_rng(0).geometric(1 / 9, count), 40)
    equal = np.full(count, tailed.sum() // count)
    equal[: tailed.sum() % count] += 1
    steps = []
    for lengths in (tailed, equal):
        work.rows.clear()
        sampler = decoder.sampler(slots)
        for number, length in enumerate(lengths.tolist()):
            sampler.submit([1, number % 5], (0, number), replace(PLAIN, max_tokens=length, stop=frozenset()))
        assert sum(len(c.tokens) for c in collected(sampler).values()) == tailed.sum()
        steps.append(len(work.rows))
    assert tailed.max() > 3 * equal.max() and steps[0] <= 1.15 * steps[1]


def test_poll_returns_as_soon_as_something_is_finished() -> None:
    sampler = decided().sampler()
    assert sampler.poll() == []
    for length in (20, 2):
        sampler.submit([1], (0, length), Sampling(max_tokens=length))
    assert [len(c.tokens) for c in sampler.poll()] == [2]
    sampler.submit([1], (0, 3), Sampling(max_tokens=3))
    assert [len(c.tokens) for c in sampler.poll()] == [3]
    assert [len(c.tokens) for c in sampler.poll()] == [20]
    assert sampler.poll() == []


# -------------------------------------------------------------------------------------------------------------- endings


def test_any_stop_token_ends_a_completion_and_is_part_of_it() -> None:
    groups = sample(decided().sampler(), ragged_prompts(), 8, PLAIN, seed=0)
    ends = set()
    for completion in (c for group in groups for c in group):
        assert not STOP & set(completion.tokens[:-1]) and len(completion.tokens) == len(completion.logp)
        if completion.stop == Stop.FINISHED:
            ends.add(completion.tokens[-1])
        else:
            assert (
                completion.stop == Stop.TRUNCATED and len(completion.tokens) == 24 and completion.tokens[-1] not in STOP
            )
    assert ends == STOP


def test_a_stop_token_at_the_limit_is_an_end() -> None:
    decoder = decided()
    [[long]] = sample(decoder.sampler(), [[1, 2]], 1, replace(PLAIN, stop=frozenset()), seed=0)
    place = long.tokens.index(long.tokens[6]) + 1
    settings = replace(PLAIN, stop=frozenset({long.tokens[6]}), max_tokens=place)
    [[short]] = sample(decoder.sampler(), [[1, 2]], 1, settings, seed=0)
    assert short.tokens == long.tokens[:place] and short.stop == Stop.FINISHED


def test_the_end_of_the_context_truncates(sharing: int) -> None:
    decoder = decided(context=20)
    for length, room in ((1, 19), (19, 1)):
        prompt = [4] * length
        groups = sample(decoder.sampler(), [prompt], 3, Sampling(max_tokens=99), seed=0)
        assert all(len(c.tokens) == room and c.stop == Stop.TRUNCATED for c in groups[0])
        assert fresh(decoder, [as_turns(prompt, c) for c in groups[0]], 1.0) < 1e-4


def test_what_cannot_be_sampled_is_refused() -> None:
    sampler = decided(context=20).sampler()
    with pytest.raises(UserError, match="a prompt of 20 tokens leaves no room in the model's context of 20"):
        sampler.submit([1] * 20, (0,), PLAIN)
    with pytest.raises(UserError, match="max_tokens=0"):
        sampler.submit([1], (0,), replace(PLAIN, max_tokens=0))
    with pytest.raises(ValueError, match="empty prompt"):
        sampler.submit([], (0,), PLAIN)
    for token in (-1, VOCABULARY):
        with pytest.raises(ValueError, match="outside the vocabulary of 40"):
            sampler.submit([1, token], (0,), PLAIN)
    with pytest.raises(ValueError, match="session 8 is closed or unknown"):
        sampler.submit([1], (0,), PLAIN, session=8)
    with pytest.raises(UserError, match="slots=0"):
        decided().sampler(0)
    assert sampler.poll() == []


def test_weights_that_are_no_numbers_stop_sampling() -> None:
    decoder = decided()
    with torch.no_grad():
        decoder.model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="no numbers any more"):
        sample(decoder.sampler(), [[1, 2]], 2, PLAIN, seed=0)


# ------------------------------------------------------------------------------------------------------------- sessions


def converse(sampler: DecoderSampler, prompts: list[list[int]], turns: int, reply: Callable[[int, int], list[int]]):
    """Several sessions at once, each answered as soon as it has spoken. Returns each one's turns."""
    sessions = [sampler.submit(prompt, (0, number, 0), PLAIN, keep=True) for number, prompt in enumerate(prompts)]
    history = [[Turn(list(prompt), False)] for prompt in prompts]
    while completions := sampler.poll():
        for completion in completions:
            _, number, turn = completion.key
            assert completion.session == sessions[number]
            history[number].append(Turn(completion.tokens, True, logp=completion.logp))
            if turn + 1 == turns:
                sampler.close(completion.session)
                continue
            observed = reply(number, turn)
            history[number].append(Turn(observed, False))
            sampler.submit(observed, (0, number, turn + 1), PLAIN, session=completion.session, keep=True)
    return history


def ragged_reply(number: int, turn: int) -> list[int]:
    rng = np.random.default_rng((number, turn))
    return rng.integers(0, VOCABULARY, rng.integers(0, 9)).tolist()  # also nothing at all


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_sessions_go_on_from_their_keys_and_values(slots: int, sharing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sessions than slots, two of them on one prompt; log-probabilities are those of a fresh forward, and only new
    tokens run: the prompt once, then each reply and the one sampled token that had not run yet."""
    work, decoder, turns = Work(monkeypatch), decided(), 4
    prompts = [*ragged_prompts(count=4), ragged_prompts(count=4)[0]]
    sampler = decoder.sampler(slots)
    history = converse(sampler, prompts, turns, ragged_reply)
    assert fresh(decoder, history, 0.8) < 1e-4
    replies = sum(len(t.tokens) + 1 for own in history for t in own[2::2])
    distinct = sum(len(prompt) for prompt in prompts[:4])
    assert work.prompt_tokens <= distinct + replies + (len(prompts[0]) if slots == 1 else 0)
    assert not sampler._contexts and not sampler._prefixes and not sampler._active


@pytest.mark.parametrize(
    ("waiting", "token_bytes", "longest", "slots"),
    [
        (1, 7680, 128, 64),  # the least
        (64, 7680, 128, 64),
        (65, 7680, 128, 128),
        (512, 7680, 128, 512),
        (10**6, 7680, 128, 512),  # the most
        (512, 7680, 546, 256),  # 512 such contexts are 2 GiB - ε; 256 are 2^30 bytes and less
        (512, 7680, 547, 128),
        (512, 46080, 96, 128),  # SmolLM2-135M in float32
        (512, 2**20, 4096, 64),  # one context is 4 GiB: not fewer than the least, as before
    ],
)
def test_small_models_get_more_slots_as_far_as_memory_and_work_go(
    waiting: int, token_bytes: int, longest: int, slots: int
) -> None:
    assert slots_for(waiting, token_bytes, longest) == slots


def test_slots_are_chosen_anew_at_each_refresh_for_what_waits_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, decoder = [], decided()
    monkeypatch.setattr(module, "slots_for", lambda *about: asked.append(about) or (2 if len(asked) < 3 else 5))
    sampler, prompts = decoder.sampler(), [[1, 2, 3], [4]]
    settings = replace(PLAIN, max_tokens=6)
    first = sample(sampler, prompts, 4, settings, seed=0)
    assert sampler.slots == 2 and asked == [(8, 2 * 2 * 2 * 8 * 4, 9)]  # 2 of layers, heads and of keys and values
    sample(sampler, prompts, 1, settings, seed=0)
    assert len(asked) == 1  # not before the weights change: sessions may be open
    sampler.refresh()
    session = sampler.submit(prompts[0], (0, 0), settings, keep=True)
    sampler.poll()
    assert asked[1] == (1, 256, decoder.config.context)  # a kept session may grow as far as that
    sampler.close(session)
    sampler.refresh()
    again = sample(sampler, prompts, 4, settings, seed=0)
    assert sampler.slots == 5 and sampler._cache is not None and sampler._cache.slots == 5
    assert all(same(a, b) for one, other in zip(again, first, strict=True) for a, b in zip(one, other, strict=True))
    asked.clear()
    sample(decoder.sampler(3), prompts, 1, settings, seed=0)
    assert not asked


def test_sessions_do_not_depend_on_slots() -> None:
    decoder, prompts = decided(), ragged_prompts(count=5)
    one, many = (converse(decoder.sampler(slots), prompts, 3, ragged_reply) for slots in (1, 64))
    assert [[t.tokens for t in own] for own in one] == [[t.tokens for t in own] for own in many]


def test_a_kept_session_holds_no_slot() -> None:
    """All first turns before any second turn, with fewer slots than sessions: nobody waits for a slot for ever."""
    sampler = decided().sampler(2)
    sessions = [sampler.submit([1, 2], (0, number), PLAIN, keep=True) for number in range(6)]
    assert len(collected(sampler)) == 6
    for number, session in enumerate(sessions):
        sampler.submit([5], (1, number), PLAIN, session=session)
    assert len(collected(sampler)) == 6
    with pytest.raises(ValueError, match="closed or unknown"):  # the second turn was not kept
        sampler.close(sessions[0])


def test_a_session_that_fills_its_context_ends_with_nothing_to_say() -> None:
    sampler = decided(context=20).sampler()
    session = sampler.submit([1] * 5, (0,), Sampling(max_tokens=10), keep=True)
    sampler.poll()
    sampler.submit([2] * 5, (1,), Sampling(max_tokens=10), session=session, keep=True)
    [completion] = sampler.poll()
    assert completion.tokens == [] and completion.stop == Stop.TRUNCATED
    sampler.close(session)
    sampler.refresh()


def test_a_session_speaks_once_at_a_time() -> None:
    sampler = decided().sampler()
    session = sampler.submit([1], (0,), PLAIN, keep=True)
    for forbidden in (lambda: sampler.submit([2], (1,), PLAIN, session=session), lambda: sampler.close(session)):
        with pytest.raises(ValueError, match="still being sampled"):
            forbidden()
    sampler.poll()
    sampler.close(session)


# -------------------------------------------------------------------------------------------------------------- weights


def test_refresh_samples_from_the_new_weights_and_only_between_sessions() -> None:
    decoder = decided()
    sampler = decoder.sampler()
    before = sample(sampler, [[1, 2]], 4, PLAIN, seed=0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.05)
    sampler.refresh()
    after = sample(sampler, [[1, 2]], 4, PLAIN, seed=0)
    assert after != before
    assert fresh(decoder, [as_turns([1, 2], c) for c in after[0]], 0.8) < 1e-4
    session = sampler.submit([1], (0,), PLAIN, keep=True)
    with pytest.raises(ValueError, match="1 sessions are open"):
        sampler.refresh()
    sampler.poll()
    sampler.close(session)
    sampler.refresh()


def test_memory_is_flat_over_200_refreshes(sharing: int) -> None:
    decoder, prompts = decided(), ragged_prompts(count=3)
    sampler = decoder.sampler(4)

    def held() -> tuple[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        return len(tensors), sum(x.untyped_storage().nbytes() for x in tensors)

    marks = []
    for cycle in range(200):
        session = sampler.submit(prompts[0], (cycle, 99), replace(PLAIN, max_tokens=2), keep=True)
        sample(sampler, prompts, 2, replace(PLAIN, max_tokens=3), seed=cycle)
        sampler.close(session)
        sampler.refresh()
        if cycle in (4, 199):
            marks.append(held())
    assert marks[0] == marks[1]


def test_the_cache_grows_by_doubling_and_keeps_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decided(context=200)
    sampler = decoder.sampler(4)
    [[long]] = sample(sampler, [[1, 2, 3]], 1, Sampling(max_tokens=190), seed=0)
    assert len(long.tokens) == 190 and fresh(decoder, [as_turns([1, 2, 3], long)], 1.0) < 1e-4
    assert sampler._cache is not None and sampler._cache.room == 200  # 64, 128, then the context's end
    [[again]] = sample(decoder.sampler(4), [[1, 2, 3]], 1, Sampling(max_tokens=190), seed=0)
    assert again.tokens == long.tokens
