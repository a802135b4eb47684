"""The path rule of a block layout on the device: once per forward pass, for all layers.

    position of a row   L + (visible tokens of its ancestors) + (its index in its segment)
    path of a segment   visible rows of its ancestors, outermost first, then its own rows

Two launches. ``_check_kernel``, a program per sequence: every rule of csrc/common/layout.h, the cache's length and its
page table; a sequence that breaks one is left out as a whole: all its rows are holes. ``_path_kernel``: programs for
tiles of rows find each row's sequence and segment (the one that covers it) and walk up its ancestors side by side;
programs for segments walk up once to count the path and once to write it. Walks end because a parent comes before its
child. Bytes and operations are negligible: some thousands of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.state import StepError
from jacobi_kernels.triton.runtime import CompileCase, launch

OP = "plan_rows"
ROWS, BLOCK = 64, 32

LAYOUT_ERROR = tl.constexpr(int(StepError.LAYOUT))
LENGTH_ERROR = tl.constexpr(int(StepError.CACHE_LENGTH))
PAGE_ERROR = tl.constexpr(int(StepError.PAGE_TABLE))

_START: tl.constexpr = tl.constexpr(0)  # columns of segments
_LENGTH: tl.constexpr = tl.constexpr(1)
_PARENT: tl.constexpr = tl.constexpr(2)
_VISIBLE: tl.constexpr = tl.constexpr(3)


@dataclass(frozen=True)
class Plan:
    """Where every query row stands; all tensors int32 on the layout's device.

    Attributes
    ----------
    row_sequence, row_segment, row_position : Tensor
        ``[T]``: sequence, segment (counted over the whole batch) and logical position, the number of tokens on the
        row's path less one; -1 for holes and for the rows of sequences with an error.
    path : Tensor
        ``[S, P]``: query row of the j-th token behind the committed ones on the path of a segment up to its own end;
        -1 beyond.
    error : Tensor
        ``[B]``: 0, or why the sequence takes no part: a key of :data:`jacobi_kernels.state.STEP_ERRORS`.
    """

    row_sequence: Tensor
    row_segment: Tensor
    row_position: Tensor
    path: Tensor
    error: Tensor


@triton.jit
def _partitions(bounds, batch, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether bounds [batch + 1] starts at 0, ascends, and ends at total."""
    wrong = (tl.load(bounds) != 0).to(tl.int32) + (tl.load(bounds + batch) != total).to(tl.int32)
    for start in range(0, batch, BLOCK):
        b = start + tl.arange(0, BLOCK)
        low = tl.load(bounds + b, mask=b < batch, other=0)
        high = tl.load(bounds + b + 1, mask=b < batch, other=0)
        wrong += tl.sum((high < low).to(tl.int32))
    return wrong == 0


@triton.jit(do_not_specialize=["rows", "batch", "num_segments", "capacity", "page_size", "pages"])
def _check_kernel(  # type: ignore[no-untyped-def]
    cu_seqlens_q,
    segments,
    cu_segments,
    cache_seqlens,
    page_table,
    error,
    rows,
    batch,
    num_segments,
    capacity,
    page_size,
    pages,
    BLOCK: tl.constexpr,
    CHECK_PAGES: tl.constexpr,
):
    """error[b] = code of the first rule that sequence b breaks; capacity -1: not checked."""
    b = tl.program_id(0)
    code = 0
    live_end = 0  # query rows that need room in the cache
    if _partitions(cu_seqlens_q, batch, rows, BLOCK) & _partitions(cu_segments, batch, num_segments, BLOCK):
        begin, end = tl.load(cu_seqlens_q + b), tl.load(cu_seqlens_q + b + 1)
        first, last = tl.load(cu_segments + b), tl.load(cu_segments + b + 1)
        broken = 0
        for base in range(first, last, BLOCK):
            s = base + tl.arange(0, BLOCK)
            inside = s < last
            at = segments + s * 4
            start = tl.load(at + _START, mask=inside, other=0)
            length = tl.load(at + _LENGTH, mask=inside, other=0)
            parent = tl.load(at + _PARENT, mask=inside, other=-1)
            visible = tl.load(at + _VISIBLE, mask=inside, other=0)
            behind = inside & (s > first)
            previous = tl.load(at - 4 + _START, mask=behind, other=0)
            previous += tl.load(at - 4 + _LENGTH, mask=behind, other=0)
            earlier = (parent >= first) & (parent < s)
            limit = tl.load(segments + parent * 4 + _LENGTH, mask=inside & earlier, other=0)
            wrong = (length < 0) | (start < begin) | (start > end) | (length > end - start)
            wrong |= (behind & (start < previous)) | ((parent != -1) & (earlier == 0))
            wrong |= (visible < 0) | (visible > limit)
            broken += tl.sum((inside & wrong).to(tl.int32))
            live_end = tl.maximum(live_end, tl.max(tl.where(inside & (length > 0), start + length - begin, 0)))
        if broken > 0:
            code = LAYOUT_ERROR + 0
    else:
        code = LAYOUT_ERROR + 0
    if code == 0:
        used = tl.load(cache_seqlens + b).to(tl.int64)
        if used < 0:
            code = LENGTH_ERROR + 0
        used += live_end
        if (capacity >= 0) & (used > capacity):
            code = LENGTH_ERROR + 0
        if CHECK_PAGES:
            needed = tl.where(code == 0, (used + page_size - 1) // page_size, 0).to(tl.int32)
            table = page_table + b.to(tl.int64) * (capacity // page_size)
            outside = 0
            for base in range(0, needed, BLOCK):
                i = base + tl.arange(0, BLOCK)
                page = tl.load(table + i, mask=i < needed, other=0)
                outside += tl.sum(((page < 0) | (page >= pages)).to(tl.int32))
            if outside > 0:
                code = PAGE_ERROR + 0
    tl.store(error + b, code)


@triton.jit
def _count_ends(bounds, index, batch, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the ends bounds[1 .. batch] are at or below each index: the sequence that it belongs to."""
    count = index * 0
    for base in range(0, batch, BLOCK):
        b = base + tl.arange(0, BLOCK)
        end = tl.load(bounds + 1 + b, mask=b < batch, other=2147483647)
        count += tl.sum((end[None, :] <= index[:, None]).to(tl.int32), 1)
    return count


@triton.jit
def _write_run(path, at, start, length, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """path[at + i] = start + i for i < length."""
    for base in range(0, length, BLOCK):
        i = base + tl.arange(0, BLOCK)
        tl.store(path + at + i, start + i, mask=(i < length) & (at + i < width))


@triton.jit
def _plan_rows(  # type: ignore[no-untyped-def]
    cu_seqlens_q,
    segments,
    cu_segments,
    cache_seqlens,
    error,
    row_sequence,
    row_segment,
    row_position,
    first_row,
    rows,
    batch,
    num_segments,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sequence, segment and position of ROWS rows."""
    row = first_row + tl.arange(0, ROWS)
    sequence = _count_ends(cu_seqlens_q, row, batch, BLOCK)
    fine = (row < rows) & (sequence < batch)
    fine &= tl.load(error + sequence, mask=fine, other=1) == 0
    first = tl.load(cu_segments + sequence, mask=fine, other=num_segments)
    last = tl.load(cu_segments + sequence + 1, mask=fine, other=0)
    segment = tl.full((ROWS,), -1, tl.int32)
    for base in range(tl.min(first), tl.max(last), BLOCK):
        s = base + tl.arange(0, BLOCK)
        start = tl.load(segments + s * 4 + _START, mask=s < num_segments, other=0)
        length = tl.load(segments + s * 4 + _LENGTH, mask=s < num_segments, other=0)
        index = row[:, None] - start[None, :]
        covers = (s[None, :] >= first[:, None]) & (s[None, :] < last[:, None])
        covers &= (index >= 0) & (index < length[None, :])
        segment = tl.maximum(segment, tl.max(tl.where(covers, s[None, :], -1), 1))
    live = segment >= 0
    position = tl.load(cache_seqlens + sequence, mask=live, other=0) + row
    position -= tl.load(segments + segment * 4 + _START, mask=live, other=0)
    at = segment
    parent = tl.load(segments + at * 4 + _PARENT, mask=live, other=-1)
    while tl.max(parent) >= 0:
        child = parent >= 0
        position += tl.load(segments + at * 4 + _VISIBLE, mask=child, other=0)
        at = tl.where(child, parent, at)
        parent = tl.load(segments + at * 4 + _PARENT, mask=child, other=-1)
    tl.store(row_sequence + row, tl.where(live, sequence, -1), mask=row < rows)
    tl.store(row_segment + row, segment, mask=row < rows)
    tl.store(row_position + row, tl.where(live, position, -1), mask=row < rows)


@triton.jit
def _write_path(segments, cu_segments, error, path, s, batch, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The path of segment s."""
    path += s.to(tl.int64) * width
    count = 0
    sequence = tl.max(_count_ends(cu_segments, tl.full((1,), 0, tl.int32) + s, batch, BLOCK))
    fine = False
    if sequence < batch:
        fine = tl.load(error + sequence) == 0
    if fine:
        start, length = tl.load(segments + s * 4 + _START), tl.load(segments + s * 4 + _LENGTH)
        before = 0
        at = s
        parent = tl.load(segments + at * 4 + _PARENT)
        while parent >= 0:
            before += tl.load(segments + at * 4 + _VISIBLE)
            at = parent
            parent = tl.load(segments + at * 4 + _PARENT)
        count = before + length
        _write_run(path, before, start, length, width, BLOCK)
        at = s
        parent = tl.load(segments + at * 4 + _PARENT)
        while parent >= 0:
            visible = tl.load(segments + at * 4 + _VISIBLE)
            before -= visible
            _write_run(path, before, tl.load(segments + parent * 4 + _START), visible, width, BLOCK)
            at = parent
            parent = tl.load(segments + at * 4 + _PARENT)
    for base in range(count, width, BLOCK):
        j = base + tl.arange(0, BLOCK)
        tl.store(path + j, -1, mask=j < width)


@triton.jit(do_not_specialize=["rows", "batch", "num_segments", "width", "tiles"])
def _path_kernel(  # type: ignore[no-untyped-def]
    cu_seqlens_q,
    segments,
    cu_segments,
    cache_seqlens,
    error,
    row_sequence,
    row_segment,
    row_position,
    path,
    rows,
    batch,
    num_segments,
    width,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs below ``tiles``: ROWS rows each; the others: one segment each."""
    program = tl.program_id(0)
    if program < tiles:
        _plan_rows(
            cu_seqlens_q,
            segments,
            cu_segments,
            cache_seqlens,
            error,
            row_sequence,
            row_segment,
            row_position,
            program * ROWS,
            rows,
            batch,
            num_segments,
            ROWS,
            BLOCK,
        )
    else:
        _write_path(segments, cu_segments, error, path, program - tiles, batch, width, BLOCK)


def plan_rows(
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    cache_seqlens: Tensor,
    rows: int,
    *,
    max_rows: int | None = None,
    k_cache: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Plan:
    """Plan a forward pass over ``rows`` query rows; nothing is read by the host.

    Parameters
    ----------
    cu_seqlens_q, segments, cu_segments : Tensor
        Block layout, see :mod:`jacobi_kernels.layout`.
    cache_seqlens : Tensor
        ``[B]`` int32, committed tokens L.
    rows : int
        T.
    max_rows : int, optional
        P, at least the query rows of any one sequence: T by default, T / B where all sequences have as many slots.
    k_cache : Tensor, optional
        One layer's cache as in :func:`jacobi_kernels.ops.multi_block_attention_with_kvcache`. With it a sequence
        without room for its rows, or with pages outside the cache, is an error.
    page_table : Tensor, optional
        ``[B, max_pages]`` int32.
    """
    batch, count = cache_seqlens.shape[0], segments.shape[0]
    width = rows if max_rows is None else max_rows
    row_sequence, row_segment, row_position = (segments.new_empty((rows,)) for _ in range(3))
    path, error = segments.new_empty((count, width)), segments.new_empty((batch,))
    pages = -1 if k_cache is None or page_table is None else k_cache.shape[0]
    page_size = 0 if k_cache is None else k_cache.shape[1]
    capacity = -1 if k_cache is None else page_size * (1 if page_table is None else page_table.shape[1])
    launch(
        OP,
        _check_kernel,
        (batch,),
        cu_seqlens_q,
        segments,
        cu_segments,
        cache_seqlens,
        page_table,
        error,
        rows,
        batch,
        count,
        capacity,
        page_size,
        pages,
        BLOCK=BLOCK,
        CHECK_PAGES=pages >= 0,
        num_warps=4,
    )
    tiles = triton.cdiv(rows, ROWS)
    launch(
        OP,
        _path_kernel,
        (tiles + count,),
        cu_seqlens_q,
        segments,
        cu_segments,
        cache_seqlens,
        error,
        row_sequence,
        row_segment,
        row_position,
        path,
        rows,
        batch,
        count,
        width,
        tiles,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return Plan(row_sequence, row_segment, row_position, path, error)


def compile_cases() -> list[CompileCase]:
    """Both kernels, with and without pages."""
    layout = {"cu_seqlens_q": "*i32", "segments": "*i32", "cu_segments": "*i32", "cache_seqlens": "*i32"}
    check = layout | {"page_table": "*i32", "error": "*i32"}
    check |= dict.fromkeys(("rows", "batch", "num_segments", "capacity", "page_size", "pages"), "i32")
    cases = []
    for paged in (False, True):
        constants = {"BLOCK": BLOCK, "CHECK_PAGES": paged}
        signature = check | dict.fromkeys(constants, "constexpr")
        name = f"{OP}: check{' pages' * paged}"
        cases.append(CompileCase(name, _check_kernel, signature, constants, num_warps=4))
    constants = {"ROWS": ROWS, "BLOCK": BLOCK}
    path = layout | dict.fromkeys(("error", "row_sequence", "row_segment", "row_position", "path"), "*i32")
    path |= dict.fromkeys(("rows", "batch", "num_segments", "width", "tiles"), "i32")
    signature = path | dict.fromkeys(constants, "constexpr")
    cases.append(CompileCase(f"{OP}: paths", _path_kernel, signature, constants, num_warps=4))
    return cases
