"""vLLM's end of `vllm.py`: run by the Python of vLLM's own environment, which need not have postrl.

    python vllm_worker.py OPTIONS      (a JSON object: model, context, slots, dtype, engine)

Standard library and vllm only. When the engine stands, one line of standard output says {"vocabulary": V}; from then on
each line of standard input is a request and is answered by one line. Everything else goes to standard error.

    {"do": "load", "folder": PATH}             -> {}
    {"do": "work", "requests": [REQUEST ...]}  -> {"done": [{"id", "tokens", "logp", "finished"} ...]}

A REQUEST has id, tokens, seed, temperature, max_tokens and stop (token ids). `work` takes new ones in and goes on with
all of them until at least one is done.
"""

import json
import os
import sys
import threading
import time

# This file's folder holds a vllm.py, which is not vLLM.
sys.path = [path for path in sys.path if os.path.abspath(path or ".") != os.path.dirname(os.path.abspath(__file__))]

# Read when vllm is imported. One process, so that it ends as a whole; a processor's threads are the caller's to place.
DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its processes meet on this machine and listen nowhere else
}
FINISHED = {"stop": True, "length": False}  # by vLLM's word for why a completion ended; any other is none


def main(options: dict) -> None:
    _end_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    llm = build(options)
    answer: dict = {"vocabulary": llm.model_config.get_vocab_size()}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # the client has gone: nothing is to be saved
        request = json.loads(line)
        answer = load(llm, request["folder"]) if request["do"] == "load" else work(llm, request["requests"])


def build(options: dict):
    """The engine, with the weights that lie in the model's folder now."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    settings = {
        "model": options["model"],
        "skip_tokenizer_init": True,
        "dtype": options["dtype"],
        "max_model_len": options["context"],
        "max_num_seqs": options["slots"],
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "generation_config": "vllm",  # not the model's own top-p and penalties
        "enforce_eager": current_platform.is_cpu(),
        "seed": 0,
    }
    return LLM(**{**settings, **options["engine"]})


def load(llm, folder: str) -> dict:
    """The weights of a Hugging Face folder of the same model; whatever was computed with the old ones is forgotten."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM still holds keys and values of the old weights")
    return {}


def work(llm, requests: list[dict]) -> dict:
    """See the module."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    engine = llm.llm_engine
    for request in requests:
        how = SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_tokens"],
            stop_token_ids=request["stop"],
            ignore_eos=True,  # what ends a completion is said by `stop` alone
            detokenize=False,
            logprobs=0,  # of the drawn token alone
        )
        engine.add_request(str(request["id"]), {"prompt_token_ids": request["tokens"]}, how)
    done: list[dict] = []
    while not done and engine.has_unfinished_requests():
        done = [report(output) for output in engine.step() if output.finished]
    return {"done": done}


def report(output) -> dict:
    """A finished request as the client reads it."""
    [answer] = output.outputs
    tokens = [int(token) for token in answer.token_ids]
    logp = [float(here[token].logprob) for token, here in zip(tokens, answer.logprobs, strict=True)]
    return {"id": int(output.request_id), "tokens": tokens, "logp": logp, "finished": FINISHED[answer.finish_reason]}


def _end_with(parent: int) -> None:
    """End when the client does, also in the middle of a pass."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
