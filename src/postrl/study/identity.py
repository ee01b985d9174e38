"""What a run or a base depends on, as a hash: figures of different definitions never meet in one table.

The code of a function is its syntax tree without comments and docstrings, with that of everything of the study's folder
that it names, down to the last helper; what it names elsewhere (postrl, torch) counts by name only, and the versions
that ran are written beside the figures instead. So a new arm, another hypothesis or a comment leaves old runs valid; a
changed helper or size does not.
"""

import ast
import functools
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType

from postrl.study.definition import Arm, Base, Contrast, Study


def digest(*parts: object) -> str:
    """16 hexadecimal digits for a sequence of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def base_key(base: Base, config: object, seed: int, threads: int, folder: Path) -> str:
    """The hash of a base's definition; seed is that of the run that needs it."""
    own = 0 if base.shared else seed
    needed = [base_key(other, config, own, threads, folder) for other in base.needs]
    options = describe(base.options(config), folder)
    return digest(base.name, code_of(base.make, folder), options, own, threads, needed)


def run_key(study: Study, arm: Arm, config: object, seed: int, threads: int, folder: Path) -> str:
    """The hash of what the figures of one run depend on."""
    bases = [base_key(base, config, seed, threads, folder) for base in arm.bases]
    metrics = sorted(metric.name for metric in study.metrics)
    return digest(arm.name, code_of(arm.run, folder), describe(config, folder), seed, threads, bases, metrics)


def plan_of(study: Study, seeds: tuple[int, ...]) -> dict[str, object]:
    """What was written down before the first run, as plain JSON."""
    return {
        "question": study.question.strip(),
        "hypothesis": study.hypothesis.strip(),
        "seeds": list(seeds),
        "contrasts": [contrast_text(c) for c in study.contrasts],
        "must_fail": [contrast_text(c) for c in study.must_fail],
    }


def contrast_text(contrast: Contrast) -> str:
    """A contrast as a phrase."""
    c = contrast
    return f"{c.treatment} {c.expect} than {c.control} in {c.metric}; a difference of {c.worth:g} matters"


@functools.cache
def code_of(function: Callable[..., object], folder: Path) -> list[str]:
    """The code that `function` runs, as far as it lies in `folder`, in a fixed order."""
    return describe(function, folder)


def describe(value: object, folder: Path) -> list[str]:
    """The same for a value, such as a configuration."""
    return sorted(set(_Walk(folder.resolve()).visit(value)))


class _Walk:
    """Follows names from object to object; each is visited once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.seen: dict[int, object] = {}  # keeps what it has seen alive, so that an id stays one object's

    def visit(self, value: object) -> Iterator[str]:
        if id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                yield from self.visit(part)
            yield _plain(value)
        elif isinstance(value, MethodType):
            yield from self.visit(value.__func__)
            yield from self.visit(value.__self__)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, ModuleType):
            yield from self._module(value)
        elif isinstance(value, Mapping):
            yield f"mapping {[(_plain(k), _plain(v)) for k, v in value.items()]}"
            for part in value.values():
                yield from self.visit(part)
        elif isinstance(value, (list, tuple, set, frozenset)):
            texts = list(map(_plain, value))
            yield f"{type(value).__name__} {sorted(texts) if isinstance(value, (set, frozenset)) else texts}"
            for part in value:
                yield from self.visit(part)
        else:
            yield from self._instance(value)

    def _instance(self, value: object) -> Iterator[str]:
        text = _plain(value)
        yield text
        if type(value).__module__ != "builtins":
            yield from self.visit(type(value))
        if text.endswith("object>") or "..." in text:  # does not say all it holds: then everything in the folder counts
            yield from (path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("*.py")))

    def _function(self, function: FunctionType) -> Iterator[str]:
        if not self._inside(function.__code__.co_filename):
            yield f"{function.__module__}.{function.__qualname__}"
            return
        if function.__name__ == "<lambda>":  # the source of a lambda is its whole line
            yield _bytecode(function.__code__)
            names = _names_of_code(function.__code__)
        else:
            text, names = _source(function)
            yield f"{function.__qualname__} {text}"
        yield from self._named(names, function.__globals__)
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            yield f"{name} = {_plain(cell.cell_contents)}"
            yield from self.visit(cell.cell_contents)
        for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from self.visit(part)

    def _class(self, kind: type) -> Iterator[str]:
        module = inspect.getmodule(kind)
        if module is None or not self._inside(str(getattr(module, "__file__", ""))):
            yield f"{kind.__module__}.{kind.__qualname__}"
            return
        text, names = _source(kind)
        yield f"{kind.__qualname__} {text}"
        yield from self._named(names, vars(module))

    def _module(self, module: ModuleType) -> Iterator[str]:
        file = str(getattr(module, "__file__", None) or "")  # built-in modules have none
        if self._inside(file):
            yield Path(file).read_text(encoding="utf-8")
        else:
            yield module.__name__

    def _named(self, names: Set[str], scope: Mapping[str, object]) -> Iterator[str]:
        for name in sorted(names & scope.keys()):
            yield f"{name} = {_plain(scope[name])}"
            yield from self.visit(scope[name])

    def _inside(self, file: str) -> bool:
        return bool(file) and _resolved(file).is_relative_to(self.folder)


@functools.cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def _plain(value: object) -> str:
    """A value as text that is the same in every process: functions by name, objects without an address."""
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        return _bytecode(value.__code__)
    if isinstance(value, (FunctionType, type)):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return f"partial({_plain(value.func)}, {_plain(value.args)}, {_plain(sorted(value.keywords.items()))})"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_plain, value))})"
    text = repr(value)
    return f"<{type(value).__qualname__} object>" if " at 0x" in text else text


@functools.cache
def _source(value: FunctionType | type) -> tuple[str, frozenset[str]]:
    """(syntax tree as text, names it uses)"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree), frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _bytecode(code: CodeType) -> str:
    constants = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames} {code.co_freevars}"


def _names_of_code(code: CodeType) -> set[str]:
    inner = [_names_of_code(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)
