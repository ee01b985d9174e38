"""Sources: what is refused, how positions run on over epochs, and that a resumed run goes on as if never stopped."""

import json
from dataclasses import asdict

import pytest

from builders import rollout
from postrl.batch import Kind
from postrl.envs.copy_task import copy_task
from postrl.envs.single_turn import Problem, Problems
from postrl.envs.two_turn import TwoTurn
from postrl.errors import UserError
from postrl.papers.reco import reco
from postrl.policies.base import Sampling
from postrl.policies.tabular import Tabular
from postrl.rewards.rubric import Reward, RewardError, Rubric
from postrl.rollout import collate
from postrl.source import Dataset, OnPolicy, Source
from scripted import CHARACTERS, Scripted

TASK = copy_task(length=2, alphabet="abc", test_share=0)  # 9 problems


def policy(context_length=32, **scripted):
    made = Tabular.random(CHARACTERS.size, memory=1, context_length=context_length, key=[2])
    if scripted:
        made.sampler = lambda: scripted["sampler"]
    return made


def on_policy(task=TASK, groups=2, size=3, sampling=Sampling(max_tokens=3), **rest):  # noqa: B008 - frozen
    rest.setdefault("policy", policy())
    return OnPolicy(task, renderer=CHARACTERS, groups_per_step=groups, group_size=size, sampling=sampling, **rest)


def test_groups_are_running_positions_and_items_follow_the_epochs():
    source = on_policy(groups=4, size=2)
    assert isinstance(source, Source)
    rollouts = [r for step in range(5) for r in source(step)]
    assert [r.group for r in rollouts] == [g for g in range(20) for _ in range(2)]
    assert [r.sample for r in rollouts] == [0, 1] * 20
    assert [r.version for r in rollouts] == [step for step in range(5) for _ in range(8)]
    items = [r.item for r in rollouts[::2]]
    assert len(set(items[:9])) == len(set(items[9:18])) == 9 and items[:9] != items[9:18]
    assert source.limits.max_context == 32 and source.limits.max_turns == 1


def test_keys_carry_seed_step_group_sample_and_turn():
    sampler = Scripted(lambda context, key: "ab")
    source = on_policy(TwoTurn(test_share=0), policy=policy(sampler=sampler), seed=11)
    source(0), source(4)
    keys = [key for _, key, _, _ in sampler.submitted]
    assert sorted(keys) == [
        (11, step, group, sample, turn)
        for step, groups in ((0, (0, 1)), (4, (2, 3)))
        for group in groups
        for sample in range(3)
        for turn in (0, 1)
    ]


def test_a_refill_draws_further_groups_of_the_same_step():
    source = on_policy()
    first, more, three = source(7), source(7), source(7, groups=3)
    assert [r.group for r in first + more + three] == [g for g in range(7) for _ in range(3)]
    assert {r.version for r in first + more + three} == {7}
    assert first[0].contexts != more[0].contexts or first[0].item != more[0].item


@pytest.fixture(scope="module")
def uninterrupted():
    source = on_policy(groups=3, size=1)
    return [source(step) for step in range(8)]


@pytest.mark.parametrize("boundary", range(8))
def test_resuming_at_every_boundary_changes_nothing(boundary, uninterrupted):
    """9 problems, 3 groups a step: epochs end at steps 3 and 6, where a peer resumed to train nothing."""
    before = on_policy(groups=3, size=1)
    for step in range(boundary):
        before(step)
    state = json.loads(json.dumps(before.state_dict()))
    after = on_policy(groups=3, size=1)
    after.load_state_dict(state)
    assert [after(step) for step in range(boundary, 8)] == uninterrupted[boundary:]


RUBRIC = Rubric((Reward("zero", lambda r: 0.0),))
QUESTIONS = [Problem(f"{chr(97 + i // 26)}{chr(97 + i % 26)}", {"answer": i}) for i in range(300)]


def changed(index, **info):
    return [*QUESTIONS[:index], Problem(QUESTIONS[index].question, info), *QUESTIONS[index + 1 :]]


@pytest.mark.parametrize(
    "other",
    [
        Problems("q", QUESTIONS[:-1], RUBRIC),
        Problems("q", changed(299, answer=-1), RUBRIC),
        Problems("q", QUESTIONS, RUBRIC, seed=1),
        Problems("q", QUESTIONS, RUBRIC, test_share=0.2),
        Problems("q", QUESTIONS, RUBRIC, template="{question}?"),
        Problems("other", QUESTIONS, RUBRIC),
        TwoTurn(),
    ],
    ids=["one less", "an answer changed", "order", "split", "template", "name", "kind"],
)
def test_a_task_that_has_changed_is_refused_on_resume(other):
    state = on_policy(Problems("q", QUESTIONS, RUBRIC)).state_dict()
    on_policy(Problems("q", list(QUESTIONS), RUBRIC)).load_state_dict(state)
    with pytest.raises(UserError, match=r"are not those of the checkpoint \(task 'q'\)"):
        on_policy(other).load_state_dict(state)


def test_a_damaged_position_is_refused():
    for bad in (-1, "3", None):
        with pytest.raises(UserError, match=r"position is .*; it is damaged"):
            on_policy().load_state_dict({**on_policy().state_dict(), "position": bad})


@pytest.mark.parametrize("part", ["position", "fingerprint"])
def test_a_state_without_a_part_is_refused(part: str):
    for source in (on_policy(), Dataset([rollout()], 1)):
        state = source.state_dict()
        del state[part]
        with pytest.raises(UserError, match="checkpoint"):
            source.load_state_dict(state)


@pytest.mark.parametrize(
    ("sampling", "option"),
    [(Sampling(top_p=0.9), "top_p=0.9"), (Sampling(top_k=5), "top_k=5"), (Sampling(temperature=0), "temperature=0")],
)
def test_training_refuses_what_changes_the_distribution(sampling, option):
    with pytest.raises(UserError, match=f"{option} is for evaluation only"):
        on_policy(sampling=sampling)
    with pytest.raises(UserError, match="max_tokens is 0"):
        on_policy(sampling=Sampling(max_tokens=0))


def test_bad_options_are_named():
    with pytest.raises(UserError, match="group_size is 0"):
        on_policy(size=0)
    with pytest.raises(UserError, match="groups_per_step is 0"):
        on_policy(groups=0)
    with pytest.raises(UserError, match="has no train problems"):
        on_policy(copy_task(test_share=1))
    with pytest.raises(UserError, match="has 2 tokens, but the context holds 2"):
        on_policy(policy=policy(context_length=2))(0)


@pytest.mark.parametrize("given", [False, True])
def test_the_policys_own_sampler_is_made_anew_at_every_call_and_a_given_one_refreshed(given: bool):
    """What a sampler holds would otherwise stay in memory while the policy trains."""
    made = []
    sampler = Scripted(lambda context, key: "ab")
    sampler.refresh = lambda: made.append("refresh")
    model = policy()
    model.sampler = lambda: made.append("new") or sampler
    source = on_policy(policy=model, **({"make_sampler": model.sampler} if given else {}))
    for step in range(3):
        source(step)
    assert made == (["new", "refresh", "refresh"] if given else ["new", "new", "new"])


def test_after_a_failed_step_nothing_has_moved_and_the_source_can_be_used_again():
    fail = [False]

    def reward(rollout):
        if fail[0]:
            raise ValueError("once")
        return 1.0

    task = Problems("q", QUESTIONS, Rubric((Reward("r", reward),)))
    made, own = [], policy()
    source = on_policy(task, policy=own, make_sampler=lambda: made.append("new") or own.sampler())
    first = source(0)
    fail[0] = True
    with pytest.raises(RewardError):
        source(1)
    assert source.position == 2
    fail[0] = False
    again = source(1)
    assert made == ["new", "new"], "completions may still be under way in the sampler of the failed step"
    assert [r.group for r in again] == [2, 2, 2, 3, 3, 3]
    whole = on_policy(task)
    assert (first, again) == (whole(0), whole(1))


def test_equal_answers_are_grouped_for_methods_that_count_them():
    """Scripted answers by sample; the first number counts, and "?" has none. w = 1/count within the group, by hand."""
    words = ["1 a", "1 b", "2", "?", "?"]
    sampler = Scripted(lambda context, key: words[key[3]] if key[2] == 0 else "1 a")
    task = Problems("q", QUESTIONS, RUBRIC)

    def number(rollout):
        return next((character for character in rollout.completion if character.isdigit()), None)

    rest = {"size": 5, "policy": policy(sampler=sampler), "sampling": Sampling(max_tokens=4)}
    rollouts = on_policy(task, **rest, answer=number)(0)
    assert [r.groups["answer"] for r in rollouts] == [0, 0, 1, 2, 2] + [0] * 5
    batch = collate(rollouts)
    assert batch.group_names == ("task", "answer")
    built = reco(typical="empirical", rescale=False)
    weight = (built.terms[0].weight(batch).sum(1) * batch.size).tolist()
    assert weight == pytest.approx([1 / 2, 1 / 2, 1, 1 / 2, 1 / 2] + [1 / 5] * 5)
    assert "answer" not in on_policy(task, **rest)(0)[0].groups


@pytest.mark.parametrize("answer", [lambda r: [1], lambda r: r.info["nothing"]], ids=["no hash", "raises"])
def test_an_answer_that_cannot_be_had_names_the_item(answer):
    with pytest.raises(UserError, match=r"option answer: no hashable value for a rollout of item '\w+'"):
        on_policy(answer=answer)(0)


def pairs(count):
    return [rollout(group=g, sample=s, kind=Kind.PAIR, completion=[g, s]) for g in range(count) for s in (0, 1)]


def content(rollouts):
    return [{**asdict(r), "group": 0} for r in rollouts]


def test_a_data_set_keeps_groups_together_and_passes_each_once_per_epoch():
    data = Dataset(pairs(5), per_step=2, seed=1)
    assert isinstance(data, Source)
    drawn = [r for step in range(5) for r in data(step)]
    assert [r.group for r in drawn] == [g for g in range(10) for _ in (0, 1)]
    assert [r.sample for r in drawn] == [0, 1] * 10
    items = [r.item for r in drawn[::2]]
    assert set(items[:5]) == set(items[5:]) and len(set(items[:5])) == 5 and items[:5] != items[5:]
    assert all(a.item == b.item for a, b in zip(drawn[::2], drawn[1::2], strict=True))


@pytest.mark.parametrize("boundary", range(7))
def test_a_data_set_resumes_at_every_boundary(boundary):
    whole = Dataset(pairs(4), per_step=2, seed=3)
    expected = [whole(step) for step in range(7)]
    before = Dataset(pairs(4), per_step=2, seed=3)
    for step in range(boundary):
        before(step)
    after = Dataset(pairs(4), per_step=2, seed=3)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [after(step) for step in range(boundary, 7)] == expected[boundary:]


def test_a_data_set_larger_step_than_epoch_gives_new_group_numbers():
    drawn = Dataset(pairs(2), per_step=5)(0)
    assert [r.group for r in drawn] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_changed_data_set_is_refused_and_so_are_bad_options():
    state = Dataset(pairs(4), per_step=2).state_dict()
    with pytest.raises(UserError, match="are not those of the checkpoint"):
        Dataset(pairs(5), per_step=2).load_state_dict(state)
    with pytest.raises(UserError, match="no rollouts"):
        Dataset([], per_step=2)
    with pytest.raises(UserError, match="per_step is 0"):
        Dataset(pairs(1), per_step=0)


def test_a_data_set_does_not_change_its_rollouts():
    given = pairs(3)
    Dataset(given, per_step=3, seed=5)(0)
    assert given == pairs(3)


def test_the_sampler_may_be_made_otherwise():
    """The same rollouts, whoever makes the sampler, and one sampler for all steps."""
    made = []
    other = policy()

    def make():
        made.append(other.sampler())
        return made[-1]

    plain, source = on_policy(), on_policy(policy=other, make_sampler=make)
    assert [source(step) for step in range(2)] == [plain(step) for step in range(2)]
    assert len(made) == 1
