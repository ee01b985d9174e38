"""Demonstrations and pairs from text."""

import json
from pathlib import Path

import pytest

from postrl.batch import Kind
from postrl.envs.written import demonstration, pair, read_pairs
from postrl.errors import UserError
from postrl.policies.chat import Characters
from postrl.rollout import collate

ASKED = [{"role": "user", "content": "ab"}]
RENDERER = Characters("abc")


def test_a_demonstration():
    rollout = demonstration(ASKED, "ca", 3, RENDERER)
    batch = collate([rollout])
    assert batch.tokens.tolist() == [[1, 2, 3, 1, 0]] and batch.mask.tolist() == [[False, False, True, True, True]]
    assert batch.kind.tolist() == [Kind.DEMONSTRATION] and batch.group().tolist() == [3]
    assert rollout.completion == "ca" and rollout.messages[-1] == {"role": "assistant", "content": "ca"}
    assert ASKED == [{"role": "user", "content": "ab"}]


def test_a_pair_is_one_group_of_a_chosen_and_a_rejected_answer():
    first, second = pair(ASKED, "c", "", 4, RENDERER)
    batch = collate([first, second])
    assert batch.kind.tolist() == [Kind.PAIR] * 2 and batch.reward("preferred").tolist() == [1.0, 0.0]
    assert batch.tokens.tolist() == [[1, 2, 3, 0], [1, 2, 0, 0]] and batch.lengths().tolist() == [2, 1]
    assert batch.prefix_id.tolist() == [0, 0] and batch.group().tolist() == [4, 4]
    assert first.item == second.item


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


GOOD = {"prompt": "ab", "chosen": "c", "rejected": "a", "score": 1}


def test_pairs_from_a_file(tmp_path: Path):
    rollouts = read_pairs(write(tmp_path / "pairs.jsonl", GOOD, "", GOOD | {"prompt": "b"}), RENDERER)
    assert [rollout.group for rollout in rollouts] == [0, 0, 1, 1]
    assert [rollout.completion for rollout in rollouts] == ["c", "a", "c", "a"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, {"prompt": "a", "chosen": "b"}], "row 2: no text in column 'rejected'; it has: prompt, chosen"),
        ([GOOD | {"chosen": None}], "row 1: no text in column 'chosen'"),
        ([GOOD | {"rejected": "c"}], "row 1: chosen and rejected are the same text"),
        ([GOOD, "{"], "line 2: not JSON"),
        (["[1]"], "line 1: not a JSON object; give preferences with the columns prompt, chosen, rejected"),
        ([GOOD | {"prompt": "\ud800"}], "row 1: column 'prompt' has half a character"),
        ([""], "holds no pair"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, rows: list[object], message: str):
    with pytest.raises(UserError, match=message) as caught:
        read_pairs(write(tmp_path / "pairs.jsonl", *rows), RENDERER)
    assert "pairs.jsonl" in str(caught.value)
