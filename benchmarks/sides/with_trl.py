"""TRL's side: a whole GRPO step of `GRPOTrainer`.

variant: "" has float32 weights and the products' type of the run, without activation checkpointing (faster than TRL's
default); "checkpointing" is TRL's default there (slower, less memory); "bfloat16" holds the weights in bfloat16 too.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.channel import Laps
from benchmarks.sides.updates import Updates
from benchmarks.work import LEARNING_RATE, Job, reward

STEPS = 1000


class Paced(TrainerCallback):
    """A lap begins where an optimiser step does, with its sampling, and ends where the next one begins."""

    def __init__(self, laps: Laps, updates: Updates, lengths: list[int]) -> None:
        self.laps, self.updates, self.lengths = laps, updates, lengths
        self._processed = 0

    def on_step_begin(self, args, state, control, **kwargs):
        processed = int(state.num_input_tokens_seen)
        facts = {"tokens": sum(self.lengths), "lengths": sorted(self.lengths), "processed": processed - self._processed}
        self._processed = processed
        self.lengths.clear()
        self.laps.lap(**facts, **self.updates.facts())


def main(job: Job) -> None:
    torch.set_num_threads(job.conditions.threads)
    work = job.work
    dtype = torch.bfloat16 if job.variant == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    lengths: list[int] = []

    def even(completion_ids: list[list[int]], **kwargs: object) -> list[float | None]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [reward(ids) for ids in completion_ids]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=even,
        args=_arguments(job),
        train_dataset=_prompts(job),
        processing_class=tokenizer,
        rollout_func=_given(job) if work.kind == "agreement" else None,
    )
    if not work.natural:  # nothing ends a completion early, and nothing has to be suppressed at every token
        trainer.generation_config.eos_token_id = model.generation_config.eos_token_id = None
        trainer.generation_kwargs["eos_token_id"] = None
        trainer.eos_token_ids = []
    updates = Updates(model, Path(job.scratch) if work.kind == "agreement" else None)
    trainer.add_callback(Paced(Laps(), updates, lengths))
    trainer.train()


def _arguments(job: Job) -> GRPOConfig:
    work = job.work
    return GRPOConfig(
        output_dir=str(Path(job.scratch) / "trl"),
        use_cpu=True,
        bf16=job.conditions.compute == "bfloat16" or job.variant == "bfloat16",
        gradient_checkpointing=job.variant == "checkpointing",
        per_device_train_batch_size=work.pass_rows,
        gradient_accumulation_steps=work.rows // work.pass_rows,
        num_generations=work.completions,
        max_completion_length=work.new_tokens,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0 if work.kind == "agreement" else 1.0,
        max_steps=STEPS,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _prompts(job: Job) -> Dataset:
    """Each step takes all prompts, in order."""
    chat = [[{"role": "user", "content": text}] for text in job.texts]
    return Dataset.from_dict({"prompt": (chat if job.work.natural else job.texts) * STEPS})


def _given(job: Job):
    """The job's own completions instead of sampled ones."""
    place = {text: number for number, text in enumerate(job.texts)}

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        taken = dict.fromkeys(place.values(), 0)
        answers: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for text in prompts:
            group = place[text]
            tokens = job.given[group][taken[group]]
            taken[group] += 1
            answers["prompt_ids"].append(job.tokens[group])
            answers["completion_ids"].append(tokens)
            answers["logprobs"].append([0.0] * len(tokens))
        return answers

    return rollout


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[1])))
