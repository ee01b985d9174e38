"""A run's hash changes with what its figures depend on, and with nothing else."""

from collections.abc import Callable
from functools import partial

import pytest

from postrl.study.finding import Found
from postrl.study.identity import base_key, describe, run_key

Edit = Callable[..., Found]


def keys(found: Found, arm: str = "loud", seed: int = 0, threads: int = 1) -> tuple[str, str]:
    """(of a run, of its base)"""
    study, folder = found.study, found.path.parent
    base = study.arm(arm).bases[0]
    made = base_key(base, study.config, seed, threads, folder)
    return run_key(study, study.arm(arm), study.config, seed, threads, folder), made


@pytest.mark.parametrize(
    "edit",
    [
        ('HYPOTHESIS = "It does', 'HYPOTHESIS = "Of course it does'),
        ("\n\ndef run(", "\n\n# a comment\ndef run("),
        ('"""Normal numbers of a seed."""', '"""Numbers."""'),
        ("gain=0.1, key=9", "gain=0.2, key=9"),  # of another arm
        ("seeds=(0, 1, 2),", "seeds=(0, 1, 2, 3),"),
        ("worth=0.1", "worth=0.2"),
        ("import os\n", "import math\nimport os\n"),
    ],
    ids=lambda edit: edit[1].strip()[:20],
)
def test_what_does_not_matter(edited: Edit, edit: tuple[str, str]):
    assert keys(edited()) == keys(edited(edit))


@pytest.mark.parametrize(
    "edit",
    [
        ("gain=0.3", "gain=0.31"),
        ("values = level + gain", "values = gain + level"),
        ("problems: int = 12", "problems: int = 13"),
        ('Metric("threads"', 'Metric("thread"'),
    ],
    ids=lambda edit: edit[1],
)
def test_what_matters_to_a_run_but_not_to_its_base(edited: Edit, edit: tuple[str, str]):
    (run, base), (other_run, other_base) = keys(edited()), keys(edited(edit))
    assert run != other_run and base == other_base


@pytest.mark.parametrize(
    "edit",
    [
        ("level: float = 0.4", "level: float = 0.5"),
        ("[7, seed]", "[8, seed]"),
        ("noise(context.seed, 1, 0.1)", "noise(context.seed, 1, 0.2)"),
    ],
    ids=lambda edit: edit[1],
)
def test_what_matters_to_the_base_matters_to_the_run(edited: Edit, edit: tuple[str, str]):
    (run, base), (other_run, other_base) = keys(edited()), keys(edited(edit))
    assert run != other_run and base != other_base


def test_seed_threads_and_arm(edited: Edit):
    found = edited()
    assert len({keys(found), keys(found, seed=1), keys(found, threads=2), keys(found, arm="echo")}) == 4
    assert keys(found, seed=1)[1] != keys(found)[1]


def test_a_shared_base_is_the_same_for_every_seed(edited: Edit):
    found = edited(("sizes: sizes.level)", "sizes: sizes.level, shared=True)"))
    assert keys(found, seed=1)[1] == keys(found)[1]


def here(value: object) -> list[str]:
    from pathlib import Path

    return describe(value, Path(__file__).parent)


def twice(function: Callable[[int], int], other: object = None) -> int:
    return function(2)


def made(step: int) -> Callable[[int], int]:
    def count(x: int) -> int:
        return x + step

    return count


def test_lambdas_closures_and_the_places_of_arguments_count():
    assert here(partial(twice, lambda x: x + 1)) == here(partial(twice, lambda x: x + 1))
    assert here(partial(twice, lambda x: x + 1)) != here(partial(twice, lambda x: x + 2))
    assert here(made(1)) != here(made(2))
    assert here(partial(twice, partial(twice, 1), partial(twice, 2))) != here(
        partial(twice, partial(twice, 2), partial(twice, 1))
    )


def test_an_object_that_does_not_say_what_it_holds_ties_the_run_to_the_whole_folder():
    text = "\n".join(here(partial(twice, object())))
    assert "test_an_object_that_does_not_say_what_it_holds" in text
    assert here(partial(twice, object())) == here(partial(twice, object()))  # no address in it
