"""The ranks of a run under ``torchrun`` or ``accelerate launch``, and how a model is spread over them.

Both launchers set RANK, WORLD_SIZE and a meeting point in the environment; without them there is one rank. Every rank
reads the same files, so a run over several machines needs a shared folder.
"""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from jacobi_training.fit_config import PARALLEL
from jacobi_training.model import TrainingModel


@dataclass(frozen=True)
class Ranks:
    """This process and how many there are."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """``values`` added up over the ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values


def own_device(device: str) -> str:
    """``device`` of this rank: 'cuda' is the GPU that the launcher gave to it."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device


def join_ranks(device: str = "cpu") -> Ranks:
    """The ranks of this run; the process group is joined on first use, over gloo on CPUs and nccl between GPUs."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Ranks()
        # The others wait while the first rank packs, or for the rank with the longest trajectories.
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(days=1))
        atexit.register(_leave)
    return Ranks(dist.get_rank(), dist.get_world_size())


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def spread(model: TrainingModel, ranks: Ranks, parallel: str) -> nn.Module:
    """``model`` over the ranks: ``ddp`` keeps a copy on each, ``fsdp2`` a share of every parameter."""
    if parallel not in PARALLEL:
        raise ValueError(f"parallel must be {' or '.join(PARALLEL)}, got {parallel!r}")
    if ranks.world == 1:
        return model
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.world,))
    for layer in model.layers():
        fully_shard(layer, mesh=mesh)
    # Embedding, norm and head belong to the outermost group: the loss in its forward sees the head's whole weight.
    fully_shard(model, mesh=mesh)
    return model


def without_sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around forward and backward of a micro-batch: DDP adds gradients up over the ranks in the last one only."""
    if last or not isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def whole(value: Any) -> Any:
    """A parameter, gradient or optimizer value with all its shares, on the CPU; every rank must ask for it."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, Tensor) else value


def share_like(value: Any, parameter: Tensor) -> Any:
    """The part of a whole tensor that this rank keeps of it when it keeps its part of ``parameter``."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def clip(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale all gradients down to a common norm of at most ``limit`` (0: leave them); returns the norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
