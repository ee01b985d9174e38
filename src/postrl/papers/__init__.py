"""The shelf: one file per paper, by the name people say. `ls` this folder, or call `shelf()`."""

import importlib
import pkgutil
from types import ModuleType

from postrl.method import Method


def shelf() -> dict[str, ModuleType]:
    """Every paper's module by stem, found by looking at the folder."""
    return {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}


def method(name: str, **options: object) -> Method:
    """The method a paper's file constructs, for example method("reco", cap=5.0).

    Raises KeyError, naming the shelf, if there is no such method.
    """
    names = [m.name for m in pkgutil.iter_modules(__path__)]
    if name not in names:
        raise KeyError(f"no method {name!r} on the shelf; there are: {', '.join(names)}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)(**options)
