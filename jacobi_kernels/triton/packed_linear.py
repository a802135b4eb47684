"""``y[m, n] = sum over k of x[m, k] * w[n // 16, k, n % 16] + bias[n]`` for few rows m.

Tiling: a program keeps BLOCK_N columns (BLOCK_N / 16 panels) of one part of k. It walks k once in steps of BLOCK_K and
multiplies every tile of weights that it loads with up to TILES tiles of ROWS = 16 rows, whose float32 accumulators stay
in registers; so weights come from memory once for 64 rows, and from L2 for every 64 more (row groups are the fastest
grid axis: they run side by side). A group with no more than 16 live rows takes the one-tile loop.

Order of a sum: k ascending in every part, one m16n8k16 instruction family whatever m is (tiles of 16 rows never become
warp-group instructions); then the parts in ascending order, then the bias, then one rounding. BLOCK_N, BLOCK_K and the
number of parts follow from n and k alone (:func:`tiling`): a row's bits depend on the row alone.

Operands take the weights' type, sums are float32: bfloat16 weights round float32 rows to bfloat16 (on a GPU; the
interpreter computes float32 only), float32 weights widen bfloat16 rows. Bytes: weights once, ``4 * parts * m * n``
twice when there are several parts, rows once per program from L2. Operations: 2 * m * n * k.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import LANES, check_packed_linear
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_dense, check_floats, check_runs_here, launch

OP = "packed_linear"
PROGRAMS = 128  # wanted at least: one for nearly every multiprocessor of the GPUs that this is written for
NUM_WARPS, NUM_STAGES = 4, 4


@dataclass(frozen=True)
class Tiling:
    """How the product of one weight is cut; ``part`` is the inner size of one part of k."""

    block_n: int
    block_k: int
    parts: int
    part: int
    rows: int
    tiles: int

    @property
    def group(self) -> int:
        """Rows that one program multiplies."""
        return self.rows * self.tiles


def tiling(n: int, k: int, dtype: torch.dtype, max_parts: int = 8) -> Tiling:
    """The tiling of a weight with ``n`` outputs and ``k`` inputs; ``max_parts`` 1 keeps k whole."""
    block_n = 128 if n >= 128 * PROGRAMS else 64 if n >= 1024 else 32
    parts = 1
    while parts < max_parts and -(-n // block_n) * parts < PROGRAMS and k >= 512 * parts:
        parts *= 2
    block_k = 64 if dtype == torch.bfloat16 else 32
    rows, tiles = 16, 4
    part = -(-max(k, 1) // (parts * block_k)) * block_k
    if INTERPRETED:  # few large programs
        block_n = min(512, max(16, triton.next_power_of_2(n)))
        block_k = min(512, max(16, triton.next_power_of_2(part)))
        rows, tiles = 64, 1
    return Tiling(block_n, block_k, max(1, -(-k // part)), part, rows, tiles)


@triton.jit
def accumulate(  # type: ignore[no-untyped-def]
    x,
    x_rows,
    first,
    live,
    w,
    n,
    k,
    k_begin,
    k_end,
    tile,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Sums over [k_begin, k_end) for rows from first on and one tile of columns: TILES of four accumulators count."""
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns // 16 * 16 < n  # whole panels: their padding is zero
    w_columns = w + (columns // 16).to(tl.int64) * (k * 16) + columns % 16
    own = first + tl.arange(0, ROWS)
    row0, row1, row2, row3 = own, own + ROWS, own + 2 * ROWS, own + 3 * ROWS
    live0, live1, live2, live3 = row0 < live, row1 < live, row2 < live, row3 < live
    if GATHER:
        row0 = tl.load(x_rows + row0, mask=live0, other=0)
        if TILES > 1:
            row1 = tl.load(x_rows + row1, mask=live1, other=0)
            row2 = tl.load(x_rows + row2, mask=live2, other=0)
            row3 = tl.load(x_rows + row3, mask=live3, other=0)
    x0, x1 = x + row0.to(tl.int64) * k, x + row1.to(tl.int64) * k
    x2, x3 = x + row2.to(tl.int64) * k, x + row3.to(tl.int64) * k
    acc0 = tl.zeros((ROWS, BLOCK_N), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for start in range(k_begin, k_end, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            weights = tl.load(w_columns[None, :] + steps[:, None] * 16, mask=inside[None, :], other=0.0)
            a0 = tl.load(x0[:, None] + steps[None, :], mask=live0[:, None], other=0.0)
        else:
            left = steps < k_end
            weights = tl.load(w_columns[None, :] + steps[:, None] * 16, mask=inside[None, :] & left[:, None], other=0.0)
            a0 = tl.load(x0[:, None] + steps[None, :], mask=live0[:, None] & left[None, :], other=0.0)
        acc0 = tl.dot(a0.to(weights.dtype), weights, acc0, input_precision="ieee")
        if TILES > 1:
            if EVEN_K:
                a1 = tl.load(x1[:, None] + steps[None, :], mask=live1[:, None], other=0.0)
                a2 = tl.load(x2[:, None] + steps[None, :], mask=live2[:, None], other=0.0)
                a3 = tl.load(x3[:, None] + steps[None, :], mask=live3[:, None], other=0.0)
            else:
                left = steps < k_end
                a1 = tl.load(x1[:, None] + steps[None, :], mask=live1[:, None] & left[None, :], other=0.0)
                a2 = tl.load(x2[:, None] + steps[None, :], mask=live2[:, None] & left[None, :], other=0.0)
                a3 = tl.load(x3[:, None] + steps[None, :], mask=live3[:, None] & left[None, :], other=0.0)
            acc1 = tl.dot(a1.to(weights.dtype), weights, acc1, input_precision="ieee")
            acc2 = tl.dot(a2.to(weights.dtype), weights, acc2, input_precision="ieee")
            acc3 = tl.dot(a3.to(weights.dtype), weights, acc3, input_precision="ieee")
    return acc0, acc1, acc2, acc3


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    acc, bias, y, first, live, tile, n, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr
):
    rows = first + tl.arange(0, ROWS)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    at = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(rows < live)[:, None] & (columns < n)[None, :])


@triton.jit(do_not_specialize=["m", "skip"])
def product_kernel(  # type: ignore[no-untyped-def]
    x,
    x_rows,
    count,
    w,
    bias,
    y,
    m,
    n,
    k,
    part,
    skip,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATHER: tl.constexpr,
    COUNTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """y [parts, m, n]; row i is row x_rows[i] of x with GATHER; only rows below count[0] - skip with COUNTED."""
    tile, index = tl.program_id(1), tl.program_id(2)
    live = m
    if COUNTED:
        live = tl.minimum(tl.load(count) - skip, m)
    first = tl.program_id(0) * (ROWS * TILES)
    if first < live:
        y += index.to(tl.int64) * m * n
        begin = index * part
        end = tl.minimum(begin + part, k)
        if TILES == 1 or live - first <= ROWS:
            a, _, _, _ = accumulate(
                x, x_rows, first, live, w, n, k, begin, end, tile, ROWS, 1, BLOCK_N, BLOCK_K, EVEN_K, GATHER
            )
            _store(a, bias, y, first, live, tile, n, ROWS, BLOCK_N, HAS_BIAS)
        else:
            a, b, c, d = accumulate(
                x, x_rows, first, live, w, n, k, begin, end, tile, ROWS, TILES, BLOCK_N, BLOCK_K, EVEN_K, GATHER
            )
            _store(a, bias, y, first, live, tile, n, ROWS, BLOCK_N, HAS_BIAS)
            _store(b, bias, y, first + ROWS, live, tile, n, ROWS, BLOCK_N, HAS_BIAS)
            _store(c, bias, y, first + 2 * ROWS, live, tile, n, ROWS, BLOCK_N, HAS_BIAS)
            _store(d, bias, y, first + 3 * ROWS, live, tile, n, ROWS, BLOCK_N, HAS_BIAS)


@triton.jit
def merged(  # type: ignore[no-untyped-def]
    partials, bias, row, columns, mask, m, n, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Sums of the parts at [row, columns] in ascending order, then the bias: float32 of the mask's shape."""
    at = partials + row.to(tl.int64) * n + columns
    value = tl.load(at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(at + tl.cast(m, tl.int64) * n * part, mask=mask, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["m"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    partials, bias, y, m, n, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < m) & (columns < n)
    value = merged(partials, bias, row, columns, mask, m, n, PARTS, HAS_BIAS)
    tl.store(y + row.to(tl.int64) * n + columns, value.to(y.dtype.element_ty), mask=mask)


def launch_product(
    op: str,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    n: int,
    cut: Tiling,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    count: Tensor | None = None,
    skip: int = 0,
) -> None:
    """Write the parts of ``x @ W.T`` to ``y``, ``[parts, m, n]`` (or ``[m, n]`` with the bias when there is one part).

    ``rows [m]`` int32 gathers: row i of y belongs to row ``rows[i]`` of x. ``count [1]`` int32 on the device: only
    ``count[0] - skip`` rows are computed.
    """
    k, m = weight.shape[1], y.shape[-2]
    grid = (triton.cdiv(m, cut.group), triton.cdiv(n, cut.block_n), cut.parts)
    launch(
        op,
        product_kernel,
        grid if m and n else (0,),
        x,
        rows,
        count,
        weight,
        bias,
        y,
        m,
        n,
        k,
        cut.part,
        skip,
        ROWS=cut.rows,
        TILES=cut.tiles,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        EVEN_K=cut.part % cut.block_k == 0 and k == cut.parts * cut.part,
        GATHER=rows is not None,
        COUNTED=count is not None,
        HAS_BIAS=bias is not None,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x @ W.T + bias`` as :func:`jacobi_kernels.ops.packed_linear`: ``[..., out_features]`` in ``x``'s dtype."""
    check_runs_here(OP, x, weight, bias)
    check_floats(OP, "weight", weight)
    check_packed_linear(x, weight, bias, out_features)
    check_dense(OP, weight=weight, bias=bias)
    y = x.new_empty((*x.shape[:-1], out_features))
    rows, k = prod(x.shape[:-1]), x.shape[-1]
    cut = tiling(out_features, k, weight.dtype)
    x, flat = x.contiguous(), y.view(rows, out_features)
    if cut.parts == 1:
        launch_product(OP, x, weight, flat, out_features, cut, bias)
        return y
    partials = x.new_empty((cut.parts, rows, out_features), dtype=torch.float32)
    launch_product(OP, x, weight, partials, out_features, cut)
    block_rows, block = (64, 1024) if INTERPRETED else (1, 1024)
    launch(
        OP,
        _merge_kernel,
        (triton.cdiv(rows, block_rows), triton.cdiv(out_features, block)),
        partials,
        bias,
        flat,
        rows,
        out_features,
        PARTS=cut.parts,
        ROWS=block_rows,
        BLOCK=block,
        HAS_BIAS=bias is not None,
    )
    return y


SHAPES = {  # name: (outputs, inputs)
    "SmolLM2-135M qkv": (960, 576),
    "SmolLM2-135M down": (576, 1536),
    "Qwen2.5-1.5B gate_up": (17920, 1536),
    "Qwen2.5-1.5B down": (1536, 8960),
    "Qwen2.5-7B qkv": (4608, 3584),
    "Qwen2.5-7B gate_up": (37888, 3584),
    "any": (70, 33),
}


def compile_cases() -> list[CompileCase]:
    """The products of three models, in bfloat16 and float32, and the merge of parts."""
    cases = []
    for name, (n, k) in SHAPES.items():
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            cut = tiling(n, k, dtype)
            signature = {"x": f"*{short}", "x_rows": "*i32", "count": "*i32", "w": f"*{short}", "bias": f"*{short}"}
            signature |= {"y": f"*{short}" if cut.parts == 1 else "*fp32", "m": "i32", "n": "i32", "k": "i32"}
            constants = {"ROWS": cut.rows, "TILES": cut.tiles, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k}
            constants |= {"EVEN_K": k % cut.block_k == 0 and k == cut.parts * cut.part}
            constants |= {"GATHER": True, "COUNTED": True, "HAS_BIAS": cut.parts == 1}
            aligned = ("x", "w", "bias", "y", *(a for a, v in (("n", n), ("k", k), ("part", cut.part)) if v % 16 == 0))
            cases.append(
                CompileCase(
                    f"{OP}: {name} {short}",
                    product_kernel,
                    signature | {"part": "i32", "skip": "i32"} | dict.fromkeys(constants, "constexpr"),
                    constants,
                    NUM_WARPS,
                    NUM_STAGES,
                    uses_mma=short == "bf16",
                    attributes=dict.fromkeys(aligned, 16),
                )
            )
    constants = {"PARTS": 8, "ROWS": 1, "BLOCK": 1024, "HAS_BIAS": True}
    signature = {"partials": "*fp32", "bias": "*bf16", "y": "*bf16", "m": "i32", "n": "i32"}
    cases.append(
        CompileCase(f"{OP}: merge", _merge_kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    )
    return cases


assert LANES == 16  # the width of a panel, written out in the kernels
