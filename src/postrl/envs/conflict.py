"""Several rewards that may pull against one another, by a knob, on a task a tiny policy learns in a minute.

The question is a few letters, the answer is these letters backwards. An answer may be bracketed, and before it may
stand a mark, a working and filler:

    abc  →  (cba)    !..(cba)    abc.(cba)    ..cb

Two tasks. In `conflict_task` one reward is at odds with the others as far as the knob says, and ignoring it costs
nothing. In `telling_conflict_task` the rewards of every good answer disagree, so that a method that leaves out
disagreeing answers leaves out what there is to learn.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from postrl.envs.single_turn import Problem, Problems
from postrl.envs.written import demonstration
from postrl.errors import UserError
from postrl.policies.base import Renderer
from postrl.policies.chat import Characters
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Rollout

MARK, FILLER, OPEN, CLOSE, ASK = "!", ".", "(", ")", "="
LETTERS = "abcd"
ROOM = 4  # characters beside the answer that a short text may have: a mark, brackets and one more
_FORM = re.compile(r"!?[a-d.]*\([a-d]*\)")
_LAST = re.compile(r"([a-d]*)\)?$")


def characters() -> Characters:
    """The renderer of both tasks; `.size` is the vocabulary."""
    return Characters(LETTERS + MARK + FILLER + OPEN + CLOSE + ASK)


# ---------------------------------------------------------------- what a text has


def correct(rollout: Rollout) -> float:
    """1 if the last letters of the text are the answer, bracketed or not."""
    found = _LAST.search(rollout.completion)
    return float(found is not None and found[1] == rollout.info["answer"])


def short(rollout: Rollout) -> float:
    """1 up to `ROOM` characters beside the answer's length, then falling by 1/4 a character to 0."""
    over = len(rollout.completion) - len(str(rollout.info["answer"])) - ROOM
    return float(min(1.0, max(0.0, 1 - over / 4)))


def formatted(rollout: Rollout) -> float:
    """1 if the text ends with one pair of brackets, with a mark, letters and filler before it at most."""
    return float(_FORM.fullmatch(rollout.completion) is not None)


def marked(rollout: Rollout) -> float:
    """1 if the text begins with the mark."""
    return float(rollout.completion.startswith(MARK))


def worked(rollout: Rollout) -> float:
    """1 if the text shows the working: the question itself, and filler, before the answer."""
    return float(rollout.completion.removeprefix(MARK).startswith(f"{rollout.info['question']}{FILLER}"))


def shown(rollout: Rollout) -> float:
    """1 if the text is correct and shows the working: a right answer without it counts for nothing."""
    return correct(rollout) * worked(rollout)


# ---------------------------------------------------------------- tasks


def conflict_task(
    conflict: float = 0.5, length: int = 3, *, weights: Sequence[float] = (1, 1, 1, 1), test_share: float = 0.1
) -> Problems:
    """Rewards correct, short, formatted, and a `rival` that opposes them as far as `conflict` = κ says.

        rival = (1 − κ) · marked + κ · (1 − (correct + short + formatted) / 3)

    κ = 0: the mark is a matter of its own, and (all four = 1) is possible. κ = 1: the rival falls exactly as the mean
    of the others rises. `marked` is logged (weight 0). weights: of the four, in this order. Components stay raw.
    Raises UserError if κ is not within 0 … 1.
    """
    if not 0 <= conflict <= 1:
        raise UserError(f"option conflict={conflict} must lie between 0 (independent) and 1 (opposed)")

    def rival(rollout: Rollout) -> float:
        agreed = (correct(rollout) + short(rollout) + formatted(rollout)) / 3
        return (1 - conflict) * marked(rollout) + conflict * (1 - agreed)

    named = {"correct": correct, "short": short, "formatted": formatted, "rival": rival}
    rewards = [Reward(name, fn, float(w)) for (name, fn), w in zip(named.items(), weights, strict=True)]
    rubric = Rubric((*rewards, Reward("marked", marked, 0.0)))
    return Problems(f"conflict {conflict:g}", _problems(length), rubric, test_share=test_share)


def telling_conflict_task(
    length: int = 3, *, weights: Sequence[float] = (1, 1, 1), test_share: float = 0.1
) -> Problems:
    """Rewards correct, worked and brief; an answer is correct only with its working, and with it no text is brief.

    Whatever is good about a text in two rewards is bad in the third, and the reverse: the disagreement is the task.
    `brief` is 1 if the text is no longer than the answer alone. `answered` (right, with or without working) is logged.
    """

    def brief(rollout: Rollout) -> float:
        return float(len(rollout.completion) <= length)

    named = {"correct": shown, "worked": worked, "brief": brief}
    rewards = [Reward(name, fn, float(w)) for (name, fn), w in zip(named.items(), weights, strict=True)]
    rubric = Rubric((*rewards, Reward("answered", correct, 0.0)))
    return Problems("telling conflict", _problems(length), rubric, test_share=test_share)


def _problems(length: int) -> list[Problem]:
    if length < 1:
        raise UserError(f"option length={length} of the conflict task must be a whole number above 0")
    words = ("".join(letters) for letters in product(LETTERS, repeat=length))
    return [Problem(word + ASK, {"question": word, "answer": word[::-1]}) for word in words]


# ---------------------------------------------------------------- pretraining


def demonstrations(
    task: Problems, renderer: Renderer, count: int, *, right: float = 0.5, working: float = 0.3, seed: int = 0
) -> list[Rollout]:
    """Texts of every habit on training questions, for `Dataset`; demonstration i is a function of the seed and i.

    Marks and brackets stand in half of them and filler (1 … 4 characters) in half; `working` is the share that shows
    the working, `right` the share with the right letters (others have one of them changed).
    """
    rollouts = []
    for number in range(count):
        environment = task.environment("train", number)
        text = _habit(environment.info, right, working, np.random.default_rng([seed, number]))
        rollouts.append(demonstration(environment.prompt(), text, number, renderer))
    return rollouts


def _habit(info: Mapping[str, object], right: float, working: float, rng: np.random.Generator) -> str:
    answer = str(info["answer"])
    if rng.random() >= right:
        place = int(rng.integers(len(answer)))
        others = [letter for letter in LETTERS if letter != answer[place]]
        answer = answer[:place] + others[int(rng.integers(len(others)))] + answer[place + 1 :]
    mark = MARK if rng.random() < 0.5 else ""
    work = f"{info['question']}{FILLER}" if rng.random() < working else ""
    filler = FILLER * int(rng.integers(1, 5)) if rng.random() < 0.5 else ""
    return mark + work + filler + (f"{OPEN}{answer}{CLOSE}" if rng.random() < 0.5 else answer)
