"""Tables of a packed layout that attention without a cache walks through, made on the device by one launch.

Every row has one path (:mod:`jacobi_kernels.layout`), so "the row that lies N positions earlier on it" is a function of
the row alone. Keys are therefore visited in tiles of N positions, from the query's own downwards, and the rows of the
next tile are ``jump[rows of this tile]``: short segments fill whole tiles, and nothing of size [T, T] exists.

One program per segment walks up its ancestors: once to add up the tokens in front of it, once more to list the last N
of them. Memory in int32: ``T * 3 + S * (N + 3) + 2 * tiles``, with ``tiles = ceil(T * group / M) + S``; the backward
adds ``S * S`` for ``sees``. A segment that breaks the layout's rules (rows outside its sequence, a parent that is not
earlier, more visible tokens than the parent has), or has such an ancestor, is a hole: no row outside is ever touched.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.triton.runtime import CompileCase, launch

ALL = 2**31 - 1  # a window that hides nothing


class PathTiles(NamedTuple):
    """Tables of one layout for query tiles of M rows (tokens times heads of a group) and key tiles of N positions.

    row_segment, row_position : ``[T]`` segment and position of a row; -1 in holes.
    jump : ``[T]`` the row N positions earlier on the row's path; -1: there is none.
    before : ``[S, N]`` the last N rows in front of a segment on its path; -1: there are fewer.
    prefix : ``[S]`` tokens in front of a segment on its path; -1: a hole.
    tile_segment, tile_first : ``[tiles]`` segment of a query tile and its first (token * group + head); -1: unused.
        Tiles lie in the order of segments.
    segment_tiles : ``[S, 2]`` first tile of a segment, end of the tiles of its sequence.
    sees : ``[S, S]`` rows of segment a that lie on the path of segment s at [s, a]; empty where not asked for.
    """

    row_segment: Tensor
    row_position: Tensor
    jump: Tensor
    before: Tensor
    prefix: Tensor
    tile_segment: Tensor
    tile_first: Tensor
    segment_tiles: Tensor
    sees: Tensor


@triton.jit
def _segment_start_length(segments, s, rows, first_row, end_row):  # type: ignore[no-untyped-def]
    """(start, length, 1 if these rows lie inside the sequence)."""
    start = tl.load(segments + 4 * s)
    length = tl.load(segments + 4 * s + 1)
    fits = (length >= 0) & (length <= rows) & (start >= first_row) & (start <= end_row - length)
    return start, length, fits.to(tl.int32)


@triton.jit
def path_tiles_kernel(  # type: ignore[no-untyped-def]
    cu_seqlens_q,
    segments,
    cu_segments,
    row_segment,
    row_position,
    jump,
    before,
    prefix,
    tile_segment,
    tile_first,
    segment_tiles,
    sees,
    rows,
    batch,
    num_segments,
    num_tiles,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)

    begun = 0  # sequences whose segments begin at or before s
    for i in range(0, batch + 1, BLOCK):
        at = tl.load(cu_segments + i + lanes, mask=i + lanes <= batch, other=2147483647)
        begun += tl.sum((at <= s).to(tl.int32), 0)
    inside = ((begun >= 1) & (begun <= batch)).to(tl.int32)
    b = tl.where(inside != 0, begun - 1, 0)
    first_segment = tl.load(cu_segments + b)
    end_segment = tl.minimum(tl.load(cu_segments + b + 1), num_segments)
    first_row = tl.maximum(tl.load(cu_seqlens_q + b), 0)
    end_row = tl.minimum(tl.load(cu_seqlens_q + b + 1), rows)

    first_tile, end_tile = 0, 0
    for i in range(0, end_segment, BLOCK):
        lengths = tl.load(segments + 4 * (i + lanes) + 1, mask=i + lanes < end_segment, other=0)
        counts = (tl.minimum(tl.maximum(lengths, 0), rows) * GROUP + BLOCK_M - 1) // BLOCK_M
        first_tile += tl.sum(tl.where(i + lanes < s, counts, 0), 0)
        end_tile += tl.sum(counts, 0)

    start, length, good = _segment_start_length(segments, s, rows, first_row, end_row)
    good *= inside
    parent = tl.load(segments + 4 * s + 2)
    visible = tl.load(segments + 4 * s + 3)
    front, child = 0, s
    while (parent >= 0) & (good != 0):
        earlier = ((parent < child) & (parent >= first_segment)).to(tl.int32)
        a = tl.where(earlier != 0, parent, s)
        _, has, fits = _segment_start_length(segments, a, rows, first_row, end_row)
        good = earlier * fits * ((visible >= 0) & (visible <= has)).to(tl.int32)
        if SEES:
            tl.store(sees + s.to(tl.int64) * num_segments + a, visible, mask=good != 0)
        front += visible
        child = a
        parent = tl.load(segments + 4 * a + 2)
        visible = tl.load(segments + 4 * a + 3)

    if good != 0:
        tl.store(prefix + s, front)
        tl.store(segment_tiles + 2 * s, first_tile)
        tl.store(segment_tiles + 2 * s + 1, tl.minimum(end_tile, num_tiles))
        if SEES:
            tl.store(sees + s.to(tl.int64) * num_segments + s, length)
        for i in range(0, (length * GROUP + BLOCK_M - 1) // BLOCK_M, BLOCK):
            mask = ((i + lanes) * BLOCK_M < length * GROUP) & (first_tile + i + lanes < num_tiles)
            tl.store(tile_segment + first_tile + i + lanes, tl.zeros_like(lanes) + s, mask=mask)
            tl.store(tile_first + first_tile + i + lanes, (i + lanes) * BLOCK_M, mask=mask)
        for i in range(0, length, BLOCK):
            row, mask = start + i + lanes, i + lanes < length
            tl.store(row_segment + row, tl.zeros_like(lanes) + s, mask=mask)
            tl.store(row_position + row, front + i + lanes, mask=mask)
            tl.store(jump + row, row - BLOCK_N, mask=mask & (i + lanes >= BLOCK_N))

        nearest = tl.arange(0, BLOCK_N)
        position = front - BLOCK_N + nearest
        found = tl.full([BLOCK_N], -1, tl.int32)
        upper = front
        parent = tl.load(segments + 4 * s + 2)
        visible = tl.load(segments + 4 * s + 3)
        while (parent >= 0) & (upper > front - BLOCK_N):
            lower = upper - visible
            begin = tl.load(segments + 4 * parent)
            found = tl.where((position >= lower) & (position < upper), begin + position - lower, found)
            upper = lower
            visible = tl.load(segments + 4 * parent + 3)
            parent = tl.load(segments + 4 * parent + 2)
        tl.store(before + s * BLOCK_N + nearest, found)
        tl.store(jump + start + nearest, found, mask=nearest < length)


@triton.jit
def first_key_rows(before, s, start, prefix, position, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows at ``position``, BLOCK_N consecutive ones that end inside segment s, on the path of s; -1 below 0."""
    ahead = position - prefix
    rows = tl.load(before + s * BLOCK_N + BLOCK_N + ahead, mask=ahead < 0, other=-1)
    return tl.where(ahead >= 0, start + ahead, rows)


@triton.jit
def row_mask(rows, width, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of [rows, BLOCK_D] that exist; where all of a row does, nothing is compared per element."""
    mask = rows[:, None]
    if D != BLOCK_D:
        mask = mask & (width < D)[None, :]
    return mask


@triton.jit
def capped(score, softcap):  # type: ignore[no-untyped-def]
    """``tanh(score / softcap)`` by an exponential that saturates to +-1."""
    return 1.0 - 2.0 / (tl.exp(score * (2.0 / softcap)) + 1.0)


def path_tiles(
    op: str,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    rows: int,
    group: int,
    block_m: int,
    block_n: int,
    sees: bool = False,
) -> PathTiles:
    """Tables of the layout for ``rows`` query rows, counted as launches of ``op``.

    Parameters
    ----------
    cu_seqlens_q, segments, cu_segments : Tensor
        ``[B+1]``, ``[S, 4]``, ``[B+1]`` int32.
    group : int
        Query heads per key head; a query tile holds ``block_m`` (token, head) pairs of one segment.
    block_m, block_n : int
        Powers of two.
    sees : bool
        Make the ``[S, S]`` table too.
    """
    num_segments = segments.shape[0]
    num_tiles = -(-rows * group // block_m) + num_segments
    sizes = [rows, rows, rows, num_segments * block_n, num_segments, num_tiles, num_tiles, 2 * num_segments]
    parts = torch.full((sum(sizes),), -1, dtype=torch.int32, device=segments.device).split(sizes)
    square = num_segments if sees else 0
    seen = torch.zeros((square, square), dtype=torch.int32, device=segments.device)
    tables = PathTiles._make((*parts, seen))
    launch(
        op,
        path_tiles_kernel,
        (num_segments,),
        cu_seqlens_q.contiguous(),
        segments.contiguous(),
        cu_segments.contiguous(),
        *tables,
        rows,
        cu_segments.shape[0] - 1,
        num_segments,
        num_tiles,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SEES=sees,
        BLOCK=128,
        num_warps=4,
    )
    return tables


def table_case(block_m: int, block_n: int, sees: bool) -> CompileCase:
    """The table kernel as the attention kernels with these tiles use it."""
    names = ("cu_seqlens_q", "segments", "cu_segments", *PathTiles._fields)
    constants = {"GROUP": 3, "BLOCK_M": block_m, "BLOCK_N": block_n, "SEES": sees, "BLOCK": 128}
    return CompileCase(
        name=f"path_tiles {block_m}x{block_n}{' sees' if sees else ''}",
        kernel=path_tiles_kernel,
        signature={
            **dict.fromkeys(names, "*i32"),
            **dict.fromkeys(("rows", "batch", "num_segments", "num_tiles"), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constexprs=constants,
    )
