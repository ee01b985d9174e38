"""The shape of the code base, read from its syntax: who may import whom, what is forbidden, how long things may be.

    errors, files <- batch, rollout <- advantages, weights, losses, method, terms, packing, ranks, enrich, values
           <- policies, envs, rewards, probes
           <- papers <- train and its helpers <- study <- cli

A module imports its own level and those before it. Adapters depend on papers and below, never the reverse.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

from postrl.method import Forward

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "postrl"
FILES = sorted(SOURCE.rglob("*.py"))
SCRIPTS = [*FILES, *sorted((ROOT / "recipes").rglob("*.py")), *sorted((ROOT / "studies").rglob("*.py"))]

KERNEL = (
    *("errors", "files", "batch", "rollout", "advantages", "weights", "losses", "method", "terms"),
    *("packing", "ranks", "enrich", "values"),
)
LEAVES = ("policies", "envs", "rewards", "probes")
LEVELS = (KERNEL[:2], KERNEL[2:4], KERNEL[4:], LEAVES, ("papers", "adapters"), (), ("study",), ("cli",))
ENGINE = LEVELS.index(())  # train and every other module that is not named above
BASELINES = {
    *("reinforce", "rloo", "grpo", "dr_grpo", "dapo", "cispo", "gspo", "gmpo", "ppo", "dpo", "rft"),
    *("clip_higher", "masked_cispo"),
}
PORTABLE = {"torch", "numpy", "jaxtyping", "postrl", *sys.stdlib_module_names}

MAX_FUNCTION, MAX_MODULE = 60, 400  # lines; a function's docstring and decorators do not count
LONG = {
    # "postrl/file.py" or "postrl/file.py:function": why it is better in one piece
    "postrl/train.py:train": "17 lines of signature and 15 that hand the parts to the loop; little of it is logic",
}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def label(path: Path) -> str:
    return path.relative_to(SOURCE.parent if path.is_relative_to(SOURCE) else ROOT).as_posix()


def imports(path: Path, lazy: bool = True) -> Iterator[str]:
    """Dotted names that a file imports: `from a import b` gives a.b. Without `lazy`, only those run at import time."""
    package = [*path.relative_to(SOURCE.parent).parent.parts] if path.is_relative_to(SOURCE) else []
    todo: list[ast.AST] = [tree(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)
        elif lazy or not (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _for_types_only(node)):
            todo.extend(ast.iter_child_nodes(node))


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def room(path: Path) -> str:
    """First name below src/postrl: `batch` for batch.py, `papers` for papers/grpo.py."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def level(name: str) -> int:
    return next((i for i, rooms in enumerate(LEVELS) if name in rooms), ENGINE)


def inside(path: Path) -> list[tuple[str, ...]]:
    """Imports of postrl itself, split after the package: ("papers", "grpo", "grpo")."""
    parts = [tuple(name.split(".")[1:]) for name in imports(path) if name.split(".")[0] == "postrl"]
    return [p for p in parts if p and ((SOURCE / p[0]).is_dir() or (SOURCE / f"{p[0]}.py").exists())]


def test_every_module_imports_only_its_own_level_and_those_before_it():
    wrong = [
        f"{label(path)} imports postrl.{'.'.join(parts)}"
        for path in FILES
        for parts in inside(path)
        if room(path) != "__init__" and level(parts[0]) > level(room(path))
    ]
    assert not wrong, wrong


def test_papers_import_no_adapter_and_no_new_paper():
    wrong = []
    for path in (p for p in FILES if room(p) == "papers"):
        own = path.relative_to(SOURCE / "papers").parts[0].removesuffix(".py")
        for parts in inside(path):
            other = parts[1] if len(parts) > 1 and parts[0] == "papers" else own
            if parts[0] == "adapters" or (own != "__init__" and other not in {own, "__init__", *BASELINES}):
                wrong.append(f"{label(path)} imports postrl.{'.'.join(parts)}")
    assert not wrong, wrong


def test_the_loop_names_no_paper():
    names = {path.stem for path in (SOURCE / "papers").iterdir() if path.stem != "__init__"}
    wrong = [
        f"{label(path)} imports postrl.{'.'.join(parts)}"
        for path in FILES
        if level(room(path)) == ENGINE and room(path) != "__init__"
        for parts in inside(path)
        if parts[0] == "papers" and len(parts) > 1 and parts[1] in names
    ]
    assert not wrong, wrong


def test_kernel_papers_and_adapters_import_torch_and_numpy_only():
    wrong = [
        f"{label(path)} imports {name}"
        for path in FILES
        if room(path) in (*KERNEL, "papers", "adapters")
        for name in imports(path, lazy=False)
        if name.split(".")[0] not in PORTABLE
    ]
    assert not wrong, wrong


def test_kernel_and_papers_load_where_nothing_else_is_installed():
    """What the syntax cannot show: nothing that a kernel file or a paper imports pulls in transformers and the like."""
    rooms = [path for path in FILES if room(path) in (*KERNEL, "papers", "adapters")]
    modules = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in rooms]
    absent = ["transformers", "accelerate", "tokenizers", "safetensors", "pyarrow", "rich", "tyro", "plotly"]
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\nfor name in {modules}: __import__(name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_nothing_forbidden(path: Path):
    """Errors are never swallowed, nothing is unpickled or evaluated, and annotations stay real."""
    found = [why for node in ast.walk(tree(path)) if (why := _forbidden(node))]
    found += [name for name in imports(path) if name.split(".")[0] in {"pickle", "dill", "cloudpickle", "joblib"}]
    assert not found, found


def _forbidden(node: ast.AST) -> str | None:
    line = f"line {getattr(node, 'lineno', '?')}: "
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        return line + "bare except"
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return line + "from __future__ import"
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in {"eval", "exec", "torch.load"}:
            return line + name
        if any(k.arg == "trust_remote_code" and ast.unparse(k.value) != "False" for k in node.keywords):
            return line + "trust_remote_code"
    return None


def lengths() -> Iterator[tuple[str, int, int]]:
    """(name, lines, limit) of every module and function."""
    for path in SCRIPTS:
        module = tree(path)
        yield label(path), len(path.read_text(encoding="utf-8").splitlines()), MAX_MODULE
        for node in ast.walk(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
                lines = (node.end_lineno or 0) - node.lineno + 1
                lines -= (doc.end_lineno or 0) - doc.lineno + 1 if doc else 0
                yield f"{label(path)}:{node.name}", lines, MAX_FUNCTION


def test_functions_and_modules_stay_short():
    long = {name: lines for name, lines, limit in lengths() if lines > limit}
    assert set(long) <= set(LONG), {name: lines for name, lines in long.items() if name not in LONG}
    assert set(LONG) <= set(long), f"no longer long, take them off the list: {set(LONG) - set(long)}"


def test_the_tests_check_shapes_and_types():
    """conftest.py switches the checks on; a frozen dataclass refuses a tensor of the wrong rank or kind."""
    Forward(logp=torch.zeros(2, 3), values=torch.zeros(2, 3))
    with pytest.raises(jaxtyping.TypeCheckError):
        Forward(logp=torch.zeros(2, 3), values=torch.zeros(2, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        Forward(logp=torch.zeros(2, 3, dtype=torch.int64))
