import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from builders import rollout
from postrl import advantages, losses, weights
from postrl.batch import Batch, Stop, spread
from postrl.errors import UserError
from postrl.method import Forward, Method, Term, objective
from postrl.policies.base import Completion, Policy, Sampler, Sampling
from postrl.policies.tabular import Tabular
from postrl.rollout import Rollout, Turn, collate

WHOLE = frozenset({"entropy", "logits"})


def logp_by_hand(policy: Tabular, before: list[int], token: int, temperature: float) -> float:
    """log π(token | the last `memory` tokens of `before`), from the table's definition."""
    base, state = policy.table.shape[1] + 1, 0
    for back in range(1, policy.memory + 1):
        state += (before[-back] + 1 if back <= len(before) else 0) * base ** (back - 1)
    logits = [value / temperature for value in policy.table[state].tolist()]
    return logits[token] - math.log(sum(math.exp(value) for value in logits))


@pytest.mark.parametrize("memory", [0, 1, 2, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_forward_against_the_definition(memory: int, temperature: float):
    policy = Tabular.random(4, memory, 20, key=[0])
    turns = [Turn([0, 3], False), Turn([1, 1], True, logp=[0.0] * 2), Turn([2], False), Turn([0], True, logp=[0.0])]
    rollouts = [
        Rollout("x", 0, 0, [turns], temperature=temperature),
        Rollout("x", 0, 1, [[Turn([3, 0, 1], True, logp=[0.0] * 3)]], temperature=temperature),
    ]
    batch = collate(rollouts).to(dtype=torch.float64)
    forward = policy(batch, WHOLE)
    assert forward.entropy is not None and forward.logits is not None
    for b, t in product(*map(range, batch.mask.shape)):
        before = batch.tokens[b, :t].tolist()
        if not batch.mask[b, t]:
            assert forward.logp[b, t] == forward.entropy[b, t] == 0 and (forward.logits[b, t] == 0).all()
            continue
        chances = [logp_by_hand(policy, before, token, float(batch.temperature[b])) for token in range(4)]
        entropy = -sum(math.exp(logp) * logp for logp in chances)
        assert float(forward.logp[b, t].detach()) == pytest.approx(chances[int(batch.tokens[b, t])], abs=1e-12)
        assert float(forward.entropy[b, t].detach()) == pytest.approx(entropy, abs=1e-12)
        torch.testing.assert_close(forward.logits[b, t].log_softmax(0), torch.tensor(chances, dtype=torch.float64))


def test_it_is_a_policy():
    policy = Tabular.uniform(3, 1, 4)
    assert isinstance(policy, Policy) and isinstance(policy.sampler(), Sampler)
    batch = collate([rollout(prompt=[0], completion=[1])])
    assert policy(batch).entropy is None and policy(batch).logits is None
    assert policy(batch).logp.dtype == torch.float32
    with pytest.raises(ValueError, match="has no hidden"):
        policy(batch, frozenset({"hidden"}))
    with pytest.raises(ValueError, match="outside the vocabulary of 3: 7"):
        policy(collate([rollout(prompt=[7], completion=[1])]))


def test_padding_and_other_rows_do_not_matter():
    policy = Tabular.random(5, 3, 20, key=[0])
    short, long = rollout(prompt=[1], completion=[2, 0]), rollout(prompt=[1, 4, 3], completion=[2, 0, 0, 1, 1, 1])
    alone = policy(collate([short]).to(dtype=torch.float64)).logp
    both = policy(collate([long, short]).to(dtype=torch.float64)).logp
    torch.testing.assert_close(both[1, :3], alone[0], rtol=0, atol=0)


@pytest.mark.parametrize("stop", [frozenset(), frozenset({2}), frozenset({0, 1})])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_enumeration_is_complete(stop: frozenset[int], temperature: float):
    policy = Tabular.random(3, 4, 8, key=[2])
    batch = policy.enumerate_sequences([1], 3, stop, temperature)
    sequences = {tuple(batch.tokens[b][batch.mask[b]].tolist()) for b in range(batch.size)}
    assert len(sequences) == batch.size
    assert float(policy.probability(batch).sum().detach()) == pytest.approx(1, abs=1e-12)
    for sequence in sequences:
        assert not stop.intersection(sequence[:-1]) and (len(sequence) == 3 or sequence[-1] in stop)
    assert torch.equal(batch.logp_old, policy(batch).logp.detach()) and torch.equal(batch.logp_old, batch.logp_sampler)


def test_expectation_of_a_function_with_a_known_mean_and_gradient():
    """One token: E[v] = Σ p_a v_a and ∂E/∂logit_a = p_a (v_a − E[v])."""
    policy = Tabular.random(4, 0, 2, key=[3])
    batch = policy.enumerate_sequences([], 1)
    value = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    mean = policy.expectation(batch, value)
    p = policy.table[0].detach().softmax(0)
    assert float(mean.detach()) == pytest.approx(float(p @ value), abs=1e-14)
    (gradient,) = torch.autograd.grad(mean, policy.table)
    torch.testing.assert_close(gradient[0], p * (value - p @ value), rtol=0, atol=1e-14)


def run(
    policy: Tabular, prompts: list[list[int]], sampling: Sampling, order: list[int] | None = None
) -> list[Completion]:
    """Completions of the prompts, in the prompts' order, submitted in `order`."""
    sampler = policy.sampler()
    owner = {sampler.submit(prompts[i], (7, i), sampling): i for i in order or range(len(prompts))}
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        done |= {owner[completion.session]: completion for completion in sampler.poll()}
    assert sampler.poll() == []
    sampler.refresh()
    return [done[i] for i in range(len(prompts))]


def as_batch(prompts: list[list[int]], completions: list[Completion], temperature: float) -> Batch:
    return collate(
        [
            Rollout("x", 0, i, [[Turn(prompt, False), Turn(c.tokens, True, logp=c.logp)]], temperature=temperature)
            for i, (prompt, c) in enumerate(zip(prompts, completions, strict=True))
        ]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_sampled_logps_are_those_of_the_forward_pass(temperature: float):
    policy = Tabular.random(4, 3, 12, key=[0])
    prompts = [[1], [0, 2], [3, 3, 3, 3], []] * 5
    completions = run(policy, prompts, Sampling(temperature, max_tokens=6, stop=frozenset({0})))
    batch = as_batch(prompts, completions, temperature)
    torch.testing.assert_close(batch.logp_sampler, policy(batch).logp.float(), rtol=0, atol=1e-5)
    assert {c.stop for c in completions} == {Stop.FINISHED, Stop.TRUNCATED}
    for completion in completions:
        assert completion.stop == (Stop.FINISHED if completion.tokens[-1] == 0 else Stop.TRUNCATED)
        assert 0 not in completion.tokens[:-1]


def test_samples_depend_on_their_key_only():
    policy = Tabular.random(4, 2, 12, key=[0])
    prompts = [[1], [0, 2], [1], [1]]
    together = run(policy, prompts, Sampling(max_tokens=8))
    backwards = run(policy, prompts, Sampling(max_tokens=8), order=[3, 2, 1, 0])
    assert [c.tokens for c in together] == [c.tokens for c in backwards]
    assert len({tuple(c.tokens) for c in (together[0], together[2], together[3])}) == 3


def test_frequencies_are_the_policys_probabilities():
    policy = Tabular.random(3, 3, 8, key=[4])
    batch = policy.enumerate_sequences([1], 2, frozenset({2}), temperature=0.8)
    chance = policy.probability(batch).detach()
    names = [tuple(batch.tokens[b][batch.mask[b]].tolist()) for b in range(batch.size)]
    completions = run(policy, [[1]] * 4000, Sampling(0.8, max_tokens=2, stop=frozenset({2})))
    observed = torch.zeros(batch.size, dtype=torch.float64)
    for completion in completions:
        observed[names.index(tuple(completion.tokens))] += 1
    chi_squared = float(((observed - 4000 * chance).square() / (4000 * chance)).sum())
    assert chi_squared < 22.5  # 99.9 % of a χ² with 6 degrees of freedom


def test_a_session_goes_on_where_it_stopped():
    """Two turns in one session draw what two fresh sessions with the whole context draw, with the same keys."""
    policy = Tabular.random(4, 6, 20, key=[0])  # remembers the whole of the first turn
    sampler, sampling = policy.sampler(), Sampling(max_tokens=3)
    session = sampler.submit([1], (0, 0), sampling, keep=True)
    (first,) = sampler.poll()
    with pytest.raises(RuntimeError, match="1 sessions are open"):
        sampler.refresh()
    assert sampler.submit([2, 2], (0, 1), sampling, session) == session
    (second,) = sampler.poll()
    fresh = policy.sampler()
    fresh.submit([1, *first.tokens, 2, 2], (0, 1), sampling)
    assert fresh.poll()[0].tokens == second.tokens
    sampler.refresh()
    session = sampler.submit([1], (0, 0), sampling, keep=True)
    sampler.poll()
    sampler.close(session)
    sampler.refresh()


def test_the_sampler_follows_the_weights():
    policy = Tabular.uniform(3, 1, 8)
    sampler = policy.sampler()
    with torch.no_grad():
        policy.table[:, 2] = 1000.0
    sampler.refresh()
    sampler.submit([0], (0,), Sampling(max_tokens=5))
    assert sampler.poll()[0].tokens == [2] * 5


def test_the_end_of_the_context():
    policy = Tabular.uniform(3, 1, 4)
    for prompt, room in [([0], 3), ([0, 1, 2], 1), ([0, 1, 2, 0], 0)]:
        (completion,) = run(policy, [prompt], Sampling(max_tokens=10))
        assert len(completion.tokens) == room and completion.stop == Stop.TRUNCATED
    with pytest.raises(UserError, match="prompt has 5 tokens but the context is 4"):
        policy.sampler().submit([0] * 5, (0,), Sampling())
    with pytest.raises(UserError, match="outside the vocabulary of 3"):
        policy.sampler().submit([3], (0,), Sampling())
    with pytest.raises(KeyError):
        policy.sampler().submit([0], (0,), Sampling(), session=99)


@pytest.mark.parametrize(
    ("sampling", "shares"),
    [
        (Sampling(), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(temperature=0.5), [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
        (Sampling(top_k=2), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(top_p=0.65), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(top_p=0.75), [0, 4 / 9, 3 / 9, 2 / 9]),
        (Sampling(temperature=0), [0, 1, 0, 0]),
    ],
)
def test_temperature_top_k_and_top_p(sampling: Sampling, shares: list[float]):
    """Truncation changes what is drawn and not the reported log-probability; greedy reports that of temperature 1."""
    chance = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64)
    policy = Tabular(chance.log(), 0, 8)
    completions = run(policy, [[]] * 500, replace(sampling, max_tokens=8))
    tokens = [token for completion in completions for token in completion.tokens]
    observed = np.bincount(tokens, minlength=4) / 4000
    assert observed == pytest.approx(shares, abs=0.03)
    assert all(observed[token] == 0 for token in range(4) if shares[token] == 0)
    reported = (chance.log()[0] / (sampling.temperature or 1)).log_softmax(0)
    assert [logp for completion in completions for logp in completion.logp] == pytest.approx(reported[tokens].tolist())


def test_save_and_load(tmp_path: Path):
    policy = Tabular.random(3, 2, 9, key=[0])
    policy.save(tmp_path / "model")
    back = Tabular.load(tmp_path / "model")
    assert torch.equal(back.table, policy.table) and (back.memory, back.context_length) == (2, 9)
    assert back.table.requires_grad


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"memory": 3, "context_length": 9}'),
        ("config.json", b'{"context_length": 9}'),
        ("model.safetensors", b"damaged"),
        ("model.safetensors", None),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, file: str, content: bytes | None):
    Tabular.random(3, 2, 9, key=[0]).save(tmp_path / "model")
    (tmp_path / "model" / file).unlink()
    if content is not None:
        (tmp_path / "model" / file).write_bytes(content)
    with pytest.raises(UserError, match="model holds no tabular policy"):
        Tabular.load(tmp_path / "model")


def test_wrong_shapes():
    with pytest.raises(ValueError, match="a memory of 2 over 3 tokens is no table of 4 rows"):
        Tabular(torch.zeros(4, 3), 2, 8)


@pytest.mark.parametrize("shuffled", [False, True])
def test_it_learns_to_copy_and_not_from_shuffled_rewards(shuffled: bool):
    """Two tokens of four, 25 updates, group size 8: from 1/2 of a possible 2 to above 1.9; shuffled, below 1."""
    policy = Tabular.uniform(4, 2, 4)
    sampler, optimiser = policy.sampler(), torch.optim.Adam(policy.parameters(), lr=0.3)
    rng = np.random.default_rng(0)
    prompts = [list(prompt) for prompt in product(range(4), repeat=2)]

    def advantage(batch: Batch) -> torch.Tensor:
        return spread(advantages.leave_one_out(advantages.total_reward(batch), batch.group()), batch)

    def loss(batch: Batch, A: torch.Tensor, forward: Forward) -> torch.Tensor:
        return losses.reinforce(batch.mask, forward.logp, A)

    method = Method("reinforce", advantage, (Term("policy gradient", loss, weights.sequence_sum),))

    def score(prompt: list[int], tokens: list[int]) -> float:
        return float(sum(a == b for a, b in zip(prompt, tokens, strict=True)))

    means = []
    for step in range(25):
        asked = [(g, n, prompt) for g, prompt in enumerate(prompts) for n in range(8)]
        owner = {sampler.submit(p, (0, step, g, n), Sampling(max_tokens=2)): (g, n, p) for g, n, p in asked}
        drawn = [(owner[c.session], c) for c in sampler.poll()]
        scores = np.array([score(prompt, c.tokens) for (_, _, prompt), c in drawn])
        means.append(scores.mean())
        scores = rng.permutation(scores) if shuffled else scores
        batch = collate(
            [
                Rollout("copy", g, n, [[Turn(p, False), Turn(c.tokens, True, logp=c.logp)]], {"score": float(r)})
                for ((g, n, p), c), r in zip(drawn, scores, strict=True)
            ]
        )
        W = tuple(term.weight(batch) for term in method.terms)
        objective(method, batch, policy(batch), W, method.advantage(batch)).backward()
        optimiser.step()
        optimiser.zero_grad()
        sampler.refresh()
    assert means[0] < 0.7
    assert (means[-1] < 1.0) if shuffled else (means[-1] > 1.9), means


def test_a_batch_in_double_precision_does_not_change_the_tables_precision():
    policy = Tabular.random(3, 1, 4, key=[0], dtype=torch.float32)
    batch = collate([rollout(prompt=[0], completion=[1], temperature=0.5)])
    assert policy(batch.to(dtype=torch.float64)).logp.dtype == torch.float32
    greedy = replace(batch, temperature=torch.zeros(1))
    assert torch.equal(policy(greedy).logp, policy(replace(batch, temperature=torch.ones(1))).logp)
