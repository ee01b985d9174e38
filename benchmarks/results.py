"""The results file: one JSON per machine, whole after every round, so that a stopped benchmark goes on."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine
from benchmarks.pairs import Round
from benchmarks.rows import Row
from benchmarks.work import Conditions
from postrl.errors import UserError
from postrl.files import read_json, write_json


class Results:
    """Rows by name. A row holds all that the page says about it; see `entry`."""

    def __init__(self, path: Path, described: Mapping[str, object]) -> None:
        self.path = path
        self.data: dict = read_json(path, "benchmark results") if path.exists() else {"rows": {}}
        if not isinstance(self.data.get("rows"), dict):
            raise UserError(f"{path} holds no rows: it is not a results file; move it away")
        self.data["machine"] = dict(described)

    def entry(self, row: Row, conditions: Conditions, fresh: bool = False) -> dict:
        """The row's entry: rounds made before if they may be continued, else a new one.

        They may if work, conditions, versions and the last commit of the source are the same. A row that has all its
        pairs is kept whatever versions and commit (the page shows them), unless `fresh`.
        """
        same = {"work": asdict(row.work), "conditions": asdict(conditions)}
        source = {"versions": machine.versions(), "commit": machine.commit()}
        old = self.data["rows"].get(row.name)
        if old is not None and not fresh and {key: old[key] for key in same} == same:
            complete = len(old["rounds"]) >= row.pairs
            if complete or {key: old[key] for key in source} == source:
                return old
        new = {
            **same,
            **source,
            "title": row.title,
            "axis": list(row.axis) if row.axis else None,
            "peers": [side.name for side in row.peers],
            "once": [side.name for side in row.once],
            "goals": [asdict(goal) for goal in row.goals],
            "pairs": row.pairs,
            "missing": {},
            "rounds": [],
        }
        self.data["rows"][row.name] = new
        return new

    def add(self, row: Row, made: Round) -> None:
        """One more round, at once on the disk."""
        self.data["rows"][row.name]["rounds"].append(dict(made))
        self.write()

    def miss(self, row: Row, side: str, reason: str) -> None:
        """Why a side has no figure."""
        self.data["rows"][row.name]["missing"][side] = reason
        self.write()

    def write(self) -> None:
        write_json(self.path, self.data)
