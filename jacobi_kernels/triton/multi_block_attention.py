"""Attention over packed training layouts: every row over its path, no cache.

    out[r] = sum over rows j of the path of r, in the window, of exp(s[r, j] - lse[r]) v[j]
    s[r, j] = softcap(scale * q[r] . k[j]),   lse[r] = log sum exp s[r, j]

A program takes BLOCK_M (token, head) pairs of one segment and one key head: the heads of a group share their keys, and
short segments still fill a tile. It walks the path in tiles of BLOCK_N positions from its last token's own downwards
(:mod:`path_tiles`): only what some row of the tile sees is touched. Online softmax in base 2, float32; q, the running
maximum, sum and the [BLOCK_M, D] accumulator stay in registers. Order: positions descending by tiles from the last
token of the tile, so the same call gives the same bits, while another layout may round differently.

Bytes: k and v once per query tile (from L2 mostly), q and out once. Operations: 4 * D per (query head, visible key).
Holes: out 0, lse -inf.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import _layout, _qkv
from jacobi_kernels.triton.path_tiles import ALL, capped, first_key_rows, path_tiles, row_mask, table_case
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_runs_here, launch

OP = "multi_block_attention"
MAX_HEAD_DIM = 256
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["window"])
def forward_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
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
    mask = row_mask(live, width, D, BLOCK_D)
    q_at = q + (start + token).to(tl.int64) * q_row + head * q_head
    queries = tl.load(q_at[:, None] + width[None, :], mask=mask, other=0.0)
    query_position = prefix + token

    last = prefix + tl.minimum((first + BLOCK_M - 1) // GROUP, length - 1)
    lowest = tl.maximum(prefix + first // GROUP - window, 0)
    offset = tl.arange(0, BLOCK_N) + (1 - BLOCK_N)
    key_rows = first_key_rows(before, s, start, prefix, last + offset, BLOCK_N)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for highest in range(last, lowest - 1, -BLOCK_N):
        found = key_rows >= 0
        at = tl.where(found, key_rows, 0).to(tl.int64)
        there = row_mask(found, width, D, BLOCK_D)
        keys = tl.load((k + at * k_row + kv_head * k_head)[:, None] + width[None, :], mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * capped(scores, softcap)
        position = highest + offset  # at least 0 where a row was found
        ahead = query_position[:, None] - position[None, :]
        seen = (position >= 0)[None, :] & (ahead >= 0) & (ahead <= window)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load((v + at * v_row + kv_head * v_head)[:, None] + width[None, :], mask=there, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        top = now
        key_rows = tl.load(jump + tl.where(found, key_rows, 0), mask=found, other=-1)

    out_at = out + ((start + token).to(tl.int64) * (tl.num_programs(1) * GROUP) + head) * D
    total = tl.where(live, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out_at[:, None] + width[None, :], result, mask=mask)
    tl.store(lse + head.to(tl.int64) * rows + start + token, (top + tl.log2(total)) * LN2, mask=live)


def blocks(
    dtype: torch.dtype, rows: int, num_segments: int, group: int, head_dim: int, operands_in_memory: bool
) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps), from shapes and the kind of GPU alone.

    ``operands_in_memory``: products leave their operands in shared memory (sm_90 on), so that 128 rows fit.
    """
    if INTERPRETED:  # few large programs
        return 64, 64, 4
    if dtype == torch.float32:  # plain fused multiply-adds: tiles that leave registers to the operands
        return 32, 32, 4
    if head_dim > 128:
        return 64, 32, 8
    if rows * group >= 128 * num_segments and (operands_in_memory or head_dim <= 64):
        return 128, 64, 8
    return 64, 64, 8 if head_dim > 64 else 4


def prepare(op: str, q: Tensor, k: Tensor, v: Tensor, *layout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check what forward and backward share; q, k and v with rows that are dense inside a head."""
    check_runs_here(op, q, k, v, *layout)
    _qkv(op, q, k, v)
    _layout(op, *layout)
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    return q, k, v


def options(
    op: str, head_dim: int, softmax_scale: float | None, window_size: int, softcap: float
) -> tuple[float, float, int]:
    """(scale, softcap, window) as the kernels take them."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise RuntimeError(f"{op}: head_dim must be within 1..{MAX_HEAD_DIM}, got {head_dim}")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise RuntimeError(f"{op}: softcap must be at least 0 (0: off) and finite, got {softcap:g}")
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise RuntimeError(f"{op}: softmax_scale must be finite, got {softmax_scale:g}")
    if window_size < -1:
        raise RuntimeError(f"{op}: window_size must be -1 (all) or at least 0, got {window_size}")
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    return scale, softcap, ALL if window_size < 0 else min(window_size, ALL)


def multi_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """:func:`jacobi_kernels.ops.multi_block_attention` in two launches.

    Row results are the same in every run, not in every layout. A layout that breaks the rules is not refused: its
    segments are treated as holes.
    """
    q, k, v = prepare(OP, q, k, v, cu_seqlens_q, segments, cu_segments)
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.zeros((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.full((heads, rows), -math.inf, dtype=torch.float32, device=q.device)
    scale, softcap, window = options(OP, head_dim, softmax_scale, window_size, softcap)
    if rows == 0 or heads == 0:
        return out, lse
    group = heads // kv_heads
    in_memory = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)
    block_m, block_n, num_warps = blocks(q.dtype, rows, segments.shape[0], group, head_dim, in_memory)
    tables = path_tiles(OP, cu_seqlens_q, segments, cu_segments, rows, group, block_m, block_n)
    launch(
        OP,
        forward_kernel,
        (tables.tile_segment.shape[0], kv_heads),
        q,
        k,
        v,
        out,
        lse,
        segments.contiguous(),
        tables.before,
        tables.jump,
        tables.prefix,
        tables.tile_segment,
        tables.tile_first,
        rows,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        scale,
        softcap,
        window,
        GROUP=group,
        D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CAPPED=softcap > 0,
        num_warps=num_warps,
        num_stages=2,
    )
    return out, lse


STRIDES = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")
SHAPES = {  # (group, head_dim)
    "SmolLM2-135M": (3, 64),
    "Qwen2.5-1.5B": (6, 128),
    "Qwen2.5-7B": (7, 128),
    "one head per group": (1, 128),
}


def attention_case(
    name: str,
    kernel: object,
    signature: dict[str, str],
    shape: tuple[int, int],
    tiles: tuple[int, int, int],
    dtype: torch.dtype,
    capped: bool,
    **more: int,
) -> CompileCase:
    """A kernel for a (group, head_dim) with (BLOCK_M, BLOCK_N, num_warps)."""
    group, head_dim = shape
    constants = {
        "GROUP": group,
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": tiles[0],
        "BLOCK_N": tiles[1],
        "CAPPED": capped,
        **more,
    }
    return CompileCase(
        name=f"{name} {str(dtype)[6:]}{' softcap' if capped else ''}",
        kernel=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        num_warps=tiles[2],
        num_stages=2,
        uses_mma=dtype != torch.float32,
        may_spill=dtype == torch.float32,
        attributes=dict.fromkeys((n for n in signature if n.endswith(("_row", "_head"))), 16),
    )


def arguments(
    operands: tuple[str, ...],
    floats: tuple[str, ...],
    tables: tuple[str, ...],
    integers: tuple[str, ...],
    dtype: torch.dtype,
) -> dict[str, str]:
    """Signature of an attention kernel, in the order in which all of them take their arguments."""
    return {
        **dict.fromkeys(operands, "*fp32" if dtype == torch.float32 else "*bf16"),
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(tables, "*i32"),
        **dict.fromkeys(integers, "i32"),
        "scale": "fp32",
        "softcap": "fp32",
        "window": "i32",
    }


TABLES = ("segments", "before", "jump", "prefixes", "tile_segment", "tile_first")


def compile_cases() -> list[CompileCase]:
    """The specialisations that training runs."""
    cases = [table_case(128, 64, sees=False), table_case(32, 32, sees=True)]
    for dtype in (torch.bfloat16, torch.float32):
        signature = arguments(("q", "k", "v", "out"), ("lse",), TABLES, ("rows", *STRIDES), dtype)
        for name, shape in SHAPES.items():
            capped = name == "one head per group"
            for in_memory in (False, True) if dtype == torch.bfloat16 and shape[1] > 64 and not capped else (False,):
                tiles = blocks(dtype, 4096, 128, *shape, in_memory)
                label = f"{OP} {name}{' sm_90 on' if in_memory else ''}"
                case = attention_case(label, forward_kernel, signature, shape, tiles, dtype, capped)
                cases.append(replace(case, may_spill=True) if in_memory else case)  # by a few bytes on sm_80
    return cases
