"""A run of TRL's trainer, with or without our method, over the answers of a case, and what each update's gradient was.

TRL is imported when a test asks for it: the import takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from postrl.adapters.trl import trainer_class
from postrl.adapters.trl_rows import Extras
from postrl.conformance.cases import GROUPS, SIZE, Case, Done
from postrl.conformance.tiny import tokenizer
from postrl.method import Method

EXTRAS = Extras(
    groupings={"answer": lambda completion_ids, **columns: [ids[0] % 3 for ids in completion_ids]},
    step_rewards=lambda steps, **columns: steps,
)


@dataclass(frozen=True)
class Run:
    """updates: loss and gradient; minis: units, by our trainer; weights: before each update; trainer: at the end."""

    updates: list[Done]
    minis: list[list[int]]
    weights: list[dict[str, torch.Tensor]]
    trainer: Any


class Watch(TrainerCallback):
    """Copies weights and gradients before each optimiser step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.minis: list[list[int]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, **rest) -> None:
        named = dict(self.trainer.model.named_parameters())
        self.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        self.weights.append({n: p.detach().clone() for n, p in named.items()})
        window = getattr(self.trainer, "_window", None)
        self.minis.append([] if window is None else sorted(window.local.tolist()))


def options(folder: Path, **changes: object) -> Any:
    """GRPOConfig: twice two mini-batches of 8 answers, in two passes each; changes replace or add options."""
    from trl import GRPOConfig

    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "num_generations": SIZE,
        "max_completion_length": 8,
        "max_steps": 4,
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "logging_strategy": "steps",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "reward_weights": [1.0, 0.5],
    }
    return GRPOConfig(**{**settings, **changes})


def rollouts(case: Case) -> Callable:
    """A `rollout_func` that gives the case's answers, whatever the model."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list]:
        units = [int(prompt) * SIZE + place % SIZE for place, prompt in enumerate(prompts)]
        answers = [case.answers[unit] for unit in units]
        return {
            "prompt_ids": [list(case.prompts[unit // SIZE]) for unit in units],
            "completion_ids": [list(a.tokens) for a in answers],
            "logprobs": [list(a.logp) for a in answers],
            "env_mask": [list(a.sampled) for a in answers],
            "number": units,
            "steps": [list(a.steps) for a in answers],
        }

    return rollout


def rewards(case: Case) -> Any:
    """Two reward functions that look the case's rewards up."""

    def correct(number, **columns) -> list[float | None]:
        return [case.answers[unit].rewards["correct"] for unit in number]

    def form(number, **columns) -> list[float | None]:
        return [case.answers[unit].rewards["form"] for unit in number]

    return [correct, form]


def train(
    case: Case,
    model: Path,
    args: Any,
    method: Method | None,
    **rest: Any,
) -> Run:
    """Plain gradient descent by TRL's own loss (method None) or by ours."""
    from transformers import AutoModelForCausalLM
    from trl import GRPOTrainer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    watch = Watch()
    kind = GRPOTrainer if method is None else trainer_class()
    optimizer = torch.optim.SGD(loaded.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = kind(
        model=loaded,
        reward_funcs=rewards(case),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(GROUPS)]}),
        processing_class=tokenizer(),
        rollout_func=rollouts(case),
        callbacks=[watch],
        optimizers=(optimizer, scheduler),
        **({} if method is None else {"method": method, "extras": EXTRAS}),
        **rest,
    )
    watch.trainer = trainer
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    updates = [Done(loss, gradient) for loss, gradient in zip(losses, watch.gradients, strict=True)]
    return Run(updates, watch.minis, watch.weights, trainer)
