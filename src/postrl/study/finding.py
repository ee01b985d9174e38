"""Finding studies: studies/NAME/study.py, by name or by path."""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from postrl.errors import UserError
from postrl.study.definition import Study

PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = (PACKAGE / "_studies", PACKAGE.parent.parent / "studies")  # of an installed wheel, of a checkout
MODULE = "postrl_study"  # every study's file is called study.py, so that name cannot be the module's


@dataclass(frozen=True)
class Found:
    """A loaded study: `name` is its folder's."""

    name: str
    path: Path
    study: Study
    summary: str  # first line of its docstring


def studies() -> dict[str, Path]:
    """Every study that can be called by name."""
    files = [path for folder in reversed(FOLDERS) for path in sorted(folder.glob("[!_.]*/study.py"))]
    return {path.parent.name: path for path in files}


def find(name: str) -> Path:
    """The file of a study: a path if `name` is written as one (the file or its folder), else a name.

    Raises UserError listing the studies.
    """
    path = Path(name).expanduser()
    if path.suffix == ".py" or len(path.parts) > 1:
        path = path / "study.py" if path.is_dir() else path
        if path.is_file() and path.suffix == ".py":
            return path.resolve()
    elif name in studies():
        return studies()[name]
    known = ", ".join(sorted(studies())) or "none are installed"
    raise UserError(f"there is no study {name!r}: give the path of a study.py or one of these names: {known}")


def load(path: Path) -> Found:
    """Run a study's file up to its definitions; its folder goes first on `sys.path`, so that it finds its neighbours.

    Raises UserError if it defines no `STUDY`, or if that cannot be right.
    """
    module = _module(path)
    study = vars(module).get("STUDY")
    if not isinstance(study, Study):
        raise UserError(f"{path} is not a study: it must define `STUDY = Study(…)`")
    study.check()
    return Found(path.parent.name, path, study, summary(path))


def summary(path: Path) -> str:
    """First line of a study's docstring, read without running the file."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _module(path: Path) -> ModuleType:
    name = f"{MODULE}_{path.parent.name}".replace("-", "_")
    taken = sys.modules.get(name)
    if taken is not None and taken.__file__ is not None and Path(taken.__file__) == path:
        return taken
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
