"""Packed weights straight from the files that hold a model: transformers' modules are never built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jacobi_decoding.devices import DeviceError, interpreted
from jacobi_decoding.errors import LoadError, UnsupportedModelError, first_line
from jacobi_decoding.lazy_weights import LazyWeights, TensorFiles
from jacobi_decoding.packed_model import PackedModel
from jacobi_decoding.step_config import step_config, step_shapes
from jacobi_kernels.step_weights import pack_step_weights

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_packed_device(format: str, device: str | torch.device) -> None:
    """Raise DeviceError, one line, where packed weights cannot run: on a GPU, and in Triton's interpreter."""
    where = "Triton's interpreter" if interpreted() else str(device)
    if where == "cpu":
        return
    remedy = "packed=False" if format in ("float32", "bfloat16") else "float32 or bfloat16"
    remedy = "unset JACOBI_BACKEND" if interpreted() else f"use --device cpu, or {remedy}"
    raise DeviceError(f"packed {format} weights run on the CPU, not on {where}; {remedy}")


def load_packed(config: Any, generation_config: Any, files: TensorFiles, format: str, source: str) -> PackedModel:
    """Pack the tensors of ``files`` in ``format`` for the model of ``config``.

    source: where they come from, for messages. Holds the packed weights and one tensor at a time in memory. Raises
    UnsupportedModelError when the step op cannot run the model, LoadError for tensors that are missing or damaged.
    """
    from safetensors import SafetensorError

    try:
        step = step_config(config)
    except UnsupportedModelError:
        raise
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise LoadError(f"the configuration of {source!r} is damaged: {first_line(error)}; copy it again") from error
    dtype = torch.bfloat16 if format == "bfloat16" else torch.float32
    try:
        names = _names(config, files, source)
        weights = pack_step_weights(LazyWeights(files, names, dtype), step, format)
    except LoadError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise damaged_weights(source, error) from error
    return PackedModel(config, generation_config, weights, step)


def damaged_weights(source: str, error: Exception) -> LoadError:
    return LoadError(f"cannot load the weights of {source!r}: {first_line(error)}; copy or download them again")


def missing_weights(source: str, missing: list[str]) -> LoadError:
    return LoadError(
        f"the weights of {source!r} lack {len(missing)} tensors, {min(missing)} among them; "
        "use a checkpoint that was saved from a causal language model"
    )


def _names(config: Any, files: TensorFiles, source: str) -> dict[str, str]:
    """What the model's tensors are called in ``files``; without the head where it is the embedding."""
    wanted = step_shapes(config)
    found: dict[str, str] = {}
    for name in wanted:
        for stored in (name, name.removeprefix("model.")):  # the latter in checkpoints of a model without its head
            if stored in files:
                found.setdefault(name, stored)
    if config.tie_word_embeddings:
        # As transformers does: one of them will do, and both are kept when they differ.
        found.setdefault(_EMBEDDING, found.get(_HEAD, ""))
        found.setdefault(_HEAD, found[_EMBEDDING])
        if found[_HEAD] == found[_EMBEDDING] or _equal(files, found[_HEAD], found[_EMBEDDING]):
            del found[_HEAD], wanted[_HEAD]
    missing = [name for name in wanted if not found.get(name)]
    if missing:
        raise missing_weights(source, missing)
    for name, shape in wanted.items():  # before memory is taken for what the configuration says
        if files.shape(found[name]) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(files.shape(found[name]))}")
    return found


def _equal(files: TensorFiles, one: str, other: str) -> bool:
    values = (files.read(name) for name in (one, other))
    return torch.equal(*(value if isinstance(value, Tensor) else value.dequantize() for value in values))
