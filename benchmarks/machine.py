"""What a machine is: everything that explains why its figures differ from another one's."""

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
PACKAGES = ("torch", "numpy", "transformers", "accelerate", "trl")


def describe() -> dict[str, object]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in _flags()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    """Of what is installed of PACKAGES."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The name the system gives it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def slug(name: str, cores: int) -> str:
    """A file name: "AMD EPYC", 2 -> "amd-epyc-2-cores"."""
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {cores} cores".lower()).strip("-")


def commit() -> str:
    """The git commit, with a plus if the source differs from it; "" outside a repository."""
    answers = []
    for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "src", "benchmarks/*.py"]):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return ""
        answers.append(done.stdout.strip())
    return answers[0] + ("+" if answers[1] else "")


def load_average() -> float:
    """Of the last minute: what else ran here."""
    return round(os.getloadavg()[0], 2)


def bfloat16_pays() -> bool:
    """Whether bfloat16 products are at least 1.5 times as fast as float32's here."""
    from postrl.policies.decoder import choose_compute_dtype

    return choose_compute_dtype(torch.device("cpu")) == torch.bfloat16


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return ""
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _flags() -> set[str]:
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())
