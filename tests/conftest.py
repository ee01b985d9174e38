"""One thread, shapes and types checked at every call of postrl, no network, and where the shared data lies."""

import os
import sys
from pathlib import Path

# Before torch is imported: two processes with spinning thread pools on two cores slow each other down tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)

if any(name == "postrl" or name.startswith("postrl.") for name in sys.modules):
    raise RuntimeError("postrl was imported before tests/conftest.py, so its shapes would not be checked")
install_import_hook("postrl", "typecheck.check")

# The same examples in every run; `--hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("fixed")

ROOT = Path(__file__).resolve().parent.parent


def _folder(variable: str, default: str) -> Path:
    """The folder an environment variable names (relative to the repository), or a skip that says how to set it."""
    folder = (ROOT / os.environ.get(variable, default)).resolve()
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}: set {variable}")
    return folder


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Inputs and outputs of released code (README.md inside): POSTRL_VECTORS, default ../shared/vectors."""
    return _folder("POSTRL_VECTORS", "../shared/vectors")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Data sets that are too large for the repository: POSTRL_SHARED, default ../shared."""
    return _folder("POSTRL_SHARED", "../shared")
