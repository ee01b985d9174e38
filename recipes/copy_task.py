"""Copy a two-letter string with a table of logits: every part of a run, in seconds, without a model file."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from postrl import papers
from postrl.cli import run_recipe
from postrl.envs.copy_task import copy_task
from postrl.evaluate import Evaluation, evaluate
from postrl.policies.base import Sampling
from postrl.policies.chat import Characters
from postrl.policies.critic import ActorCritic, TabularCritic, Values
from postrl.policies.tabular import Tabular
from postrl.settings import Settings
from postrl.source import OnPolicy
from postrl.train import Result, train


@dataclass(frozen=True)
class Config:
    """Options of this recipe."""

    method: str = "grpo"
    """A method of the shelf: see `postrl papers`."""
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the method, for example `--options cap 3`."""
    length: int = 2
    """Letters to copy."""
    alphabet: str = "abcd"
    """The letters there are."""
    groups_per_step: int = 16
    """Strings per step."""
    group_size: int = 8
    """Answers per string, which are compared with one another."""
    train: Settings = field(default_factory=lambda: Settings(steps=40, updates=4, learning_rate=0.1))
    out: Path = Path("runs/copy_task")
    """Folder of the run."""
    resume: bool = False
    """Go on with the run in `out`."""


def main(config: Config) -> Result:
    """Train, and evaluate before and after.

    A table knows nothing about strings it has not met, so evaluation runs on the training strings.
    """
    config.train.check()
    renderer = Characters(config.alphabet)
    task = copy_task(config.length, config.alphabet, test_share=0.0, seed=config.train.seed)
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
        seed=config.train.seed,
    )

    def evaluation() -> Evaluation:
        return evaluate(
            policy,
            renderer,
            task,
            split="train",
            items=16,
            n=16,
            ks=(1, 4, 16),
            sampling=sampling,
            seed=config.train.seed,
        )

    method = papers.method(config.method, **config.options)
    model = ActorCritic(policy, TabularCritic.zeros(policy)) if "values" in method.needs else policy
    described = asdict(config)
    for name in ("train", "out", "resume"):
        del described[name]
    return train(
        method,
        model,
        source,
        config.train,
        config.out,
        enrich=[Values(model, config.train.token_budget)] if isinstance(model, ActorCritic) else [],
        evaluate=evaluation,
        describe={**described, "task": task.name, "characters": config.alphabet},
        resume=config.resume,
    )


if __name__ == "__main__":
    run_recipe(Config, main)
