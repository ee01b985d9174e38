"""A run's policy out of its checkpoint, and as a Hugging Face folder that transformers loads."""

from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open
from torch import nn

from postrl import checkpoint
from postrl.compute import recorded_dtype
from postrl.errors import UserError
from postrl.files import read_json, whole_folder
from postrl.policies.base import Policy, Renderer
from postrl.policies.chat import ChatTemplate
from postrl.policies.loading import load_policy
from postrl.policies.lora import LoRA, LoRADecoder
from postrl.record import read_run

Which = Literal["best", "last"] | int


def is_run(folder: Path) -> bool:
    """Whether a training run lies in the folder."""
    return (folder / "run.json").exists()


def configuration(run: Path) -> dict:
    """What a run was told. Raises UserError if `run` holds no run, or a damaged one."""
    return read_run(run)["configuration"]


def find_checkpoint(run: Path, which: Which) -> Path:
    """Folder of the last, the best, or a step's checkpoint. Raises UserError naming those there are."""
    if not is_run(run):
        raise UserError(f"{run} holds no run (no run.json): give the folder of a training run")
    saved = checkpoint.checkpoints(run / "checkpoints")
    if not saved:
        raise UserError(f"{run} has no checkpoint yet: train longer, or with a smaller checkpoint_every")
    if which == "last":
        return saved[-1]
    step = _best_step(saved[-1]) if which == "best" else which
    by_step = {int(path.name.removeprefix("step_")): path for path in saved}
    if step not in by_step:
        said = "the run was never evaluated, so none is the best" if step is None else f"there is none of step {step}"
        raise UserError(f"checkpoint {which} of {run} cannot be had: {said}; there are: {', '.join(map(str, by_step))}")
    return by_step[step]


def _best_step(path: Path) -> int | None:
    progress = read_json(path / "state.json", "a checkpoint of postrl").get("progress")
    if not isinstance(progress, dict):
        raise UserError(f"{path / 'state.json'} is damaged (no progress); delete its folder to use an older checkpoint")
    return progress.get("best_step")


def load_run(run: Path, which: Which = "last") -> tuple[Policy, Renderer]:
    """The policy of a run as it was at a checkpoint, and its renderer.

    The run's configuration names its `model` and, for adapters, `lora_rank`, as the recipes write them. Raises
    UserError if it names none, or the checkpoint is damaged or of another model.
    """
    path = find_checkpoint(run, which)
    told = configuration(run)
    if not isinstance(told.get("model"), str):
        raise UserError(f"{run / 'run.json'} names no model: only a language model's run can be evaluated or exported")
    rank = told.get("lora_rank", 0)
    if not isinstance(rank, int) or rank < 0:
        raise UserError(f"{run / 'run.json'} is damaged: lora_rank is {rank!r}")
    lora = LoRA(rank=rank, alpha=2.0 * rank) if rank else None  # the scale does not follow from the tensors
    policy, renderer = load_policy(told["model"], lora=lora, compute_dtype=recorded_dtype(run))
    assert isinstance(policy, nn.Module)
    # What was trained is what was saved: everything, some layers, or an adapter.
    trained = _names(path / "policy.safetensors")
    part = "policy." if any(name.startswith("critic.") for name in trained) else ""  # beside a critic (ActorCritic)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(part + name in trained)
    checkpoint.restore(path, policy, None, {}, part)
    return policy, renderer


def _names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or missing ({error}); delete its folder to use an older one") from error


def export(run: Path, folder: Path, which: Which = "last") -> Path:
    """Write a run's policy with tokenizer and chat template; returns the checkpoint it came from.

    An adapter on our decoder is merged into its base's weights; the `hf` engine writes a PEFT folder. Raises UserError
    as `load_run` does, or if `folder` holds something already.
    """
    path = find_checkpoint(run, which)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} already holds something: choose a new folder to export to")
    policy, renderer = load_run(run, which)
    whole = policy.merged() if isinstance(policy, LoRADecoder) else policy
    assert isinstance(renderer, ChatTemplate)  # what load_policy gives where it is not told otherwise
    with whole_folder(folder) as beside:
        whole.save(beside)
        renderer.save(beside)
    return path
