"""Split-KV attention of a block layout over the KV cache, with the append of the new keys and values fused in.

    s_j = softcap(scale * q . k_j)     for the keys j of a query's path, or of the window at the path's end
    out = sum_j exp(s_j - max) v_j / sum_j exp(s_j - max)

A key's slot is its logical position on the query's path. Tiles are 64 slots, splits 256, both at absolute positions.
A program takes M rows (query, head of the group) of one sequence and one key/value head, and one split or, where rows
alone fill the GPU, all splits in turn. Tiles wholly below L, the committed length, need no mask (but for a window) and
serve all M rows. Tiles that reach past L are gathered once per segment of the rows, along the segment's path: slots
below L from the cache, the others from k and v, rounded to the cache's type. Nothing is read from the cache that this
launch writes, so the programs of the first split append their rows beside it, in any order.

Registers: M x 64 scores, and M x head_dim sums of the split and of the splits before it. The second launch merges what
programs of one split left in memory (float32 sums, their weights and maxima).

Order of a row's sums, whatever it runs beside: k ascending inside a product, one MMA shape for every M; slots of a
tile; tiles ascending; splits folded in ascending order, in registers or by the second launch with the same operations.
Unseen keys weigh exactly 0 and leave a row's sums and maximum as they are, so a tile or split that a row does not see
may be visited or not. Fused multiply-adds are written out: no compiler choice differs between the two kinds of tiles.
(A value that a row may not see must be finite where another row of its tile sees it.)

Bytes: keys and values up to each sequence's length once per M rows, from L2 after the first; partial results twice,
``8 * head_dim`` per row and split. Operations: 4 * head_dim per row and slot of the visited tiles.

:func:`attend_with_kvcache` is the inner function for callers that plan once for many layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import check_cached_attention
from jacobi_kernels.triton.multi_block_attention import ALL, options
from jacobi_kernels.triton.plan import Plan, plan_rows
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_runs_here, launch

OP = "multi_block_attention_with_kvcache"
SPLIT = 256  # slots
PROGRAMS = 128  # with fewer, splits run side by side
PARTIAL_BYTES = 1 << 28  # and in turn where their results would need more
MAX_HEAD_DIM = 256
LOG2E = 1.4426950408889634


@triton.jit
def fold(best, total, out, best2, total2, out2):  # type: ignore[no-untyped-def]
    """The rows' (maximum, weights, values) followed by a later split's; nothing seen is (-inf, 0, 0)."""
    new = tl.maximum(best, best2)
    safe = tl.where(new == float("-inf"), 0.0, new)
    old_weight, new_weight = tl.exp2(best - safe), tl.exp2(best2 - safe)
    total = tl.fma(total2, new_weight, total * old_weight)
    weights = tl.broadcast_to(new_weight[:, None], out.shape)
    return new, total, tl.fma(out2, weights, out * old_weight[:, None])


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    q, keys, values, visible, best, total, out, inner, factor, MASKED: tl.constexpr, SOFTCAP: tl.constexpr
):
    """The rows' (maximum, weights, values) followed by one tile of keys; exponents are to the base 2."""
    score = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if SOFTCAP:
        score = 1.0 - 2.0 / (tl.exp2(score * inner) + 1.0)  # tanh
    scaled = score * factor
    if MASKED:
        scaled = tl.where(visible, scaled, float("-inf"))
    new = tl.maximum(best, tl.max(scaled, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    shift = tl.broadcast_to(-safe[:, None], score.shape)
    weight = tl.exp2(tl.fma(score, tl.full(score.shape, 0.0, tl.float32) + factor, shift))
    if MASKED:
        weight = tl.where(visible, weight, 0.0)
    alpha = tl.exp2(best - safe)
    total = tl.fma(total, alpha, tl.sum(weight, 1))
    out = tl.dot(weight.to(values.dtype), values, out * alpha[:, None], input_precision="ieee")
    return new, total, out


@triton.jit
def _cache_rows(  # type: ignore[no-untyped-def]
    slot, wanted, b, page_table, table_width, pages, slab_stride, row_stride, PAGE_SIZE: tl.constexpr
):
    """(offset, whether it lies in the cache) of sequence b's cache rows ``slot`` where ``wanted``."""
    if PAGE_SIZE > 0:
        page = tl.load(page_table + b.to(tl.int64) * table_width + slot // PAGE_SIZE, mask=wanted, other=-1)
        wanted &= (page >= 0) & (page < pages)
        return page.to(tl.int64) * slab_stride + (slot % PAGE_SIZE).to(tl.int64) * row_stride, wanted
    return b.to(tl.int64) * slab_stride + slot.to(tl.int64) * row_stride, wanted


@triton.jit(
    do_not_specialize=["batch", "rows", "capacity", "pages", "table_width", "path_width", "splits_each", "window"]
)
def _attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    k_cache,
    v_cache,
    cache_seqlens,
    cu_seqlens_q,
    row_segment,
    row_position,
    path,
    page_table,
    out,
    partial_best,
    partial_total,
    partial_out,
    batch,
    rows,
    capacity,
    pages,
    table_width,
    path_width,
    splits_each,
    window,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    slab_stride,
    row_stride,
    inner,
    factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    tile_index, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    # Sequence b owns row tiles from begin * GROUP // M + b on.
    b_all = tl.arange(0, BLOCK_B)
    begins = tl.load(cu_seqlens_q + b_all, mask=b_all < batch, other=0)
    b = tl.sum(((begins * GROUP // M + b_all <= tile_index) & (b_all < batch)).to(tl.int32)) - 1
    if b < 0:
        return
    begin, end = tl.load(cu_seqlens_q + b), tl.load(cu_seqlens_q + b + 1)
    index = (tile_index - (begin * GROUP // M + b)) * M + tl.arange(0, M)
    query, head = begin + index // GROUP, kv_head * GROUP + index % GROUP
    inside = (index >= 0) & (query >= 0) & (query < end) & (query < rows)
    segment = tl.load(row_segment + query, mask=inside, other=-1)
    position = tl.load(row_position + query, mask=inside, other=-1)
    live = segment >= 0
    last = tl.max(position)
    if last < 0:
        return
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + b), 0), capacity)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    kv_columns = (kv_head * HEAD_DIM + d)[None, :]

    if part == 0:
        slot = length + query - begin
        at, fits = _cache_rows(
            slot,
            live & (index % GROUP == 0) & (slot < capacity),
            b,
            page_table,
            table_width,
            pages,
            slab_stride,
            row_stride,
            PAGE_SIZE,
        )
        mask = fits[:, None] & in_head[None, :]
        new = query.to(tl.int64)[:, None]
        new_keys = tl.load(k + new * k_stride + kv_columns, mask=mask)
        tl.store(k_cache + at[:, None] + kv_columns, new_keys.to(k_cache.dtype.element_ty), mask=mask)
        new_values = tl.load(v + new * v_stride + kv_columns, mask=mask)
        tl.store(v_cache + at[:, None] + kv_columns, new_values.to(v_cache.dtype.element_ty), mask=mask)

    first_slot = 0
    if WINDOW:
        first_slot = tl.maximum(tl.min(tl.where(live, position, 2147483647)) - window, 0)
    first_split = tl.maximum(part * splits_each, first_slot // SPLIT)
    end_split = tl.minimum((part + 1) * splits_each, last // SPLIT + 1)
    if first_split >= end_split:
        return

    q_at = q + query.to(tl.int64)[:, None] * q_stride + (head * HEAD_DIM)[:, None] + d[None, :]
    queries = tl.load(q_at, mask=live[:, None] & in_head[None, :], other=0.0).to(k_cache.dtype.element_ty)
    first_segment = tl.min(tl.where(live, segment, 2147483647))
    last_segment = tl.max(segment)
    shared_end = length // TILE  # tiles below are the same for all rows
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    values = tl.zeros((M, BLOCK_D), tl.float32)

    for split in range(first_split, end_split):
        begin_tile = tl.maximum(split * (SPLIT // TILE), first_slot // TILE)
        end_tile = (split + 1) * (SPLIT // TILE)
        s_best = tl.full((M,), float("-inf"), tl.float32)
        s_total = tl.zeros((M,), tl.float32)
        s_values = tl.zeros((M, BLOCK_D), tl.float32)

        for tile in range(begin_tile, tl.minimum(end_tile, shared_end)):
            slot = tile * TILE + tl.arange(0, TILE)
            at, fits = _cache_rows(
                slot, slot >= 0, b, page_table, table_width, pages, slab_stride, row_stride, PAGE_SIZE
            )
            mask = fits[:, None] & in_head[None, :]
            tile_keys = tl.load(k_cache + at[:, None] + kv_columns, mask=mask, other=0.0)
            tile_values = tl.load(v_cache + at[:, None] + kv_columns, mask=mask, other=0.0)
            visible = slot[None, :] >= position[:, None] - window
            s_best, s_total, s_values = _attend_tile(
                queries, tile_keys, tile_values, visible, s_best, s_total, s_values, inner, factor, WINDOW, SOFTCAP
            )

        for s in range(first_segment, last_segment + 1):
            mine = segment == s
            reach = tl.max(tl.where(mine, position, -1)) + 1
            rows_of_path = path + tl.cast(s, tl.int64) * path_width - length
            end_gathered = tl.minimum(end_tile, (reach + TILE - 1) // TILE)
            for tile in tl.range(tl.maximum(begin_tile, shared_end), end_gathered, num_stages=1):
                slot = tile * TILE + tl.arange(0, TILE)
                at, old = _cache_rows(
                    slot, slot < length, b, page_table, table_width, pages, slab_stride, row_stride, PAGE_SIZE
                )
                on_path = (slot >= length) & (slot < reach) & (slot - length < path_width)
                row = tl.load(rows_of_path + slot, mask=on_path, other=-1)
                new_mask = ((row >= 0) & (row < rows))[:, None] & in_head[None, :]
                old_mask = old[:, None] & in_head[None, :]
                new = row.to(tl.int64)[:, None]
                tile_keys = tl.load(k + new * k_stride + kv_columns, mask=new_mask, other=0.0).to(queries.dtype)
                tile_keys = tl.load(k_cache + at[:, None] + kv_columns, mask=old_mask, other=tile_keys)
                tile_values = tl.load(v + new * v_stride + kv_columns, mask=new_mask, other=0.0).to(queries.dtype)
                tile_values = tl.load(v_cache + at[:, None] + kv_columns, mask=old_mask, other=tile_values)
                visible = mine[:, None] & (slot[None, :] <= position[:, None])
                if WINDOW:
                    visible &= slot[None, :] >= position[:, None] - window
                s_best, s_total, s_values = _attend_tile(
                    queries,
                    tile_keys,
                    tile_values,
                    visible,
                    s_best,
                    s_total,
                    s_values,
                    inner,
                    factor,
                    True,
                    SOFTCAP,
                )
        best, total, values = fold(best, total, values, s_best, s_total, s_values)

    store = live[:, None] & in_head[None, :]
    if PARTIAL:
        at = (part.to(tl.int64) * rows + query) * HEADS + head
        tl.store(partial_best + at, best, mask=live)
        tl.store(partial_total + at, total, mask=live)
        tl.store(partial_out + at[:, None] * HEAD_DIM + d[None, :], values, mask=store)
    else:
        at = query.to(tl.int64)[:, None] * out_stride + (head * HEAD_DIM)[:, None] + d[None, :]
        tl.store(out + at, (values / total[:, None]).to(out.dtype.element_ty), mask=store)


@triton.jit(do_not_specialize=["rows", "parts", "window"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    row_position,
    out,
    partial_best,
    partial_total,
    partial_out,
    rows,
    parts,
    window,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Row ``program 0``, BLOCK_H heads: its splits in ascending order; holes are 0."""
    row = tl.program_id(0)
    position = tl.load(row_position + row)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    first_split = 0
    if WINDOW:
        first_split = tl.maximum(position - window, 0) // SPLIT
    end_split = tl.where(position < 0, 0, tl.minimum(position // SPLIT + 1, parts))
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    values = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for split in range(first_split, end_split):
        at = (tl.cast(split, tl.int64) * rows + row) * HEADS + head
        s_best = tl.load(partial_best + at, mask=head < HEADS, other=float("-inf"))
        s_total = tl.load(partial_total + at, mask=head < HEADS, other=0.0)
        s_values = tl.load(partial_out + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        best, total, values = fold(best, total, values, s_best, s_total, s_values)
    result = values / tl.where(total == 0.0, 1.0, total)[:, None]
    at = row.to(tl.int64) * out_stride + (head * HEAD_DIM)[:, None] + d[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


def _rows_per_tile(dtype: torch.dtype) -> int:
    """M."""
    return 16 if dtype == torch.float32 else 32


def _row_tiles(rows: int, batch: int, group: int, dtype: torch.dtype) -> int:
    """Row tiles of a key/value head, whatever the sequences' shares of the rows are."""
    return rows * group // _rows_per_tile(dtype) + batch if rows else 0


def _parts(rows: int, batch: int, heads: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype) -> int:
    """Splits that run side by side; 0: each program runs all of its rows' splits in turn."""
    parts = max(1, triton.cdiv(capacity, SPLIT))
    full = _row_tiles(rows, batch, heads // kv_heads, dtype) * kv_heads >= PROGRAMS
    return 0 if full or parts * rows * heads * (head_dim + 2) * 4 > PARTIAL_BYTES else parts


def attention_workspace_size(
    rows: int, batch: int, heads: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype
) -> int:
    """Bytes that :func:`attend_with_kvcache` needs; ``capacity``: slots of a sequence, ``dtype``: the cache's."""
    return _parts(rows, batch, heads, kv_heads, head_dim, capacity, dtype) * rows * heads * (head_dim + 2) * 4


def attend_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    plan: Plan,
    *,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Append and attend as :func:`jacobi_kernels.ops.multi_block_attention_with_kvcache`, with a plan that exists.

    Parameters
    ----------
    q, k, v : Tensor
        ``[T, H, D]`` and ``[T, KVH, D]``, dense in the last two dimensions (views of one projection will do); float32
        or the cache's type. They are rounded to the cache's type first.
    k_cache, v_cache : Tensor
        One layer's cache, with the same strides.
    plan : Plan
        Of this layout and these ``cache_seqlens``; holes of the plan write nothing and give 0. ``segments`` and
        ``cu_segments`` are not looked at again.
    out : Tensor, optional
        ``[T, H, D]`` of any floating type, dense in the last two dimensions; by default new, of ``q``'s type.
    workspace : Tensor, optional
        At least :func:`attention_workspace_size` bytes, contiguous and 16-byte aligned; by default allocated.

    Returns
    -------
    Tensor
        ``out``.
    """
    rows, heads, head_dim = q.shape
    kv_heads, batch = k.shape[1], cache_seqlens.shape[0]
    paged = page_table is not None
    page_size, table_width = (k_cache.shape[1], page_table.shape[1]) if page_table is not None else (0, 0)
    capacity = page_size * table_width if paged else k_cache.shape[1]
    group, m, dtype = heads // kv_heads, _rows_per_tile(k_cache.dtype), k_cache.dtype
    scale, softcap, window = options(OP, head_dim, softmax_scale, window_size, softcap)
    block_d = max(16, triton.next_power_of_2(head_dim))
    num_warps, num_stages = _warps_stages(block_d, dtype)
    if out is None:
        out = q.new_empty(q.shape)
    parts = _parts(rows, batch, heads, kv_heads, head_dim, capacity, dtype)
    best = total = sums = None
    if parts:
        count = parts * rows * heads
        if workspace is None:
            workspace = q.new_empty((count * (head_dim + 2),), dtype=torch.float32)
        floats = workspace.view(torch.float32)
        sums, best, total = floats[: count * (head_dim + 2)].split((count * head_dim, count, count))
    else:
        out.zero_()  # holes
    launch(
        OP,
        _attention_kernel,
        (_row_tiles(rows, batch, group, dtype), kv_heads, parts or 1),
        q,
        k,
        v,
        k_cache,
        v_cache,
        cache_seqlens,
        cu_seqlens_q,
        plan.row_segment,
        plan.row_position,
        plan.path,
        page_table,
        out,
        best,
        total,
        sums,
        batch,
        rows,
        capacity,
        k_cache.shape[0],
        table_width,
        plan.path.shape[1],
        1 if parts else max(1, triton.cdiv(capacity, SPLIT)),
        window,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        2.0 * LOG2E * scale / softcap if softcap else 0.0,
        LOG2E * (softcap if softcap else scale),
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_B=triton.next_power_of_2(max(batch, 1)),
        M=m,
        PAGE_SIZE=page_size,
        WINDOW=window < ALL,
        SOFTCAP=softcap > 0,
        PARTIAL=parts > 0,
        TILE=_tile(dtype),
        SPLIT=SPLIT,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if parts:
        block_h = triton.next_power_of_2(heads) if INTERPRETED else 4
        launch(
            OP,
            _merge_kernel,
            (rows, triton.cdiv(heads, block_h)),
            plan.row_position,
            out,
            best,
            total,
            sums,
            rows,
            parts,
            window,
            out.stride(0),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_H=block_h,
            WINDOW=window < ALL,
            SPLIT=SPLIT,
            num_warps=4,
        )
    return out


def _tile(dtype: torch.dtype) -> int:
    """Slots of a tile. Plain float32 products keep their operands in registers."""
    return 16 if dtype == torch.float32 and not INTERPRETED else 64


def _warps_stages(block_d: int, dtype: torch.dtype) -> tuple[int, int]:
    """(num_warps, num_stages) of the attention kernel: they follow from the head and the type alone."""
    return (4 if block_d <= 64 and dtype != torch.float32 else 8), (2 if block_d > 128 else 3)


def _check_strides(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise RuntimeError(f"{OP}: head_dim must be within 1..{MAX_HEAD_DIM}, got {q.shape[2]}")
    for name, t in (("q", q), ("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if t.stride(-1) != 1 or (t.shape[-2] > 1 and t.stride(-2) != t.shape[-1]):
            raise RuntimeError(f"{OP}: {name} must be dense in its last two dimensions, got strides {list(t.stride())}")
    for size, ours, theirs in zip(k_cache.shape[:2], k_cache.stride()[:2], v_cache.stride()[:2], strict=True):
        if size > 1 and ours != theirs:
            raise RuntimeError(
                f"{OP}: v_cache must have k_cache's strides {list(k_cache.stride())}, got {list(v_cache.stride())}"
            )


def multi_block_attention_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
) -> Tensor:
    """As :func:`jacobi_kernels.ops.multi_block_attention_with_kvcache`, on the device.

    Values are not checked on the host: a sequence whose layout, length or pages are out of range is left out as a
    whole, writes nothing and gives 0.
    """
    check_runs_here(OP, q, k, v, k_cache, v_cache)
    check_cached_attention(q, k, v, k_cache, v_cache, cache_seqlens, cu_seqlens_q, segments, cu_segments, page_table)
    _check_strides(q, k, v, k_cache, v_cache)
    layout = (cu_seqlens_q, segments, cu_segments)
    for t in (*layout, cache_seqlens, page_table):
        if t is not None and not t.is_contiguous():
            raise RuntimeError(f"{OP}: the layout, cache_seqlens and page_table must be contiguous")
    plan = plan_rows(*layout, cache_seqlens, q.shape[0], k_cache=k_cache, page_table=page_table)
    return attend_with_kvcache(
        q,
        k,
        v,
        k_cache,
        v_cache,
        cache_seqlens,
        *layout,
        plan,
        page_table=page_table,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
    )


SHAPES = {  # name: (heads, kv_heads, head_dim)
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-1.5B": (12, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "head_dim 80": (8, 8, 80),
    "head_dim 256": (8, 4, 256),
}


def _attention_case(name: str, short: str, page_size: int, partial: bool, window: bool, softcap: bool) -> CompileCase:
    heads, kv_heads, head_dim = SHAPES[name]
    dtype = torch.float32 if short == "fp32" else torch.bfloat16
    block_d = triton.next_power_of_2(head_dim)
    signature = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), f"*{short}")
    signature |= dict.fromkeys(
        ("cache_seqlens", "cu_seqlens_q", "row_segment", "row_position", "path", "page_table"), "*i32"
    )
    signature |= {"out": f"*{short}"} | dict.fromkeys(("partial_best", "partial_total", "partial_out"), "*fp32")
    sizes = ("batch", "rows", "capacity", "pages", "table_width", "path_width", "splits_each", "window")
    signature |= dict.fromkeys(sizes, "i32")
    strides = ("q_stride", "k_stride", "v_stride", "out_stride", "slab_stride", "row_stride")
    signature |= dict.fromkeys(strides, "i32") | {"inner": "fp32", "factor": "fp32"}
    constants = {"HEADS": heads, "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_B": 8}
    constants |= {"M": _rows_per_tile(dtype), "PAGE_SIZE": page_size, "WINDOW": window, "SOFTCAP": softcap}
    constants |= {"PARTIAL": partial, "TILE": _tile(dtype), "SPLIT": SPLIT}
    words = ("paged" * bool(page_size), "split" * partial, "window" * window, "softcap" * softcap)
    return CompileCase(
        " ".join(filter(None, (f"{OP}: {name} {short}", *words))),
        _attention_kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constants,
        *_warps_stages(block_d, dtype),
        uses_mma=short != "fp32",
        may_spill=short == "fp32" and head_dim > 128,
        attributes=dict.fromkeys((*(a for a, t in signature.items() if t.startswith("*")), *strides), 16),
    )


def compile_cases() -> list[CompileCase]:
    """The kernels for three models and two odd head sizes: types, pages, splits, window and soft cap."""
    cases = [_attention_case(name, "bf16", 0, partial, False, False) for name in SHAPES for partial in (False, True)]
    cases += [_attention_case(name, "fp32", 0, True, False, False) for name in SHAPES]
    cases += [
        _attention_case("Qwen2.5-7B", "bf16", 16, True, False, False),
        _attention_case("Qwen2.5-7B", "bf16", 0, True, True, True),
        _attention_case("Qwen2.5-7B", "fp16", 0, True, False, False),
        _attention_case("SmolLM2-135M", "fp32", 16, False, True, False),
    ]
    for name, (heads, _, head_dim) in SHAPES.items():
        constants = {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_H": 4}
        constants |= {"WINDOW": False, "SPLIT": SPLIT}
        signature = {"row_position": "*i32", "out": "*bf16"}
        signature |= dict.fromkeys(("partial_best", "partial_total", "partial_out"), "*fp32")
        signature |= dict.fromkeys(("rows", "parts", "window", "out_stride"), "i32")
        signature |= dict.fromkeys(constants, "constexpr")
        cases.append(CompileCase(f"{OP}: {name} merge", _merge_kernel, signature, constants))
    return cases
