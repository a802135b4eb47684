"""``redraft``: what one forward pass made final is emitted, then the next query layout is written.

The rules are those of csrc/common/redraft.h, stage by stage: emission, pool and blocks here, chain and candidates in
:mod:`jacobi_kernels.triton.draft`, searches in :mod:`jacobi_kernels.triton.pool`, checks in
:mod:`jacobi_kernels.triton.redraft_check`. One program per sequence. Scalars (lengths, counters, the state's columns)
live in registers and are the same in all threads; lanes take tokens: comparisons are counts or minima of mismatches,
copies are masked stores. Loops over tiles of lanes end at the sequence's own lengths.

A token that one thread stores may be loaded by another, so a barrier stands behind every stage that writes what a later
one reads, and in front of every one that overwrites what an earlier one reads: text after emission, pool rows, the new
layout over the old one, guesses before they are searched, candidates before they are compared.

A sequence whose layout or state is out of range is left as it is but for its column ERROR; one whose ERROR is set
already is left alone. Bytes: one to six passes over the text and the pool (4 bytes a token, from L1 and L2), the query
rows, and the pool's rows once more for every entry that is stored.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.state import MAX_DRAFT_OPTION, MAX_TOKEN, STATE_COLUMNS, StateColumn
from jacobi_kernels.triton.draft import Slots, draft_candidates, draft_chain
from jacobi_kernels.triton.pool import KEPT, MATCH_TOKENS, History, store_entry
from jacobi_kernels.triton.redraft_check import (
    ACTIVE,
    BLOCK_FILL,
    DONE,
    MAX_LEN,
    NUM_FINAL,
    POOL_NEXT,
    POOL_START,
    PROMPT_LEN,
    TEXT_LEN,
    check_sequence,
    segment_of_row,
)
from jacobi_kernels.triton.runtime import CompileCase, check_runs_here, launch

OP = "redraft"
LANES, NUM_WARPS = 512, 8

ACCEPTED = tl.constexpr(int(StateColumn.ACCEPTED))
WINNER = tl.constexpr(int(StateColumn.WINNER))
EMITTED = tl.constexpr(int(StateColumn.EMITTED))
FIXED_POINT = tl.constexpr(int(StateColumn.FIXED_POINT))
ERROR = tl.constexpr(int(StateColumn.ERROR))
STOP_TOKEN, LENGTH = tl.constexpr(1), tl.constexpr(2)  # reasons in DONE


@triton.jit
def _emit(  # type: ignore[no-untyped-def]
    predictions, rows, tokens, text, text_len, max_len, accepted, num_final, stops, num_stops, LANES: tl.constexpr
):
    """Appends the new final tokens to the text, up to and with the first stop token; returns (emitted, done)."""
    lanes = tl.arange(0, LANES)
    count = tl.minimum(accepted - num_final + 1, max_len - text_len)
    stop = count + 0  # place of the first stop token
    for i in range(0, count, LANES):
        at = i + lanes
        path = num_final + at  # its token on the path, or the prediction behind the path
        row = tl.load(rows + tl.minimum(path, accepted - 1), mask=at < count, other=0)
        token = tl.load(tokens + row, mask=(at < count) & (path < accepted), other=-1)
        last = tl.load(predictions + row, mask=(at < count) & (path == accepted), other=-1)
        token = tl.where(path == accepted, last, token)
        stops_here = at < 0
        for j in range(num_stops):
            wanted = tl.load(stops + j)
            stops_here = stops_here | ((wanted >= 0) & (token == wanted))
        stop = tl.minimum(stop, tl.min(tl.where(stops_here & (at < count), at, count), 0))
        tl.store(text + text_len + at, token, mask=(at < count) & (at <= stop))
    emitted = tl.minimum(count, stop + 1)
    done = tl.where(stop < count, STOP_TOKEN, tl.where(text_len + emitted == max_len, LENGTH, 0))
    return emitted, done


@triton.jit
def _accepted_run(tokens, predictions, start, length, before, num_final, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Leading tokens of the rows start .. that equal the prediction before them; num_final are final anyway."""
    run = length + 0
    for i in range(0, length, LANES):
        at = i + tl.arange(0, LANES)
        compared = (at >= num_final) & (at < length)
        token = tl.load(tokens + start + at, mask=compared, other=0)
        expected = tl.load(predictions + tl.where(at > 0, start + at - 1, before), mask=compared, other=0)
        run = tl.minimum(run, tl.min(tl.where(compared & (token != expected), at, length), 0))
    return run


@triton.jit
def _feed_pool(h, slots, predictions, winner, old_length, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores what the chain and the losing candidates predicted behind their accepted part; returns POOL_NEXT."""
    next_row = h.next_row
    chain_start = tl.load(slots.segments)
    for s in range(slots.candidates + 1):
        start, length = tl.load(slots.segments + 4 * s), tl.load(slots.segments + 4 * s + 1)
        if (length > 0) & ((s == 0) | (s != winner)):
            final = tl.where(s == 0, 1, 0)
            accepted = _accepted_run(slots.tokens, predictions, start, length, chain_start, final, LANES)
            # The token behind the accepted part is final: it ends the context, which never passes the text's end.
            context_end = tl.minimum(old_length + 1 - final + accepted + 1, h.text_length)
            context_length = tl.minimum(MATCH_TOKENS, context_end)
            next_row = store_entry(
                h.pool,
                h.rows,
                h.width,
                next_row,
                h.text + (context_end - context_length),
                context_length,
                predictions + (start + accepted),
                length - accepted,
            )
    return next_row


@triton.jit
def _unchanged(tokens, predictions, start, length, block_size, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the last block_size tokens of the chain are what was predicted for them."""
    count = 0
    for i in range(length - block_size, length, LANES):
        at = i + tl.arange(0, LANES)
        there = at < length
        token = tl.load(tokens + start + at, mask=there, other=0)
        expected = tl.load(predictions + start + at - 1, mask=there & (at > 0), other=0)
        count += tl.sum((there & ((at == 0) | (token == expected))).to(tl.int32), 0)
    return count


@triton.jit
def _copy(source, target, count, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    for i in range(0, count, LANES):
        at = i + tl.arange(0, LANES)
        tl.store(target + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def _lay_out(slots, first, chain_length, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The chain of the given length and empty candidates, at their fixed starts."""
    for i in range(0, slots.candidates + 1, LANES):
        s = i + tl.arange(0, LANES)
        there = s <= slots.candidates
        candidate = s > 0
        tl.store(
            slots.segments + 4 * s,
            tl.where(candidate, slots.candidate_row + (s - 1) * slots.stride, slots.begin),
            mask=there,
        )
        tl.store(slots.segments + 4 * s + 1, tl.where(candidate, 0, chain_length), mask=there)
        tl.store(slots.segments + 4 * s + 2, tl.where(candidate, first, -1), mask=there)
        tl.store(slots.segments + 4 * s + 3, (candidate & (chain_length > 0)).to(tl.int32), mask=there)


@triton.jit
def _redraft_sequence(  # type: ignore[no-untyped-def]
    predictions,
    rows,
    accepted,
    fixed_point,
    tokens,
    segments,
    first,
    begin,
    end,
    cache_seqlen,
    text,
    pool,
    state,
    stops,
    ranked,
    pool_rows,
    pool_width,
    num_stops,
    block_size,
    blocks,
    candidates,
    spawn_unchanged,
    LANES: tl.constexpr,
):
    """One checked sequence; segments, cache_seqlen, text, pool, state, stops and ranked point to its own."""
    stride = block_size - 1
    candidate_row = end - candidates * stride
    slots = Slots(tokens, segments, begin, candidate_row, stride, candidates)
    text_len, prompt_len = tl.load(state + TEXT_LEN), tl.load(state + PROMPT_LEN)
    max_len, num_final = tl.load(state + MAX_LEN), tl.load(state + NUM_FINAL)
    active, fill = tl.load(state + ACTIVE), tl.load(state + BLOCK_FILL)
    pool_next, text_begin = tl.load(state + POOL_NEXT), tl.load(state + POOL_START)
    done, cached = tl.load(state + DONE), tl.load(cache_seqlen)
    main_start, main_length = tl.load(segments), tl.load(segments + 1)

    emitted, winner, last_row, winner_end = 0, 0, -1, 0
    done = tl.where((done == 0) & (text_len >= max_len), LENGTH, done)
    if (done == 0) & (accepted > 0):
        last_row = tl.load(rows + accepted - 1)
        winner = segment_of_row(segments, candidates + 1, last_row, LANES)
        winner_end = tl.load(segments + 4 * winner) + tl.load(segments + 4 * winner + 1)
        decode = text_len > prompt_len
        if cached >= text_len:
            emitted, done = _emit(
                predictions, rows, tokens, text, text_len, max_len, accepted, num_final, stops, num_stops, LANES
            )
            text_len += emitted
            tl.debug_barrier()  # the text is read from here on
        if decode & (done == 0):
            before = History(text, text_begin, text_len, pool, pool_rows, pool_width, pool_next)
            pool_next = _feed_pool(before, slots, predictions, winner, cached - accepted, LANES)
            fill += accepted
            active = tl.maximum(1, active - fill // block_size)
            fill = fill % block_size
            if (main_length >= block_size) & (active < blocks):
                unchanged = _unchanged(tokens, predictions, main_start, main_length, block_size, LANES)
                active += (unchanged >= spawn_unchanged).to(tl.int32)

    tl.debug_barrier()  # tokens, segments and state have been read by all threads
    history = History(text, text_begin, text_len, pool, pool_rows, pool_width, pool_next)
    num_final, chain_length = 1, 0
    prefill = (cached < text_len) & (text_len == prompt_len)
    if done != 0:
        tl.store(cache_seqlen, tl.minimum(cached, text_len))
    elif prefill:
        num_final = tl.minimum(candidate_row - begin, text_len - cached)
        chain_length = num_final
        _copy(text + cached, tokens + begin, num_final, LANES)
    else:
        chain_length = tl.minimum(block_size * active, max_len - text_len)
        draft_chain(
            history,
            tokens + begin,
            chain_length,
            predictions,
            accepted,
            last_row,
            winner_end,
            main_start,
            main_length,
            LANES,
        )
    _lay_out(slots, first, chain_length, LANES)
    tl.store(state + TEXT_LEN, text_len)
    tl.store(state + NUM_FINAL, num_final)
    tl.store(state + ACTIVE, active)
    tl.store(state + BLOCK_FILL, fill)
    tl.store(state + POOL_NEXT, pool_next)
    tl.store(state + DONE, done)
    tl.store(state + ACCEPTED, accepted)
    tl.store(state + WINNER, winner)
    tl.store(state + EMITTED, emitted)
    tl.store(state + FIXED_POINT, fixed_point)
    limit = tl.minimum(stride, max_len - text_len - 1)
    if (done == 0) & (prefill == 0) & (limit > 0) & (candidates > 0):
        tl.debug_barrier()  # the chain and the segments' lengths are compared with candidates
        draft_candidates(history, slots, limit, ranked, LANES)


POINTERS = (
    *("predictions", "accepted_rows", "num_accepted", "fixed_point", "tokens", "segments", "cu_seqlens_q"),
    *("cu_segments", "cache_seqlens", "text", "pool", "state", "stop_tokens", "ranked"),
)
SIZES = (
    *("batch", "total_rows", "num_segments", "least_rows", "text_capacity", "pool_rows", "pool_width", "num_stops"),
    *("block_size", "blocks", "candidates", "spawn_unchanged"),
)


@triton.jit(do_not_specialize=[*POINTERS, *SIZES])  # one compilation serves every call
def redraft_kernel(  # type: ignore[no-untyped-def]
    predictions,
    accepted_rows,
    num_accepted,
    fixed_point,
    tokens,
    segments,
    cu_seqlens_q,
    cu_segments,
    cache_seqlens,
    text,
    pool,
    state,
    stop_tokens,
    ranked,
    batch,
    total_rows,
    num_segments,
    least_rows,
    text_capacity,
    pool_rows,
    pool_width,
    num_stops,
    block_size,
    blocks,
    candidates,
    spawn_unchanged,
    STATE_COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per sequence; fixed_point as bytes, ranked [B, 8, 16] is scratch."""
    b = tl.program_id(0)
    text += b.to(tl.int64) * text_capacity
    pool += b.to(tl.int64) * pool_rows * (1 + pool_width)
    state += b * STATE_COLUMNS
    stop_tokens += b.to(tl.int64) * num_stops
    ranked += b.to(tl.int64) * (MATCH_TOKENS * KEPT)
    failed = tl.load(state + ERROR)
    error = check_sequence(
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
        LANES,
    )
    tl.debug_barrier()
    if failed == 0:
        if error != 0:
            tl.store(state + ERROR, error)
        else:
            begin, first = tl.load(cu_seqlens_q + b), tl.load(cu_segments + b)
            _redraft_sequence(
                predictions,
                accepted_rows + begin,
                tl.load(num_accepted + b),
                (tl.load(fixed_point + b) != 0).to(tl.int32),
                tokens,
                segments + 4 * first,
                first,
                begin,
                tl.load(cu_seqlens_q + b + 1),
                cache_seqlens + b,
                text,
                pool,
                state,
                stop_tokens,
                ranked,
                pool_rows,
                pool_width,
                num_stops,
                block_size,
                blocks,
                candidates,
                spawn_unchanged,
                LANES,
            )


def fewest_unchanged(block_size: int, spawn_ratio: float) -> int:
    """The fewest unchanged tokens u of a block with ``u / block_size >= spawn_ratio`` in float64."""
    return bisect_left(range(block_size), True, key=lambda u: u / block_size >= spawn_ratio)


def redraft(
    predictions: Tensor,
    accepted_rows: Tensor,
    num_accepted: Tensor,
    fixed_point: Tensor,
    tokens: Tensor,
    segments: Tensor,
    cu_seqlens_q: Tensor,
    cu_segments: Tensor,
    cache_seqlens: Tensor,
    text: Tensor,
    pool: Tensor,
    state: Tensor,
    stop_tokens: Tensor,
    *,
    block_size: int,
    blocks: int,
    candidates: int,
    spawn_ratio: float = 0.85,
) -> None:
    """Emit, feed the pool and lay out the next step, as :func:`jacobi_kernels.ops.redraft`.

    What the CPU op refuses by value sets the sequence's column ERROR, and leaves the sequence as it is.

    Raises
    ------
    RuntimeError
        For a tensor of another shape or type, or not contiguous, and for an option out of range.
    """
    check_runs_here(OP, tokens)
    rows, batch = tokens.shape[0], state.shape[0]
    int32 = torch.int32
    for name, tensor, dtype, shape in (
        ("predictions", predictions, int32, (rows,)),
        ("accepted_rows", accepted_rows, int32, (rows,)),
        ("num_accepted", num_accepted, int32, (batch,)),
        ("fixed_point", fixed_point, torch.bool, (batch,)),
        ("tokens", tokens, int32, (rows,)),
        ("segments", segments, int32, (segments.shape[0], 4)),
        ("cu_seqlens_q", cu_seqlens_q, int32, (batch + 1,)),
        ("cu_segments", cu_segments, int32, (batch + 1,)),
        ("cache_seqlens", cache_seqlens, int32, (batch,)),
        ("text", text, int32, (batch, *text.shape[1:2])),
        ("pool", pool, int32, (batch, *pool.shape[1:3])),
        ("state", state, int32, (batch, STATE_COLUMNS)),
        ("stop_tokens", stop_tokens, int32, (batch, *stop_tokens.shape[1:2])),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise RuntimeError(
                f"{OP}: {name} must be contiguous {dtype} of shape {list(shape)}, "
                f"got {tensor.dtype} of shape {list(tensor.shape)} with strides {tensor.stride()}"
            )
    for name, value, least in (("block_size", block_size, 1), ("blocks", blocks, 1), ("candidates", candidates, 0)):
        if not least <= value <= MAX_DRAFT_OPTION:
            raise RuntimeError(f"{OP}: {name} must be within {least}..2^20, got {value}")
    if not 0.0 <= spawn_ratio <= 1.0:
        raise RuntimeError(f"{OP}: spawn_ratio must be within 0..1, got {spawn_ratio}")
    pool_rows, entry = pool.shape[1:]
    if entry < 1 or pool_rows * entry > MAX_TOKEN:
        raise RuntimeError(f"{OP}: pool must have shape [B, entries, 1 + width] below 2^31, got {list(pool.shape)}")
    launch(
        OP,
        redraft_kernel,
        (batch,),
        predictions,
        accepted_rows,
        num_accepted,
        fixed_point.view(torch.uint8),
        tokens,
        segments,
        cu_seqlens_q,
        cu_segments,
        cache_seqlens,
        text,
        pool,
        state,
        stop_tokens,
        torch.empty((batch, MATCH_TOKENS.value, KEPT.value), dtype=int32, device=tokens.device),
        batch,
        rows,
        segments.shape[0],
        min(blocks * block_size + candidates * (block_size - 1), MAX_TOKEN),
        text.shape[1],
        pool_rows,
        entry - 1,
        stop_tokens.shape[1],
        block_size,
        blocks,
        candidates,
        fewest_unchanged(block_size, spawn_ratio),
        STATE_COLUMNS=STATE_COLUMNS,
        LANES=LANES,
        num_warps=NUM_WARPS,
    )


def compile_cases() -> list[CompileCase]:
    """One kernel for everything."""
    constants = {"STATE_COLUMNS": STATE_COLUMNS, "LANES": LANES}
    signature = dict.fromkeys(POINTERS, "*i32") | {"fixed_point": "*u8"} | dict.fromkeys(SIZES, "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    return [CompileCase(OP, redraft_kernel, signature, constants, NUM_WARPS)]
