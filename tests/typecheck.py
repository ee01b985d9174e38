"""The run-time type checker of the tests: beartype, with two corrections.

int is accepted where float is asked for, as pyright does; and `Self`, which beartype knows only in classes that it
decorates as a whole (jaxtyping hands it the methods one by one), is not checked.
"""

from collections.abc import Callable
from typing import Self, get_args

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable) -> Callable:
    hints = getattr(function, "__annotations__", {})
    if any(_names_self(hint) for hint in hints.values()):
        function.__annotations__ = {name: object if _names_self(hint) else hint for name, hint in hints.items()}
    return _beartype(function)


def _names_self(hint: object) -> bool:
    return hint is Self or any(_names_self(part) for part in get_args(hint))
