"""The grammar refuses what would make contraction ambiguous; the parser agrees with brute force."""

from itertools import product

import numpy as np
import pytest

from postrl.envs.grammar_rules import Grammar, Parser, derive, pick
from postrl.errors import UserError


def languages(grammar: Grammar, length: int) -> dict[str, set[str]]:
    """Symbol -> every word of up to `length` symbols that it derives, by breadth-first expansion."""
    found = {}
    for root in grammar.symbols:
        words, new = {root}, {root}
        while new:
            grown = {
                word[:i] + side + word[i + 1 :]
                for word in new
                if len(word) < length
                for i in range(len(word))
                for side in grammar.expansions[word[i]]
            }
            new = grown - words
            words |= grown
        found[root] = words
    return found


@pytest.mark.parametrize("seed", range(3))
def test_roots_are_those_of_brute_force(seed: int):
    """Every word of up to four symbols of a grammar of four, derivable or not."""
    grammar = Grammar.random(4, 2, seed)
    derived, parser = languages(grammar, 4), Parser(grammar)
    for length in (1, 2, 3, 4):
        for letters in product(grammar.symbols, repeat=length):
            word = "".join(letters)
            assert parser.roots(word) == "".join(s for s in grammar.symbols if word in derived[s]), word


def test_a_symbol_from_elsewhere_has_no_root():
    parser = Parser(Grammar.random(4, 2))
    assert parser.roots("Z") == parser.roots("AZ") == parser.roots("") == ""


def test_random_grammars_have_distinct_right_sides():
    grammar = Grammar.random(24, 3, seed=5)
    sides = [side for each in grammar.expansions.values() for side in each]
    assert len(sides) == len(set(sides)) == len(grammar.contraction) == 72
    assert grammar == Grammar.random(24, 3, seed=5) != Grammar.random(24, 3, seed=6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar({"A": ("AB",), "B": ("AB",)}), "one right side twice"),
        (lambda: Grammar({"A": ("AC",), "B": ("AB",)}), "two of its own symbols"),
        (lambda: Grammar({"A": ("A",)}), "two of its own symbols"),
        (lambda: Grammar.random(60), "symbols=60"),
        (lambda: Grammar.random(4, 5), "expansions=5"),
        (lambda: Grammar.random(4, 0), "expansions=0"),
    ],
)
def test_bad_grammars_are_named(make, message: str):
    with pytest.raises(UserError, match=message):
        make()


def test_derived_words_have_their_root():
    grammar, rng = Grammar.random(12, 3), np.random.default_rng(0)
    parser = Parser(grammar)
    for length in range(1, 9):
        root = pick(grammar.symbols, rng)
        word = derive(grammar, root, length, rng)
        assert len(word) == length and root in parser.roots(word)
