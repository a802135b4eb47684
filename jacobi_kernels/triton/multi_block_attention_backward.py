"""Gradients of attention over packed layouts.

    p[r, j] = exp(s[r, j] - lse[r]),   delta[r] = out[r] . grad_out[r] - grad_lse[r]
    ds[r, j] = p[r, j] (grad_out[r] . v[j] - delta[r]) scale (1 - (s[r, j] / softcap)^2)
    dq[r] = sum over j of ds[r, j] k[j]
    dk[j] = sum over r of ds[r, j] q[r],   dv[j] = sum over r of p[r, j] grad_out[r]

Three kernels, each result written once by one program, no atomics:
- delta: a program per rows and head;
- dq: the walk of the forward, (token, head) tiles of one segment over key tiles by descending position;
- dk, dv: BLOCK_N neighbouring rows of one key head, whatever segments they belong to, over the query tiles of their
  sequences in ascending order (each in PARTS parts). Tiles that see none of the rows are passed over after a few loads;
  which rows a segment sees is one number per pair of segments (``sees`` of :mod:`path_tiles`). The heads of a group are
  rows of the same tile, so their sum is part of the product.

Scores are computed twice (dq; dk, dv): 14 * D operations per (query head, visible key). Memory: delta, ``4 * H * T``
bytes, and the tables, ``4 * S * S`` bytes of them for ``sees``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import _dtype, _shape
from jacobi_kernels.triton.multi_block_attention import (
    LOG2E,
    SHAPES,
    STRIDES,
    TABLES,
    arguments,
    attention_case,
    options,
    prepare,
)
from jacobi_kernels.triton.path_tiles import PathTiles, capped, first_key_rows, path_tiles, row_mask, table_case
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, launch

OP = "multi_block_attention_backward"
DELTA_ROWS = 16


@triton.jit
def delta_kernel(  # type: ignore[no-untyped-def]
    out,
    grad_out,
    grad_lse,
    delta,
    rows,
    out_row,
    out_head,
    grad_row,
    grad_head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    row, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    width = tl.arange(0, BLOCK_D)
    mask = row_mask(row < rows, width, D, BLOCK_D)
    at = row.to(tl.int64)
    x = tl.load((out + at * out_row + head * out_head)[:, None] + width[None, :], mask=mask, other=0.0)
    y = tl.load((grad_out + at * grad_row + head * grad_head)[:, None] + width[None, :], mask=mask, other=0.0)
    total = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    place = head.to(tl.int64) * rows + row
    if HAS_LSE:
        total -= tl.load(grad_lse + place, mask=row < rows, other=0.0)
    tl.store(delta + place, total, mask=row < rows)


@triton.jit(do_not_specialize=["window"])
def dq_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad_out,
    dq,
    lse,
    delta,
    segments,
    before,
    jump,
    prefixes,
    tile_segment,
    tile_first,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s = tl.load(tile_segment + tile)
    if s < 0:
        return
    start, length = tl.load(segments + 4 * s), tl.load(segments + 4 * s + 1)
    prefix, first = tl.load(prefixes + s), tl.load(tile_first + tile)

    pair = first + tl.arange(0, BLOCK_M)
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    live = token < length
    width = tl.arange(0, BLOCK_D)
    row = (start + token).to(tl.int64)
    mask = row_mask(live, width, D, BLOCK_D)
    queries = tl.load((q + row * q_row + head * q_head)[:, None] + width[None, :], mask=mask, other=0.0)
    grads = tl.load((grad_out + row * grad_row + head * grad_head)[:, None] + width[None, :], mask=mask, other=0.0)
    place = head.to(tl.int64) * rows + row
    base = tl.load(lse + place, mask=live, other=float("inf")) * LOG2E  # rows outside: weights of 0
    shift = tl.load(delta + place, mask=live, other=0.0)
    query_position = prefix + token

    last = prefix + tl.minimum((first + BLOCK_M - 1) // GROUP, length - 1)
    lowest = tl.maximum(prefix + first // GROUP - window, 0)
    offset = tl.arange(0, BLOCK_N) + (1 - BLOCK_N)
    key_rows = first_key_rows(before, s, start, prefix, last + offset, BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for highest in range(last, lowest - 1, -BLOCK_N):
        found = key_rows >= 0
        at = tl.where(found, key_rows, 0).to(tl.int64)
        there = row_mask(found, width, D, BLOCK_D)
        keys = tl.load((k + at * k_row + kv_head * k_head)[:, None] + width[None, :], mask=there, other=0.0)
        values = tl.load((v + at * v_row + kv_head * v_head)[:, None] + width[None, :], mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        slope = scale
        if CAPPED:
            share = capped(scores, softcap)
            scores = softcap * share
            slope = scale * (1.0 - share * share)
        position = highest + offset  # at least 0 where a row was found
        ahead = query_position[:, None] - position[None, :]
        seen = (position >= 0)[None, :] & (ahead >= 0) & (ahead <= window)
        weights = tl.exp2(tl.where(seen, scores * LOG2E - base[:, None], float("-inf")))
        pull = tl.dot(grads, tl.trans(values), input_precision="ieee") - shift[:, None]
        slopes = tl.where(seen, weights * pull * slope, 0.0)
        acc = tl.dot(slopes.to(keys.dtype), keys, acc, input_precision="ieee")
        key_rows = tl.load(jump + tl.where(found, key_rows, 0), mask=found, other=-1)

    at_dq = dq + (row * (tl.num_programs(1) * GROUP) + head) * D
    tl.store(at_dq[:, None] + width[None, :], acc.to(dq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["window", "num_segments"])
def dkdv_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad_out,
    dk,
    dv,
    lse,
    delta,
    segments,
    row_segment,
    row_position,
    prefixes,
    tile_segment,
    tile_first,
    segment_tiles,
    sees,
    num_segments,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, kv_head = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    owner = tl.load(row_segment + row, mask=row < rows, other=-1)
    live = owner >= 0
    owner = tl.where(live, owner, 0)
    position = tl.load(row_position + row, mask=live, other=-1)
    index = row - tl.load(segments + 4 * owner, mask=live, other=0)  # of the row in its segment
    begin = tl.min(tl.load(segment_tiles + 2 * owner, mask=live, other=2147483647), 0)
    end = tl.max(tl.load(segment_tiles + 2 * owner + 1, mask=live, other=0), 0)

    width = tl.arange(0, BLOCK_D)
    mask = row_mask(live, width, D, BLOCK_D)
    at = row.to(tl.int64)
    keys = tl.load((k + at * k_row + kv_head * k_head)[:, None] + width[None, :], mask=mask, other=0.0)
    values = tl.load((v + at * v_row + kv_head * v_head)[:, None] + width[None, :], mask=mask, other=0.0)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    for part in range(begin * PARTS, end * PARTS):
        s = tl.load(tile_segment + part // PARTS)
        if s >= 0:
            length, prefix = tl.load(segments + 4 * s + 1), tl.load(prefixes + s)
            first = tl.load(tile_first + part // PARTS) + part % PARTS * BLOCK_M
            lowest = prefix + first // GROUP
            last = prefix + tl.minimum((first + BLOCK_M - 1) // GROUP, length - 1)
            visible = tl.load(sees + s.to(tl.int64) * num_segments + owner, mask=live, other=0)
            near = live & (index < visible) & (position <= last) & (lowest - position <= window) & (lowest <= last)
            if tl.max(near.to(tl.int32), 0) != 0:
                pair = first + tl.arange(0, BLOCK_M)
                token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
                there = token < length
                query_row = (tl.load(segments + 4 * s) + token).to(tl.int64)
                query_mask = row_mask(there, width, D, BLOCK_D)
                queries = tl.load(
                    (q + query_row * q_row + head * q_head)[:, None] + width[None, :], mask=query_mask, other=0.0
                )
                grads = tl.load(
                    (grad_out + query_row * grad_row + head * grad_head)[:, None] + width[None, :],
                    mask=query_mask,
                    other=0.0,
                )
                place = head.to(tl.int64) * rows + query_row
                base = tl.load(lse + place, mask=there, other=float("inf")) * LOG2E
                shift = tl.load(delta + place, mask=there, other=0.0)
                scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale  # [BLOCK_N, BLOCK_M]
                slope = scale
                if CAPPED:
                    share = capped(scores, softcap)
                    scores = softcap * share
                    slope = scale * (1.0 - share * share)
                ahead = (prefix + token)[None, :] - position[:, None]
                seen = near[:, None] & there[None, :] & (ahead >= 0) & (ahead <= window)
                weights = tl.exp2(tl.where(seen, scores * LOG2E - base[None, :], float("-inf")))
                acc_v = tl.dot(weights.to(grads.dtype), grads, acc_v, input_precision="ieee")
                pull = tl.dot(values, tl.trans(grads), input_precision="ieee") - shift[None, :]
                slopes = tl.where(seen, weights * pull * slope, 0.0)
                acc_k = tl.dot(slopes.to(queries.dtype), queries, acc_k, input_precision="ieee")

    place_k = ((at * tl.num_programs(1) + kv_head) * D)[:, None] + width[None, :]
    mask = row_mask(row < rows, width, D, BLOCK_D)  # holes too: 0
    tl.store(dk + place_k, acc_k.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + place_k, acc_v.to(dv.dtype.element_ty), mask=mask)


class Blocks(NamedTuple):
    """Tiles of the two passes: (BLOCK_M, BLOCK_N, num_warps) each; BLOCK_M of dkdv divides that of dq."""

    dq: tuple[int, int, int]
    dkdv: tuple[int, int, int]

    @property
    def parts(self) -> int:
        return self.dq[0] // self.dkdv[0]


def backward_blocks(dtype: torch.dtype, head_dim: int) -> Blocks:
    """The tiles whose accumulators fit into registers."""
    if INTERPRETED:  # few large programs
        return Blocks((64, 64, 4), (32, 64, 4))
    if dtype == torch.float32:
        return Blocks((32, 32, 4), (16, 32, 4))
    if head_dim > 128:
        return Blocks((64, 32, 8), (32, 64, 8))
    if head_dim > 64:
        return Blocks((64, 64, 8), (32, 64, 8))
    return Blocks((64, 64, 4), (32, 128, 8))


def multi_block_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    grad_softmax_lse: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`jacobi_kernels.ops.multi_block_attention_backward` in four launches; the same bits in every run."""
    q, k, v = prepare(OP, q, k, v, cu_seqlens_q, segments, cu_segments)
    rows, heads, head_dim = q.shape
    kv_heads, num_segments = k.shape[1], segments.shape[0]
    for name, t in (("grad_out", grad_out), ("out", out)):
        _dtype(OP, name, t, q.dtype)
        _shape(OP, name, t, "[T, num_heads, head_dim]", tuple(q.shape))
    for name, per_row in (("softmax_lse", softmax_lse), ("grad_softmax_lse", grad_softmax_lse)):
        if per_row is not None:
            _dtype(OP, name, per_row, torch.float32)
            _shape(OP, name, per_row, "[num_heads, T]", (heads, rows))
    scale, softcap, window = options(OP, head_dim, softmax_scale, window_size, softcap)
    dq = torch.zeros((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    dk = torch.empty((rows, kv_heads, head_dim), dtype=q.dtype, device=q.device)
    dv = torch.empty_like(dk)
    if rows == 0 or heads == 0:
        return dq, dk, dv

    grad_out, out = (t if t.stride(2) == 1 else t.contiguous() for t in (grad_out, out))
    lse = softmax_lse.contiguous()
    grad_lse = None if grad_softmax_lse is None else grad_softmax_lse.contiguous()
    delta = torch.empty((heads, rows), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    launch(
        OP,
        delta_kernel,
        (triton.cdiv(rows, DELTA_ROWS), heads),
        out,
        grad_out,
        delta if grad_lse is None else grad_lse,
        delta,
        rows,
        out.stride(0),
        out.stride(1),
        grad_out.stride(0),
        grad_out.stride(1),
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK=DELTA_ROWS,
        HAS_LSE=grad_lse is not None,
        num_warps=4,
    )
    group = heads // kv_heads
    chosen = backward_blocks(q.dtype, head_dim)
    tables = path_tiles(OP, cu_seqlens_q, segments, cu_segments, rows, group, *chosen.dq[:2], sees=True)
    segments = segments.contiguous()
    numbers = (
        rows,
        *(t.stride(i) for t in (q, k, v, grad_out) for i in (0, 1)),
        scale,
        softcap,
        window,
    )
    constants = {"GROUP": group, "D": head_dim, "BLOCK_D": block_d, "CAPPED": softcap > 0, "num_stages": 2}
    launch(
        OP,
        dq_kernel,
        (tables.tile_segment.shape[0], kv_heads),
        *(q, k, v, grad_out, dq, lse, delta, segments),
        *(tables.before, tables.jump, tables.prefix, tables.tile_segment, tables.tile_first),
        *numbers,
        **constants,
        BLOCK_M=chosen.dq[0],
        BLOCK_N=chosen.dq[1],
        num_warps=chosen.dq[2],
    )
    launch(
        OP,
        dkdv_kernel,
        (triton.cdiv(rows, chosen.dkdv[1]), kv_heads),
        *(q, k, v, grad_out, dk, dv, lse, delta, segments),
        *(tables.row_segment, tables.row_position, tables.prefix, tables.tile_segment, tables.tile_first),
        *(tables.segment_tiles, tables.sees, num_segments),
        *numbers,
        **constants,
        BLOCK_M=chosen.dkdv[0],
        BLOCK_N=chosen.dkdv[1],
        PARTS=chosen.parts,
        num_warps=chosen.dkdv[2],
    )
    return dq, dk, dv


def compile_cases() -> list[CompileCase]:
    """The specialisations that training runs."""
    dkdv_tables = (*TABLES[:1], *PathTiles._fields[:2], *TABLES[3:], *PathTiles._fields[-2:])
    integers = ("rows", *STRIDES, "grad_row", "grad_head")
    delta_constants = {"D": 128, "BLOCK_D": 128, "BLOCK": DELTA_ROWS, "HAS_LSE": True}
    delta_signature = {
        **dict.fromkeys(("out", "grad_out"), "*bf16"),
        **dict.fromkeys(("grad_lse", "delta"), "*fp32"),
        **dict.fromkeys(("rows", "out_row", "out_head", "grad_row", "grad_head"), "i32"),
        **dict.fromkeys(delta_constants, "constexpr"),
    }
    cases = [
        table_case(64, 64, sees=True),
        CompileCase(f"{OP} delta", delta_kernel, delta_signature, delta_constants),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for name, shape in SHAPES.items():
            chosen, capped = backward_blocks(dtype, shape[1]), name == "one head per group"
            for kernel, results, tables, numbers, tiles, more in (
                (dq_kernel, ("dq",), TABLES, integers, chosen.dq, {}),
                (
                    dkdv_kernel,
                    ("dk", "dv"),
                    dkdv_tables,
                    ("num_segments", *integers),
                    chosen.dkdv,
                    {"PARTS": chosen.parts},
                ),
            ):
                signature = arguments(("q", "k", "v", "grad_out", *results), ("lse", "delta"), tables, numbers, dtype)
                label = f"{OP} {' '.join(results)} {name}"
                cases.append(attention_case(label, kernel, signature, shape, tiles, dtype, capped, **more))
    return cases
