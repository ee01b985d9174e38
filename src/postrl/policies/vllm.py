"""Sampling by vLLM, in a worker process of vLLM's own environment: its pins fit nobody else's.

The policy's weights pass as a safetensors folder before the first completion after each `refresh`; completions pass as
lines of JSON through pipes. vLLM's numbers are not the trainer's: the loop measures the gap (`mismatch/mean`) and
multiplies the truncated ratio π_train/π_sampler onto A (`importance_cap`), as for any sampler.
"""

import json
import math
import os
import selectors
import shutil
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from postrl.batch import Stop
from postrl.errors import UserError
from postrl.files import read_json, write_json
from postrl.policies.base import Completion, Key, Policy, Sampling
from postrl.policies.checkpoint_io import INDEX
from postrl.policies.decoder import Decoder
from postrl.policies.hf import HuggingFacePolicy
from postrl.policies.lora import LoRADecoder

WORKER = Path(__file__).with_name("vllm_worker.py")
PYTHON = Path(".venv-vllm/bin/python")  # where `make vllm-env` puts it
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# A launcher's word to its own processes: vLLM would take it for itself.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")


# Arguments of vllm's `LLM` that are said otherwise, or that the correction of the mismatch rests on.
OWN = ("model", "max_model_len", "max_num_seqs", "dtype", "seed", "logprobs_mode", "generation_config")


@dataclass(frozen=True)
class _Request:
    session: int
    key: Key
    context: tuple[int, ...]  # everything before the completion
    sampling: Sampling
    keep: bool

    def message(self, number: int) -> dict[str, Any]:
        return {
            "id": number,
            "tokens": self.context,
            "seed": seed_of(self.key),
            "temperature": self.sampling.temperature,
            "max_tokens": self.sampling.max_tokens,
            "stop": sorted(self.sampling.stop),
        }


def seed_of(key: Key) -> int:
    """The seed of one completion, of 63 bits. vLLM has its own stream: the tokens are not those of our samplers."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


class VllmSampler:
    """A `Sampler` of a policy's weights as they were at the first `poll` after `refresh`, by vLLM.

    python: of an environment with vllm (`make vllm-env`). slots: completions at a time. dtype: of vLLM's products;
    float32 is closest to the trainer. context: longest prompt with answer, by default the policy's. engine: further
    arguments of vllm's `LLM`, such as gpu_memory_utilization, but none of `OWN`. threads: of a processor; None leaves
    that to the environment. patience: seconds for one answer of the worker.

    Only whole distributions are drawn from: top_p < 1, top_k and temperature 0 are refused, for log-probabilities would
    be those after the cut. A completion depends on its key and not on what is sampled beside it, up to rounding.
    The worker ends with `stop`, with this object and with this process. Raises UserError if the environment is missing,
    the policy cannot be handed over, or the worker ends or is silent.
    """

    def __init__(
        self,
        policy: Policy,
        python: Path | str = PYTHON,
        *,
        slots: int = 64,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        context: int | None = None,
        engine: Mapping[str, object] | None = None,
        threads: int | None = None,
        patience: float = 1800.0,
        worker: Path = WORKER,
    ) -> None:
        self.python, self.worker = Path(python), worker
        if not self.python.is_file():
            raise UserError(f"{python} does not exist: build vLLM's environment (make vllm-env) or name its Python")
        if slots < 1:
            raise UserError(f"slots={slots}: a sampler needs at least one")
        if taken := [name for name in OWN if name in (engine or {})]:
            raise UserError(f"option {taken[0]} of vLLM's engine is postrl's own: leave it out")
        self.policy, self.patience, self.threads = policy, patience, threads
        self.context_length = policy.context_length if context is None else min(context, policy.context_length)
        self._options = {"context": self.context_length, "slots": slots, "dtype": dtype, "engine": dict(engine or {})}
        self._process: _Process | None = None
        self._vocabulary = 0
        self._stale = True
        self._fresh: deque[_Request] = deque()  # not sent yet
        self._sent: dict[int, _Request] = {}
        self._kept: dict[int, tuple[int, ...] | None] = {}  # open sessions' tokens; None while one is sampled
        self._done: list[Completion] = []
        self._sessions = self._requests = 0

    def submit(
        self, tokens: Sequence[int], key: Key, sampling: Sampling, session: int | None = None, keep: bool = False
    ) -> int:
        """See `Sampler`. Raises UserError for a prompt that leaves no room in the context or a `sampling` that cuts the
        distribution, ValueError for an empty prompt or a session that is unknown or not finished. An extension that
        leaves no room gives an empty TRUNCATED completion."""
        if sampling.top_p < 1 or sampling.top_k or sampling.temperature == 0:
            raise UserError(f"vLLM samples whole distributions here, but not {sampling}: use the policy's own sampler")
        if sampling.max_tokens < 1:
            raise UserError(f"max_tokens={sampling.max_tokens}: a completion needs at least one")
        context = (*(() if session is None else self._idle(session)), *(int(token) for token in tokens))
        room = self.context_length - len(context)
        if not context:
            raise ValueError("an empty prompt: nothing predicts the first token")
        if session is None:
            if room < 1:
                raise UserError(
                    f"a prompt of {len(context)} tokens leaves no room in the context of {self.context_length}"
                )
            session, self._sessions = self._sessions, self._sessions + 1
        self._kept[session] = None
        limited = replace(sampling, max_tokens=min(sampling.max_tokens, max(1, room)))
        request = _Request(session, key, context, limited, keep)
        if room < 1:
            self._finish(request, [], [], Stop.TRUNCATED)
        else:
            self._fresh.append(request)
        return session

    def poll(self) -> list[Completion]:
        """See `Sampler`. Raises UserError if the worker ends or the probabilities are no numbers, ValueError for tokens
        outside the vocabulary."""
        if not self._done and (self._fresh or self._sent):
            self._work()
        done, self._done = self._done, []
        return done

    def close(self, session: int) -> None:
        """See `Sampler`. Raises ValueError for a session that is unknown or not finished."""
        self._idle(session)
        del self._kept[session]

    def refresh(self) -> None:
        """See `Sampler`. Raises ValueError if something is under way."""
        if self._kept:
            raise ValueError(f"{len(self._kept)} sessions are open; close them before the weights change")
        self._stale = True

    def stop(self) -> None:
        """End the worker; a later `poll` starts another. What was under way is lost."""
        if self._process is not None:
            self._process.end()
        self._process, self._stale = None, True
        self._fresh.clear()
        self._sent.clear()
        self._kept.clear()

    def _idle(self, session: int) -> tuple[int, ...]:
        context = self._kept.get(session)
        if context is None:
            raise ValueError(f"session {session} is closed, unknown or still being sampled")
        return context

    def _work(self) -> None:
        process = self._ready()
        messages = []
        while self._fresh:
            request = self._fresh.popleft()
            if not 0 <= min(request.context) <= max(request.context) < self._vocabulary:
                raise ValueError(f"a token is outside the vocabulary of {self._vocabulary}")
            messages.append(request.message(self._requests))
            self._sent[self._requests] = request
            self._requests += 1
        finished = process.ask({"do": "work", "requests": messages}).get("done")
        if not isinstance(finished, list) or not finished:  # the loop would ask for ever
            raise process.failure("finished none of its requests")
        for done in finished:
            try:
                request, tokens, logp = self._sent.pop(done["id"]), done["tokens"], done["logp"]
                stop = Stop.FINISHED if done["finished"] else Stop.TRUNCATED
                fits = 0 < len(tokens) == len(logp) <= request.sampling.max_tokens
                fits = fits and all(isinstance(token, int) and 0 <= token < self._vocabulary for token in tokens)
                wrong = not all(math.isfinite(value) for value in logp)
            except (KeyError, TypeError) as error:
                raise process.failure(f"answered what was not asked ({error!r})") from error
            if wrong:
                raise UserError("the policy's probabilities are no numbers any more: resume with a lower learning rate")
            if not fits:
                raise process.failure(f"gave {len(tokens)} tokens that do not fit the request or the vocabulary")
            self._finish(request, tokens, logp, stop)

    def _finish(self, request: _Request, tokens: list[int], logp: list[float], stop: Stop) -> None:
        self._done.append(Completion(request.session, request.key, tokens, logp, stop))
        if request.keep:
            self._kept[request.session] = (*request.context, *tokens)
        else:
            del self._kept[request.session]

    def _ready(self) -> "_Process":
        """The worker, with the policy's present weights."""
        if self._process is not None and self._process.end.alive and not self._stale:
            return self._process
        if self._process is None or not self._process.end.alive:
            process = _Process(self.patience)
            write_weights(self.policy, process.weights)
            options = {"model": str(process.weights), **self._options}
            said = process.start([str(self.python), str(self.worker)], options, self.threads)
            if not isinstance(said.get("vocabulary"), int):
                raise process.failure("did not say its vocabulary")
            self._vocabulary, self._process = said["vocabulary"], process
        else:
            write_weights(self.policy, self._process.weights)
            self._process.ask({"do": "load", "folder": str(self._process.weights)})
        self._stale = False
        return self._process


class _Process:
    """A worker, its log, and the folder through which weights pass; they end with this object."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.folder = Path(tempfile.mkdtemp(prefix="postrl-vllm-"))
        self.weights, self.log = self.folder / "model", self.folder / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.end = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def start(self, command: Sequence[str], options: Mapping[str, object], threads: int | None) -> dict[str, Any]:
        """Start the worker; what it says when its engine stands."""
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment |= {"OMP_WAIT_POLICY": "PASSIVE"}  # it waits while the trainer works on the same cores
        environment |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self.end.detach()
        with self.log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    [*command, json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # an interrupt is ours: the step goes on to its end
                )
            except OSError as error:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise UserError(f"{command[0]} cannot be run ({error.strerror}): name the Python of vLLM") from error
        self._process = process
        self.end = weakref.finalize(self, _end, process, self.folder)
        return self._answer(process)

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and self.end.alive
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self.failure(f"ended with exit status {process.wait()}") from None
        return self._answer(process)

    def _answer(self, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
        assert process.stdout is not None
        line, latest = b"", time.monotonic() + self.patience
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):  # a worker may also hang in the middle of a line
                if not selector.select(max(0.0, latest - time.monotonic())):
                    raise self.failure(f"was silent for {self.patience:g} s")
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    raise self.failure(f"ended with exit status {process.wait()}")
                line += part
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self.failure(f"said {line[:80]!r}, which is no answer")
        return found

    def failure(self, what: str) -> UserError:
        """Says the end of the log, then ends the worker."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        self.end()
        return UserError("\n".join([f"vLLM's worker {what}; resume the run when its cause is mended:", *lines]))


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue  # what was not read any more is of no use
    shutil.rmtree(folder, ignore_errors=True)


def write_weights(policy: Policy, folder: Path) -> None:
    """The policy as a Hugging Face folder whose head is a tensor of its own.

    vLLM's build for processors packs the head; where a model ties it to the embeddings, a reload leaves the old packed
    one in place (seen in 0.32), so the new policy would be sampled through the old head. Raises UserError for a policy
    that is more, or less, than a model's weights.
    """
    if not isinstance(policy, Decoder | LoRADecoder | HuggingFacePolicy):
        raise UserError(f"vLLM cannot sample a {type(policy).__name__}: it has models of transformers only")
    plain = policy.decoder if isinstance(policy, LoRADecoder) else policy
    if plain.interventions:
        raise UserError("vLLM cannot change hidden states while it samples: leave the interventions' scope")
    whole = policy.merged() if isinstance(policy, LoRADecoder) else policy
    whole.save(folder)
    if not (folder / "config.json").exists():
        raise UserError("vLLM needs whole weights, not an adapter: train the adapter with engine 'decoder'")
    config = read_json(folder / "config.json", "a model's configuration")
    if config.get("tie_word_embeddings"):
        _untie(folder, config)


def _untie(folder: Path, config: Mapping[str, Any]) -> None:
    places: dict[str, str] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file.name)
    if EMBEDDING not in places:
        raise UserError(
            f"vLLM cannot take new weights of {config.get('model_type')}: its tied head has an unknown place"
        )
    with safe_open(folder / places[EMBEDDING], framework="pt") as opened:
        save_file({HEAD: opened.get_tensor(EMBEDDING)}, folder / "head.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {**places, HEAD: "head.safetensors"}}
    write_json(folder / INDEX, index)
    write_json(folder / "config.json", {**config, "tie_word_embeddings": False})
