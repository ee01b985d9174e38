"""Arrays of other trainers as a batch: the same record that `collate` makes of the same answers."""

from dataclasses import replace

import pytest
import torch

from postrl.adapters import arrays
from postrl.adapters.arrays import Answers, Scores
from postrl.batch import Batch
from postrl.conformance.cases import EOS, SIZE, Case, make_case
from postrl.errors import UserError
from postrl.rollout import collate


def padded(rows: list[list], left: bool = False, fill: float = 0) -> torch.Tensor:
    width = max(len(row) for row in rows)
    full = [[fill] * (width - len(row)) + row if left else row + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(full)


def answers_of(case: Case, junk: int = 7) -> Answers:
    """As TRL and verl hold them; padding ids are ordinary tokens, to be told by the mask alone."""
    prompts = [case.prompts[unit // SIZE] for unit in range(len(case.answers))]
    sampled = padded([a.sampled for a in case.answers])
    return Answers(
        prompt_ids=padded(prompts, left=True, fill=junk),
        prompt_mask=padded([[1] * len(p) for p in prompts], left=True).bool(),
        completion_ids=padded([a.tokens for a in case.answers], fill=junk),
        completion_mask=padded([[1] * len(a.tokens) for a in case.answers]).bool(),
        sampled=sampled.bool(),
        logp_sampler=padded([a.logp for a in case.answers], fill=float("nan")),
        logp_old=padded([a.logp for a in case.answers], fill=float("nan")),
    )


def scores_of(case: Case) -> Scores:
    names = ("correct", "form")
    rewards = [[torch.nan if a.rewards[n] is None else a.rewards[n] for n in names] for a in case.answers]
    return Scores(
        rewards=torch.tensor(rewards),
        reward_weights=torch.tensor([1.0, 0.5]),
        reward_names=names,
        stop=arrays.stopped([a.tokens[-1] != EOS for a in case.answers]),
        groupings={"answer": arrays.numbered([a.tokens[0] % 3 for a in case.answers])},
        step_rewards=arrays.step_table([a.steps for a in case.answers]),
        step_groups=arrays.step_numbers(arrays.observations(answers_of(case))),
    )


def same_partition(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got[:, None] == got[None], wanted[:, None] == wanted[None])


@pytest.mark.parametrize("seed", range(6))
def test_batch_is_that_of_collate(seed: int):
    case = make_case(seed)
    made = arrays.batch(arrays.rows(answers_of(case)), scores_of(case), SIZE, 0.7, 3)
    wanted: Batch = collate([replace(r, temperature=0.7, version=3) for r in case.rollouts()])
    width = wanted.tokens.shape[1]
    for name in ("tokens", "valid", "mask", "segment", "logp_sampler", "logp_old"):
        got, right = getattr(made, name), getattr(wanted, name)
        assert torch.equal(got[:, :width], right.to(got.dtype)), name
        assert not made.valid[:, width:].any()
    for name in ("prefix_length", "temperature", "unit", "reward_weights", "kind", "version", "stop"):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name
    assert torch.equal(made.rewards.nan_to_num(-9), wanted.rewards.nan_to_num(-9))
    assert made.step_rewards is not None and wanted.step_rewards is not None
    assert torch.equal(made.step_rewards.nan_to_num(-9), wanted.step_rewards.nan_to_num(-9))
    assert made.step_groups is not None and wanted.step_groups is not None
    assert torch.equal(made.step_groups < 0, wanted.step_groups < 0)
    assert same_partition(made.step_groups.flatten(), wanted.step_groups.flatten())
    assert made.group_names == wanted.group_names and made.reward_names == wanted.reward_names
    assert same_partition(made.prefix_id, wanted.prefix_id)
    assert all(same_partition(a, b) for a, b in zip(made.groups.T, wanted.groups.T, strict=True))


def test_what_is_not_known_is_nan_on_sampled_tokens_only():
    answers = replace(answers_of(make_case(0)), logp_old=None, logp_sampler=None)
    found = arrays.rows(answers)
    assert (
        torch.isnan(found["logp_old"][found["mask"]]).all() and torch.isnan(found["logp_sampler"][found["mask"]]).all()
    )
    assert not found["logp_old"][~found["mask"]].any()
    assert "logp_ref" not in found


def test_nan_off_the_mask_does_not_pass():
    answers = answers_of(make_case(0))
    assert torch.isnan(answers.logp_old).any()
    assert torch.isfinite(arrays.rows(answers)["logp_old"]).all()


def test_given_steps_replace_runs():
    sampled = torch.tensor([[True, True, True, False, True]])
    answers = Answers(
        prompt_ids=torch.tensor([[5, 6]]),
        prompt_mask=torch.tensor([[False, True]]),
        completion_ids=torch.tensor([[1, 2, 3, 9, 4]]),
        completion_mask=torch.ones(1, 5, dtype=torch.bool),
        sampled=sampled,
    )
    assert answers.segments().tolist() == [[0, 0, 0, -1, 1]]
    assert arrays.observations(answers) == [[(6,), (9,)]]
    steps = arrays.step_columns([[0, 1, 1, 1, 2]], torch.Size((1, 5)))
    finer = replace(answers, steps=steps)
    assert finer.segments().tolist() == [[0, 1, 1, -1, 2]]
    assert arrays.observations(finer) == [[(6,), (), (9,)]]
    assert arrays.rows(finer)["segment"].tolist() == [[-1, 0, 1, 1, -1, 2, -1]]


@pytest.mark.parametrize("steps", [[1, 2], [0, 2], [1, 0], [0, 0, 0, 0]])
def test_steps_that_do_not_count_are_named(steps: list[int]):
    with pytest.raises(UserError, match="steps of answer 0 are"):
        arrays.step_columns([steps], torch.Size((1, 3)))


def test_cut_groups_are_refused():
    case = make_case(0)
    with pytest.raises(UserError, match="16 answers are no whole groups of 5"):
        arrays.batch(arrays.rows(answers_of(case)), scores_of(case), 5, 1.0, 0)
