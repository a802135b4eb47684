"""The gradients of multi_block_attention: against float64 autograd of attention with a mask, and bit for bit."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels import ops, reference
from tests.kernels.helpers import (
    Layout,
    assert_as_accurate,
    assert_equal,
    assert_same_everywhere,
    chain_with_candidates,
    chains,
    int32,
    make_layout,
    random_layout,
    random_tensor,
    threads,
)

FLOATS = [torch.float32, torch.bfloat16]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_size": 0},
    {"window_size": 20},
    {"softcap": 5.0},
    {"window_size": 70, "softcap": 3.0, "softmax_scale": 0.3},
]
CONTEXTS = ("all", "clean", "window")


def training_segments(prompt: int, block: int, blocks: int, context: str, last: int) -> list[tuple[int, int, int, int]]:
    """A packed sample: the prompt, then for each block a noisy and a clean segment; the last has ``last`` rows.

    Clean blocks continue one another; noisy ones continue the noisy block before (``all``), the clean one (``clean``),
    or change between both every second block (``window``).
    """
    segments = [(0, prompt, -1, 0)]
    noisy = clean = 0
    for j in range(blocks):
        length = last if j == blocks - 1 else block
        parent = noisy if context == "all" or (context == "window" and j % 2) else clean
        start = sum(segments[-1][:2])
        segments += [
            (start, length, parent, segments[parent][1]),
            (start + length, length, clean, segments[clean][1]),
        ]
        noisy, clean = len(segments) - 2, len(segments) - 1
    return segments


def training_layout(*samples: tuple[int, int, int, str, int]) -> Layout:
    return make_layout([training_segments(*sample) for sample in samples])


def qkv(seed: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (
        2 * random_tensor(seed, rows, heads, head_dim, dtype=dtype),
        random_tensor(seed + 1, rows, kv_heads, head_dim, dtype=dtype),
        random_tensor(seed + 2, rows, kv_heads, head_dim, dtype=dtype),
    )


def gradients(inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], layout: Layout, **options: Any) -> Any:
    """dq, dk, dv of the op under autograd, for the sum of its results times ``weights`` (out's alone, or both's)."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    results = ops.multi_block_attention(*leaves, *layout, **options)
    return torch.autograd.grad(results[: len(weights)], leaves, weights)


def masked_gradients(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    layout: Layout,
    dtype: torch.dtype,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
) -> Any:
    """The same by autograd of plain attention with a [T, T] mask made from the rows' paths."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    q, k, v = leaves
    mask = torch.zeros(layout.rows, layout.rows, dtype=torch.bool)
    for paths in reference.row_paths(layout.segments, layout.cu_segments):
        for row, path in paths.items():
            mask[row, path if window_size < 0 else path[-window_size - 1 :]] = True
    live = mask.any(1)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1))
    scores = scores * (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)[:, live]
    out = torch.einsum("hij,jhd->ihd", scores.softmax(2), v.repeat_interleave(group, 1))
    loss = (out * weights[0][live]).sum()
    if len(weights) > 1:
        loss = loss + (scores.logsumexp(2) * weights[1][:, live]).sum()
    return torch.autograd.grad(loss, leaves)


def check_against_mask(
    seed: int, layout: Layout, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, **options: Any
) -> None:
    inputs = qkv(seed, layout.rows, heads, kv_heads, head_dim, dtype)
    weights = (random_tensor(seed + 3, layout.rows, heads, head_dim, dtype=dtype),)
    if seed % 2:
        weights += (random_tensor(seed + 4, heads, layout.rows),)
    actual = gradients(inputs, weights, layout, **options)
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


@st.composite
def layouts(draw: Any) -> Layout:
    kind = draw(st.sampled_from(["chains", "tree", "training"]))
    if kind == "tree":
        return random_layout(draw(st.integers(0, 10_000)), draw(st.integers(1, 3)), max_length=20)
    if kind == "chains":
        return chains(*draw(st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 49, 65]), min_size=1, max_size=3)))
    samples = []
    for _ in range(draw(st.integers(1, 2))):
        block = draw(st.sampled_from([1, 3, 8, 16, 17]))
        shape = draw(st.sampled_from([1, 5, 16, 33])), block, draw(st.integers(0, 4))
        samples.append((*shape, draw(st.sampled_from(CONTEXTS)), draw(st.integers(1, block))))
    return training_layout(*samples)


@settings(max_examples=80)
@given(
    layout=layouts(),
    seed=st.integers(0, 10_000),
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 16, 40, 64]),
    dtype=st.sampled_from(FLOATS),
    window_size=st.sampled_from([-1, -1, 0, 3, 30]),
    softcap=st.sampled_from([0.0, 0.0, 4.0]),
)
def test_any_layout_close_to_autograd_with_a_mask(
    layout: Layout,
    seed: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window_size: int,
    softcap: float,
) -> None:
    options = {"window_size": window_size, "softcap": softcap}
    check_against_mask(seed, layout, group * kv_heads, kv_heads, head_dim, dtype, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 96), (2, 2, 128), (49, 1, 7)])
def test_a_training_layout_close_to_autograd_with_a_mask(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    layout = training_layout((70, 17, 3, "window", 9), (5, 16, 2, "all", 16))
    check_against_mask(1, layout, heads, kv_heads, head_dim, dtype, **options)


def test_reference_is_autograd_with_a_mask() -> None:
    layout = random_layout(7, 3)
    inputs = qkv(5, layout.rows, 4, 2, 8, torch.float32)
    weights = (random_tensor(6, layout.rows, 4, 8), random_tensor(7, 4, layout.rows))
    options: dict[str, Any] = {"window_size": 4, "softcap": 2.0}
    results = ops.multi_block_attention(*inputs, *layout, **options)
    actual = reference.multi_block_attention_backward(
        weights[0], *inputs, *results, *layout, grad_softmax_lse=weights[1], **options
    )
    exact = masked_gradients(inputs, weights, layout, torch.float64, **options)
    torch.testing.assert_close(actual, exact, rtol=1e-10, atol=1e-12)


def test_gradients_are_the_slopes_of_the_forward() -> None:
    layout = training_layout((9, 4, 2, "all", 3))
    inputs = qkv(8, layout.rows, 2, 1, 16, torch.float32)
    weights = (random_tensor(9, layout.rows, 2, 16), random_tensor(10, 2, layout.rows))
    step = 2.0**-7

    def loss(*values: Tensor) -> float:
        results = ops.multi_block_attention(*values, *layout, softcap=6.0)
        return sum(float((x.double() * w).sum()) for x, w in zip(results, weights, strict=True))

    for i, gradient in enumerate(gradients(inputs, weights, layout, softcap=6.0)):
        direction = random_tensor(11 + i, *gradient.shape)
        ends = [[*inputs[:i], inputs[i] + sign * step * direction, *inputs[i + 1 :]] for sign in (1, -1)]
        slope = (loss(*ends[0]) - loss(*ends[1])) / (2 * step)
        expected = float((gradient.double() * direction).sum())
        assert abs(slope - expected) <= 2e-3 * float((gradient * direction).double().norm()), "qkv"[i]


def test_extreme_scores() -> None:
    layout = chains(100)
    inputs, weights = qkv(7, 100, 2, 1, 32, torch.float32), (random_tensor(8, 100, 2, 32),)
    for scale in (0.0, 100.0, -100.0, 1e4):
        assert all(bool(t.isfinite().all()) for t in gradients(inputs, weights, layout, softmax_scale=scale))
    dq, dk, _ = gradients(inputs, weights, layout, softmax_scale=0.0)
    assert not dq.any()
    assert not dk.any()


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_for_threads_and_instruction_sets(dtype: torch.dtype, options: dict[str, Any]) -> None:
    layout = training_layout((50, 16, 2, "window", 11), (1, 3, 3, "clean", 2), (70, 1, 1, "all", 1))
    for heads, kv_heads, head_dim in ((6, 2, 64), (3, 3, 40)):
        inputs = qkv(28, layout.rows, heads, kv_heads, head_dim, dtype)
        weights = random_tensor(29, layout.rows, heads, head_dim, dtype=dtype), random_tensor(30, heads, layout.rows)
        assert_same_everywhere(lambda i=inputs, w=weights: gradients(i, w, layout, **options))


def test_threads_disturb_nobody() -> None:
    """Many calls on two threads: a race would show sooner or later."""
    layout = training_layout((20, 8, 2, "all", 5), (3, 8, 3, "window", 8))
    inputs, weights = qkv(36, layout.rows, 4, 2, 32, torch.float32), (random_tensor(37, layout.rows, 4, 32),)
    expected = gradients(inputs, weights, layout)
    with threads(2):
        for _ in range(100):
            assert_equal(gradients(inputs, weights, layout), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sequences_of_a_batch_equal_the_sequences_alone(dtype: torch.dtype) -> None:
    samples = [training_segments(40, 16, 2, "all", 7), [], training_segments(7, 5, 3, "clean", 5)]
    layout = make_layout(samples)
    inputs = qkv(26, layout.rows, 4, 2, 32, dtype)
    weight = random_tensor(27, layout.rows, 4, 32, dtype=dtype)
    together = gradients(inputs, (weight,), layout)
    for (begin, end), sample in zip(pairwise(layout.cu_seqlens_q.tolist()), samples, strict=True):
        alone = gradients(tuple(t[begin:end] for t in inputs), (weight[begin:end],), make_layout([sample]))
        assert_equal(alone, tuple(t[begin:end] for t in together), f"rows {begin}..{end}")


def test_rows_that_a_query_does_not_see_leave_its_gradient_alone() -> None:
    layout = chain_with_candidates(20, 2, 9, gap=2)  # candidates at rows 22..30 and 33..41
    inputs, weights = qkv(31, layout.rows, 2, 1, 32, torch.float32), (random_tensor(32, layout.rows, 2, 32),)
    expected = gradients(inputs, weights, layout)
    holes = torch.ones(layout.rows, dtype=torch.bool)
    for start, length, _, _ in layout.segments.tolist():
        holes[start : start + length] = False
    for t in (*inputs, *weights):
        t[holes] = torch.nan
    assert_equal(gradients(inputs, weights, layout), expected, "holes")
    for t in inputs:
        t[22:31] = torch.nan
    dq, dk, dv = gradients(inputs, weights, layout)
    others = torch.cat([torch.arange(22), torch.arange(31, layout.rows)])
    assert_equal(dq[others], expected[0][others], "dq")
    assert_equal((dk[33:], dv[33:]), (expected[1][33:], expected[2][33:]), "the other candidate")


@pytest.mark.parametrize("dtype", FLOATS)
def test_strided_arguments(dtype: torch.dtype) -> None:
    """Slices of one fused projection, as models make them; and the gradient of a sum, which has no strides."""
    layout = chains(5, 30)
    fused = random_tensor(22, 35, 4 + 2 + 2, 64, dtype=dtype)
    views = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    weight = torch.ones((), dtype=dtype).expand(35, 4, 64)
    dense = tuple(t.contiguous() for t in views)
    assert_equal(gradients(views, (weight,), layout), gradients(dense, (weight.contiguous(),), layout))
    lse_weight = random_tensor(23, 35, 4).T
    expected = gradients(dense, (weight, lse_weight.contiguous()), layout)
    assert_equal(gradients(views, (weight, lse_weight), layout), expected)


@pytest.mark.parametrize("window_size", [2**31 - 1, 2**31, 2**63 - 1])
def test_a_huge_window_sees_all(window_size: int) -> None:
    layout = training_layout((30, 16, 2, "all", 16))
    inputs, weights = qkv(16, layout.rows, 2, 1, 32, torch.float32), (random_tensor(17, layout.rows, 2, 32),)
    assert_equal(gradients(inputs, weights, layout, window_size=window_size), gradients(inputs, weights, layout))


def test_memory_grows_with_rows_alone() -> None:
    """A table of all pairs of these rows would take 256 MiB."""
    code = """
import resource, torch
from jacobi_kernels import BlockLayout, ops
torch.set_num_threads(1)
def run(rows):
    layout = BlockLayout.chain([rows])
    q = torch.randn(rows, 1, 16, requires_grad=True)
    ops.multi_block_attention(q, q, q, layout.cu_seqlens_q, layout.segments, layout.cu_segments)[0].sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(-run(100) + run(8192))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 32


# In torch -------------------------------------------------------------------------------------------------------------


def test_only_the_asked_gradients_and_results_take_part() -> None:
    layout = training_layout((6, 4, 2, "all", 3))
    inputs = qkv(40, layout.rows, 2, 1, 16, torch.float32)
    weights = random_tensor(41, layout.rows, 2, 16), random_tensor(42, 2, layout.rows)
    q, k, v = inputs
    leaf = k.clone().requires_grad_()
    out, lse = ops.multi_block_attention(q, leaf, v, *layout)
    assert_equal((out.detach(), lse.detach()), ops.multi_block_attention(*inputs, *layout), "the forward")
    (out * weights[0]).sum().backward()
    assert_equal(leaf.grad, gradients(inputs, weights[:1], layout)[1])
    leaf = k.clone().requires_grad_()
    (ops.multi_block_attention(q, leaf, v, *layout)[1] * weights[1]).sum().backward()
    nothing = torch.zeros_like(weights[0])
    assert_equal(leaf.grad, gradients(inputs, (nothing, weights[1]), layout)[1], "through softmax_lse alone")
    with torch.no_grad():
        assert not ops.multi_block_attention(q, leaf, v, *layout)[0].requires_grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_opcheck_under_autograd(dtype: torch.dtype) -> None:
    layout = random_layout(1, 2)
    inputs = tuple(t.requires_grad_() for t in qkv(43, layout.rows, 4, 2, 16, dtype))
    options = {"window_size": 5, "softcap": 3.0}
    torch.library.opcheck(torch.ops.jacobi.multi_block_attention.default, (*inputs, *layout), options)


def test_compiles_with_its_backward() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, *layout: Tensor) -> Tensor:
        out, lse = ops.multi_block_attention(q, k, v, *layout, window_size=9)
        return (out.float() ** 2).sum() + lse.where(lse.isfinite(), 0).sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for layout in (training_layout((6, 4, 2, "all", 3)), random_layout(3, 2)):
        inputs = tuple(t.requires_grad_() for t in qkv(44, layout.rows, 4, 2, 16, torch.float32))
        expected = torch.autograd.grad(loss(*inputs, *layout), inputs)
        actual = torch.autograd.grad(compiled(*inputs, *layout), inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_second_derivatives_are_refused() -> None:
    layout = chains(4)
    q, k, v = qkv(45, 4, 1, 1, 16, torch.float32)
    out, _ = ops.multi_block_attention(q.requires_grad_(), k, v, *layout)
    with pytest.raises(RuntimeError, match=r"multi_block_attention_backward: .* requires grad but the op has no"):
        torch.autograd.grad((out**2).sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("grad_out", torch.zeros(6, 2, 8), r"grad_out must have shape .* = \[6, 4, 8\], got \[6, 2, 8\]"),
        ("grad_out", torch.zeros(6, 4, 8).bfloat16(), "grad_out must be float32, got bfloat16"),
        ("grad_out", torch.zeros(6, 8, 4).transpose(1, 2), "grad_out must be dense in its last two dimensions"),
        ("out", torch.zeros(5, 4, 8), r"out must have shape .* = \[6, 4, 8\], got \[5, 4, 8\]"),
        ("softmax_lse", torch.zeros(6, 4), r"softmax_lse must have shape .* = \[4, 6\], got \[6, 4\]"),
        ("softmax_lse", torch.zeros(4, 6).double(), "softmax_lse must be float32, got float64"),
        ("softmax_lse", torch.zeros(6, 4).T, "softmax_lse must be contiguous"),
        ("grad_softmax_lse", torch.zeros(4, 5), r"grad_softmax_lse must have shape .* = \[4, 6\], got \[4, 5\]"),
        ("k", torch.zeros(6, 3, 8), r"v must have shape .* = \[6, 3, 8\], got \[6, 2, 8\]"),
        ("segments", int32(0, 7, -1, 0)[None], r"segments\[0\] = \(start 0, .*\): rows must lie inside"),
        ("softcap", -1.0, "softcap must be at least 0"),
        ("window_size", -2, "window_size must be -1"),
    ],
)
def test_refusals(argument: str, value: Any, message: str) -> None:
    q, k, v = qkv(46, 6, 4, 2, 8, torch.float32)
    layout = chains(6)
    out, lse = ops.multi_block_attention(q, k, v, *layout)
    values = {"grad_out": out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, **layout._asdict()}
    values[argument] = value
    with pytest.raises(RuntimeError, match=f"^multi_block_attention_backward: {message}"):
        ops.multi_block_attention_backward(**values)
