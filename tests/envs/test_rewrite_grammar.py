"""Chains hold single rewrites only and keep their roots; the task's buckets, rewards and words; it can be learnt."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from postrl.batch import Kind, Stop
from postrl.envs.grammar_audit import Auditor, StepKind, summarise
from postrl.envs.grammar_rules import Grammar, Parser, derive
from postrl.envs.rewrite_grammar import (
    audit,
    bucket,
    chain,
    chains,
    characters,
    demonstrations,
    primitive_cost,
    rewrite_task,
    unchained,
    words,
)
from postrl.errors import UserError
from postrl.rollout import Rollout, Turn, collate

GRAMMAR = Grammar.random(8, 3)


@settings(max_examples=60)
@given(
    st.tuples(st.integers(2, 12), st.integers(1, 3)).filter(lambda pair: pair[1] <= pair[0]),
    st.sampled_from([0.25, 1.0, 8.0]),
    st.integers(0, 10**6),
)
def test_chains_are_single_rewrites_that_keep_the_root(shape: tuple[int, int], weight: float, seed: int):
    grammar = Grammar.random(*shape, seed=seed)
    walk = chain(grammar, np.random.default_rng(seed), weight)
    auditor, parser = Auditor(grammar), Parser(grammar)
    assert 2 <= len(walk) <= 11 and max(map(len, walk)) <= 8
    for before, after in pairwise(walk):
        assert auditor.step(before, after).kind in {StepKind.PRIMITIVE, StepKind.EXPANSION}
        assert abs(len(before) - len(after)) == 1
        # What the shorter word stands for, the longer one does, too.
        short, long = sorted((before, after), key=len)
        assert set(parser.roots(short)) <= set(parser.roots(long))


def contraction_share(walks: list[list[str]]) -> float:
    return float(np.mean([len(v) < len(u) for walk in walks for u, v in pairwise(walk)]))


def test_the_contraction_weight_sets_the_mix():
    shares = [contraction_share(chains(GRAMMAR, 120, weight)) for weight in (0.5, 1, 2, 4, 8)]
    assert shares == sorted(shares) and shares[-1] - shares[0] > 0.2


def test_the_control_shows_the_same_rewrites_without_their_order():
    walks = chains(GRAMMAR, 50, 4.0)
    control = unchained(walks)
    assert contraction_share(control) == contraction_share(walks)
    assert all(len(walk) == 2 for walk in control) and len(control) == sum(len(walk) - 1 for walk in walks)


def test_chains_depend_on_seed_and_number_only():
    assert chains(GRAMMAR, 5, seed=3) == chains(GRAMMAR, 9, seed=3)[:5] != chains(GRAMMAR, 5, seed=4)


def test_demonstrations_are_to_be_learnt_from_the_second_word_on():
    renderer = characters(GRAMMAR)
    rollouts = demonstrations([["AB", "C"], ["D", "AB", "ABA"]], renderer)
    assert [r.completion for r in rollouts] == ["C", "AB>ABA"] and [r.group for r in rollouts] == [0, 1]
    batch = collate(rollouts)
    assert set(batch.kind.tolist()) == {Kind.DEMONSTRATION}
    assert batch.mask[0].tolist() == [False] * 3 + [True] * 2 + [False] * 4
    assert batch.tokens[0, 4] == renderer.end
    assert renderer.text(batch.tokens[1, 2:].tolist()) == "AB>ABA"


@pytest.mark.parametrize(("length", "cost", "number"), [(2, 2, 1), (5, 14, 1), (6, 20, 2), (7, 27, 3), (8, 35, 4)])
def test_costs_and_buckets_at_a_budget_of_14(length: int, cost: int, number: int):
    """Checked against text: the words of n−1, …, 1 symbols, separators between them, the end."""
    text = ">".join("A" * n for n in range(length - 1, 0, -1))
    assert primitive_cost(length) == len(text) + 1 == cost
    assert bucket(length, 14) == number


def test_a_bucket_is_the_least_that_has_to_be_saved():
    for length in range(2, 10):
        for budget in range(2, 40):
            left_out = bucket(length, budget) - 1
            costs = [n + 1 for n in range(1, length)]  # of a word and what follows it
            assert sum(costs[: len(costs) - left_out]) <= budget
            assert left_out == 0 or sum(costs[: len(costs) - left_out + 1]) > budget


def test_words_have_one_root_and_the_supply_ends():
    parser = Parser(GRAMMAR)
    found = words(GRAMMAR, 5, 300)
    assert len(found) == 300 and all(parser.roots(word) == root for word, root in found.items())
    assert {len(root) for root in found.values()} == {1}
    rng = np.random.default_rng(0)
    drawn = [parser.roots(derive(GRAMMAR, "A", 5, rng)) for _ in range(100)]
    assert sum(len(roots) > 1 for roots in drawn) > 5, "no word of this grammar had to be left out"
    assert words(GRAMMAR, 2, 1000) == GRAMMAR.contraction


def rollout(task, answer: str, stop: Stop = Stop.FINISHED, length: int | None = None) -> Rollout:
    """An answer to the first training problem; `length` overrides the number of sampled tokens."""
    environment = task.environment("train", 0)
    n = len(answer) + 1 if length is None else length
    turns = [Turn([1], False), Turn([1] * n, True, answer, [0.0] * n)]
    return Rollout(environment.item, 0, 0, [turns], stop=stop, info=dict(environment.info))


def score(task, made: Rollout) -> list[float]:
    return [reward.fn(made) for reward in task.rubric.rewards]


def test_rewards():
    task = rewrite_task(GRAMMAR, (3,), budget=6, words_per_length=20)
    info = task.environment("train", 0).info
    word, root = str(info["word"]), str(info["root"])
    other = next(s for s in GRAMMAR.symbols if s != root)
    wrong = next(s + t for s in GRAMMAR.symbols for t in GRAMMAR.symbols if GRAMMAR.contraction.get(s + t) != root)
    assert score(task, rollout(task, root)) == [1, 1]
    assert score(task, rollout(task, f"{word}>{root}")) == [1, 1]  # an idle step is no invalid one
    assert score(task, rollout(task, f"{wrong}>{root}")) == [1, 0]  # an invalid step that pays
    assert score(task, rollout(task, other)) == [0, 0]
    assert score(task, rollout(task, root, Stop.TRUNCATED)) == [0, 0]
    assert score(task, rollout(task, root, length=7)) == [0, 0]  # beyond the budget


def test_what_is_trained_on():
    weights = [[r.weight for r in rewrite_task(GRAMMAR, (3,), audited=a).rubric.rewards] for a in (False, True)]
    assert weights == [[1, 0], [0, 1]]


def test_the_splits_share_no_word_whatever_the_seed():
    tasks = [rewrite_task(GRAMMAR, (4, 5), words_per_length=40, seed=seed) for seed in (0, 1)]
    train, test = ({t.environment(s, i).item for t in tasks for i in range(t.size(s))} for s in ("train", "test"))
    assert train and test and not train & test


def test_bad_options_are_named():
    with pytest.raises(UserError, match="budget=1 of the rewrite task"):
        rewrite_task(GRAMMAR, (3,), budget=1)
    for lengths in ((), (1, 3)):
        with pytest.raises(UserError, match="lengths="):
            rewrite_task(GRAMMAR, lengths)


def test_the_audit_reads_a_rollout():
    task = rewrite_task(GRAMMAR, (6,), budget=14, words_per_length=20)
    root = str(task.environment("train", 0).info["root"])
    trace = audit(Auditor(GRAMMAR), rollout(task, root), 14)
    assert summarise([trace]).kinds == {StepKind.SEQUENTIAL: 1} and trace.valid
