"""The two-turn world; what collection makes of it is in tests/test_collect.py."""

import pytest

from postrl.envs.base import Environment, Task
from postrl.envs.two_turn import TwoTurn
from postrl.errors import UserError


def test_the_secret_is_told_after_the_first_turn_only():
    task = TwoTurn(length=2, alphabet="abc")
    environment = task.environment("train", 0)
    assert isinstance(task, Task) and isinstance(environment, Environment)
    secret = environment.info["answer"]
    assert secret not in environment.prompt()[0]["content"]
    told = environment.step("whatever")
    assert (told.done, told.reward, told.messages) == (False, 0.0, ({"role": "user", "content": secret},))
    heard = environment.step(f" {secret}\n")
    assert (heard.done, heard.reward) == (True, 1.0)
    other = task.environment("train", 0)
    assert other.info == environment.info and not other.step("x").done, "every environment starts anew"
    assert other.step("wrong").reward == 0.0


def test_secrets_are_distinct_and_held_out_ones_disjoint():
    task = TwoTurn(length=2, alphabet="abcdef")
    train, test = ([task.environment(s, i).item for i in range(task.size(s))] for s in ("train", "test"))
    assert len(set(train)) == len(train) and len(set(train) | set(test)) == 36 and not set(train) & set(test)


def test_an_empty_split_says_so():
    with pytest.raises(UserError, match="has no test problems"):
        TwoTurn(test_share=0).environment("test", 0)
