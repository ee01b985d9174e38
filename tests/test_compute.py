"""The compute type: measured, asked for, and kept by the run."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from postrl import compute, recipes_folder
from postrl.compute import compute_dtype, name_of, recorded_dtype
from postrl.envs.copy_task import copy_task
from postrl.errors import UserError
from postrl.export import load_run
from postrl.policies.decoder import Decoder
from postrl.settings import Settings
from tiny_models import LLAMA, save_model, tiny_model


def run_of(folder: Path, **configuration: object) -> Path:
    (folder / "run.json").write_text(json.dumps({"configuration": configuration}))
    return folder


@pytest.mark.parametrize("measured", [torch.float32, torch.bfloat16])
def test_auto_is_what_was_measured_and_says_so(
    measured: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(compute, "choose_compute_dtype", lambda device: measured)
    assert compute_dtype("auto") == measured
    assert f"matrix products in {name_of(measured)}" in capsys.readouterr().out


@pytest.mark.parametrize("others", [torch.float32, torch.bfloat16])
def test_all_processes_compute_in_bfloat16_or_none_does(others: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        num_processes, device = 2, torch.device("cpu")

        def __init__(self, cpu: bool) -> None:
            assert cpu is not torch.accelerator.is_available()

        def print(self, *said: object, **how: object) -> None:
            pass

    def all_reduce(mine: torch.Tensor, operation: torch.distributed.ReduceOp.RedOpType) -> None:
        theirs = torch.tensor(int(others == torch.bfloat16))
        least = operation == torch.distributed.ReduceOp.MIN
        mine.copy_(torch.minimum(mine, theirs) if least else torch.maximum(mine, theirs))

    monkeypatch.setattr(compute, "PartialState", Two)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(compute, "choose_compute_dtype", lambda device: torch.bfloat16)
    assert compute_dtype("auto") == others


def test_what_was_asked_for_is_not_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(compute, "choose_compute_dtype", lambda device: pytest.fail("measured"))
    assert compute_dtype("float32") == torch.float32 and compute_dtype("bfloat16") == torch.bfloat16
    assert not capsys.readouterr().out


def test_a_run_keeps_its_own_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "choose_compute_dtype", lambda device: torch.float32)
    assert compute_dtype("auto", run_of(tmp_path, compute_dtype="bfloat16")) == torch.bfloat16
    assert compute_dtype("float32", tmp_path) == torch.float32  # refused later, when the run is opened
    assert recorded_dtype(run_of(tmp_path, model="x")) == torch.float32


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.json is damaged: compute_dtype is 'int8'"):
        compute_dtype("auto", run_of(tmp_path, compute_dtype="int8"))


def test_a_recipe_trains_in_it_and_a_resume_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model", tiny_model(**{**LLAMA, "max_position_embeddings": 512}))
    recipe, seen = recipes_folder.load("reasoning"), []
    monkeypatch.setattr(compute, "choose_compute_dtype", lambda device: torch.bfloat16)

    def run(steps: int, resume: bool, **options: object) -> None:
        settings = Settings(steps=steps, updates=2, checkpoint_every=1)
        measure = recipe.config().measure
        recipe.main(
            recipe.config(
                model=str(model),
                train=settings,
                groups_per_step=1,
                group_size=2,
                max_tokens=2,
                measure=dataclasses.replace(measure, items=1, samples=1, ks=(1,)),
                out=tmp_path / "run",
                resume=resume,
                threads=1,
                **options,
            ),
            task=copy_task(),
        )

    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder,
        "forward",
        lambda self, *rest: seen.append((self.compute_dtype, self.recompute)) or forward(self, *rest),
    )
    run(1, resume=False, recompute=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["configuration"]["compute_dtype"] == "bfloat16"
    monkeypatch.setattr(compute, "choose_compute_dtype", lambda device: torch.float32)  # another machine
    run(2, resume=True, recompute=True)
    assert set(seen) == {(torch.bfloat16, True)}
    assert load_run(tmp_path / "run")[0].compute_dtype == torch.bfloat16
    with pytest.raises(UserError, match="was run with compute_dtype='bfloat16', not 'float32'"):
        run(3, resume=True, recompute=True, compute_dtype="float32")


def test_processes_without_an_accelerator_talk_over_gloo():
    """Started by torchrun, which says nothing of processors: whoever asks first decides for the whole run."""
    ask = (
        "import torch.distributed as dist; from postrl.compute import compute_dtype; compute_dtype('auto', None);"
        "print(dist.get_backend())"
    )
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=os.environ | alone)
    assert done.stdout.splitlines()[-1:] == ["nccl" if torch.cuda.is_available() else "gloo"], done.stderr
