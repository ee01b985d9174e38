"""A small run of the loop, for its tests: copy two letters and stop, with a table of logits. About 30 ms a step.

Run as a file it is a process that tests can kill: `python copy_run.py FOLDER PLACE NUMBER [OPTIONS AS JSON]` ends
itself by SIGKILL the NUMBER-th time it comes to PLACE (see `PLACES`). Without arguments it reads such argument lists,
one JSON list a line, forks a process for each and answers with its exit code: the imports are paid once.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from postrl import checkpoint, papers, record
from postrl.display import Display
from postrl.evaluate import Evaluation
from postrl.method import Method
from postrl.policies.base import Sampling
from postrl.policies.tabular import Tabular
from postrl.record import read_metrics
from postrl.rollout import Rollout, Turn
from postrl.settings import Settings
from postrl.train import Result, train

LETTERS = 2
END = LETTERS  # the token that ends an answer
SAMPLING = Sampling(max_tokens=3, stop=frozenset({END}))
Score = Callable[[list[int], list[int]], dict[str, float | None]]


def letters_policy(memory: int = 4, dtype: torch.dtype = torch.float32) -> Tabular:
    """Uniform over two letters and the end."""
    return Tabular.uniform(LETTERS + 1, memory, 8, dtype)


def overlap(prompt: list[int], answer: list[int]) -> dict[str, float | None]:
    """`correct`: the two letters and the end, exactly; `overlap`: the share of them at their places."""
    right = [*prompt, END]
    return {
        "correct": float(answer == right),
        "overlap": sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right)),
    }


class Copying:
    """`groups` groups of `size` answers a step, sampled from the policy's present weights; each group a new prompt."""

    def __init__(
        self,
        policy: Tabular,
        groups: int = 6,
        size: int = 4,
        score: Score = overlap,
        shuffle: bool = False,
        seed: int = 0,
    ):
        self.sampler, self.groups, self.size = policy.sampler(), groups, size
        self.score, self.shuffle, self.seed = score, shuffle, seed
        self.position = 0
        self.calls: list[int] = []

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]

    def __call__(self, step: int) -> list[Rollout]:
        self.calls.append(step)
        rollouts = []
        for _ in range(self.groups):
            self.position += 1  # before sampling: a source that fails has moved on
            rollouts += self._group(step, self.position)
        if self.shuffle:
            self._shuffle(rollouts, step)
        return rollouts

    def _group(self, step: int, group: int) -> list[Rollout]:
        prompt = [group // LETTERS % LETTERS, group % LETTERS]  # every prompt once in four groups
        for sample in range(self.size):
            self.sampler.submit(prompt, (self.seed, step, group, sample), SAMPLING)
        rollouts = []
        for completion in self.sampler.poll():
            turns = [Turn(prompt, False), Turn(completion.tokens, True, logp=completion.logp)]
            scores = self.score(prompt, completion.tokens)
            weights = {name: float(name != "correct" or len(scores) == 1) for name in scores}
            place = completion.key[-1]
            item = "".join("ab"[letter] for letter in prompt)
            rollouts.append(
                Rollout(item, group, place, [turns], rewards=scores, reward_weights=weights, stop=completion.stop)
            )
        return rollouts

    def _shuffle(self, rollouts: list[Rollout], step: int) -> None:
        """Every unit gets the rewards of another one, of any group."""
        order = np.random.default_rng([self.seed, step, 1]).permutation(len(rollouts))
        rewards = [rollouts[index].rewards for index in order]
        for rollout, mixed in zip(rollouts, rewards, strict=True):
            rollout.rewards = mixed


def quiet(steps: int = 1) -> tuple[Display, io.StringIO]:
    """A display that writes into a string."""
    text = io.StringIO()
    return Display(steps, console=Console(file=text, width=200)), text


def run(
    folder: Path,
    method: Method | str = "grpo",
    policy: Tabular | None = None,
    source: Callable[[int], list[Rollout]] | None = None,
    resume: bool = False,
    rest: dict | None = None,
    **options,
) -> Result:
    """`train` on the copy task; `options` are those of Settings, `rest` the further arguments of `train`."""
    policy = letters_policy() if policy is None else policy
    source = Copying(policy) if source is None else source
    options = {"steps": 6, "updates": 2, "learning_rate": 0.1, "checkpoint_every": 2} | options
    method = papers.method(method) if isinstance(method, str) else method
    rest = {"display": quiet()[0]} | (rest or {})
    return train(method, policy, source, Settings(**options), folder, resume=resume, **rest)


def evaluation(score: float) -> Evaluation:
    """An evaluation whose pass@1 is `score`."""
    nothing = {"items": [], "scored": [], "correct": [], "intervals": {}, "examples": []}
    zero = dict.fromkeys(("left_out", "missing", "truncated"), 0)
    figure = dict.fromkeys(("mean_tokens", "distinct_correct", "distinct_answers", "distinct_2", "answer_entropy"), 0.0)
    return Evaluation("copy", "test", 0, 1, pass_at={"1": score}, **nothing, **zero, **figure)


def figures(folder: Path) -> list[dict]:
    """Every line of `metrics.jsonl` without its times."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def tables(folder: Path) -> dict[str, bytes]:
    """Every Parquet file of rollouts, whole."""
    return {path.name: path.read_bytes() for path in sorted((folder / "rollouts").glob("*.parquet"))}


def assert_same_run(folder: Path, other: Path) -> None:
    """The same metrics, bit for bit (times aside), and the same files of rollouts."""
    assert [json.dumps(line) for line in figures(folder)] == [json.dumps(line) for line in figures(other)]
    assert tables(folder) == tables(other)


# ---------------------------------------------------------------- a process to kill


class Killer:
    """Ends the process at the `number`-th call of `here`."""

    def __init__(self, number: int):
        self.left = number

    def here(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _in_collection(killer: Killer) -> None:
    group = Copying._group

    def killing(self: Copying, step: int, number: int) -> list[Rollout]:
        killer.here()
        return group(self, step, number)

    Copying._group = killing


def _in_update(killer: Killer) -> None:
    step = torch.optim.AdamW.step

    def killing(self: torch.optim.AdamW, closure: None = None) -> None:
        step(self)
        killer.here()

    torch.optim.AdamW.step = killing


def _in_checkpoint(killer: Killer) -> None:
    """Between the weights and the moments."""
    save = checkpoint.save_file

    def killing(tensors: dict, path: Path) -> None:
        killer.here()
        save(tensors, path)

    checkpoint.save_file = killing


def _before_rename(killer: Killer) -> None:
    """A checkpoint is written whole, but does not have its name yet."""
    rename = Path.rename

    def killing(self: Path, target: Path) -> Path:
        killer.here()
        return rename(self, target)

    Path.rename = killing


def _in_forgetting(killer: Killer) -> None:
    """A checkpoint is in place; an old one is about to be removed."""
    remove = checkpoint.shutil.rmtree

    def killing(path: Path, **options) -> None:
        if Path(path).name.startswith("step_"):
            (Path(path) / "optimizer.safetensors").unlink()
            killer.here()
        remove(path, **options)

    checkpoint.shutil.rmtree = killing


def _in_metrics(killer: Killer) -> None:
    """Half a line is on the disk."""
    append = record.Metrics._append

    def killing(self: record.Metrics, text: str) -> None:
        append(self, text[: len(text) // 2])
        killer.here()
        append(self, text[len(text) // 2 :])

    record.Metrics._append = killing


def _in_rollouts(killer: Killer) -> None:
    write = record.pq.write_table

    def killing(table: object, path: Path, **options) -> None:
        write(table, path, **options)
        killer.here()

    record.pq.write_table = killing


PLACES: dict[str, Callable[[Killer], None]] = {
    "collection": _in_collection,
    "update": _in_update,
    "checkpoint": _in_checkpoint,
    "rename": _before_rename,
    "forgetting": _in_forgetting,
    "metrics": _in_metrics,
    "rollouts": _in_rollouts,
    "nowhere": lambda killer: None,
}


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            main(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main(arguments: Sequence[str]) -> None:
    folder, place, number, *options = arguments
    torch.set_num_threads(1)
    PLACES[place](Killer(int(number)))
    result = run(Path(folder), **json.loads(options[0] if options else "{}"))
    print(result.status, result.progress.step, flush=True)
    sys.exit({"finished": 0, "interrupted": 130}[result.status])


if __name__ == "__main__":
    main(sys.argv[1:]) if len(sys.argv) > 1 else serve()
