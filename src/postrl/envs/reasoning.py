"""Any procedural task of reasoning-gym, with distinct problems, held-out ones, and an answer that is taken out first.

reasoning-gym seeds problem i of a data set with seed + i and re-draws freely: thousands of "infinite" draws may hold a
few hundred different questions. Here every draw is compared with those before it by content, so that an epoch holds a
problem once, and the size of the space is measured. Its scores pay partial credit for any text that contains the right
answer, so `correct` is a score of exactly 1 for the *extracted* answer; the raw score is logged beside it.
"""

import dataclasses
import difflib
import importlib.util
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from postrl.envs.base import Split, content_hash, digest, split_of
from postrl.envs.evaluated import UNREADABLE, harmless
from postrl.envs.single_turn import SingleTurn, ask, epoch_position
from postrl.errors import UserError
from postrl.rewards.exact import Extract, last_number
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Rollout

CHUNK = 500  # problems of one reasoning-gym data set; the next chunk begins where its seeds end
PATIENCE = (1_000, 20_000)  # draws without a new problem that end the space: five times its size, within these bounds
CHECKED = 8  # problems whose own answer must pass extraction and scoring, written in one of these forms
FORMS = ("…", "<answer>…</answer>", "\\boxed{…}", "Answer: …")


class ReasoningTask:
    """`ReasoningTask("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1})`: problems drawn when needed.

    name, options: the data set of reasoning-gym and its configuration (without seed and size). template: the user's
    message, in which "{question}" stands for the question. extract: takes the answer out of a completion, for example
    last_number (the default), tagged, boxed, after_answer, whole_text of `postrl.rewards.exact`. measure: `size` stops
    counting problems there and calls the splits unbounded. seed: which problems come first, not which are held out.
    Raises UserError for an unknown name or option, and for an `extract` that cannot read the task's own answers.
    """

    max_turns = 1

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        extract: Extract = last_number,
        template: str = "{question}",
        system: str | None = None,
        test_share: float = 0.1,
        measure: int = 5_000,
        seed: int = 0,
    ) -> None:
        ask("", template)  # refuses a template without a place for the problem, before anything is loaded
        self.name, self.seed, self.measure = name, seed, measure
        self._options, self._extract, self._template, self._system = dict(options or {}), extract, template, system
        self._test_share, self._drawn, self._exhausted = test_share, 0, False
        self._entries: dict[str, dict[str, Any]] = {}  # every problem so far
        self._order: dict[Split, list[str]] = {"train": [], "test": []}
        # Far from other seeds: reasoning-gym adds the position to the seed.
        self._first = int(np.random.default_rng([seed]).integers(2**30))
        self._dataset = self._make(0)
        self.rubric = Rubric((Reward("correct", self._correct), Reward("raw_score", self._raw_score, weight=0.0)))
        self._check()

    @property
    def fingerprint(self) -> str:
        """Of the configuration and the first problems, which differ if the library or an option does."""
        first = [[item, str(entry["answer"])] for item, entry in islice(self._entries.items(), CHECKED)]
        return digest([self.name, self.seed, self._template, self._system, self._test_share, first])

    def size(self, split: Split) -> int | None:
        """Number of distinct problems found until `PATIENCE` ran out; None if both splits have more than `measure`.

        It draws them, which takes long where a problem does (some puzzles take a second each).
        """
        while len(self._entries) <= self.measure and not self._exhausted:
            self._draw()
        return len(self._order[split]) if self._exhausted else None

    def describe(self, seconds: float = 5.0) -> str:
        """The size of the space, in words, as far as drawing for so many seconds shows it."""
        end = time.monotonic() + seconds
        while len(self._entries) <= self.measure and not self._exhausted and time.monotonic() < end:
            self._draw()
        train, test = len(self._order["train"]), len(self._order["test"])
        if not self._exhausted:
            return f"{self.name}: at least {train + test} distinct problems"
        return f"{self.name}: {train} distinct problems for training and {test} held out, found in {self._drawn} draws"

    def environment(self, split: Split, index: int) -> SingleTurn:
        order = self._order[split]
        while index >= len(order) and not self._exhausted:
            self._draw()
        if not order:
            raise UserError(f"task {self.name!r} has no {split} problems; give it other options or another test_share")
        # The first epoch keeps the order of drawing, which is random already and known before the space is exhausted.
        place = index if index < len(order) else epoch_position(index, len(order), self.seed, split)
        item = order[place]
        entry = self._entries[item]
        info = {"answer": None if entry["answer"] is None else str(entry["answer"]), "question": entry["question"]}
        return SingleTurn(item, ask(entry["question"], self._template, self._system), info)

    def _draw(self) -> None:
        """Draw until a new problem comes, or the space is exhausted."""
        low, high = PATIENCE
        for _ in range(min(max(5 * len(self._entries), low), high)):
            if self._drawn and self._drawn % CHUNK == 0:
                self._dataset = self._make(self._drawn)
            entry = self._dataset[self._drawn % CHUNK]
            self._drawn += 1
            item = content_hash(entry["question"])
            if item not in self._entries:
                self._entries[item] = entry
                self._order[split_of(item, self._test_share)].append(item)
                return
        self._exhausted = True

    def _make(self, drawn: int) -> Any:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError("reasoning-gym is not installed; run: pip install 'postrl[reasoning]'")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.name not in DATASETS:
            near = difflib.get_close_matches(self.name, DATASETS)
            meant = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise UserError(f"reasoning-gym has no task {self.name!r}{meant}; it has: {', '.join(sorted(DATASETS))}")
        if {"seed", "size"} & set(self._options):
            raise UserError(
                f"options of {self.name!r} name seed or size; use ReasoningTask's own seed, there is no size"
            )
        known = [each.name for each in dataclasses.fields(DATASETS[self.name][1]) if each.name not in ("seed", "size")]
        unknown = [option for option in self._options if option not in known]
        if unknown:
            raise UserError(f"task {self.name!r} has no option {unknown[0]!r}; its options are: {', '.join(known)}")
        try:
            return reasoning_gym.create_dataset(self.name, seed=self._first + drawn, size=CHUNK, **self._options)
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(f"reasoning-gym's {self.name!r} refuses the options {self._options}: {error}") from error

    def _check(self) -> None:
        """A task whose own answers do not come through would only ever pay 0."""
        while len(self._entries) < CHECKED and not self._exhausted:
            self._draw()
        for entry in islice(self._entries.values(), CHECKED):
            answer = entry["answer"]
            if answer is not None and all(self._score(form.replace("…", str(answer)), entry) != 1 for form in FORMS):
                raise UserError(
                    f"extract={self._extract} does not read the answer {str(answer)!r:.60} of task {self.name!r}; "
                    "choose another function of postrl.rewards.exact, for example tagged or whole_text"
                )

    def _score(self, completion: str, entry: dict[str, Any]) -> float:
        answer = self._extract(completion)
        if answer is None:
            return 0.0
        if not harmless(entry["metadata"].get("source_dataset", self.name), answer):
            answer = UNREADABLE
        return float(self._dataset.score_answer(answer, entry))

    def _raw_score(self, rollout: Rollout) -> float:
        return self._score(rollout.completion, self._entries[rollout.item])

    def _correct(self, rollout: Rollout) -> float:
        return float(self._raw_score(rollout) == 1)
