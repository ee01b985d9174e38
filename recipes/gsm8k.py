"""Post-train a language model on grade-school word problems (GSM8K).

    postrl train gsm8k --data path/to/train.jsonl --method dapo

A small model solves next to none of them, so most groups have no variance: start from one that solves some.
"""

from dataclasses import dataclass, field
from pathlib import Path

import reasoning

from postrl.cli import run_recipe
from postrl.envs.gsm8k import gsm8k
from postrl.settings import Settings
from postrl.train import Result


@dataclass(frozen=True)
class Config(reasoning.Config):
    """The options of `reasoning`, on other problems."""

    data: str = "openai/gsm8k"
    """A data set of the Hugging Face hub, or a local JSONL file with the columns question and answer."""
    task: str = "gsm8k"
    """Only a label here."""
    template: str = "{question}\nThink step by step and end with the answer as a number."
    """The user's message; {question} stands for the problem."""
    max_tokens: int = 256
    """Longest completion."""
    train: Settings = field(default_factory=lambda: Settings(steps=100, learning_rate=2e-6, refill=3))
    out: Path = Path("runs/gsm8k")
    """Folder of the run."""


def main(config: Config) -> Result:
    task = gsm8k(config.data, template=config.template, seed=config.train.seed)
    task.rubric = reasoning.rubric(config, task.rubric)
    return reasoning.main(config, task=task)


if __name__ == "__main__":
    run_recipe(Config, main)
