"""Range check of everything that redraft indexes with: csrc/common/layout.h, then csrc/common/redraft_check.h.

One sequence, all lanes of its program. Every value that later loads depend on is replaced by 0 once something is wrong,
so a bad state costs no stray access, here or after.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jacobi_kernels.state import StateColumn, StepError

TEXT_LEN = tl.constexpr(int(StateColumn.TEXT_LEN))
PROMPT_LEN = tl.constexpr(int(StateColumn.PROMPT_LEN))
MAX_LEN = tl.constexpr(int(StateColumn.MAX_LEN))
NUM_FINAL = tl.constexpr(int(StateColumn.NUM_FINAL))
ACTIVE = tl.constexpr(int(StateColumn.ACTIVE))
BLOCK_FILL = tl.constexpr(int(StateColumn.BLOCK_FILL))
POOL_NEXT = tl.constexpr(int(StateColumn.POOL_NEXT))
POOL_START = tl.constexpr(int(StateColumn.POOL_START))
DONE = tl.constexpr(int(StateColumn.DONE))

LAYOUT_ERROR = tl.constexpr(int(StepError.LAYOUT))
STATE_ERROR = tl.constexpr(int(StepError.STATE))


@triton.jit
def _partition_faults(bounds, batch, total, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 when bounds [batch + 1] start at 0, ascend and end at total."""
    faults = (tl.load(bounds) != 0).to(tl.int32) + (tl.load(bounds + batch) != total).to(tl.int32)
    for i in range(0, batch, LANES):
        at = i + tl.arange(0, LANES)
        low = tl.load(bounds + at, mask=at < batch, other=0)
        faults += tl.sum((tl.load(bounds + at + 1, mask=at < batch, other=0) < low).to(tl.int32), 0)
    return faults


@triton.jit
def segment_of_row(segments, count, row, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of ``count`` segments that holds ``row``, else 0."""
    found = count + 0
    for i in range(0, count, LANES):
        s = i + tl.arange(0, LANES)
        start = tl.load(segments + 4 * s, mask=s < count, other=0)
        length = tl.load(segments + 4 * s + 1, mask=s < count, other=0)
        holds = (row >= start) & (row - start < length)
        found = tl.minimum(found, tl.min(tl.where(holds, s, count), 0))
    return tl.where(found < count, found, 0)


@triton.jit
def _segment_faults(  # type: ignore[no-untyped-def]
    segments, first, count, begin, end, candidate_row, stride, LANES: tl.constexpr
):
    """(breaches of the layout's rules, segments that are not where redraft lays them out) of one sequence."""
    layout, place = 0, 0
    for i in range(0, count, LANES):
        s = i + tl.arange(0, LANES)
        there = s < count
        at = segments + 4 * (first + s)
        start = tl.load(at, mask=there, other=0)
        length = tl.load(at + 1, mask=there, other=0)
        parent = tl.load(at + 2, mask=there, other=-1)
        visible = tl.load(at + 3, mask=there, other=0)
        before = there & (s > 0)
        next_row = tl.load(at - 4, mask=before, other=0) + tl.load(at - 3, mask=before, other=0)
        next_row = tl.where(before, next_row, begin)
        parented = there & (parent >= first) & (parent < first + s)
        seen = tl.load(segments + 4 * parent + 1, mask=parented, other=0)
        bad = (length < 0) | (start < begin) | (start > end) | (length > end - start) | (start < next_row)
        bad = bad | ((parent != -1) & (parented == 0)) | (visible < 0) | (visible > seen)
        layout += tl.sum((there & bad).to(tl.int32), 0)

        candidate = s > 0
        moved = start != tl.where(candidate, candidate_row + (s - 1) * stride, begin)
        large = length > tl.where(candidate, stride, candidate_row - begin)
        unlinked = parent != tl.where(candidate, first, -1)
        unlinked = unlinked | ((length > 0) & (visible != candidate.to(tl.int32)))
        place += tl.sum((there & (moved | large | unlinked)).to(tl.int32), 0)
    return layout, place


@triton.jit
def _path_faults(  # type: ignore[no-untyped-def]
    rows,
    predictions,
    segments,
    accepted,
    num_final,
    begin,
    end,
    candidate_row,
    stride,
    candidates,
    LANES: tl.constexpr,
):
    """Accepted rows that are no path, and live rows without the prediction that they need; 0 when nothing ran."""
    faults = 0
    if accepted > 0:
        winner = segment_of_row(segments, candidates + 1, tl.load(rows + accepted - 1), LANES)
        for i in range(0, accepted, LANES):
            at = i + tl.arange(0, LANES)
            behind = (at > 0) & (winner > 0)  # in the candidate, behind the chain's first row
            segment = segments + 4 * tl.where(behind, winner, 0)
            step = at - behind.to(tl.int32)
            there = at < accepted
            wrong = step >= tl.load(segment + 1, mask=there, other=0)
            wrong = wrong | (tl.load(rows + at, mask=there, other=0) != tl.load(segment, mask=there, other=0) + step)
            faults += tl.sum((there & wrong).to(tl.int32), 0)
        chain_length = tl.load(segments + 1)
        for i in range(begin, end, LANES):
            row = i + tl.arange(0, LANES)
            candidate = row - candidate_row
            ours = (row < end) & (candidate >= 0)
            c = candidate // tl.maximum(stride, 1)
            length = tl.load(segments + 4 * (1 + c) + 1, mask=ours & (c < candidates), other=0)
            live = ours & (candidate - c * stride < length)
            live = live | ((row - begin >= num_final - 1) & (row - begin < chain_length))
            prediction = tl.load(predictions + row, mask=live, other=0)
            faults += tl.sum((prediction < 0).to(tl.int32), 0)
    return faults


@triton.jit
def check_sequence(  # type: ignore[no-untyped-def]
    predictions,
    accepted_rows,
    num_accepted,
    segments,
    cu_seqlens_q,
    cu_segments,
    cache_seqlens,
    pool,
    state,
    b,
    batch,
    total_rows,
    num_segments,
    least_rows,
    text_capacity,
    pool_rows,
    pool_width,
    block_size,
    blocks,
    candidates,
    LANES: tl.constexpr,
):
    """0, or what is wrong with sequence b: LAYOUT_ERROR or STATE_ERROR. ``pool`` and ``state`` are its own."""
    stride = block_size - 1
    faults = _partition_faults(cu_seqlens_q, batch, total_rows, LANES)
    faults += _partition_faults(cu_segments, batch, num_segments, LANES)
    begin, end = tl.load(cu_seqlens_q + b), tl.load(cu_seqlens_q + b + 1)
    first = tl.load(cu_segments + b)
    faults += (tl.load(cu_segments + b + 1) - first != 1 + candidates).to(tl.int32)
    count = tl.where(faults == 0, 1 + candidates, 0)
    candidate_row = end - candidates * stride
    layout, place = _segment_faults(segments, first, count, begin, end, candidate_row, stride, LANES)
    faults += layout
    error = tl.where(faults > 0, LAYOUT_ERROR, 0)

    text_len, prompt_len = tl.load(state + TEXT_LEN), tl.load(state + PROMPT_LEN)
    max_len, active = tl.load(state + MAX_LEN), tl.load(state + ACTIVE)
    fill, done = tl.load(state + BLOCK_FILL), tl.load(state + DONE)
    pool_next, pool_start = tl.load(state + POOL_NEXT), tl.load(state + POOL_START)
    num_final = tl.load(state + NUM_FINAL)
    accepted, cached = tl.load(num_accepted + b), tl.load(cache_seqlens + b)
    bad = (end - begin < least_rows) | (place > 0)
    bad = bad | (text_len < 1) | (text_len > text_capacity) | (prompt_len < 1) | (prompt_len > text_len)
    bad = bad | (max_len < text_len) | (max_len > text_capacity) | (active < 1) | (active > blocks)
    bad = bad | (fill < 0) | (fill >= block_size) | (pool_next < 0) | (pool_next >= tl.maximum(pool_rows, 1))
    bad = bad | (pool_start < 0) | (pool_start > text_len) | (done < 0) | (done > 2)
    bad = bad | (accepted < 0) | (accepted > end - begin) | (cached < accepted) | (cached - text_len > accepted)
    wrong = bad.to(tl.int32)
    for i in range(0, pool_rows, LANES):
        row = i + tl.arange(0, LANES)
        stored = tl.load(pool + row * (1 + pool_width), mask=row < pool_rows, other=0)
        wrong += tl.sum(((stored < 0) | (stored > pool_width)).to(tl.int32), 0)

    prefill = text_len == prompt_len
    idle = (done == 0) & (accepted == 0)
    left = tl.where(prefill, cached < text_len, cached == text_len - 1)
    wrong += (idle & (left == 0) & (text_len < max_len)).to(tl.int32)
    ran = (done == 0) & (accepted > 0)
    strange = (num_final < 1) | (num_final > accepted) | ((prefill == 0) & (num_final != 1))
    # What was cached before, with the final tokens of the chain, is a prefix of the text; all of it unless in prefill.
    known = cached - accepted + num_final
    strange = strange | (known > text_len) | ((known < text_len) & ((prefill == 0) | (accepted != num_final)))
    wrong += (ran & strange).to(tl.int32)

    path = tl.where(ran & (error == 0) & (wrong == 0), accepted, 0)
    wrong += _path_faults(
        accepted_rows + begin,
        predictions,
        segments + 4 * first,
        path,
        num_final,
        begin,
        end,
        candidate_row,
        stride,
        candidates,
        LANES,
    )
    return tl.where((error == 0) & (wrong > 0), STATE_ERROR, error)
