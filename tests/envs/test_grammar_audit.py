"""Every kind of step by hand, the preference among explanations, and the figures that follow from counts."""

import math
import time

import numpy as np
import pytest

from postrl.envs.grammar_audit import Auditor, Repertoire, Step, StepKind, Trace, covered, distinct_traces, summarise
from postrl.envs.grammar_rules import Grammar

# A → BC, DE · B → CD, FF · C → EF, BB · D → FA, AC · E → AB, DD · F → BA, EE
HAND = Grammar(
    {
        "A": ("BC", "DE"),
        "B": ("CD", "FF"),
        "C": ("EF", "BB"),
        "D": ("FA", "AC"),
        "E": ("AB", "DD"),
        "F": ("BA", "EE"),
    }
)


@pytest.mark.parametrize(
    ("before", "after", "kind", "macros"),
    [
        ("BC", "A", StepKind.PRIMITIVE, ()),
        ("EBCF", "EAF", StepKind.PRIMITIVE, ()),
        ("CDC", "A", StepKind.SEQUENTIAL, (("CDC", "A"),)),  # (CD)C → BC → A
        ("FCDCF", "FAF", StepKind.SEQUENTIAL, (("CDC", "A"),)),
        ("CDEF", "A", StepKind.SEQUENTIAL, (("CDEF", "A"),)),  # (CD)(EF) → BC → A: three contractions
        ("CDFF", "BB", StepKind.PARALLEL, ()),
        ("CDAFF", "BAB", StepKind.PARALLEL, ()),
        ("CDCFF", "AB", StepKind.MIXED, (("CDC", "A"),)),
        ("CDCCDC", "AA", StepKind.MIXED, (("CDC", "A"), ("CDC", "A"))),
        ("ABC", "ABC", StepKind.IDENTITY, ()),
        ("A", "BC", StepKind.EXPANSION, ()),
        ("FA", "FCDC", StepKind.EXPANSION, ()),  # two at once
        ("BC", "D", StepKind.INVALID, ()),  # BC is A's
        ("BCF", "DF", StepKind.INVALID, ()),
        ("BC", "CB", StepKind.INVALID, ()),  # neither shorter nor longer
        ("A", "CB", StepKind.INVALID, ()),
        ("BCA", "A", StepKind.INVALID, ()),  # a symbol vanished
        ("CDFF", "BF", StepKind.INVALID, ()),  # the second half is wrong
    ],
)
def test_every_kind_of_step(before: str, after: str, kind: StepKind, macros: tuple):
    assert Auditor(HAND).step(before, after) == Step(kind, macros)


def test_independent_contractions_explain_before_ordered_ones():
    """With X → XX every cut is possible: XXXX → XX is (XX)(XX), not (X)(XXX)."""
    grammar = Grammar({"X": ("XX",), "Y": ("YX",)})
    auditor = Auditor(grammar)
    assert auditor.step("XXXX", "XX").kind is StepKind.PARALLEL
    assert auditor.step("XXXXX", "XX") == Step(StepKind.MIXED, (("XXX", "X"),))  # (XX)(XXX), not (X)(XXXX)
    assert auditor.step("YXXX", "Y").kind is StepKind.SEQUENTIAL


@pytest.mark.parametrize(
    ("answer", "finished", "words", "solved"),
    [
        ("BC>A", True, ("CDC", "BC", "A"), True),
        ("BC>A", False, ("CDC", "BC"), False),  # the last word may be cut off
        ("A", True, ("CDC", "A"), True),
        ("BC>E", True, ("CDC", "BC", "E"), False),
        ("BC", True, ("CDC", "BC"), False),
        ("BC>", True, (), False),
        ("BC>", False, ("CDC", "BC"), False),
        (">A", True, (), False),
        ("", True, (), False),
        ("BC>A!", True, (), False),
        ("B>>A", True, (), False),
    ],
)
def test_traces(answer: str, finished: bool, words: tuple, solved: bool):
    trace = Auditor(HAND).trace("CDC", answer, "A", finished)
    assert (trace.words, trace.solved) == (words, solved)
    assert len(trace.steps) == max(0, len(words) - 1)


def test_an_outcome_reward_does_not_see_an_invalid_step():
    trace = Auditor(HAND).trace("CDC", "EE>A", "A")
    assert trace.solved and not trace.valid
    assert Auditor(HAND).trace("CDC", "BC>A", "A").valid


def test_summary_by_hand():
    auditor = Auditor(HAND)
    answers = [("CDC", "BC>A"), ("CDC", "A"), ("CDC", "EE>A"), ("CDC", "BC>BC"), ("CDFF", "BB>BBB")]
    got = summarise([auditor.trace(word, answer, "A") for word, answer in answers])
    assert (got.traces, got.solved, got.valid, got.steps) == (5, 3, 2, 9)
    assert got.success == 3 / 5 and got.valid_success == 2 / 5
    # primitive: CDC>BC, BC>A, CDC>BC; sequential: CDC>A; invalid: CDC>EE, EE>A, BB>BBB; identity; parallel: CDFF>BB
    assert got.shares[StepKind.PRIMITIVE] == 3 / 9 and got.shares[StepKind.INVALID] == 3 / 9
    assert sum(got.shares.values()) == pytest.approx(1)
    assert got.novel == 5 and got.novel_per_thousand == pytest.approx(5000 / 9)
    assert got.selectivity == 2 / 5


def test_nothing_has_no_shares():
    got = summarise([])
    assert all(math.isnan(x) for x in (got.success, got.valid_success, got.selectivity, got.novel_per_thousand))


def test_repertoire_by_hand():
    """Macro P at times 0, 0, 3, 9 and Q at 3: ages 0, 0, 3, 9, 0."""
    trace = {c: Trace(("x",), (Step(StepKind.SEQUENTIAL, ((c, "A"),)),), False) for c in "PQ"}
    repertoire = Repertoire()
    repertoire.add(0, [trace["P"], trace["P"]])
    repertoire.add(3, [trace["P"], trace["Q"]])
    repertoire.add(9, [trace["P"]])
    assert len(repertoire.uses) == 2 and repertoire.reuse == 5 / 2
    assert repertoire.effective == pytest.approx(1 / (0.8**2 + 0.2**2))
    assert [repertoire.established(age) for age in (0, 2, 3, 9)] == [2 / 5, 2 / 5, 1 / 5, 0]
    assert math.isnan(Repertoire().reuse) and math.isnan(Repertoire().effective)


def test_covered_at_k():
    logp = np.log([0.5, 0.02, 0.0009])
    assert [covered(logp, k) for k in (1, 2, 64, 1024, 2048)] == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3, 1])
    assert math.isnan(covered(np.zeros(0), 4))


def test_distinct_derivations_count_only_valid_ones():
    auditor = Auditor(HAND)
    traces = [auditor.trace("CDC", answer, "A") for answer in ("A", "BC>A", "A", "EE>A")]
    assert distinct_traces(traces) == {("CDC", "A"): 2, ("CDC", "BC", "A"): 1}


def test_work_grows_like_a_polynomial():
    """A grammar in which everything derives from X, a step with C(29, 9) cuts, and a word of 3·10¹⁵ derivations."""
    auditor, start = Auditor(Grammar({"X": ("XX",)})), time.process_time()
    assert auditor.step("X" * 30, "X" * 10) == Step(StepKind.MIXED, (("XXX", "X"),) * 10)
    assert time.process_time() - start < 3


def test_a_step_is_audited_once(monkeypatch: pytest.MonkeyPatch):
    """What makes 100,000 traces of a policy that repeats itself a matter of seconds."""
    auditor, asked = Auditor(HAND), []
    search = auditor._audit
    monkeypatch.setattr(auditor, "_audit", lambda *step: asked.append(step) or search(*step))
    for _ in range(3):
        auditor.trace("CDC", "BC>A", "A")
    assert asked == [("CDC", "BC"), ("BC", "A")]
