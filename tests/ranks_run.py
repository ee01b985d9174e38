"""A small run for `test_ranks.py`, to be started in one process or several: python ranks_run.py FOLDER OPTIONS.

OPTIONS is a JSON object: fields of Settings, and `resume`, `divisible` (false: a source that only one process can
call), `die` or `interrupt` (the step in which process 1 gets SIGKILL or SIGTERM), `warmup` (PPO with a critic that
first trains alone for so many steps).
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from postrl import papers, train
from postrl.envs.copy_task import copy_task
from postrl.errors import UserError
from postrl.parallel import leave, spread
from postrl.policies.base import Sampling
from postrl.policies.chat import Characters
from postrl.policies.critic import ActorCritic, DecoderCritic, Values, parameter_groups
from postrl.ranks import here
from postrl.rollout import Rollout
from postrl.settings import Parallel, Settings
from postrl.source import OnPolicy
from tiny import tiny_decoder

OPTIONS = {"steps": 4, "updates": 2, "learning_rate": 0.01, "checkpoint_every": 1, "token_budget": 24}


class Seamed:
    """The source, with the accidents that a test asks for; without `part`, unless it is divisible."""

    def __init__(self, source: OnPolicy, accidents: dict[str, int]):
        self.source, self.accidents = source, accidents

    def __call__(self, step: int) -> list[Rollout]:
        return self.source(step)

    def state_dict(self) -> dict[str, object]:
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.source.load_state_dict(state)


class Divided(Seamed):
    def part(self, step: int, rank: int, world: int) -> list[Rollout]:
        if rank == 1 and self.accidents.get("die") == step + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and self.accidents.get("interrupt") == step + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.source.part(step, rank, world)


def main(folder: Path, options: dict) -> None:
    torch.set_num_threads(1)
    resume, divisible = options.pop("resume", False), options.pop("divisible", True)
    accidents = {name: options.pop(name) for name in ("die", "interrupt") if name in options}
    renderer = Characters("abcd")
    policy = tiny_decoder(renderer.size, dtype=torch.float64)
    task = copy_task(2, "abcd", seed=0)
    sampling = Sampling(max_tokens=3)
    source = OnPolicy(task, policy, renderer, groups_per_step=3, group_size=4, sampling=sampling)
    source = (Divided if divisible else Seamed)(source, accidents)
    warmup = options.pop("warmup", None)
    settings = Settings(**(OPTIONS | options))
    method, rest = papers.method("gspo"), {}
    if warmup is not None:
        method = papers.method("ppo")
        policy = ActorCritic(policy, DecoderCritic.copied(policy, head_seed=1))
        values = Values(policy, settings.token_budget, warmup, "bootstrap")
        rest = {"enrich": [values], "parameters": parameter_groups(5.0)}

    def watched(policy: torch.nn.Module, accelerator: Accelerator, parallel: Parallel) -> torch.nn.Module:
        trained = spread(policy, accelerator, parallel)
        sharded = here().world > 1 and parallel == "shard"
        assert all(isinstance(parameter, DTensor) == sharded for parameter in trained.parameters())
        return trained

    train.spread = watched
    train.train(method, policy, source, settings, folder, resume=resume, **rest)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
        leave()
    except UserError as error:
        sys.exit(f"error: {error}")
