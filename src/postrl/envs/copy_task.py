"""Copy a short string: the smallest task a policy can learn, for tests of methods and loops."""

from itertools import product

from postrl.envs.single_turn import Problem, Problems
from postrl.errors import UserError
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Rollout


def correct(rollout: Rollout) -> float:
    """1 if the completion is the string, exactly."""
    return float(rollout.completion == rollout.info["answer"])


def overlap(rollout: Rollout) -> float:
    """Share of the positions that hold the right character; what is too long counts as wrong positions."""
    answer, text = str(rollout.info["answer"]), rollout.completion
    return sum(a == b for a, b in zip(answer, text, strict=False)) / max(len(answer), len(text))


def copy_task(
    length: int = 2, alphabet: str = "abcd", *, shaped: bool = True, test_share: float = 0.1, seed: int = 0
) -> Problems:
    """Every string of `length` characters of `alphabet`; the prompt is the string and so is the right answer.

    shaped: train on the share of right positions (`overlap`), else on the whole string being right (`correct`); the
    other component is logged. test_share may be 0 where nothing needs to be held out.
    """
    if length < 1:
        raise UserError(f"option length={length} of task 'copy' must be a whole number above 0")
    strings = ["".join(letters) for letters in product(alphabet, repeat=length)]
    rewards = (Reward("correct", correct, weight=1.0 - shaped), Reward("overlap", overlap, weight=float(shaped)))
    problems = [Problem(text, {"answer": text}) for text in strings]
    return Problems(f"copy {length} of {alphabet}", problems, Rubric(rewards), test_share=test_share, seed=seed)
