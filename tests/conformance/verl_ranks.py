"""A script for torchrun: verl's training worker and FSDP2 engine on CPUs, with our losses. Rank 0 writes each update.

usage: verl_ranks.py MODEL OUT METHOD MICRO_BATCH_SIZE

verl knows no platform without an accelerator; `Processor` below tells its engine the names that it asks for. Packing of
rows (use_remove_padding) needs flash attention and is switched off.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conformance import verl_side
from conformance.cases import make_case, stopping
from postrl.parallel import leave

MINI = 8


class Idle:
    """The device module of plain processors: nothing to wait for, to empty or to measure."""

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self) -> str:
        return "CPU"

    def is_available(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *values, **named: 0


def without_accelerator() -> None:
    """A platform of plain processors, for code that asks verl what it runs on. Before the engine is imported."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class Processor(PlatformCUDA):
        device_name = "cpu"
        device_module = Idle()

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(Processor())


def worker(folder: str, micro: int) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.engine import TrainingWorkerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker

    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(FSDPEngineWithLMHead)
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=folder,
            override_config={"attn_implementation": "eager"},
            load_tokenizer=False,
            enable_gradient_checkpointing=False,
            use_remove_padding=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision=single,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=micro,
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=1.0, weight_decay=0.0, clip_grad=1e9, total_training_steps=4, lr_warmup_steps=0
        ),
        checkpoint_config=CheckpointConfig(),
    )
    torch.distributed.init_process_group("gloo")  # verl would ask for one backend for processors and one for devices
    made = TrainingWorker(config)
    made.reset()
    return made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(folder: str, out: str, name: str, micro: str) -> None:
    torch.set_num_threads(1)
    import verl  # noqa: F401

    without_accelerator()
    from torch.distributed.tensor import DTensor
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    from postrl.adapters import verl_trainer

    verl_trainer.register()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case = stopping(make_case(1, missing=0.15), verl_side.LONGEST)
    rows, config = verl_side.prepared(
        case, Path(folder), f"postrl_{name}", pytest.MonkeyPatch(), ranks=ranks, mini=MINI
    )
    share = torch.arange(len(rows)).chunk(ranks)[rank]
    data = tu.index_select_tensor_dict(rows, share)
    ids = [torch.cat([a, b]) for a, b in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)]
    data["input_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    data["position_ids"] = torch.nested.as_nested_tensor([torch.arange(len(x)) for x in ids], layout=torch.jagged)
    data = data.exclude("extra_fields", "uid", "rm_scores", "returns")
    tu.assign_non_tensor(
        data, mini_batch_size=MINI, global_batch_size=MINI, epochs=1, seed=1, temperature=1.0, calculate_entropy=False
    )
    made = worker(folder, int(micro))
    made.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor)))
    module, step = made.engine.module, made.engine.optimizer_step
    assert ranks == 1 or any(isinstance(p, DTensor) for p in module.parameters())
    number = 0

    def watched() -> Any:
        nonlocal number
        named = {n: p for n, p in module.named_parameters() if p.grad is not None}
        gradient, weights = {n: whole(p.grad) for n, p in named.items()}, {n: whole(p) for n, p in named.items()}
        if rank == 0:
            save_file(gradient, Path(out) / f"gradient_{number}.safetensors")
            save_file(weights, Path(out) / f"weights_{number}.safetensors")
        number += 1
        return step()

    made.engine.optimizer_step = watched
    metrics = tu.get(made.train_mini_batch(data), "metrics")
    if rank == 0:
        (Path(out) / "found.json").write_text(json.dumps({"losses": metrics["loss"], "updates": number}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
