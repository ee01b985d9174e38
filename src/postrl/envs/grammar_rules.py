"""A binary rewrite grammar in which every contraction is unique, and the parser that says what a word stands for.

Words are strings; every character is a symbol. The rules are a reconstruction: the paper that the world follows (arXiv
2607.07646) does not publish its own.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from postrl.errors import UserError

LETTERS = string.ascii_uppercase + string.ascii_lowercase
REMEMBERED = 300_000  # segments whose roots a parser keeps; then it forgets all and starts again


@dataclass(frozen=True)
class Grammar:
    """K symbols; `expansions[s]` are the m right sides of symbol s, two symbols each, for example {"A": ("BC", "AA")}.

    No right side stands twice, so contraction is a partial function. Raises UserError if one does.
    """

    expansions: dict[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        sides = [side for each in self.expansions.values() for side in each]
        if len(set(sides)) < len(sides):
            raise UserError("the grammar has one right side twice; make all right sides distinct")
        if any(len(side) != 2 or not set(side) <= self.expansions.keys() for side in sides):
            raise UserError("every right side of the grammar must be two of its own symbols")

    @classmethod
    def random(cls, symbols: int = 24, expansions: int = 3, seed: int = 0) -> "Grammar":
        """K = `symbols` and m = `expansions`, right sides drawn without replacement from the K² pairs.

        Raises UserError for more than 52 symbols, or more expansions than symbols (the pairs would not suffice).
        """
        if not 1 <= symbols <= len(LETTERS):
            raise UserError(f"option symbols={symbols} of the grammar must lie between 1 and {len(LETTERS)}")
        if not 1 <= expansions <= symbols:
            raise UserError(f"option expansions={expansions} of the grammar must lie between 1 and symbols={symbols}")
        names = LETTERS[:symbols]
        drawn = np.random.default_rng([seed, symbols, expansions]).permutation(symbols**2)[: symbols * expansions]
        pairs = [names[pair // symbols] + names[pair % symbols] for pair in drawn]
        return cls({s: tuple(pairs[i * expansions : (i + 1) * expansions]) for i, s in enumerate(names)})

    @property
    def symbols(self) -> str:
        """Every symbol, in order."""
        return "".join(self.expansions)

    @cached_property
    def contraction(self) -> dict[str, str]:
        """Pair -> the only symbol that expands to it."""
        return {side: symbol for symbol, sides in self.expansions.items() for side in sides}

    def contractions(self, word: str) -> list[str]:
        """What one contraction can make of a word, by position."""
        pairs = ((i, self.contraction.get(word[i : i + 2])) for i in range(len(word) - 1))
        return [word[:i] + symbol + word[i + 2 :] for i, symbol in pairs if symbol is not None]


class Parser:
    """Roots of words, remembered: the same short segments come again and again."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._known: dict[str, str] = {}

    def roots(self, word: str) -> str:
        """Every symbol that derives `word`, sorted; "" if none does (Cocke, Younger and Kasami's chart, by recursion).

        A single symbol derives itself.
        """
        if len(word) == 1:
            return word if word in self.grammar.expansions else ""
        found = self._known.get(word)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = "".join(sorted(self._search(word)))
            self._known[word] = found
        return found

    def _search(self, word: str) -> set[str]:
        contraction, found = self.grammar.contraction, set()
        for cut in range(1, len(word)):
            right = self.roots(word[cut:]) if (left := self.roots(word[:cut])) else ""
            found |= {contraction[x + y] for x in left for y in right if x + y in contraction}
        return found


def derive(grammar: Grammar, root: str, length: int, rng: np.random.Generator) -> str:
    """A word of `length` symbols that `root` derives: expansions of random symbols by random rules."""
    word = root
    while len(word) < length:
        place = int(rng.integers(len(word)))
        word = word[:place] + pick(grammar.expansions[word[place]], rng) + word[place + 1 :]
    return word


def pick(options: Sequence[str], rng: np.random.Generator) -> str:
    """One of them, all equally likely."""
    return options[int(rng.integers(len(options)))]
