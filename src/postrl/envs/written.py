"""Answers that exist already, as text: demonstrations to imitate and pairs to prefer between, for `source.Dataset`."""

from collections.abc import Sequence
from pathlib import Path

from postrl.batch import Kind
from postrl.envs.base import content_hash
from postrl.errors import UserError
from postrl.files import read_jsonl
from postrl.policies.base import Renderer
from postrl.rollout import Message, Rollout, Turn

COLUMNS = ("prompt", "chosen", "rejected")


def demonstration(messages: Sequence[Message], answer: str, group: int, renderer: Renderer) -> Rollout:
    """An answer to learn, after these messages: its tokens and the one that ends the turn. It has no rewards."""
    return _rollout(messages, answer, group, 0, renderer, Kind.DEMONSTRATION)


def pair(messages: Sequence[Message], chosen: str, rejected: str, group: int, renderer: Renderer) -> list[Rollout]:
    """Two answers to one prompt, which are one group: the chosen one has reward `preferred` 1, the other one 0."""
    pair = [_rollout(messages, answer, group, k, renderer, Kind.PAIR) for k, answer in enumerate((chosen, rejected))]
    for rollout in pair:
        rollout.item = content_hash("".join(message["content"] for message in messages))
        rollout.rewards = {"preferred": 1.0 - rollout.sample}
    return pair


def _rollout(
    messages: Sequence[Message], answer: str, group: int, sample: int, renderer: Renderer, kind: Kind
) -> Rollout:
    asked = "".join(message["content"] for message in messages)
    tokens = renderer.answer(answer)
    turns = [
        Turn(renderer.prompt(messages), False, asked),
        Turn(tokens, True, answer, [0.0] * len(tokens)),  # the loop computes their log-probabilities anew
    ]
    said = [*messages, {"role": "assistant", "content": answer}]
    return Rollout(content_hash(asked + answer), group, sample, [turns], kind=kind, messages=said)


def read_pairs(path: Path, renderer: Renderer) -> list[Rollout]:
    """The pairs of a JSONL file with the columns prompt, chosen and rejected, all of them text.

    Raises UserError naming the file, line and column for what is not there, and for a pair of equal answers.
    """
    rollouts: list[Rollout] = []
    for number, row in enumerate(read_jsonl(path, f"preferences with the columns {', '.join(COLUMNS)}"), 1):
        for column in COLUMNS:
            if not isinstance(row.get(column), str):
                there = ", ".join(row) or "none"
                raise UserError(f"{path}, row {number}: no text in column {column!r}; it has: {there}")
            if any("\ud800" <= character <= "\udfff" for character in str(row[column])):
                raise UserError(f"{path}, row {number}: column {column!r} has half a character (\\ud800…\\udfff)")
        prompt, chosen, rejected = (str(row[column]) for column in COLUMNS)
        if chosen == rejected:
            raise UserError(f"{path}, row {number}: chosen and rejected are the same text; remove the row")
        rollouts += pair([{"role": "user", "content": prompt}], chosen, rejected, number - 1, renderer)
    if not rollouts:
        raise UserError(f"{path} holds no pair; give it at least one line")
    return rollouts
