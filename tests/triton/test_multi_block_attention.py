"""Attention over packed layouts in Triton, forward and backward, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import tests.kernels.test_attention_backward as cases
from jacobi_kernels import reference
from jacobi_kernels.triton.multi_block_attention import multi_block_attention
from tests.kernels.helpers import (
    Layout,
    assert_as_accurate,
    assert_equal,
    chains,
    int32,
    make_layout,
    random_layout,
    random_tensor,
)
from tests.kernels.test_attention_backward import OPTIONS, qkv, training_layout


def forward(inputs: tuple[Tensor, ...], layout: Layout, device: str, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = multi_block_attention(*(t.to(device) for t in (*inputs, *layout)), **options)
    return out.cpu(), lse.cpu()


def check_forward(inputs: tuple[Tensor, ...], layout: Layout, device: str, **options: Any) -> None:
    out, lse = forward(inputs, layout, device, **options)
    exact, exact_lse = reference.multi_block_attention(*inputs, *layout, **options)
    low, low_lse = reference.multi_block_attention(*inputs, *layout, **options, dtype=torch.float32)
    live = exact_lse[0].isfinite()
    assert out.dtype == inputs[0].dtype
    assert lse.dtype == torch.float32
    assert not out[~live].any()
    assert bool((lse[:, ~live] == -torch.inf).all())
    if live.any():
        assert_as_accurate(out[live], low[live].to(out.dtype), exact[live], factor=4.0, slack=4.0)
        assert_as_accurate(lse[:, live], low_lse[:, live], exact_lse[:, live], factor=4.0, slack=4.0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (9, 3, 40), (2, 2, 128), (35, 1, 7)])
def test_forward_close_to_float64(
    heads: int, kv_heads: int, head_dim: int, options: dict[str, Any], device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    layout = make_layout(
        [[(0, 50, -1, 0), (52, 9, 0, 45), (61, 3, 1, 4), (64, 2, 1, 0)], [], [(1, 5, -1, 0)]], row_counts=[70, 2, 6]
    )
    for dtype in dtypes:
        check_forward(qkv(1, layout.rows, heads, kv_heads, head_dim, dtype), layout, device, **options)
