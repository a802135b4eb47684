"""The cache a wrapped model is handed: our key/value tensors and the block layout of the running step.

transformers' layers call ``cache.update(keys, values, layer)`` and pass what it returns to the attention function.
Ours returns the new rows as they are: appending and attending happen in one op, which the attention function calls
with the tensors kept here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_kernels.layout import BlockLayout


def least_rows(device: torch.device) -> int:
    """Rows of a forward, holes behind the others included: on a GPU torch splits a row's sum over more threads the
    fewer rows there are, up to 16."""
    return 32 if device.type == "cuda" else 0


class _RowsLayer(CacheLayerMixin):
    """One layer as transformers sees it: it keeps nothing and gives the new rows back."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name up to transformers 5.17


class LayoutCache(Cache):
    """Key and value rows of every layer, with the layout and lengths of the step that runs.

    k_cache, v_cache [layers, B, capacity, KVH, D]. layout, cache_seqlens, positions [T]: of the running forward, beside
    the caches, with holes behind the rows where there are few; most: the last position. Sequences have different
    lengths and a forward holds rows of all of them, so transformers' one "sequence length" is 0 here and positions
    always travel as explicit ``position_ids``.
    """

    def __init__(
        self, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: Any
    ) -> None:
        super().__init__(layers=[_RowsLayer() for _ in range(layers)])
        shape = (layers, batch, capacity, kv_heads, head_dim)
        self.k_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.v_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.begin(BlockLayout.chain([0] * batch), torch.zeros(batch, dtype=torch.int32))

    def begin(self, layout: BlockLayout, cache_seqlens: Tensor) -> None:
        """Set the layout, which has no holes, and the committed lengths [B] int32 of the next forward, both on the CPU.

        On the CPU ``cache_seqlens`` stays the caller's tensor.
        """
        device = self.k_cache.device
        if layout.rows < (least := least_rows(device)):
            bounds = torch.cat([layout.cu_seqlens_q[:-1], torch.tensor([least], dtype=torch.int32)])
            layout = BlockLayout(bounds, layout.segments, layout.cu_segments)
        positions = layout.positions(cache_seqlens)
        self.most = int(positions.max()) if layout.rows else -1
        self.layout, self.positions = layout.to(device), positions.clamp(min=0).to(device)
        self.cache_seqlens = cache_seqlens.to(device)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """Convolution and recurrent states depend on the order of evaluation: no layout can branch them."""
        raise UnsupportedModelError(
            "a layer with a convolution or recurrent state",
            "its state cannot follow several guesses at a time",
            "decode with model.generate",
        )

    update_conv_state = get_recurrent_state = update_recurrent_state = has_previous_state = get_conv_state

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    @property
    def batch(self) -> int:
        return int(self.k_cache.shape[1])

    @property
    def capacity(self) -> int:
        return int(self.k_cache.shape[2])
