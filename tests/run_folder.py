"""Run folders as training leaves them, made by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from postrl.evaluate import Evaluation, Sample
from postrl.record import write_rollouts
from postrl.rollout import Rollout, Turn, collate

ALPHABET = "ab"


def evaluation(correct: Sequence[int], samples: int = 4, answer: str = "7", items: str = "item") -> Evaluation:
    """Of one problem per entry of `correct`, which says how many of the samples solve it."""
    share = sum(correct) / len(correct) / samples
    return Evaluation(
        task="sums",
        split="test",
        seed=0,
        samples=samples,
        items=[f"{items} {number}" for number in range(len(correct))],
        scored=[samples] * len(correct),
        correct=list(correct),
        pass_at={"1": share, "4": sum(c > 0 for c in correct) / len(correct)},
        intervals={"1": (max(0.0, share - 0.1), min(1.0, share + 0.1)), "4": (0.0, 1.0)},
        left_out=0,
        missing=0,
        truncated=0,
        mean_tokens=3.0,
        distinct_correct=1.0,
        distinct_answers=2.0,
        distinct_2=float("nan"),
        answer_entropy=0.5,
        examples=[Sample(f"{items} 0", "user: 3 + 4", answer, {"correct": float(correct[0] > 0)})],
    )


def rollouts(text: str = "ab", groups: int = 2, size: int = 3) -> list[Rollout]:
    """Answers of which the first of each group is right; every message and name holds `text`."""
    made = []
    for group in range(groups):
        for sample in range(size):
            turns = [Turn([1, 2], False, "ab"), Turn([1, 2, 0], True, text, [-0.5, -1.5, -0.25])]
            messages = [{"role": "user", "content": f"copy {text}"}, {"role": "assistant", "content": text}]
            rewards: dict[str, float | None] = {"correct": float(sample == 0), text[:40]: None}
            made.append(Rollout(text, group, sample, [turns], rewards=rewards, messages=messages))
    return made


def write_step(folder: Path, step: int, made: Sequence[Rollout]) -> None:
    """The Parquet file of a step: advantage 1 for the first of a group, −1 for the others, weight .5, ratio 1.25."""
    batch = collate(made)
    sign = torch.tensor([1.0 if rollout.sample == 0 else -1.0 for rollout in made])
    advantage = torch.where(batch.mask, sign[batch.unit][:, None], 0.0)
    weight, ratio = torch.full_like(advantage, 0.5), torch.full_like(advantage, 1.25)
    write_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet", made, batch, advantage, weight, ratio)


def make_run(
    folder: Path,
    before: Evaluation | None = None,
    after: Evaluation | None = None,
    text: str = "ab",
    steps: int = 2,
    **configuration: object,
) -> Path:
    """A finished run of `steps` steps; `text` is what its model wrote."""
    folder.mkdir(parents=True)
    told = {"method": "grpo", "steps": steps, "seed": 0, "characters": ALPHABET, **configuration}
    about = {"configuration": told, "command": ["recipe.py", text], "versions": {"postrl": "0"}}
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    lines: list[dict[str, object]] = [] if before is None else [{"step": 0, "evaluation": before.to_json()}]
    for step in range(1, steps + 1):
        write_step(folder, step, rollouts(text))
        lines.append({"step": step, "reward": 0.1 * step, "entropy": 1.0 / step, "tokens": 18.0, "time/step": 2.0})
    lines += [] if after is None else [{"step": steps, "evaluation": after.to_json()}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder
