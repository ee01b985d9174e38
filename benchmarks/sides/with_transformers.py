"""transformers' side: `generate`, and forward, backward and AdamW on padded rows."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.channel import Laps
from benchmarks.sides.updates import Updates
from benchmarks.work import LEARNING_RATE, TOKEN_BUDGET, Job


def main(job: Job) -> None:
    torch.set_num_threads(job.conditions.threads)
    {"sample": sampling, "train": training}[job.work.kind](job, Laps())


def sampling(job: Job, laps: Laps) -> None:
    """Weights in the products' type, as a frozen sampler would hold them; nothing ends a completion early."""
    work = job.work
    dtype = getattr(torch, job.conditions.compute)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    how = GenerationConfig(
        max_new_tokens=work.new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    prompts = torch.tensor([tokens for tokens in job.tokens for _ in range(work.completions)])  # all of one length
    facts: dict[str, object] = {}
    while True:
        laps.lap(**facts)
        with torch.inference_mode():
            out: torch.Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=how)
        new = out.shape[1] - prompts.shape[1]
        facts = {"tokens": new * len(out), "lengths": [new] * len(out)}


def training(job: Job, laps: Laps) -> None:
    """Float32 weights, products in the run's type; the loss is the mean over all tokens but each row's first."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    tokens, parameters = torch.tensor(job.tokens), list(model.parameters())
    parts = tokens.split(max(1, TOKEN_BUDGET // tokens.shape[1]))
    product = getattr(torch, job.conditions.compute)
    updates, facts = Updates(model), {}
    while True:
        laps.lap(**facts, **updates.facts())
        loss = 0.0
        optimizer.zero_grad()
        for part in parts:
            with torch.autocast("cpu", dtype=product, enabled=product != torch.float32):
                share = model(input_ids=part, labels=part).loss * (len(part) / len(tokens))
            share.backward()
            loss += float(share.detach())
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        facts = {"tokens": tokens.numel(), "loss": loss, "gradient_norm": float(norm)}


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[1])))
