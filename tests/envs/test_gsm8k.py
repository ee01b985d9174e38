"""GSM8K from a file and, as far as that goes without a network, from the hub."""

import json

import pytest

from postrl.envs.gsm8k import gsm8k
from postrl.errors import UserError
from postrl.rewards.exact import boxed
from postrl.rollout import Rollout, Turn

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"Add.\n#### {2 * i:,}"} for i in range(0, 40_000, 1000)]


def write(path, rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return str(path)


def score(task, environment, text):
    rollout = Rollout(environment.item, 0, 0, [[Turn([], True, text=text)]], info=dict(environment.info))
    return {reward.name: reward.fn(rollout) for reward in task.rubric.rewards}


def test_the_published_problems(shared_data):
    task = gsm8k(str(shared_data / "data" / "gsm8k" / "train.jsonl"))
    assert task.size("train") + task.size("test") == 7473
    train, test = ({task.environment(s, i).item for i in range(task.size(s))} for s in ("train", "test"))
    assert len(train) + len(test) == 7473 and not train & test
    for index in range(50):
        environment = task.environment("test", index)
        answer = environment.info["answer"]
        assert score(task, environment, f"So it is ${answer}.") == {"correct": 1.0, "answered": 1.0}
        assert score(task, environment, f"So it is {answer}1")["correct"] == 0.0


def test_answers_are_compared_by_value(tmp_path):
    task = gsm8k(write(tmp_path / "rows.jsonl", ROWS), extract=boxed)
    environment = next(e for i in range(99) if (e := task.environment("train", i)).info["answer"] == "2000")
    assert score(task, environment, r"\boxed{2,000}") == {"correct": 1.0, "answered": 1.0}
    assert score(task, environment, r"\boxed{\frac{4000}{2}}") == {"correct": 1.0, "answered": 1.0}
    assert score(task, environment, r"\boxed{2001}") == {"correct": 0.0, "answered": 1.0}
    assert score(task, environment, "2000") == {"correct": 0.0, "answered": 0.0}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], {"question": "x"}], r"rows.jsonl, row 2: no text in column 'answer'; it has: question"),
        (
            [{"prompt": "x", "answer": "#### 1"}],
            r"row 1: no text in column 'question'; it has: prompt, answer",
        ),
        ([{"question": "x", "answer": 1}], r"row 1: no text in column 'answer'"),
        ([{"question": "x", "answer": "1"}], r"row 1: column 'answer' has no final number after '####'"),
        ([ROWS[0], "{"], r"rows.jsonl, line 2: not JSON"),
        (["[1]"], r"rows.jsonl, line 1: not a JSON object"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        gsm8k(write(tmp_path / "rows.jsonl", rows))


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*nowhere\.jsonl"):
        gsm8k(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"cannot read .*bytes\.jsonl"):
        gsm8k(str(tmp_path / "bytes.jsonl"))
    with pytest.raises(UserError, match="cannot read"):
        gsm8k(str(tmp_path))


def test_line_separators_inside_a_question_do_not_cut_it(tmp_path):
    rows = [{"question": "a\u2028b?", "answer": "#### 1"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0], ensure_ascii=False) + "\n", encoding="utf-8")
    task = gsm8k(str(tmp_path / "rows.jsonl"))
    assert task.size("train") + task.size("test") == 1


def test_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = gsm8k()
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})]
    assert task.size("train") + task.size("test") == len(ROWS)


def test_an_unreachable_hub_is_one_sentence():
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match="cannot load the data set 'nobody/nothing'"):
        gsm8k("nobody/nothing")
