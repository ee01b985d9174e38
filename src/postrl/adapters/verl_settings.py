"""What the methods in verl run with: the environment variable POSTRL_VERL, a file or the text itself.

verl's own configuration is closed to keys it does not know. An environment variable reaches the processes of one node
by itself; for those of others, `forward` adds what the driver read to the variables that verl sets everywhere.
"""

import functools
import json
import math
import os
import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from postrl.errors import UserError
from postrl.method import Method
from postrl.papers import method as build
from postrl.papers import methods

VARIABLE = "POSTRL_VERL"
FORWARDED = "POSTRL_VERL_TEXT"  # what the driver's variable held, as JSON: files need not be on every node
EXAMPLE = '{"reco": {"cap": 10}, "data": {"rewards": {"correct": 1, "form": 0.5}}}'
DATA = ("rewards", "groupings", "step_rewards", "step_groups", "steps")


@dataclass(frozen=True)
class Data:
    """Which entries of verl's `reward_extra_info` (what `compute_score` returns besides `score`) a method reads.

    rewards: weights by name; None: verl's score is the only reward that counts. groupings: name of a grouping -> entry
    that answers of one group share. step_rewards, step_groups, steps: entries with one value per step, or per token, as
    in the TRL adapter's `Extras`.
    """

    rewards: Mapping[str, float] | None = None
    groupings: Mapping[str, str] = field(default_factory=dict)
    step_rewards: str | None = None
    step_groups: str | None = None
    steps: str | None = None


@dataclass(frozen=True, eq=False)
class Settings:
    """Options by method, and where its data is."""

    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    data: Data = field(default_factory=Data)

    def method(self, name: str) -> Method:
        """Raises UserError, as `papers.method`, for a method or an option there is not."""
        return build(name, **self.options.get(name, {}))


def parse(text: str) -> Settings:
    """JSON text, or the path of a .json or .toml file. Raises UserError naming what is wrong with it."""
    table = _table(text)
    wrong = sorted(set(table) - {*methods(), "data"})
    if wrong:
        raise UserError(f"{VARIABLE} has {wrong[0]!r}, which is neither 'data' nor a method: {', '.join(methods())}")
    for name, value in table.items():
        if not isinstance(value, dict):
            raise UserError(f"{VARIABLE}: {name!r} must be a table of options, as in {EXAMPLE}")
    options = {name: value for name, value in table.items() if name != "data"}
    settings = Settings(options, _data(table.get("data", {})))
    for name in options:
        settings.method(name)
    return settings


def _table(text: str) -> dict:
    path = Path(text)
    try:
        if text.lstrip().startswith("{"):
            found = json.loads(text)
        elif path.suffix == ".toml":
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".json":
            found = json.loads(path.read_text(encoding="utf-8"))
        else:
            raise UserError(f"{VARIABLE}={text!r} is neither a .toml or .json file nor JSON text such as {EXAMPLE}")
    except OSError as error:
        raise UserError(f"{VARIABLE} names {text!r}, which cannot be read: give an absolute path") from error
    except ValueError as error:
        raise UserError(f"{VARIABLE}={text[:80]!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{VARIABLE} must be a table such as {EXAMPLE}")
    return found


def _data(table: Mapping[str, object]) -> Data:
    wrong = sorted(set(table) - set(DATA))
    if wrong:
        raise UserError(f"{VARIABLE}: 'data' has no {wrong[0]!r}; it has: {', '.join(DATA)}")
    for name, value in table.items():
        fits = isinstance(value, dict) if name in ("rewards", "groupings") else isinstance(value, str)
        if not fits:
            kind = "a table" if name in ("rewards", "groupings") else "the name of an entry of reward_extra_info"
            raise UserError(f"{VARIABLE}: data.{name} is {value!r}; give {kind}")
    rewards = table.get("rewards")
    if isinstance(rewards, dict):
        numbers = all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in rewards.values()
        )  # JSON as Python reads it has NaN and Infinity
        if not rewards or not numbers:
            raise UserError(f"{VARIABLE}: data.rewards is {rewards!r}; give each reward's name a number, its weight")
    groupings = table.get("groupings")
    if isinstance(groupings, dict):
        for name, entry in groupings.items():
            if not isinstance(entry, str) or name == "task":
                raise UserError(
                    f"{VARIABLE}: data.groupings has {name!r}: {entry!r}; give each name an entry of reward_extra_info "
                    "('task' is the prompt's own group)"
                )
    return Data(**table)  # type: ignore[arg-type]  # each was looked at above


@functools.cache
def settings() -> Settings:
    """Of this process, read once. Raises UserError each time if they are wrong."""
    return parse(os.environ.get(FORWARDED) or os.environ.get(VARIABLE) or "{}")


def forward(environment: MutableMapping[str, str]) -> None:
    """Adds this process's settings, as text, to the variables that verl will set in all of its processes."""
    text = os.environ.get(VARIABLE)
    if text:  # an empty variable is none, as in `settings`
        environment[FORWARDED] = json.dumps(_table(text))
