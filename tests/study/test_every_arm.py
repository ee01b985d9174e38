"""Every exploratory arm of every study runs: --extended takes so long that a crash there is found late."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postrl.study import finding
from postrl.study.definition import Arm, BaseContext, Context, bases_of
from postrl.study.records import check_figures

PACKAGES = {"control": "stable_baselines3", "reco": "reasoning_gym"}
STEPS = 4  # of training; the bases keep their quick sizes, since an arm may need a policy that is sometimes right


def make_bases(arms: Sequence[Arm], config: Any, folder: Path) -> dict[str, Path]:
    """All that the arms start from, by name."""
    done: dict[str, Path] = {}
    for base in bases_of(arms):
        done[base.name] = folder / base.name
        done[base.name].mkdir(parents=True)
        needed = {other.name: done[other.name] for other in base.needs}
        base.make(BaseContext(base.options(config), 0, done[base.name], needed, 1))
    return done


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some twenty arms in one test
@pytest.mark.parametrize("name", sorted(finding.studies()))
def test_every_exploratory_arm_runs(name: str, tmp_path: Path):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    study = finding.load(finding.find(name)).study
    config = study.quick.config
    if hasattr(config, "steps"):
        config = replace(config, steps=STEPS)
    arms = [arm for arm in study.arms if arm.exploratory]
    assert arms, "--extended would add nothing"
    bases = make_bases(arms, config, tmp_path / "bases")
    for arm in arms:
        work = tmp_path / arm.name
        work.mkdir()
        context = Context(arm.name, 0, config, work, {base.name: bases[base.name] for base in arm.bases}, 1)
        check_figures(arm.run(context), study, arm.name)
