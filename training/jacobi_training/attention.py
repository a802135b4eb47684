"""The attention of a model in training: ``multi_block_attention`` under the name that transformers calls it by.

The layout travels where a mask would: the mask function hands every layer a :class:`LayoutMask`, which transformers
passes on untouched. So gradient checkpointing recomputes with the layout of its own forward, and compiled layers see
plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from jacobi_decoding.attention_hook import refuse_arguments
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.mask_pattern import window_of_mask

NAME = "jacobi_training"
REMEDY = "train another model"


class LayoutMask(NamedTuple):
    """What a layer gets as its mask: the block layout (see :mod:`jacobi_kernels.layout`) and the layer's window.

    window_size: -1 for full attention, else the tokens before a query's own that it sees.
    """

    cu_seqlens_q: Tensor
    segments: Tensor
    cu_segments: Tensor
    window_size: int


@dataclass
class _Running:
    layout: tuple[Tensor, Tensor, Tensor]
    windows: dict[int | None, int] = field(default_factory=dict)  # by the window that transformers names


_RUNNING: ContextVar[_Running | None] = ContextVar("jacobi_training_layout", default=None)


@contextmanager
def attending(cu_seqlens_q: Tensor, segments: Tensor, cu_segments: Tensor) -> Iterator[None]:
    """Forwards inside attend by this layout (its three int32 tensors)."""
    token = _RUNNING.set(_Running((cu_seqlens_q, segments, cu_segments)))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What ``AttentionInterface`` calls: query [1, H, R, D], key and value [1, KVH, R, D] to [1, R, H, D].

    Under autocast the three may come in different dtypes; they meet in the wider one. The window is the mask's, as in
    decoding. Raises UnsupportedModelError for what the op does not compute.
    """
    refuse_arguments(module, kwargs, is_causal, REMEDY)
    if dropout:
        remedy = "set attention_dropout to 0 in the model's config.json"
        raise UnsupportedModelError(type(module).__name__, "attention dropout is active", remedy)
    if not isinstance(attention_mask, LayoutMask):
        why = "the model does not build its attention mask with transformers.masking_utils"
        raise UnsupportedModelError(type(module).__name__, why, REMEDY)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    q, k, v = (x[0].transpose(0, 1).to(dtype).contiguous() for x in (query, key, value))
    out, _ = torch.ops.jacobi.multi_block_attention.default(
        q,
        k,
        v,
        attention_mask.cu_seqlens_q,
        attention_mask.segments,
        attention_mask.cu_segments,
        softmax_scale=scaling,
        window_size=attention_mask.window_size,
        softcap=float(softcap) if softcap else 0.0,
    )
    return out[None], None


def mask_function(*args: Any, **kwargs: Any) -> LayoutMask:
    """What ``AttentionMaskInterface`` calls, once per kind of layer and forward."""
    running = _RUNNING.get()
    if running is None:
        raise RuntimeError("attention 'jacobi_training' only works inside jacobi_training.model.TrainingModel")
    named = kwargs.get("local_size")
    if named not in running.windows:
        running.windows[named] = window_of_mask(kwargs.get("mask_function"), named)
    return LayoutMask(*running.layout, running.windows[named])


def register() -> None:
    """Make the name known to transformers; again and again does no harm."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_function)
