"""vLLM's side (its build for processors): sampling. Runs in its own environment, without postrl."""

import os
import sys
from pathlib import Path

# Read when vllm is imported: threads are ours to place, the cache holds all rows, one process shows all its memory.
os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="4",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

from benchmarks.channel import Laps
from benchmarks.work import Job


def main(job: Job) -> None:
    work, laps = job.work, Laps()
    engine = LLM(
        job.model,
        dtype=job.conditions.compute,
        enforce_eager=True,
        max_model_len=work.prompt_tokens + work.new_tokens,
        max_num_seqs=work.rows,
        # Each lap has the same prompts: their keys and values must not be there already.
        enable_prefix_caching=False,
        seed=0,
    )
    how = SamplingParams(temperature=1.0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in job.tokens for _ in range(work.completions)]
    facts: dict[str, object] = {}
    while True:
        laps.lap(**facts)
        done = engine.generate(prompts, how, use_tqdm=False)
        lengths = sorted(len(answer.outputs[0].token_ids) for answer in done)
        facts = {"tokens": sum(lengths), "lengths": lengths}


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[1])))
