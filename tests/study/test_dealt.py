"""Rewards dealt anew: the group's own, on other members."""

from collections.abc import Mapping

from builders import rollout
from postrl.rollout import Rollout
from postrl.study.dealt import Dealt, deal


def members() -> list[Rollout]:
    made = [rollout(group=group, sample=i) for group in (0, 1) for i in range(16)]
    for number, member in enumerate(made):
        member.rewards = {"correct": float(number)}
    return made


def numbers(rollouts: list[Rollout]) -> list[float]:
    return [member.rewards["correct"] or 0.0 for member in rollouts]


class Given:
    """The same rollouts every step."""

    def __call__(self, step: int) -> list[Rollout]:
        return members()

    def state_dict(self) -> dict[str, object]:
        return {"position": 3}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.loaded = dict(state)


def test_rewards_stay_in_the_group_and_go_to_others():
    made = members()
    deal(made, (0, 3))
    dealt = numbers(made)
    assert sorted(dealt[:16]) == list(range(16)) and sorted(dealt[16:]) == list(range(16, 32))
    assert sum(value == number for number, value in enumerate(dealt)) < 8


def test_a_source_is_dealt_anew_each_step_and_keeps_its_state():
    given = Given()
    source = Dealt(given, 5)
    steps = [numbers(source(step)) for step in (0, 1, 0)]
    assert steps[0] == steps[2] != steps[1] and sorted(steps[0]) == list(range(32))
    assert numbers(Dealt(given, 6)(0)) != steps[0]
    source.load_state_dict(source.state_dict())
    assert given.loaded == {"position": 3}
