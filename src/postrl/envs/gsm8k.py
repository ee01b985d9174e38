"""Grade-school word problems, GSM8K (Cobbe et al., arXiv 2110.14168), from the Hugging Face hub or a JSONL file."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from postrl.envs.single_turn import Problem, Problems
from postrl.errors import UserError
from postrl.files import read_jsonl
from postrl.rewards.exact import Extract, last_number, same_answer
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Rollout

COLUMNS = ("question", "answer")


def gsm8k(
    source: str = "openai/gsm8k",
    *,
    extract: Extract = last_number,
    template: str = "{question}\nEnd with the answer as a number.",
    system: str | None = None,
    test_share: float = 0.1,
    seed: int = 0,
) -> Problems:
    """The problems of `source`: a JSONL file with the columns question and answer, or a data set's name on the hub.

    Held-out problems are a fixed share of the source's own (`split_of`), so the published test split stays untouched.
    extract: takes the answer out of a completion; it is then compared with the number after "####" by value, and by
    math-verify where it is no plain number. Raises UserError naming the file, line and column for what is not there.
    """
    local = source.endswith((".jsonl", ".json")) or Path(source).exists()
    rows = read_jsonl(Path(source), "problems with the columns question and answer") if local else _hub(source)
    problems = [_problem(source, number, row) for number, row in enumerate(rows, 1)]

    def correct(rollout: Rollout) -> float:
        return float(same_answer(extract(rollout.completion), str(rollout.info["answer"])))

    def answered(rollout: Rollout) -> float:
        return float(extract(rollout.completion) is not None)

    rubric = Rubric((Reward("correct", correct), Reward("answered", answered, weight=0.0)))
    return Problems(
        f"gsm8k ({source})", problems, rubric, template=template, system=system, test_share=test_share, seed=seed
    )


def _problem(source: str, number: int, row: Mapping[str, object]) -> Problem:
    for column in COLUMNS:
        if not isinstance(row.get(column), str):
            raise UserError(f"{source}, row {number}: no text in column {column!r}; it has: {', '.join(row) or 'none'}")
    solution, mark, answer = str(row["answer"]).rpartition("####")
    if not mark:
        raise UserError(f"{source}, row {number}: column 'answer' has no final number after '####'")
    return Problem(str(row["question"]), {"answer": answer.strip().replace(",", ""), "solution": solution.strip()})


def _hub(name: str) -> list[Mapping[str, object]]:
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"reading {name} needs datasets (pip install 'postrl[datasets]'), or give a local JSONL file")
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset(name, "main", split="train").to_list()]
    except (OSError, ValueError, ConnectionError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UserError(
            f"cannot load the data set {name!r} ({reason}); give a name on the hub or a JSONL file"
        ) from error
