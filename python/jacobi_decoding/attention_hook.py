"""The attention function and the mask function that transformers calls by the name ``jacobi``.

transformers looks functions up by ``config._attn_implementation`` and calls them with the attention module first. Many
model families drop extra keyword arguments on the way, so nothing travels by keyword: the function finds the running
layout and cache by the module, in a registry filled when the model was adapted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.layout_cache import LayoutCache
from jacobi_decoding.mask_pattern import window_of_mask
from jacobi_kernels.layout import BlockLayout

NAME = "jacobi"

# Arguments that do not change what attention computes.
# fmt: off
_INERT = frozenset({
    "position_ids", "cache_position", "position_embeddings", "use_cache", "cache", "past_key_value",
    "past_key_values", "output_attentions", "output_hidden_states", "return_dict", "output_router_logits",
    "deterministic", "num_items_in_batch", "logits_to_keep"
})
# fmt: on
_REASONS = {
    "s_aux": "attention sinks (s_aux) are not supported",
    "sinks": "attention sinks (sinks) are not supported",
    "position_bias": "a position bias on the scores is not supported",
    "alibi": "ALiBi is not supported",
    "indices": "sparse attention by token indices is not supported",
    "block_indices": "sparse attention by block indices is not supported",
}
_REMEDY = "decode this model with model.generate"

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[AttentionHook]] = weakref.WeakKeyDictionary()
_PROBING: ContextVar[bool] = ContextVar("jacobi_probing", default=False)


@dataclass(frozen=True)
class AttentionSlot:
    """What the probe learned about one attention module; ``window_size`` is -1 for full attention."""

    index: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window_size: int


class AttentionHook:
    """Routes the attention calls of one model to the running cache.

    slots: one per attention module in the order of their calls, filled by :meth:`probing`.
    """

    def __init__(self) -> None:
        self.slots: weakref.WeakKeyDictionary[nn.Module, AttentionSlot] = weakref.WeakKeyDictionary()
        self._cache: LayoutCache | None = None
        self._probe: BlockLayout | None = None
        self._thread = 0  # the one whose forward the cache or the probe is for

    def own(self, decoder: nn.Module) -> None:
        """Enter the modules of ``decoder``, some of which are attention modules, in the registry."""
        for module in decoder.modules():
            _OWNERS[module] = weakref.ref(self)

    @contextmanager
    def probing(self, layout: BlockLayout) -> Iterator[None]:
        """Learn the attention modules from one forward over ``layout``, which starts at position 0."""
        self.slots.clear()
        self._probe = layout
        self._thread = threading.get_ident()
        token = _PROBING.set(True)
        try:
            yield
        finally:
            _PROBING.reset(token)
            self._probe = None

    @contextmanager
    def running(self, cache: LayoutCache) -> Iterator[None]:
        """Attend over ``cache`` with its current layout."""
        self._cache = cache
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._cache = None

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, softcap: float
    ) -> Tensor:
        """q [T, H, D], k and v [T, KVH, D] of every row of the running layout; returns [T, H, D]."""
        if (self._probe or self._cache) is not None and self._thread != threading.get_ident():
            raise RuntimeError("the model is wrapped for Jacobi decoding by another thread: call it afterwards")
        if self._probe is not None:
            window = self._learn(module, k, v, mask)
            layout = self._probe
            return torch.ops.jacobi.multi_block_attention.default(
                q,
                k,
                v,
                layout.cu_seqlens_q,
                layout.segments,
                layout.cu_segments,
                softmax_scale=scale,
                window_size=window,
                softcap=softcap,
            )[0]
        cache = self._cache
        if cache is None:
            raise RuntimeError("the model is wrapped for Jacobi decoding: call it after generation has ended")
        slot = self.slots.get(module)
        if slot is None:
            raise _unsupported(module, "it was not called when the model was adapted")
        if mask is not None:
            raise _unsupported(module, "the model builds an attention mask of its own")
        layout = cache.layout
        return torch.ops.jacobi.multi_block_attention_with_kvcache.default(
            q,
            k,
            v,
            cache.k_cache[slot.index],
            cache.v_cache[slot.index],
            cache.cache_seqlens,
            layout.cu_seqlens_q,
            layout.segments,
            layout.cu_segments,
            softmax_scale=scale,
            window_size=slot.window_size,
            softcap=softcap,
        )

    def _learn(self, module: nn.Module, k: Tensor, v: Tensor, mask: Any) -> int:
        window = getattr(mask, "jacobi_window_size", None)
        if window is None:
            raise _unsupported(module, "the model does not build its attention mask with transformers.masking_utils")
        if module in self.slots:
            raise _unsupported(module, "it runs more than once in a forward, so it needs more than one cache layer")
        if v.shape != k.shape:
            raise _unsupported(module, f"keys {list(k.shape[1:])} and values {list(v.shape[1:])} differ in shape")
        self.slots[module] = AttentionSlot(len(self.slots), k.shape[1], k.shape[2], k.dtype, window)
        return window


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
    """What ``AttentionInterface`` calls: query [1, H, T, D], key and value [1, KVH, T, D] to [1, T, H, D].

    ``sliding_window`` is not read: kernels that build no mask need it, but what the model means is its mask, and the
    probe took the window from there.
    """
    refuse_arguments(module, kwargs, is_causal)
    if dropout:
        raise UnsupportedModelError(type(module).__name__, "attention dropout is active", "call model.eval() first")
    reference = _OWNERS.get(module)
    hook = reference() if reference is not None else None
    if hook is None:
        raise RuntimeError(f"{type(module).__name__}: attention 'jacobi' only works inside jacobi_decoding")
    out = hook.attend(
        module, _rows(query), _rows(key), _rows(value), attention_mask, scaling, float(softcap) if softcap else 0.0
    )
    return out.unsqueeze(0), None


def refuse_arguments(
    module: nn.Module, arguments: Mapping[str, Any], is_causal: bool | None, remedy: str = _REMEDY
) -> None:
    """Raise UnsupportedModelError when ``arguments``, those that no kernel of ours takes, would change the result."""
    for name, given in arguments.items():
        if given is not None and given is not False and name not in _INERT:
            why = _REASONS.get(name, f"the attention argument {name!r} is unknown")
            raise UnsupportedModelError(type(module).__name__, why, remedy)
    if is_causal is False:
        raise UnsupportedModelError(type(module).__name__, "attention is not causal", remedy)


def mask_function(*args: Any, **kwargs: Any) -> Tensor | None:
    """What ``AttentionMaskInterface`` calls. Attention goes by the layout, so there is no mask; a probe gets a marker
    that carries the window of the layers it is handed to."""
    if not _PROBING.get():
        return None
    window = window_of_mask(kwargs.get("mask_function"), kwargs.get("local_size"))
    marker = torch.zeros(1, 1, kwargs["q_length"], kwargs["kv_length"])
    marker.jacobi_window_size = window  # type: ignore[attr-defined]
    return marker


def _rows(x: Tensor) -> Tensor:
    """[1, heads, T, D] to dense [T, heads, D]."""
    return x.squeeze(0).transpose(0, 1).contiguous()


def _unsupported(module: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(type(module).__name__, why, _REMEDY)


def register() -> None:
    """Make the name known to transformers; again and again does no harm."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_function)
