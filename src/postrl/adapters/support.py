"""What another trainer can do with a method: all of it, a named variant, or nothing, and why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Full:
    """The same numbers as in our loop. note: what the trainer must be given or told, if anything."""

    note: str = ""


@dataclass(frozen=True)
class Variant:
    """Something else than in our loop, by name, and what differs."""

    name: str
    difference: str


@dataclass(frozen=True)
class Refused:
    """Not at all."""

    reason: str


Support = Full | Variant | Refused
