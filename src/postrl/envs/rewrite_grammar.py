"""RG-1, a world of rewriting in which every step can be audited, and short budgets force steps nobody has shown.

Pretraining shows chains of single rewrites. The task asks for the root of a word within B tokens; a word of n symbols
costs n(n−1)/2 + n − 1 tokens by single contractions, so that long words can be solved only by steps that do several
contractions at once. A reconstruction of the world of arXiv 2607.07646, whose own rules are not public.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from postrl.batch import Stop
from postrl.envs.grammar_audit import SEPARATOR, Auditor, Trace
from postrl.envs.grammar_rules import Grammar, Parser, derive, pick
from postrl.envs.single_turn import Problem, Problems
from postrl.envs.written import demonstration
from postrl.errors import UserError
from postrl.policies.base import Renderer
from postrl.policies.chat import Characters
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Message, Rollout

STOP_AT_ROOT = 0.8  # probability that a chain ends where it has come to a single symbol
PATIENCE = 200  # draws in a row without a new word after which a length is exhausted


def characters(grammar: Grammar) -> Characters:
    """The renderer: one token per symbol, one for the separator, one for the end. `.size` is the vocabulary."""
    return Characters(grammar.symbols + SEPARATOR)


# ---------------------------------------------------------------- pretraining


def chain(
    grammar: Grammar,
    rng: np.random.Generator,
    contraction_weight: float = 1.0,
    max_length: int = 8,
    steps: tuple[int, int] = (2, 10),
) -> list[str]:
    """A walk of single rewrites: words w0, w1, …, each made from the last by one expansion or one contraction.

    Where a word can both shrink and grow, it shrinks with odds ρ : 1, ρ = `contraction_weight`; all contractions
    are equally likely then, or all symbols and their rules. w0 is derived from a random symbol and has 1 … max_length
    symbols, all equally likely. The number of rewrites lies within `steps`, or is smaller if the walk ends at a single
    symbol (`STOP_AT_ROOT`).
    """
    word = derive(grammar, pick(grammar.symbols, rng), int(rng.integers(1, max_length + 1)), rng)
    words = [word]
    for _ in range(int(rng.integers(steps[0], steps[1] + 1))):
        shorter = grammar.contractions(word)
        longer = len(word) < max_length
        if not shorter and not longer:
            break
        contract = bool(shorter) and (not longer or rng.random() * (contraction_weight + 1) < contraction_weight)
        word = pick(shorter, rng) if contract else derive(grammar, word, len(word) + 1, rng)
        words.append(word)
        if len(word) == 1 and rng.random() < STOP_AT_ROOT:
            break
    return words


def chains(grammar: Grammar, count: int, contraction_weight: float = 1.0, seed: int = 0) -> list[list[str]]:
    """`count` chains; chain i is a function of the seed and i."""
    return [chain(grammar, np.random.default_rng([seed, i]), contraction_weight) for i in range(count)]


def unchained(walks: Iterable[Sequence[str]]) -> list[list[str]]:
    """The matched control: the same single rewrites, each a chain of its own, in the order of the chains."""
    return [[before, after] for words in walks for before, after in pairwise(words)]


def demonstrations(walks: Iterable[Sequence[str]], renderer: Renderer) -> list[Rollout]:
    """Chains -> demonstrations for `Dataset`: the first word is the prompt, the rest is to be learnt."""
    rollouts = []
    for number, (first, *rest) in enumerate(walks):
        asked: list[Message] = [{"role": "user", "content": first + SEPARATOR}]
        rollouts.append(demonstration(asked, SEPARATOR.join(rest), number, renderer))
    return rollouts


# ---------------------------------------------------------------- the task


def primitive_cost(length: int) -> int:
    """Tokens that contract a word of `length` symbols one pair at a time: every word, separators, the end."""
    return length * (length - 1) // 2 + length - 1


def bucket(length: int, budget: int) -> int:
    """1 + how many contractions a word of `length` symbols has to save to fit into `budget` tokens.

    Leaving out a word of l symbols saves l + 1 tokens, so the longest ones go first. Raises UserError if even the root
    alone does not fit.
    """
    if budget < primitive_cost(2):
        raise UserError(f"option budget={budget} of the rewrite task must hold a symbol and the end: 2 at least")
    over, cost = 0, primitive_cost(length)
    while cost > budget:
        over += 1
        cost -= length - over + 1
    return 1 + over


def words(grammar: Grammar, length: int, count: int, seed: int = 0) -> dict[str, str]:
    """Up to `count` different words of `length` symbols with exactly one root: word -> root.

    Fewer if `PATIENCE` draws in a row bring nothing new: there are not many short words.
    """
    rng, parser = np.random.default_rng([seed, length]), Parser(grammar)
    found: dict[str, str] = {}
    idle = 0
    while len(found) < count and idle < PATIENCE:
        word = derive(grammar, pick(grammar.symbols, rng), length, rng)
        roots = parser.roots(word)
        idle += 1
        if len(roots) == 1 and word not in found:
            found[word], idle = roots, 0
    return found


def rewrite_task(
    grammar: Grammar,
    lengths: Sequence[int] = (3, 4, 5, 6, 7, 8),
    *,
    budget: int = 14,
    words_per_length: int = 1000,
    audited: bool = False,
    test_share: float = 0.1,
    seed: int = 0,
) -> Problems:
    """Name the root of a word, within `budget` tokens, the end included: sample with max_tokens = budget.

    `correct` is 1 if the answer ends in time and its last word is the root, and sees nothing else; `valid` is 1 if
    moreover no step is invalid. audited: train on `valid` and only log `correct`, instead of the reverse. info has
    word, root and bucket.
    Raises UserError for a length below 2, or a budget that holds no answer.
    """
    if not lengths or min(lengths) < 2:
        raise UserError(f"option lengths={list(lengths)} of the rewrite task must be lengths of 2 symbols or more")
    auditor = Auditor(grammar)
    rewards = (
        Reward("correct", lambda rollout: float(audit(auditor, rollout, budget).solved), 1.0 - audited),
        Reward("valid", lambda rollout: float(audit(auditor, rollout, budget).valid), float(audited)),
    )
    problems = [
        Problem(word + SEPARATOR, {"word": word, "root": root, "bucket": bucket(length, budget)})
        for length in lengths
        for word, root in words(grammar, length, words_per_length, seed).items()
    ]
    name = f"rewrite {min(lengths)}-{max(lengths)} of {len(grammar.symbols)} symbols in {budget} tokens"
    return Problems(name, problems, Rubric(rewards), test_share=test_share, seed=seed)


def audit(auditor: Auditor, rollout: Rollout, budget: int) -> Trace:
    """The trace of a rollout of `rewrite_task`."""
    finished = rollout.stop == Stop.FINISHED and rollout.sampled_tokens() <= budget
    return auditor.trace(str(rollout.info["word"]), rollout.completion, str(rollout.info["root"]), finished)
