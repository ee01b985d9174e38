"""The auditor of rewrite traces: what every step did, whether the grammar allows it, and what a policy makes of it.

A step u → v is explained by a cut of u into |v| segments, each a word of the symbol of v at its place. c_j = |segment
j| − 1 is the number of contractions that the step did there at once. Where several cuts explain a step, the one whose
largest c_j is smallest counts: nothing is called an ordered composition that independent contractions explain.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from postrl.envs.grammar_rules import REMEMBERED, Grammar, Parser
from postrl.probes.diversity import hill_number

SEPARATOR = ">"  # between the words of a trace


class StepKind(Enum):
    """What a step did."""

    INVALID = "invalid"  # no cut explains it
    IDENTITY = "identity"  # nothing
    PRIMITIVE = "primitive"  # one contraction
    SEQUENTIAL = "sequential"  # several contractions, all in one segment: each needs the result of another
    PARALLEL = "parallel"  # one contraction in each of several segments
    MIXED = "mixed"  # contractions in several segments, several in one of them
    EXPANSION = "expansion"  # the way back: one or more expansions


COMPOSED = frozenset({StepKind.SEQUENTIAL, StepKind.PARALLEL, StepKind.MIXED})
Macro = tuple[str, str]  # (segment of three symbols or more, the symbol it was contracted to in one step)


@dataclass(frozen=True)
class Step:
    """One audited rewrite. `macros` are its segments of c ≥ 2."""

    kind: StepKind
    macros: tuple[Macro, ...] = ()


@dataclass(frozen=True)
class Trace:
    """An audited answer. words: what was written, prompt's word first; empty if the text is no list of words."""

    words: tuple[str, ...]
    steps: tuple[Step, ...]
    solved: bool  # ended by itself, and the last word is the root: all that an outcome reward sees

    @property
    def valid(self) -> bool:
        """Solved without a single invalid step."""
        return self.solved and all(step.kind is not StepKind.INVALID for step in self.steps)


class Auditor:
    """Audits steps and traces of one grammar; steps are remembered, since policies repeat themselves."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.parser = grammar, Parser(grammar)
        self._known: dict[tuple[str, str], Step] = {}

    def step(self, before: str, after: str) -> Step:
        """What the rewrite of `before` to `after` did."""
        found = self._known.get((before, after))
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[before, after] = self._audit(before, after)
        return found

    def trace(self, word: str, answer: str, root: str, finished: bool = True) -> Trace:
        """An answer "w1>w2>…" to the prompt's `word`. finished: it ended by itself; else its last word may be cut off
        and is not audited."""
        words = answer.split(SEPARATOR)
        symbols = self.grammar.expansions.keys()
        if not all(words if finished else words[:-1]) or not set(answer) <= {*symbols, SEPARATOR}:
            return Trace((), (), False)
        words = [word, *(words if finished else words[:-1])]
        steps = tuple(self.step(u, v) for u, v in pairwise(words))
        return Trace(tuple(words), steps, finished and words[-1] == root)

    def _audit(self, before: str, after: str) -> Step:
        if before == after:
            return Step(StepKind.IDENTITY)
        total = len(before) - len(after)
        if total < 0:
            return Step(StepKind.EXPANSION if self._cut(after, before) else StepKind.INVALID)
        cut = self._cut(before, after) if total else None
        if cut is None:
            return Step(StepKind.INVALID)
        largest, ends = cut
        pieces = zip((0, *ends), ends, after, strict=False)
        macros = tuple((before[start:end], symbol) for start, end, symbol in pieces if end - start > 2)
        if largest == total:
            return Step(StepKind.PRIMITIVE if total == 1 else StepKind.SEQUENTIAL, macros)
        return Step(StepKind.PARALLEL if largest == 1 else StepKind.MIXED, macros)

    def _cut(self, long: str, short: str) -> tuple[int, tuple[int, ...]] | None:
        """Largest c_j and the ends of the segments of `long`, one per symbol of `short`; None if there is no cut."""
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # by how much of `long` is used up
        for place, symbol in enumerate(short):
            further: dict[int, tuple[int, tuple[int, ...]]] = {}
            last = len(long) - (len(short) - place - 1)  # every later symbol needs a segment, too
            for start, (largest, ends) in best.items():
                for end in (last,) if place == len(short) - 1 else range(start + 1, last + 1):
                    if symbol in self.parser.roots(long[start:end]):
                        found = (max(largest, end - start - 1), (*ends, end))
                        further[end] = min(found, further.get(end, found))
            best = further
        return best.get(len(long))


@dataclass(frozen=True)
class Summary:
    """Counts over traces, and what follows from them. Shares of nothing are nan."""

    traces: int
    solved: int
    valid: int
    kinds: Counter[StepKind]

    @property
    def steps(self) -> int:
        return self.kinds.total()

    @property
    def success(self) -> float:
        """Share of traces that end in the root: what the outcome reward pays."""
        return _ratio(self.solved, self.traces)

    @property
    def valid_success(self) -> float:
        """Share of traces that end in the root by allowed steps only."""
        return _ratio(self.valid, self.traces)

    @property
    def shares(self) -> dict[StepKind, float]:
        """Of every kind among all steps."""
        return {kind: _ratio(self.kinds[kind], self.steps) for kind in StepKind}

    @property
    def composed(self) -> int:
        """Steps of several contractions at once that the grammar allows."""
        return sum(self.kinds[kind] for kind in COMPOSED)

    @property
    def novel(self) -> int:
        """Steps of a kind that pretraining never showed: composed contractions, and invalid rewrites. Identities and
        expansions are left out: neither brings a word nearer to its root."""
        return self.kinds[StepKind.INVALID] + self.composed

    @property
    def novel_per_thousand(self) -> float:
        """Novel steps per 1000 steps."""
        return 1000 * _ratio(self.novel, self.steps)

    @property
    def selectivity(self) -> float:
        """Share of the novel steps that the grammar allows."""
        return _ratio(self.composed, self.novel)


def summarise(traces: Iterable[Trace]) -> Summary:
    """The counts of some traces."""
    listed = list(traces)
    kinds = Counter(step.kind for trace in listed for step in trace.steps)
    return Summary(len(listed), sum(t.solved for t in listed), sum(t.valid for t in listed), kinds)


@dataclass
class Repertoire:
    """The macros a policy uses, over the course of training."""

    uses: Counter[Macro] = field(default_factory=Counter)
    first: dict[Macro, int] = field(default_factory=dict)  # when it was first used
    ages: Counter[int] = field(default_factory=Counter)  # of a macro at each of its uses

    def add(self, time: int, traces: Iterable[Trace]) -> None:
        """The traces of training step `time`; call it in order of time."""
        for macro in (macro for trace in traces for step in trace.steps for macro in step.macros):
            self.uses[macro] += 1
            self.ages[time - self.first.setdefault(macro, time)] += 1

    @property
    def reuse(self) -> float:
        """Uses per distinct macro."""
        return _ratio(self.uses.total(), len(self.uses))

    @property
    def effective(self) -> float:
        """Hill number D2 of the uses: how many equally used macros would be as varied."""
        return hill_number(list(self.uses.values()), 2.0)

    def established(self, age: int) -> float:
        """Share of all uses that were of macros first used more than `age` training steps earlier."""
        return _ratio(sum(count for past, count in self.ages.items() if past > age), self.ages.total())


def covered(logp: Float[np.ndarray, "n"], k: int) -> float:
    """Share of sequences with log-probability (nats) of at least −ln k: those that k samples are likely to contain.

    Give it the base policy's log-probabilities of what a trained policy solved. nan without sequences.
    """
    return float((logp >= -math.log(k)).mean()) if logp.size else math.nan


def distinct_traces(traces: Sequence[Trace]) -> Counter[tuple[str, ...]]:
    """How often each valid derivation occurs."""
    return Counter(trace.words for trace in traces if trace.valid)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
