from dataclasses import replace
from pathlib import Path

import pytest
import torch

from builders import ragged_rollouts, rollout
from postrl.batch import Kind, Stop
from postrl.errors import UserError
from postrl.rollout import Rollout, Turn, collate, read_jsonl, write_jsonl


@pytest.mark.parametrize("seed", range(5))
def test_collate_against_a_loop(seed: int):
    """Column t speaks of token t: ids, who wrote it, which turn, what the sampler reported; nothing else."""
    rollouts = ragged_rollouts(seed)
    batch = collate(rollouts)
    b = 0
    for unit, one in enumerate(rollouts):
        for turns in one.contexts:
            t, sampled = 0, 0
            for turn in turns:
                for position, token in enumerate(turn.tokens):
                    assert batch.tokens[b, t] == token and batch.valid[b, t]
                    assert bool(batch.mask[b, t]) == turn.sampled
                    assert batch.segment[b, t] == (sampled if turn.sampled else -1)
                    assert batch.logp_sampler[b, t] == pytest.approx(turn.logp[position] if turn.sampled else 0.0)
                    t += 1
                sampled += turn.sampled
            assert not batch.valid[b, t:].any() and not batch.mask[b, t:].any() and (batch.segment[b, t:] == -1).all()
            assert batch.unit[b] == unit and batch.prefix_length[b] == len(turns[0].tokens)
            b += 1
        assert batch.groups[unit].tolist() == [one.group]
        for name, score in one.rewards.items():
            got = batch.reward(name)[unit]
            assert torch.isnan(got) if score is None else got == score
    assert b == len(batch.unit) and batch.size == len(rollouts)
    assert torch.equal(batch.logp_old, batch.logp_sampler)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_one_prefix_begin_alike(seed: int):
    batch = collate(ragged_rollouts(seed))
    first: dict[int, list[int]] = {}
    for b, number in enumerate(batch.prefix_id.tolist()):
        prefix = batch.tokens[b, : batch.prefix_length[b]].tolist()
        assert first.setdefault(number, prefix) == prefix
        assert not batch.mask[b, : batch.prefix_length[b]].any()
    assert len({tuple(prefix) for prefix in first.values()}) == len(first)


def test_prefix_is_everything_before_the_first_sampled_turn():
    one = Rollout("x", 0, 0, [[Turn([1], False), Turn([2], False), Turn([3], True, logp=[0.0]), Turn([4], False)]])
    assert collate([one]).prefix_length.tolist() == [2]


def test_masks_come_from_lengths_when_padding_looks_like_end_of_sequence():
    """A completion of the padding id: every token of it counts, padding does not (padding is 0 in `tokens`)."""
    batch = collate([rollout(completion=[5, 0]), rollout(sample=1, completion=[0, 0, 0, 0])])
    assert batch.mask.tolist() == [[False, False, True, True, False, False], [False, False, True, True, True, True]]
    assert torch.equal(batch.valid.sum(1), torch.tensor([4, 6]))


def test_tool_tokens_are_read_but_not_trained():
    turns = [Turn([1], False), Turn([2], True, logp=[-1.0]), Turn([3, 4], False), Turn([5], True, logp=[-2.0])]
    batch = collate([Rollout("x", 0, 0, [turns])])
    assert batch.valid.tolist() == [[True] * 5]
    assert batch.mask.tolist() == [[False, True, False, False, True]]
    assert batch.segment.tolist() == [[-1, 0, -1, -1, 1]]
    assert batch.logp_sampler.tolist() == [[0.0, -1.0, 0.0, 0.0, -2.0]]


def test_several_contexts_are_rows_of_one_unit():
    one = rollout()
    two = replace(one, sample=1, contexts=[*one.contexts, [Turn([9], False), Turn([8], True, logp=[-3.0])]])
    batch = collate([one, two])
    assert batch.unit.tolist() == [0, 1, 1] and batch.lengths().tolist() == [2, 3]
    assert batch.prefix_id.tolist() == [0, 0, 1]


def test_a_unit_may_have_no_sampled_token_or_no_context():
    batch = collate([rollout(), rollout(sample=1, completion=[]), replace(rollout(sample=2), contexts=[])])
    assert batch.size == 3 and len(batch.unit) == 2 and batch.lengths().tolist() == [2, 0, 0]


def test_kind_version_stop_temperature_and_steps_arrive():
    one = rollout(kind=Kind.DEMONSTRATION, stop=Stop.TRUNCATED, version=7, temperature=0.5, step_rewards=[1.0, 2.0])
    batch = collate([one, rollout(sample=1, step_rewards=[3.0])])
    assert batch.kind.tolist() == [2, 0] and batch.stop.tolist() == [1, 0] and batch.version.tolist() == [7, 0]
    assert batch.temperature.tolist() == [0.5, 1.0]
    assert batch.step_rewards is not None
    torch.testing.assert_close(batch.step_rewards, torch.tensor([[1.0, 2.0], [3.0, torch.nan]]), equal_nan=True)


def test_weights_default_to_one():
    batch = collate([rollout(rewards={"a": 1.0, "b": 2.0}, reward_weights={"b": 0.25})])
    assert batch.reward_weights.tolist() == [1.0, 0.25]


@pytest.mark.parametrize("rollouts", [[], [Rollout("x", 0, 0, [])], [Rollout("x", 0, 0, [[Turn([], False)]])]])
def test_nothing_to_collate(rollouts: list[Rollout]):
    with pytest.raises(ValueError, match=f"{len(rollouts)} rollouts without a single token"):
        collate(rollouts)


def test_unequal_lengths_are_caught_when_a_turn_is_made():
    with pytest.raises(ValueError, match="2 tokens but 1 log-probabilities"):
        Turn([1, 2], True, logp=[0.0])


@pytest.mark.parametrize("logp", [[], [-0.5], [-0.5] * 3])
def test_unequal_lengths_are_caught_at_the_boundary_with_the_items_name(logp: list[float]):
    """Also when a turn was edited afterwards; one number for two tokens would otherwise be broadcast in silence."""
    broken = rollout(group=4, sample=2)
    broken.contexts[0][1].logp = logp
    with pytest.raises(ValueError, match=f"item 'item4', sample 2: .* 2 tokens but {len(logp)} log-probabilities"):
        collate([rollout(), broken])


@pytest.mark.parametrize(
    "odd",
    [
        {"rewards": {"other": 1.0}},
        {"rewards": {}},
        {"reward_weights": {"score": 0.5}},
        {"groups": {"siblings": 1}},
    ],
)
def test_rollouts_that_do_not_fit_together_are_named(odd: dict):
    with pytest.raises(ValueError, match=f"item 'item3' has {next(iter(odd))}"):
        collate([rollout(), rollout(group=3, **odd)])


def test_a_file_holds_declared_fields_and_nothing_that_is_not_json(tmp_path: Path):
    noted = rollout(0)
    noted.judge = "said so"  # by a reward
    write_jsonl(tmp_path / "rollouts.jsonl", [noted])
    assert read_jsonl(tmp_path / "rollouts.jsonl") == [rollout(0)]
    with pytest.raises(TypeError, match="function is neither plain JSON"):
        write_jsonl(tmp_path / "rollouts.jsonl", [rollout(0, info={"x": lambda: 1})])


def test_jsonl_round_trip(tmp_path: Path):
    rollouts = ragged_rollouts(0)
    rollouts[0].contexts[0][0].text = 'line\nbreak \u2028 \x85 é ∑ "quoted"'
    rollouts[1].messages, rollouts[1].info = [{"role": "user", "content": "2+2?"}], {"answer": 4, "hard": [1.5, None]}
    rollouts[2].kind, rollouts[2].stop = Kind.PAIR, Stop.ERROR
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, rollouts)
    back = read_jsonl(path)
    assert back == rollouts
    assert isinstance(back[2].kind, Kind) and isinstance(back[2].stop, Stop)
    write_jsonl(path, [])
    assert read_jsonl(path) == []


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"item": "x"',
        b"5",
        b"[]",
        b"",
        b'{"item": "x"}',
        b"\xff\xfe",
        b'{"item":"x","group":0,"sample":0,"kind":9,"stop":0,"contexts":[]}',
        b'{"item":"x","group":0,"sample":0,"kind":0,"stop":0,"contexts":[[{"tokens":[1],"sampled":true,"logp":[]}]]}',
        b'{"item":"x","group":0,"sample":0,"kind":0,"stop":0,"contexts":[],"colour":1}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: bytes):
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, [rollout()])
    path.write_bytes(path.read_bytes() + damaged + b"\n")
    with pytest.raises(UserError, match=r"rollouts\.jsonl, line 2: not a rollout"):
        read_jsonl(path)


def test_completion_is_the_last_sampled_text():
    turns = [Turn([1], False, "?"), Turn([2], True, "a", [0.0]), Turn([3], False, "!"), Turn([4], True, "b", [0.0])]
    assert Rollout("x", 0, 0, [turns]).completion == "b"
    assert Rollout("x", 0, 0, []).completion == ""
    assert Rollout("x", 0, 0, [turns]).sampled_tokens() == 2


def test_steps_that_answer_equal_observations_have_equal_numbers():
    """The text counts, not the template's tokens around it; without text the tokens do."""

    def turn(tokens, text=""):
        return Turn(list(tokens), False, text=text)

    def said(token):
        return Turn([token], True, logp=[-1.0])

    a = rollout()
    a.contexts = [[turn([1], "start"), said(5), turn([2], "kitchen"), said(6), turn([2], "start"), said(6)]]
    b = replace(
        a, sample=1, contexts=[[turn([1], "start"), said(5), turn([3], "kitchen"), said(7)], [turn([4]), said(5)]]
    )
    c = replace(a, sample=2, contexts=[[turn([4]), said(5)], [turn([1], "start"), said(5), turn([4]), said(5)]])
    batch = collate([a, b, c])
    assert batch.step_groups is not None and batch.step_groups.tolist() == [[0, 1, 0], [0, 1, -1], [2, 2, -1]]
    assert batch.step_rewards is None
    longer = collate([replace(a, step_rewards=[1.0]), b, c])
    assert longer.step_rewards is not None and longer.step_rewards.shape == (3, 3)
    assert longer.step_groups is not None and torch.equal(longer.step_groups, batch.step_groups)
