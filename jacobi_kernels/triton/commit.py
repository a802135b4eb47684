"""``commit``: the winning path's key and value rows move to their committed places in the cache.

Query row r of a sequence was appended at cache row L + (r - begin); accepted row i belongs at L + i. One program per
(columns of a row, layer, sequence) walks the accepted rows in ascending tiles of ROWS: it loads a whole tile, waits for
all its threads, then stores it. Rows ascend along a path, so sources lie at or behind their destinations: what a tile
overwrites has been read by itself or by an earlier tile, and no later tile reads it. Programs share no column.

A second launch advances the lengths, since every program of the first reads the old one. Elements are copied as
integers. A sequence whose rows, length or pages are out of range is left alone, length included: both launches come to
the same verdict. When the main chain won, all rows are in place and no element is read.
Bytes otherwise: 2 caches * layers * moved rows * row bytes, read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels import _ops
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_runs_here, launch

OP = "commit"
ROWS = 8  # rows of a tile: 8 x 512 elements are 32 registers of a thread
COLUMNS = 512
LIMITS = ("rows", "capacity", "num_pages", "max_pages", "page_size")  # arguments that no code is specialised on


@triton.jit
def _accepted_path(  # type: ignore[no-untyped-def]
    cache_seqlens,
    accepted_rows,
    num_accepted,
    cu_seqlens_q,
    page_table,
    b,
    rows,
    capacity,
    num_pages,
    max_pages,
    page_size,
    PAGED: tl.constexpr,
    LANES: tl.constexpr,
):
    """(old length, first query row, accepted rows: 0 when anything is out of range, those that are out of place)."""
    lanes = tl.arange(0, LANES)
    begin = tl.load(cu_seqlens_q + b)
    end = tl.load(cu_seqlens_q + b + 1)
    length = tl.load(cache_seqlens + b)
    count = tl.load(num_accepted + b)
    fits = (begin >= 0) & (begin <= end) & (end <= rows) & (length >= 0) & (length <= capacity)
    fits = fits & (count >= 0) & (count <= end - begin)
    count = tl.where(fits, count, 0)
    wrong, moved, needed = 0, 0, 0  # needed: cache rows behind L
    for i in range(0, count, LANES):
        at = i + lanes
        inside = at < count
        row = tl.load(accepted_rows + begin + at, mask=inside, other=0)
        before = tl.load(accepted_rows + begin + at - 1, mask=inside & (at > 0), other=-1)
        before = tl.where(at > 0, before, begin - 1)
        wrong += tl.sum((inside & ((row <= before) | (row < begin) | (row >= end))).to(tl.int32), 0)
        moved += tl.sum((inside & (row - begin != at)).to(tl.int32), 0)
        needed = tl.maximum(needed, tl.max(tl.where(inside, row - begin + 1, 0), 0))
    wrong += (needed > capacity - length).to(tl.int32)
    if PAGED:
        first_page = length // page_size
        end_page = tl.where((wrong == 0) & (needed > 0), (length + needed - 1) // page_size + 1, first_page)
        for i in range(first_page, end_page, LANES):
            at = i + lanes
            inside = at < end_page
            page = tl.load(page_table + b.to(tl.int64) * max_pages + at, mask=inside, other=0)
            wrong += tl.sum((inside & ((page < 0) | (page >= num_pages))).to(tl.int32), 0)
    return length, begin, tl.where(wrong == 0, count, 0), moved


@triton.jit
def _row_offset(page_table, b, position, inside, slab_stride, row_stride, max_pages, page_size, PAGED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements from the start of a layer to the cache rows ``position`` of sequence b, int64."""
    if PAGED:
        page = tl.load(page_table + b.to(tl.int64) * max_pages + position // page_size, mask=inside, other=0)
        return page.to(tl.int64) * slab_stride + (position % page_size).to(tl.int64) * row_stride
    return b.to(tl.int64) * slab_stride + position.to(tl.int64) * row_stride


@triton.jit(do_not_specialize=LIMITS)
def move_kernel(  # type: ignore[no-untyped-def]
    k_cache,
    v_cache,
    cache_seqlens,
    accepted_rows,
    num_accepted,
    cu_seqlens_q,
    page_table,
    rows,
    capacity,
    num_pages,
    max_pages,
    page_size,
    row_size,
    k_layer_stride,
    k_slab_stride,
    k_row_stride,
    v_layer_stride,
    v_slab_stride,
    v_row_stride,
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Caches as integers of their elements' size; strides in elements."""
    layer, b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    length, begin, count, moved = _accepted_path(
        cache_seqlens,
        accepted_rows,
        num_accepted,
        cu_seqlens_q,
        page_table,
        b,
        rows,
        capacity,
        num_pages,
        max_pages,
        page_size,
        PAGED,
        LANES,
    )
    if moved > 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        k_columns = k_cache + layer * k_layer_stride + column
        v_columns = v_cache + layer * v_layer_stride + column
        for i in range(0, count, ROWS):
            at = i + tl.arange(0, ROWS)
            inside = at < count
            row = tl.load(accepted_rows + begin + at, mask=inside, other=0) - begin
            out_of_place = inside & (row != at)
            mask = out_of_place[:, None] & (column < row_size)[None, :]
            k_from = _row_offset(
                page_table, b, length + row, inside, k_slab_stride, k_row_stride, max_pages, page_size, PAGED
            )
            k_to = _row_offset(
                page_table, b, length + at, inside, k_slab_stride, k_row_stride, max_pages, page_size, PAGED
            )
            v_from = _row_offset(
                page_table, b, length + row, inside, v_slab_stride, v_row_stride, max_pages, page_size, PAGED
            )
            v_to = _row_offset(
                page_table, b, length + at, inside, v_slab_stride, v_row_stride, max_pages, page_size, PAGED
            )
            k = tl.load(k_columns[None, :] + k_from[:, None], mask=mask)
            v = tl.load(v_columns[None, :] + v_from[:, None], mask=mask)
            tl.debug_barrier()  # every thread has read what any thread is about to overwrite
            tl.store(k_columns[None, :] + k_to[:, None], k, mask=mask)
            tl.store(v_columns[None, :] + v_to[:, None], v, mask=mask)


@triton.jit(do_not_specialize=LIMITS)
def advance_kernel(  # type: ignore[no-untyped-def]
    cache_seqlens,
    accepted_rows,
    num_accepted,
    cu_seqlens_q,
    page_table,
    rows,
    capacity,
    num_pages,
    max_pages,
    page_size,
    PAGED: tl.constexpr,
    LANES: tl.constexpr,
):
    """cache_seqlens[b] += num_accepted[b], one program per sequence."""
    b = tl.program_id(0)
    length, _, count, _ = _accepted_path(
        cache_seqlens,
        accepted_rows,
        num_accepted,
        cu_seqlens_q,
        page_table,
        b,
        rows,
        capacity,
        num_pages,
        max_pages,
        page_size,
        PAGED,
        LANES,
    )
    tl.store(cache_seqlens + b, length + count)


def commit(
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    accepted_rows: Tensor,
    num_accepted: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_table: Tensor | None = None,
) -> None:
    """Move the accepted path's rows and advance the lengths, as :func:`jacobi_kernels.ops.commit`.

    A sequence whose accepted rows, length or pages are out of range is left as it is; that no two sequences write one
    page is not checked. Raises RuntimeError for tensors of a wrong shape or type, caches whose last two dimensions are
    not dense, and index tensors that are not contiguous.
    """
    batch = cache_seqlens.shape[0]
    _ops._layer_caches(OP, k_cache, v_cache, batch, page_table)
    integers = torch.int16 if k_cache.element_size() == 2 else torch.int32
    k, v = k_cache.view(integers), v_cache.view(integers)
    check_runs_here(OP, k, v)
    heads, width = k.shape[3:]
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if (width > 1 and cache.stride(4) != 1) or (heads > 1 and cache.stride(3) != width):
            raise RuntimeError(f"{OP}: {name} must be dense in its last two dimensions, got strides {cache.stride()}")
    for name, index, words, shape in (
        ("cache_seqlens", cache_seqlens, "[B]", (batch,)),
        ("accepted_rows", accepted_rows, "[T]", ("*",)),
        ("num_accepted", num_accepted, "[B]", (batch,)),
        ("cu_seqlens_q", cu_seqlens_q, "[B+1]", (batch + 1,)),
        ("page_table", page_table, "[B, max_pages]", (batch, "*")),
    ):
        if index is not None:
            _ops._int32(OP, name, index, words, shape)
            if not index.is_contiguous():
                raise RuntimeError(f"{OP}: {name} must be contiguous, got strides {index.stride()}")
    layers, slabs, rows = k.shape[:3]
    row_size = heads * width
    max_pages = 0 if page_table is None else page_table.shape[1]
    shared = (
        cache_seqlens,
        accepted_rows,
        num_accepted,
        cu_seqlens_q,
        page_table,
        accepted_rows.shape[0],
        rows if page_table is None else max_pages * rows,
        slabs,
        max_pages,
        rows,
    )
    columns = min(COLUMNS, triton.next_power_of_2(max(row_size, 16)))
    options = {"PAGED": page_table is not None, "LANES": 64, "num_warps": 4}
    launch(
        OP,
        move_kernel,
        (triton.cdiv(row_size, columns), layers, batch),
        k,
        v,
        *shared,
        row_size,
        *k.stride()[:3],
        *v.stride()[:3],
        ROWS=64 if INTERPRETED else ROWS,
        COLUMNS=columns,
        **options,
    )
    launch(OP, advance_kernel, (batch,), *shared, **options)


def compile_cases() -> list[CompileCase]:
    """Rows of SmolLM2-135M (3 heads of 64) and Qwen2.5 (2 and 4 heads of 128), 16 and 32 bits, both cache kinds."""
    cases = []
    indices = dict.fromkeys(("cache_seqlens", "accepted_rows", "num_accepted", "cu_seqlens_q", "page_table"), "*i32")
    limits = dict.fromkeys(LIMITS, "i32")
    strides = dict.fromkeys([f"{c}_{s}_stride" for c in "kv" for s in ("layer", "slab", "row")], "i64")
    for paged in (False, True):
        kind = "paged" if paged else "contiguous"
        constants: dict[str, object] = {"PAGED": paged, "LANES": 64}
        signature = indices | limits | dict.fromkeys(constants, "constexpr")
        cases.append(CompileCase(f"{OP}: lengths, {kind}", advance_kernel, signature, constants))
        for row_size, bits in ((192, 16), (256, 16), (512, 16), (192, 32), (512, 32)):
            constants = {"PAGED": paged, "ROWS": ROWS, "COLUMNS": triton.next_power_of_2(row_size), "LANES": 64}
            signature = {"k_cache": f"*i{bits}", "v_cache": f"*i{bits}"} | indices | limits | {"row_size": "i32"}
            cases.append(
                CompileCase(
                    f"{OP}: rows of {row_size} x {bits} bits, {kind}",
                    move_kernel,
                    signature | strides | dict.fromkeys(constants, "constexpr"),
                    constants,
                    attributes=dict.fromkeys(("k_cache", "v_cache", "row_size", *strides), 16),
                )
            )
    return cases
