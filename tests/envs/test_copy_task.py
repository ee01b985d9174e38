"""The copy task refuses lengths that leave nothing to copy."""

import pytest

from postrl.envs.copy_task import copy_task
from postrl.errors import UserError


@pytest.mark.parametrize("length", [0, -1])
def test_length_below_one_is_named(length: int):
    with pytest.raises(UserError, match=f"option length={length} of task 'copy'"):
        copy_task(length)
