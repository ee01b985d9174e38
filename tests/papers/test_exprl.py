"""ExpRL: the four credits, who leaves the loss, and how an answer is cut into steps."""

import itertools
from dataclasses import replace

import pytest
import torch

import laws
import reference
from builders import rollout
from postrl.batch import Batch, Stop
from postrl.errors import UserError
from postrl.papers.exprl import Judged, exprl, judged, likert, step_counts, step_ends
from postrl.papers.grpo import grpo
from postrl.rollout import Turn, collate

OPTIONS = [
    {"single_segment": "raw"},
    {"single_segment": "group_mean", "clip_overflow": False, "low": 0.1, "high": 0.3},
    {"credit": "end_norm"},
    {"credit": "group_norm"},
    {"credit": "outcome", "singleton": "raw", "ddof": 0, "eps": 1e-4},
]


def shaken(case: laws.Case) -> laws.Case:
    """The case with truncated units and some unread verdicts among the step rewards."""
    steps = case.batch.step_rewards.clone()
    steps[torch.tensor(case.rng.random(steps.shape) < 0.15)] = torch.nan
    cut = torch.tensor(case.rng.random(case.batch.size) < 0.3)
    stop = torch.where(cut, int(Stop.TRUNCATED), int(Stop.FINISHED)).to(torch.int8)
    return replace(case, batch=replace(case.batch, step_rewards=steps, stop=stop))


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(exprl(**options), shaken(case), **options), examples=12)


@pytest.mark.parametrize("law", laws.LAWS)
@pytest.mark.parametrize("credit", ["outcome", "group_norm"])
def test_laws(credit, law):
    laws.hold(law, exprl(credit), examples=5)


def steps(scores: list[list[float]], groups=None, stop=None, length=1) -> Batch:
    """Units with the given scores of their segments, each `length` tokens long; one group."""
    rows = [[0.5] * len(s) * length for s in scores]
    case = laws.by_hand([0] * len(scores) if groups is None else groups, [0.0] * len(scores), rows, rows)
    width = max(map(len, scores))
    padded = [s + [torch.nan] * (width - len(s)) for s in scores]
    return replace(
        case.batch,
        segment=torch.where(case.batch.mask, torch.arange(width * length)[None] // length, -1).to(torch.int32),
        step_rewards=torch.tensor(padded, dtype=torch.float64),
        step_groups=None,
        stop=case.batch.stop if stop is None else torch.tensor(stop, dtype=torch.int8),
    )


def test_by_hand():
    """s = (1/4, 1, 1/2): A = (−1/4, 3/4, −1/2). EndNorm (−1/4, 1/2, 1/2). Two tokens a segment share its credit."""
    batch = steps([[0.25, 1.0, 0.5]], length=2)
    laws.equal(exprl().advantage(batch), [[-0.25, -0.25, 0.75, 0.75, -0.5, -0.5]])
    laws.equal(exprl("end_norm").advantage(batch), [[-0.25, -0.25, 0.5, 0.5, 0.5, 0.5]])
    # GroupNorm: 1/4, 1, 1/2 and 1/4 have mean 1/2
    laws.equal(exprl("group_norm").advantage(steps([[0.25, 1.0, 0.5], [0.25]])), [[-0.25, 0.5, 0.0], [-0.25, 0, 0]])


def test_deltas_sum_to_zero_over_the_segments():
    def check(case):
        case = shaken(case)
        a = exprl().advantage(case.batch)
        for n in range(case.batch.size):
            segments = {}
            for b, t in (case.batch.mask & (case.batch.unit == n)[:, None]).nonzero().tolist():
                segments[int(case.batch.segment[b, t])] = float(a[b, t])
            if set(segments) == set(range(int(step_counts(case.batch)[n]))):  # no segment whose row lost its tokens
                assert abs(sum(segments.values())) < 1e-12

    laws.over_cases(check)


def test_the_rule_for_a_single_segment():
    """Scores 3/4 alone, and (0, 1/4). Final scores have mean 1/2. Raw credit never falls below 0: it rewards T = 1."""
    batch = steps([[0.75], [0.0, 0.25]])
    for rule, alone in (("zero", 0.0), ("raw", 0.75), ("group_mean", 0.25)):
        laws.equal(exprl(single_segment=rule).advantage(batch), [[alone, 0.0], [-0.25, 0.25]])
    lone = steps([[0.75], [0.5]], groups=[0, 1])
    laws.equal(exprl(single_segment="group_mean").advantage(lone), [[0.0], [0.0]])


def test_overflow_is_score_zero_throughout():
    batch = steps([[0.5, 1.0], [0.75], [0.5, torch.nan]], stop=[1, 0, 1])
    mean = exprl(single_segment="group_mean")
    laws.equal(mean.advantage(batch), [[0.0, 0.0], [0.5, 0.0], [0.0, 0.0]])  # final scores 0, 3/4, 0
    laws.equal(exprl("group_norm").advantage(batch), [[-0.15] * 2, [0.6, 0.0], [-0.15] * 2])
    kept = exprl("end_norm", clip_overflow=False)
    laws.equal(kept.advantage(batch), [[-0.5, 1.0], [0.75, 0.0], [0.0, 0.0]])
    assert mean.terms[0].weight(batch).count_nonzero() == 5, "an overlong answer needs no verdict to be in the loss"
    assert kept.terms[0].weight(batch).count_nonzero() == 3


@pytest.mark.parametrize("first", [True, False])
def test_an_unread_verdict_takes_the_answer_out_of_loss_and_statistics(first):
    """The released trainer keeps an answer whose first verdict is unread, with a credit of −100.5."""
    lost = [torch.nan, 0.5] if first else [0.5, torch.nan]
    batch = steps([lost, [0.25, 0.75], [1.0]])
    method = exprl("group_norm")
    laws.equal(method.advantage(batch), [[0.0, 0.0], [0.25 - 2 / 3, 0.75 - 2 / 3], [1 / 3, 0.0]])
    laws.equal(method.terms[0].weight(batch), [[0.0, 0.0], [1 / 3, 1 / 3], [1 / 3, 0.0]])
    said = method.figures(batch, batch.logp_old)
    assert said == pytest.approx({"unread": 1 / 3, "segments": 5 / 3, "single_segment": 1 / 3})


def test_an_unread_outcome_is_no_zero_in_its_group():
    case = laws.by_hand([0, 0, 0], [1.0, 0.5, torch.nan], [[0.5]] * 3, [[0.5]] * 3)
    half = 2**-0.5
    laws.equal(exprl("outcome", eps=0.0).advantage(case.batch), [[half], [-half], [0.0]])
    laws.equal(exprl("outcome").terms[0].weight(case.batch), [[0.5], [0.5], [0.0]])


def test_outcome_without_overlong_answers_has_grpos_credit():
    def check(case):
        laws.near(exprl("outcome").advantage(case.batch), grpo().advantage(case.batch), "advantage")

    laws.over_cases(check)


def test_a_segment_beyond_the_scores_is_unread():
    batch = steps([[0.5, 1.0], [1.0]])
    short = replace(batch, step_rewards=batch.step_rewards[:, :1])
    laws.equal(exprl(single_segment="raw").advantage(short), [[0.0, 0.0], [1.0, 0.0]])


# ---------------------------------------------------------------- cutting and judging


def spell(tokens) -> str:
    return "".join("#" if t == 0 else "#" * 3 + "\n" if t == 1 else "" if t == 2 else chr(t) for t in tokens)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ([97, 98], [2]),
        ([97, 0, 0, 0, 98], [4, 5]),
        ([97, 0, 0, 0], [4]),
        ([97, 0, 0, 0, 2], [5]),  # a stop token is no step
        ([97, 0, 0, 0, 32, 2], [6]),  # nor is white space
        ([97, 0, 0, 0, 0, 98], [4, 6]),
        ([0, 0, 0, 0, 0, 0, 98], [3, 6, 7]),
        ([97, 1, 98, 1, 99], [2, 4, 5]),
        ([97, 0, 0, 1, 98], [4, 5]),  # "##" + "###": closed once, by the token that completes it
        ([1, 1], [1, 2]),
        ([], [0]),
    ],
)
def test_where_steps_end(tokens, ends):
    assert step_ends(tokens, spell) == ends


def test_pieces_of_a_turn_are_the_turn():
    """No token or log-probability is lost or moved, and the texts are those of the steps."""
    for tokens in itertools.product([97, 0, 1], repeat=5):
        one = rollout(completion=tokens, rewards={"score": 1.0})
        [cut] = judged([one], spell, lambda r, text: None)
        pieces = [turn for turn in cut.contexts[0] if turn.sampled]
        assert [i for turn in pieces for i in turn.tokens] == list(tokens)
        assert [x for turn in pieces for x in turn.logp] == one.contexts[0][1].logp
        assert "".join(turn.text for turn in pieces) == spell(tokens) and all(turn.tokens for turn in pieces)
        assert one.contexts[0][1].tokens == list(tokens), "the rollout given has changed"


@pytest.mark.parametrize(
    ("unit", "read"), [("prefix", ["a###", "a###b###", "a###b###c"]), ("step", ["a###", "b###", "c"])]
)
def test_what_the_judge_reads(unit, read):
    seen = []

    def judge(one, text):
        assert one.completion == "whole"
        seen.append(text)
        return [1, 4, None][len(seen) - 1]

    one = rollout(completion=[97, 0, 0, 0, 98, 0, 0, 0, 99])
    one.contexts[0][1] = replace(one.contexts[0][1], text="whole")
    [cut] = judged([one], spell, judge, unit)
    assert seen == read
    batch = collate([cut])
    assert batch.step_rewards.nan_to_num(nan=-1.0).tolist() == [[0.0, 0.75, -1.0]]
    assert batch.segment.tolist() == [[-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 2]]


def test_likert():
    assert [likert(v) for v in range(1, 6)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    for bad in (0, 6):
        with pytest.raises(UserError, match="verdict"):
            likert(bad)


def test_a_judged_source_keeps_the_sources_place():
    class Letters:
        position = 0

        def __call__(self, step):
            self.position += 1
            return [rollout(group=self.position, completion=[97, 0, 0, 0, 98])]

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    source = Judged(Letters(), spell, lambda one, text: 5)
    [first] = source(0)
    assert first.step_rewards == [1.0, 1.0] and [t.sampled for t in first.contexts[0]] == [False, True, True]
    again = Judged(Letters(), spell, lambda one, text: 5)
    again.load_state_dict(source.state_dict())
    assert again(1)[0].group == 2


def test_a_tool_turn_stays_between_steps():
    one = rollout(completion=[97, 1, 98])
    one.contexts[0] += [Turn([50], False), Turn([99], True, logp=[-1.0])]
    [cut] = judged([one], spell, lambda r, text: 3)
    assert [t.sampled for t in cut.contexts[0]] == [False, True, True, False, True]
    assert cut.step_rewards == [0.5] * 3
