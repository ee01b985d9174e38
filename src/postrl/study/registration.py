"""What was written down before the first run, and what was changed later: registered.json."""

import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from postrl.errors import UserError
from postrl.files import read_json, write_json
from postrl.study.identity import digest


@dataclass(frozen=True)
class Registration:
    """One entry: the plan as it stood at a date. `results` counts the runs whose figures could be known by then."""

    date: str  # UTC, ISO 8601
    commit: str | None
    plan: dict[str, object]  # see identity.plan_of
    hash: str
    results: int
    why: str  # "first", "changed" or "fresh"


def register(path: Path, plan: dict[str, object], results: int, folder: Path, fresh: bool = False) -> None:
    """Append the plan to the file if it is new or differs from the last entry; nothing is ever taken out of it.

    results: runs that have figures already. fresh: old results are being discarded now, which is written down as well.
    """
    entries = read(path)
    key = digest(plan)
    if entries and entries[-1].hash == key and not fresh:
        return
    why = "first" if not entries else "fresh" if fresh else "changed"
    date = datetime.now(UTC).isoformat(timespec="seconds")
    entry = Registration(date, commit_of(folder), plan, key, results, why)
    write_json(path, {"registrations": [asdict(one) for one in (*entries, entry)]})


def read(path: Path) -> list[Registration]:
    """In order; none if there is no file. Raises UserError if it is damaged."""
    if not path.exists():
        return []
    try:
        return [Registration(**entry) for entry in read_json(path, "a study's registration")["registrations"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a study's registration ({error!r})") from error


def commit_of(folder: Path) -> str | None:
    """The git commit of a folder, with "+" if tracked files differ from it; None where there is no git."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no") if head else ""
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return head + ("+" if changed else "") if head else None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
