"""Kernels of multi_block_attention_with_kvcache: rows over splits of the cache, new rows appended; merge of splits.

    s_j = softcap(scale * q . k_j)     for the keys j of a query's path, or of the window at the path's end
    out = sum_j exp(s_j - max) v_j / sum_j exp(s_j - max)

A key's slot is its logical position on the query's path. Tiles are 64 slots (16 for float32, which has no matrix
instructions), splits 256, all at absolute positions. A program takes M rows (query, head of the group) of one sequence
and one key/value head, and one split or, where rows alone fill the GPU, all splits in turn. Tiles wholly below L, the
committed length, need no mask (but for a window) and serve all M rows. Tiles that reach past L are gathered once per
segment of the rows, along the segment's path: slots below L from the cache, the others from k and v, rounded to the
cache's type. Nothing is read from the cache that this launch writes, so the programs of the first split append their
rows beside it, in any order.

Registers: M x TILE scores, and M x head_dim sums of the split and of the splits before it. The second launch merges
what programs of one split left in memory (float32 sums, their weights and maxima).

Order of a row's sums, whatever it runs beside: k ascending inside a product, one MMA shape for every number of rows;
slots of a tile; tiles ascending; splits folded in ascending order, in registers or by the second launch with the same
operations. Unseen keys weigh exactly 0 and leave a row's sums and maximum as they are, so a tile or split that a row
does not see may be visited or not. Fused multiply-adds are written out where a product meets a sum, so no compiler
choice differs between the two kinds of tiles. (A value that a row may not see must be finite where another row of its
tile sees it.)

Bytes: keys and values up to each sequence's length once per M rows, from L2 after the first; partial results twice,
``8 * head_dim`` per row and split. Operations: 4 * head_dim per row and slot of the visited tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    do_not_specialize=["batch", "rows", "capacity", "pages", "table_width", "path_width", "splits_each", "window"],
    do_not_specialize_on_alignment=["partial_best", "partial_total"],
)
def attention_kernel(  # type: ignore[no-untyped-def]
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
        values /= tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, values.to(out.dtype.element_ty), mask=store)


@triton.jit(
    do_not_specialize=["rows", "parts", "window"], do_not_specialize_on_alignment=["partial_best", "partial_total"]
)
def merge_kernel(  # type: ignore[no-untyped-def]
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
