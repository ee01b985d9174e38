"""The shelf: one file per paper, by the name people say. `ls` this folder, or call `shelf()`.

A module holds `PAPER` and, if the paper is a policy-gradient method, a constructor named like the file that returns a
`Method`. Any other module says in `NO_METHOD` what it is instead.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from postrl.errors import UserError
from postrl.method import Method


def shelf() -> dict[str, ModuleType]:
    """Every paper's module by stem, found by looking at the folder. Raises UserError for a file that lacks a part."""
    found = {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}
    for name, module in found.items():
        for part in ("PAPER",) if "NO_METHOD" in vars(module) else ("PAPER", name):
            if part not in vars(module):
                raise UserError(f"{module.__file__} defines no {part}; CONTRIBUTING.md says what a paper's file holds")
    return found


def methods() -> dict[str, Callable[..., Method]]:
    """The constructor of every policy-gradient method on the shelf, by stem."""
    return {name: vars(module)[name] for name, module in shelf().items() if "NO_METHOD" not in vars(module)}


def method(name: str, **options: object) -> Method:
    """The method a paper's file constructs, for example method("reco", cap=5.0).

    Raises UserError, naming the shelf or the method's options, if there is no such method or option, and for a value of
    another type than the option is annotated with, NaN, or a negative number: the options of this shelf are widths,
    scales, caps and counts, and a wrong sign would train something else in silence.
    """
    constructors = methods()
    if name not in constructors and name in shelf():
        raise UserError(f"paper {name!r} has no method of its own: {vars(shelf()[name])['NO_METHOD']}")
    if name not in constructors:
        raise UserError(f"no method {name!r} on the shelf; choose one of: {', '.join(constructors)}")
    known = inspect.signature(constructors[name]).parameters
    wrong = [option for option in options if option not in known]
    if wrong:
        raise UserError(f"method {name!r} has no option {wrong[0]!r}; its options are: {', '.join(known) or 'none'}")
    kinds = get_type_hints(constructors[name])
    for option, value in options.items():
        # A constructor of the user's own may annotate nothing.
        if option in kinds and not _fits(value, kinds[option]):
            raise UserError(f"option {option}={value!r} of method {name!r} must be {_said(kinds[option])}")
        if isinstance(value, int | float) and value < 0:
            raise UserError(f"option {option}={value!r} of method {name!r} must be at least 0")
    return constructors[name](**options)


def _said(kind: Any) -> str:
    words = {float: "a number", int: "a whole number", bool: "True or False", str: "a text", NoneType: "None"}
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_said, get_args(kind)))
    return words.get(kind, str(kind))


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type: a plain class, a Literal, or a union of them. NaN is of none."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(kind))
    if not isinstance(kind, type):
        return True  # a function, say: only scripts can pass one
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
