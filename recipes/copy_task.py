"""Copy a two-letter string with a table of logits: every part of a run, in seconds, without a model file."""

from dataclasses import dataclass
from pathlib import Path

from postrl import papers
from postrl.cli import run_recipe
from postrl.envs.copy_task import copy_task
from postrl.evaluate import Evaluation, evaluate
from postrl.policies.base import Sampling
from postrl.policies.chat import Characters
from postrl.policies.tabular import Tabular
from postrl.settings import Settings
from postrl.source import OnPolicy
from postrl.train import Result, train


@dataclass(frozen=True)
class Config:
    """Options of this recipe."""

    folder: Path = Path("runs/copy_task")
    """Where the run's files go."""
    resume: bool = False
    """Go on with the run in `folder`."""
    method: str = "grpo"
    """A policy-gradient method of the shelf; `postrl papers` lists them."""
    length: int = 2
    """Letters to copy."""
    alphabet: str = "abcd"
    """The letters there are."""
    steps: int = 40
    """Rollout batches to train on."""
    updates: int = 4
    """Mini-batches per rollout batch."""
    groups_per_step: int = 16
    """Strings per rollout batch."""
    group_size: int = 8
    """Answers per string."""
    learning_rate: float = 0.1
    """Of AdamW, on the table's logits."""
    seed: int = 0
    """Decides the shuffles, the strings and every sampled letter."""


def main(config: Config) -> Result:
    """Train, and evaluate before and after.

    A table knows nothing about strings it has not met, so evaluation runs on the training strings.
    """
    renderer = Characters(config.alphabet)
    task = copy_task(config.length, config.alphabet, test_share=0.0, seed=config.seed)
    # One row of the table per context, so that every position of every string is learnt by itself.
    policy = Tabular.uniform(renderer.size, memory=2 * config.length, context_length=2 * config.length + 1)
    sampling = Sampling(max_tokens=config.length + 1)
    source = OnPolicy(
        task,
        policy,
        renderer,
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        sampling=sampling,
        seed=config.seed,
    )

    def evaluation() -> Evaluation:
        return evaluate(
            policy, renderer, task, split="train", items=16, n=16, ks=(1, 4, 16), sampling=sampling, seed=config.seed
        )

    settings = Settings(
        steps=config.steps, updates=config.updates, learning_rate=config.learning_rate, seed=config.seed
    )
    return train(
        papers.method(config.method),
        policy,
        source,
        settings,
        config.folder,
        evaluate=evaluation,
        describe={"recipe": "copy_task", "task": task.name, "characters": config.alphabet},
        resume=config.resume,
    )


if __name__ == "__main__":
    run_recipe(Config, main)
