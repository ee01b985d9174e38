"""A policy's training passes over several processes: replicated (DDP) or sharded (FSDP2)."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from postrl.policies.base import layers_of
from postrl.ranks import connected, here
from postrl.settings import Parallel


@runtime_checkable
class Resting(Protocol):
    """A policy parts of which have no gradient while it is held, such as one beside a critic that warms up."""

    held: bool

    def hold(self, still: bool) -> None: ...


def hold_alike(policy: nn.Module, trained: nn.Module) -> None:
    """What rests in the policy rests in the module that trains it."""
    if isinstance(policy, Resting) and isinstance(trained, Resting):
        if isinstance(trained, FSDPModule):
            trained.reshard()  # after a forward pass the outermost parameters are gathered ones, not the optimiser's
        trained.hold(policy.held)


@contextmanager
def gradient_sync(policy: nn.Module, now: bool) -> Iterator[None]:
    """Inside, a backward pass adds up gradients over processes (`now`) or leaves that to a later one."""
    if isinstance(policy, DistributedDataParallel) and not now:
        with policy.no_sync():
            yield
        return
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(now)
    with connected():
        yield


def spread(policy: nn.Module, accelerator: Accelerator, parallel: Parallel) -> nn.Module:
    """The module whose forward and backward passes train `policy`, which is moved to the accelerator's device.

    Alone it is the policy itself, and "replicate" wraps it (DDP). "shard" makes a copy whose parameters, gradients and
    optimiser state are spread over the processes (torch's `fully_shard`, FSDP2); the policy itself stays whole, to
    sample and to be saved: `copy_weights` brings it up to date. Raises UserError for a policy without a list of layers.
    """
    policy.to(accelerator.device)
    if here().world == 1 or parallel == "replicate":
        return accelerator.prepare_model(policy)
    trained = copy.deepcopy(policy)
    for layer in layers_of(trained):
        fully_shard(layer)
    fully_shard(trained)
    return trained


def leave() -> None:
    """Part from the other processes: once, at the very end, when nothing that `spread` made is in use any more.

    A process that ends while its connections are open, or closes them under a module that still uses them, now and then
    hangs or aborts (gloo's threads)."""
    if dist.is_initialized():
        gc.collect()
        with connected():
            dist.barrier()
        dist.destroy_process_group()


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Parameters of one onto the other, where `spread` has made two of one policy and one of them is sharded."""
    with torch.no_grad():
        for old, new in zip(source.parameters(), target.parameters(), strict=True):
            if isinstance(old, DTensor):
                new.copy_(old.full_tensor())
            elif isinstance(new, DTensor):
                new.copy_(distribute_tensor(old.detach(), new.device_mesh, new.placements))
