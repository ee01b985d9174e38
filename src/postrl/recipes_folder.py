"""Finding recipes: Python files that run one training, by path or by name."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType

from postrl.errors import UserError

PACKAGE = Path(__file__).resolve().parent
FOLDERS = (PACKAGE / "_recipes", PACKAGE.parent.parent / "recipes")  # of an installed wheel, of a checkout


@dataclass(frozen=True)
class Recipe:
    """A loaded recipe: `main(config)` runs it, `config` is the dataclass of its options."""

    path: Path
    config: type
    main: Callable[[object], object]
    summary: str  # first line of its docstring


def recipes() -> dict[str, Path]:
    """Every recipe that can be called by name. Files whose name starts with "_" are helpers."""
    files = [path for folder in reversed(FOLDERS) for path in sorted(folder.glob("[!_]*.py"))]
    return {path.stem: path for path in files}


def find(name: str) -> Path:
    """The file of a recipe: a path if `name` is written as one, else a name. Raises UserError listing the recipes."""
    path = Path(name).expanduser()
    if path.suffix == ".py" or len(path.parts) > 1:
        if path.is_file() and path.suffix == ".py":
            return path.resolve()
    elif name in recipes():
        return recipes()[name]
    known = ", ".join(sorted(recipes())) or "none are installed"
    raise UserError(f"there is no recipe {name!r}: give the path of a Python file or one of these names: {known}")


def load(name: str) -> Recipe:
    """Run a recipe's file up to its definitions.

    The file's folder goes first on `sys.path`, as when Python runs it, so that it can import its neighbours; the folder
    of the recipes goes last, so that a copy of one still finds them. Raises UserError if there is no such recipe or it
    defines no `Config` and `main`.
    """
    path = find(name)
    module = _module(path)
    defined = vars(module)
    config, main = defined.get("Config"), defined.get("main")
    if not (isinstance(config, type) and is_dataclass(config) and callable(main)):
        raise UserError(f"{path} is not a recipe: it must define a dataclass `Config` and a function `main(config)`")
    return Recipe(path, config, main, (module.__doc__ or "").strip().partition("\n")[0])


def _module(path: Path) -> ModuleType:
    taken = sys.modules.get(path.stem)
    if taken is not None:
        if taken.__file__ is not None and Path(taken.__file__).resolve() == path:
            return taken
        raise UserError(f"a module called {path.stem!r} is already loaded: rename the recipe {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.path += [str(folder) for folder in FOLDERS if folder.is_dir() and str(folder) not in sys.path]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and imports by neighbours look here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
