"""Attention over packed layouts in Triton, forward and backward: against float64, and the same bits again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels import reference
from jacobi_kernels.triton.multi_block_attention import multi_block_attention
from jacobi_kernels.triton.multi_block_attention_backward import multi_block_attention_backward
from tests.kernels.helpers import (
    Layout,
    assert_as_accurate,
    assert_equal,
    chain_with_candidates,
    chains,
    int32,
    make_layout,
    random_tensor,
)
from tests.kernels.test_attention_backward import OPTIONS, layouts, masked_gradients, qkv, training_layout

CASES = [
    *((2, 1, 64, options) for options in OPTIONS),
    (2, 2, 40, OPTIONS[2]),
    (7, 1, 7, OPTIONS[4]),
    (1, 1, 96, OPTIONS[0]),
]


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


def gradients(
    inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], layout: Layout, device: str, **options: Any
) -> list[Tensor]:
    """dq, dk, dv for the sum of the results times ``weights`` (out's alone, or both's)."""
    q, k, v, *tables = (t.to(device) for t in (*inputs, *layout))
    out, lse = multi_block_attention(q, k, v, *tables, **options)
    grad_out, *grad_lse = (w.to(device) for w in weights)
    results = multi_block_attention_backward(
        grad_out, q, k, v, out, lse, *tables, grad_softmax_lse=grad_lse[0] if grad_lse else None, **options
    )
    return [t.cpu() for t in results]


def check_backward(
    seed: int, layout: Layout, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, **options: Any
) -> None:
    inputs = qkv(seed, layout.rows, heads, kv_heads, head_dim, dtype)
    weights = (random_tensor(seed + 3, layout.rows, heads, head_dim, dtype=dtype),)
    if seed % 2:
        weights += (random_tensor(seed + 4, heads, layout.rows),)
    actual = gradients(inputs, weights, layout, device, **options)
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in inputs]
    if layout.rows == 0:
        return
    exact = masked_gradients(inputs, weights, layout, torch.float64, **options)
    low = masked_gradients(inputs, weights, layout, torch.float32, **options)
    # dq and dk carry the roundings of softmax_lse and out as well, by differences that may cancel to nothing.
    largest = max(float(t.abs().max()) for t in (*exact, *weights))
    floor = 16 * torch.finfo(torch.float32).eps * largest
    slack = 4.0 if dtype == torch.float32 else 8.0
    for ours, rough, want in zip(actual, low, exact, strict=True):
        assert_as_accurate(ours, rough.to(dtype), want, factor=4.0, slack=slack, floor=floor)
    live = torch.zeros(layout.rows, dtype=torch.bool)
    for start, length, _, _ in layout.segments.tolist():
        live[start : start + length] = True
    assert all(not t[~live].any() for t in actual), "gradients in holes"


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "options"), CASES, ids=str)
def test_forward_close_to_float64(
    heads: int, kv_heads: int, head_dim: int, options: dict[str, Any], device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    layout = make_layout(
        [[(0, 40, -1, 0), (42, 9, 0, 35), (51, 3, 1, 4), (54, 2, 1, 0)], [], [(1, 5, -1, 0)]], row_counts=[60, 2, 6]
    )
    for dtype in dtypes:
        check_forward(qkv(1, layout.rows, heads, kv_heads, head_dim, dtype), layout, device, **options)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "options"), CASES, ids=str)
def test_backward_close_to_autograd_with_a_mask(
    heads: int, kv_heads: int, head_dim: int, options: dict[str, Any], device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    layout = training_layout((20, 9, 3, "window", 5), (3, 16, 1, "all", 16))
    for dtype in dtypes:
        check_backward(1, layout, heads, kv_heads, head_dim, dtype, device, **options)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=layouts(),
    seed=st.integers(0, 1000),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 40]),
    window_size=st.sampled_from([-1, -1, 0, 3, 30]),
    softcap=st.sampled_from([0.0, 0.0, 4.0]),
)
def test_any_layout(
    layout: Layout, seed: int, group: int, head_dim: int, window_size: int, softcap: float, device: str
) -> None:
    options = {"window_size": window_size, "softcap": softcap}
    check_forward(qkv(seed, layout.rows, group, 1, head_dim, torch.float32), layout, device, **options)
    check_backward(seed, layout, group, 1, head_dim, torch.float32, device, **options)


@pytest.mark.parametrize("window_size", [-1, 20])
def test_a_chain_of_short_segments_is_one_chain(window_size: int, device: str) -> None:
    """Tiles of keys are filled across segments: pieces of 1 to 3 tokens give what one long segment gives."""
    segments, live, row = [], [], 0
    while len(live) < 40:
        length = min(1 + len(segments) % 3, 40 - len(live))
        segments.append((row, length, len(segments) - 1, segments[-1][1] if segments else 0))
        live += range(row, row + length)
        row += length + int(len(segments) % 4 == 0)
    layout = make_layout([segments])
    inputs = qkv(18, layout.rows, 2, 1, 16, torch.float32)
    out, lse = forward(inputs, layout, device, window_size=window_size)
    whole = forward(tuple(t[live] for t in inputs), chains(40), device, window_size=window_size)
    torch.testing.assert_close(out[live], whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, live], whole[1], rtol=1e-5, atol=1e-5)


def test_extreme_scores(device: str) -> None:
    layout, inputs = chains(70), qkv(7, 70, 2, 1, 32, torch.float32)
    weights = (random_tensor(8, 70, 2, 32),)
    for scale in (0.0, -100.0, 1e4):
        out, lse = forward(inputs, layout, device, softmax_scale=scale)
        exact_lse = reference.multi_block_attention(*inputs, *layout, softmax_scale=scale)[1]
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        assert bool(out.isfinite().all())
        assert all(bool(t.isfinite().all()) for t in gradients(inputs, weights, layout, device, softmax_scale=scale))


# Exactness ------------------------------------------------------------------------------------------------------------


def test_what_nobody_sees_changes_nothing(device: str) -> None:
    """NaN in holes, other numbers in a candidate that the rest does not see; and a second run gives the same bits."""
    layout = chain_with_candidates(20, 2, 9, gap=2)  # candidates at rows 22..30 and 33..41
    inputs, weights = qkv(31, layout.rows, 2, 1, 32, torch.float32), (random_tensor(32, layout.rows, 2, 32),)
    out, lse = forward(inputs, layout, device)
    expected = gradients(inputs, weights, layout, device)
    assert_equal(gradients(inputs, weights, layout, device), expected, "again")
    live = torch.zeros(layout.rows, dtype=torch.bool)
    for start, length, _, _ in layout.segments.tolist():
        live[start : start + length] = True
    for t in (*inputs, *weights):
        t[~live] = torch.nan
    assert_equal(forward(inputs, layout, device), (out, lse), "holes")
    assert_equal(gradients(inputs, weights, layout, device), expected, "holes")
    for t in inputs:
        t[22:31] *= -2.0
    others = torch.cat([torch.arange(22), torch.arange(31, layout.rows)])
    changed = forward(inputs, layout, device)
    assert_equal((changed[0][others], changed[1][:, others]), (out[others], lse[:, others]), "forward")
    dq, dk, dv = gradients(inputs, weights, layout, device)
    assert_equal(dq[others], expected[0][others], "dq")
    assert_equal((dk[33:], dv[33:]), (expected[1][33:], expected[2][33:]), "the other candidate")


def test_strided_arguments(device: str) -> None:
    """Slices of one fused projection, as models make them; and the gradient of a sum, which has no strides."""
    layout = chains(5, 30)
    fused = random_tensor(22, 35, 4 + 2 + 2, 16).to(device)
    views = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    weight = torch.ones(()).expand(35, 4, 16)
    dense = tuple(t.contiguous() for t in views)
    assert_equal(forward(views, layout, device), forward(dense, layout, device))
    lse_weight = random_tensor(23, 35, 4).T
    expected = gradients(dense, (weight.contiguous(), lse_weight.contiguous()), layout, device)
    assert_equal(gradients(views, (weight, lse_weight), layout, device), expected)


@pytest.mark.parametrize("window_size", [2**31 - 1, 2**63 - 1])
def test_a_huge_window_sees_all(window_size: int, device: str) -> None:
    layout = training_layout((10, 6, 2, "all", 6))
    inputs = qkv(16, layout.rows, 2, 1, 16, torch.float32)
    assert_equal(forward(inputs, layout, device, window_size=window_size), forward(inputs, layout, device))


@pytest.mark.parametrize(
    "broken",
    [
        (1, (20, 8, 0, 12)),  # rows behind the sequence
        (1, (-3, 8, 0, 12)),
        (1, (12, 8, 1, 3)),  # its own parent
        (1, (12, 8, 2, 3)),  # a parent that comes later
        (1, (12, 8, 0, 13)),  # more than the parent has
        (1, (12, 8, 0, -1)),
        (1, (12, -8, 0, 12)),
        (1, (12, 2**31 - 1, 0, 12)),
    ],
)
def test_segments_that_break_the_rules_are_holes(broken: tuple[int, tuple[int, ...]], device: str) -> None:
    """So are segments that continue them; the rest is what it is without them."""
    layout = make_layout([[(0, 12, -1, 0), (12, 8, 0, 12), (20, 3, 1, 8)], [(0, 4, -1, 0)]])
    inputs = qkv(17, layout.rows, 2, 1, 16, torch.float32)
    weights = random_tensor(18, layout.rows, 2, 16), random_tensor(19, 2, layout.rows)
    layout.segments[broken[0]] = int32(*broken[1])
    good = make_layout([[(0, 12, -1, 0)], [(0, 4, -1, 0)]], row_counts=[23, 4])
    assert_equal(forward(inputs, layout, device), forward(inputs, good, device))
    assert_equal(gradients(inputs, weights, layout, device), gradients(inputs, weights, good, device))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_rows(lengths: tuple[int, ...], device: str) -> None:
    layout = chains(*lengths)
    inputs = qkv(19, 0, 2, 1, 16, torch.float32)
    out, lse = forward(inputs, layout, device)
    assert out.shape == (0, 2, 16)
    assert lse.shape == (2, 0)
    assert [t.shape for t in gradients(inputs, (out,), layout, device)] == [t.shape for t in inputs]


def test_no_segments(device: str) -> None:
    layout = make_layout([[]], row_counts=[3])
    inputs = qkv(20, 3, 2, 1, 16, torch.float32)
    out, lse = forward(inputs, layout, device)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    assert not any(bool(t.any()) for t in gradients(inputs, (out,), layout, device))


@pytest.mark.parametrize(
    "options", [{"softcap": -1.0}, {"softcap": float("inf")}, {"softmax_scale": float("nan")}, {"window_size": -2}]
)
def test_refusals(options: dict[str, Any], device: str) -> None:
    inputs, layout = qkv(21, 4, 2, 1, 16, torch.float32), chains(4)
    with pytest.raises(RuntimeError, match=r"^multi_block_attention: \w+ must be"):
        forward(inputs, layout, device, **options)
    tensors = [t.to(device) for t in (*inputs, *layout)]
    with pytest.raises(RuntimeError, match=r"^multi_block_attention: k must have shape"):
        multi_block_attention(tensors[0], tensors[1][:3], *tensors[2:])
    with pytest.raises(RuntimeError, match=r"^multi_block_attention: q's num_heads must be a positive multiple"):
        multi_block_attention(*(t[:, :0] for t in tensors[:3]), *tensors[3:])
    with pytest.raises(RuntimeError, match=r"^multi_block_attention: head_dim must be within 1..256, got 257"):
        forward(qkv(21, 4, 2, 1, 257, torch.float32), layout, device)
    with pytest.raises(RuntimeError, match=r"^multi_block_attention: cu_seqlens_q must have shape \[B\+1\], got \[0\]"):
        multi_block_attention(*tensors[:3], tensors[3][:0], tensors[4], tensors[5][:0])
