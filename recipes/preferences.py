"""Post-train a language model on pairs of answers of which one is preferred (DPO), from a file.

    postrl train preferences --data pairs.jsonl --options kind ipo

Each line of the file is a JSON object with the texts prompt, chosen and rejected. Nothing is sampled. A tenth of the
pairs, chosen by their prompts, is never trained on; what was learnt is measured on them and kept in `held_out.json`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from postrl.batch import unit_sum
from postrl.cli import Options, run_recipe, use_threads
from postrl.compute import compute_dtype, name_of
from postrl.display import Display
from postrl.enrich import forward_all
from postrl.envs.base import split_of
from postrl.envs.written import read_pairs
from postrl.errors import UserError
from postrl.files import write_json
from postrl.memory import keep_memory
from postrl.papers import method
from postrl.policies.loading import load_policy
from postrl.policies.lora import LoRA
from postrl.ranks import launched_first
from postrl.rollout import Rollout, collate
from postrl.settings import Settings
from postrl.source import Dataset
from postrl.train import Result, train

HELD_OUT = 0.1


@dataclass(frozen=True)
class Config:
    """Options of one run."""

    data: str = ""
    """A JSONL file with the columns prompt, chosen and rejected."""
    model: str = "smollm2"
    """A Hugging Face folder, a .gguf file, a model id of the hub, or smollm2."""
    options: Options = field(default_factory=dict)
    """Arguments of dpo, for example `--options beta 0.05`."""
    pairs_per_step: int = 16
    """Pairs per step."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank instead of all weights; 0 trains all weights."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products; weights stay in float32. A resumed run goes on with what it began with."""
    threads: int = 2
    """Processor threads."""
    train: Settings = field(default_factory=lambda: Settings(steps=100, updates=1, learning_rate=1e-6, warmup=10))
    out: Path = Path("runs/preferences")
    """Folder of the run."""
    resume: bool = False
    """Go on with the run in `out`."""


def main(config: Config) -> Result:
    config.train.check()
    if not config.data:
        raise UserError("option data is empty; give a JSONL file with the columns prompt, chosen and rejected")
    use_threads(config.threads)
    keep_memory()
    rule = method("dpo", **config.options)
    compute = compute_dtype(config.compute_dtype, config.out if config.resume else None)
    lora = LoRA(rank=config.lora_rank, alpha=2.0 * config.lora_rank) if config.lora_rank else None
    policy, renderer = load_policy(config.model, lora=lora, compute_dtype=compute, seed=config.train.seed)
    reference, _ = load_policy(config.model, compute_dtype=compute)
    assert isinstance(policy, nn.Module) and isinstance(reference, nn.Module)
    rollouts = read_pairs(Path(config.data), renderer)
    longest = max(sum(len(turn.tokens) for turn in rollout.contexts[0]) for rollout in rollouts)
    if longest > policy.context_length:
        raise UserError(
            f"{config.data}: a prompt with its answer has {longest} tokens, but the model's context holds "
            f"{policy.context_length}; leave such pairs out"
        )
    shown = [rollout for rollout in rollouts if split_of(rollout.item, HELD_OUT) == "train"]
    held_out = [rollout for rollout in rollouts if split_of(rollout.item, HELD_OUT) == "test"]
    if launched_first():
        print(f"{len(shown) // 2} pairs for training and {len(held_out) // 2} held out", flush=True)
    describe = {**asdict(config), "compute_dtype": name_of(compute)}
    for name in ("train", "out", "resume"):
        del describe[name]
    result = train(
        rule,
        policy,
        Dataset(shown, config.pairs_per_step, config.train.seed),
        config.train,
        config.out,
        reference=reference,
        describe=describe,
        resume=config.resume,
        display=Display(config.train.steps, "dpo"),
    )
    if held_out and result.status == "finished":
        figures = measure(policy, reference, held_out, config.train.token_budget)
        if launched_first():  # every process has the same weights
            print("held out: " + "  ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)
            write_json(config.out / "held_out.json", figures)
    return result


@torch.no_grad()
def measure(policy: nn.Module, reference: nn.Module, pairs: Sequence[Rollout], token_budget: int) -> dict[str, float]:
    """DPO's own figures on pairs, h = log π − log π_ref in nats: the share with h(chosen) > h(rejected), the mean of
    the difference, and the share whose chosen answer has become less likely than it was."""
    batch = collate(pairs)
    now, before = (forward_all(model, batch, token_budget).logp for model in (policy, reference))
    gain = unit_sum(now - before, batch).double()
    chosen, rejected = gain[::2], gain[1::2]  # as `read_pairs` gives them
    return {
        "accuracy": float((chosen > rejected).double().mean()),
        "margin": float((chosen - rejected).mean()),
        "displaced": float((chosen < 0).double().mean()),
    }


if __name__ == "__main__":
    run_recipe(Config, main)
