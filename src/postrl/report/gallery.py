"""Rollouts for the reader's eye: answers before and after, and tokens with what training said of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from postrl.evaluate import Evaluation
from postrl.report.data import Rollouts, Run
from postrl.report.figures import number
from postrl.report.text import Pieces, visible

GROUPS, PER_GROUP, TOKENS, CHARACTERS = 2, 6, 400, 2000  # shown of a step, of a group, of a rollout, of a text


@dataclass(frozen=True)
class Token:
    """One token and its numbers; `figures` is empty where the policy did not sample it."""

    text: str
    figures: str = ""  # "logp_old advantage weight ratio", for the page's script
    shade: float = 0.0  # A·W over the largest one shown, in [-1, 1]


@dataclass(frozen=True)
class Card:
    """One rollout of a group."""

    sample: int
    stop: str
    rewards: list[tuple[str, str]]
    advantage: str  # mean over its sampled tokens
    tokens: list[Token]
    more: int  # tokens that are not shown


@dataclass(frozen=True)
class Group:
    """Rollouts of one problem in one step."""

    step: int
    item: str
    prompt: str
    cards: list[Card]
    more: int  # rollouts that are not shown


@dataclass(frozen=True)
class Answer:
    """One evaluated answer."""

    label: str
    text: str
    correct: bool | None
    rewards: list[tuple[str, str]]


@dataclass(frozen=True)
class Question:
    """One problem and what the policies answered to it."""

    prompt: str
    answers: list[Answer]


def questions(series: Sequence[tuple[str, str, Evaluation]]) -> list[Question]:
    """The evaluated examples side by side: one answer per (label, colour, evaluation), matched by problem."""
    order: dict[str, Question] = {}
    for label, _, evaluation in series:
        for sample in evaluation.examples:
            question = order.setdefault(sample.item, Question(shorten(sample.prompt), []))
            score = sample.rewards.get("correct")
            question.answers.append(
                Answer(
                    label, shorten(sample.completion), None if score is None else score == 1, _rewards(sample.rewards)
                )
            )
    return list(order.values())


def gallery(run: Run) -> list[Group]:
    """Groups of the first and the last step in which there was most to learn (the widest spread of advantages)."""
    return [group for rollouts in run.rollouts for group in _groups(rollouts, run.pieces)]


def _groups(rollouts: Rollouts, pieces: Pieces) -> list[Group]:
    members = [list(rows) for _, rows in groupby(rollouts.rows, lambda row: row["group"])]
    chosen = sorted(members, key=_spread, reverse=True)[:GROUPS]
    credits = [_credit(row, t) for rows in chosen for row in rows for t in range(len(row["tokens"])) if row["mask"][t]]
    largest = max((abs(credit) for credit in credits), default=0.0) or 1.0
    groups = []
    for rows in chosen:
        best_first = sorted(rows, key=_advantage, reverse=True)
        # The best and the worst tell most about a group.
        half = PER_GROUP // 2
        shown = best_first if len(rows) <= PER_GROUP else best_first[:half] + best_first[-half:]
        cards = [_card(row, pieces, largest) for row in shown]
        groups.append(Group(rollouts.step, rows[0]["item"], _prompt(rows[0]), cards, len(rows) - len(shown)))
    return groups


def _card(row: Mapping[str, Any], pieces: Pieces, largest: float) -> Card:
    first = next((t for t, sampled in enumerate(row["mask"]) if sampled), len(row["mask"]))
    texts = pieces(row["tokens"][first : first + TOKENS])
    rewards = {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")}
    tokens = [_token(row, first + t, text, largest) for t, text in enumerate(texts)]
    more = max(0, len(row["tokens"]) - first - TOKENS)
    return Card(row["sample"], row["stop"], _rewards(rewards), number(_advantage(row)), tokens, more)


def _token(row: Mapping[str, Any], t: int, text: str, largest: float) -> Token:
    if not row["mask"][t]:
        return Token(visible(text))
    figures = " ".join(f"{row[name][t]:.4g}" for name in ("logp_old", "advantage", "weight", "ratio"))
    return Token(visible(text), figures, round(_credit(row, t) / largest, 3))


def _credit(row: Mapping[str, Any], t: int) -> float:
    credit = row["advantage"][t] * row["weight"][t]
    return credit if math.isfinite(credit) else 0.0


def _advantage(row: Mapping[str, Any]) -> float:
    sampled = [a for a, mask in zip(row["advantage"], row["mask"], strict=True) if mask and math.isfinite(a)]
    return sum(sampled) / len(sampled) if sampled else 0.0


def _spread(rows: Sequence[Mapping[str, Any]]) -> float:
    advantages = [_advantage(row) for row in rows]
    return max(advantages) - min(advantages)


def _prompt(row: Mapping[str, Any]) -> str:
    """The messages before the policy's first one."""
    opening = []
    for message in row["messages"]:
        if message["role"] == "assistant":
            break
        opening.append(f"{message['role']}: {message['content']}")
    return shorten("\n".join(opening))


def _rewards(rewards: Mapping[str, float | None]) -> list[tuple[str, str]]:
    return [(visible(name), "missing" if value is None else number(value)) for name, value in rewards.items()]


def shorten(text: str) -> str:
    """Visible text of at most CHARACTERS characters; what is left out is counted."""
    if len(text) <= CHARACTERS:
        return visible(text)
    return visible(text[:CHARACTERS]) + f" … ({len(text) - CHARACTERS} more characters)"
