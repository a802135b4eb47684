"""Checkpoints of a run that resume bit for bit: trained parameters and optimizer state after so many steps.

    step-00000040/state.pt           tensors, read with ``weights_only``
    step-00000040/checkpoint.json    step and sha256 of state.pt

A folder is written under a temporary name and renamed, so what is there is whole unless it was damaged later; the
previous one is kept for that case. Values are whole tensors by parameter name, whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jacobi_training.distributed import Ranks, share_like, whole
from jacobi_training.run_settings import write_json

KEPT = 2
_NAME = re.compile(r"step-(\d{8})")
_STATE, _INFO = "state.pt", "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; one line that names it and the remedy."""


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Write the checkpoint after ``step`` steps and drop all but the last two; every rank calls, the first writes."""
    state = _state(model, optimizer)
    if ranks.first:
        target = folder / f"step-{step:08d}"
        temporary = folder / f".{target.name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            torch.save(state, temporary / _STATE)
            digest = _digest(temporary / _STATE)
            write_json(temporary / _INFO, {"step": step, "sha256": digest})
            shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same step
            os.replace(temporary, target)
            for old in _found(folder)[:-KEPT]:
                shutil.rmtree(folder / f"step-{old:08d}")
        except (OSError, RuntimeError) as error:  # torch.save raises the second when a file is cut short
            reason = getattr(error, "strerror", None) or "a file was cut short"
            raise OSError(f"cannot write checkpoints to {str(folder)!r}: {reason}; make room there") from None
    ranks.wait()


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, warn: Callable[[str], None]) -> int:
    """Load the newest whole checkpoint; the step that it was written after, 0 when there is none.

    warn: called with one line for each damaged checkpoint that is passed over. Raises CheckpointError when all are
    damaged, or when a whole one is of another model.
    """
    steps = _found(folder)
    for step in reversed(steps):
        path = folder / f"step-{step:08d}"
        try:
            state = _read(path, step)
        except CheckpointError as error:
            warn(f"{error}; going back to the one before")
            continue
        try:
            _load(state, model, optimizer)
        except (KeyError, RuntimeError, TypeError, AttributeError):
            raise CheckpointError(f"{str(path)!r} is of another model; delete {str(folder)!r} to start anew") from None
        return step
    if steps:
        raise CheckpointError(f"no checkpoint in {str(folder)!r} is whole; delete that folder to start anew")
    return 0


def _found(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _read(path: Path, step: int) -> dict[str, Any]:
    try:
        info = json.loads((path / _INFO).read_text(encoding="utf-8"))
        whole_file = info["step"] == step and info["sha256"] == _digest(path / _STATE)
        if whole_file:
            return torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError):
        pass
    raise CheckpointError(f"checkpoint {str(path)!r} is damaged")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by the names they have outside any wrapper."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {name: p for name, p in inner.named_parameters() if p.requires_grad}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = trained(model)
    return {
        "parameters": {name: whole(p) for name, p in parameters.items()},
        "optimizer": {
            name: {key: whole(value) for key, value in optimizer.state[p].items()} for name, p in parameters.items()
        },
    }


@torch.no_grad()
def _load(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = trained(model)
    if set(state["parameters"]) != set(parameters):
        raise KeyError("parameters")
    for name, p in parameters.items():
        value: Tensor = state["parameters"][name]
        p.copy_(share_like(value, p))
        optimizer.state[p] = {key: share_like(part.to(p.device), p) for key, part in state["optimizer"][name].items()}
