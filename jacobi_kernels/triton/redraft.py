"""``redraft``: what one forward pass made final is emitted, then the next query layout is written.

The rules are those of csrc/common/redraft.h in modules beside this one: checks (redraft_check), emission and
pool (accepted), chain and candidates (draft), searches (pool). One program per sequence. Scalars (lengths, counters,
the state's columns) live in registers and are the same in all threads; lanes take tokens: comparisons are counts or
minima of mismatches, copies are masked stores. Loops over tiles of lanes end at the sequence's own lengths.

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
from jacobi_kernels.triton.accepted import LENGTH, emit, feed_pool, unchanged_tokens
from jacobi_kernels.triton.draft import Slots, draft_candidates, draft_chain
from jacobi_kernels.triton.pool import KEPT, MATCH_TOKENS, History
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
            emitted, done = emit(
                predictions, rows, tokens, text, text_len, max_len, accepted, num_final, stops, num_stops, LANES
            )
            text_len += emitted
            tl.debug_barrier()  # the text is read from here on
        if decode & (done == 0):
            before = History(text, text_begin, text_len, pool, pool_rows, pool_width, pool_next)
            pool_next = feed_pool(before, slots, predictions, winner, cached - accepted, LANES)
            fill += accepted
            active = tl.maximum(1, active - fill // block_size)
            fill = fill % block_size
            if (main_length >= block_size) & (active < blocks):
                unchanged = unchanged_tokens(tokens, predictions, main_start, main_length, block_size, LANES)
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


POINTERS, SIZES = 14, 12  # leading arguments of the kernel


@triton.jit(do_not_specialize=list(range(POINTERS + SIZES)))  # one compilation serves every call
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


def check_options(op: str, pool: Tensor, block_size: int, blocks: int, candidates: int, spawn_ratio: float) -> None:
    """RuntimeError for an option out of range, or a pool that no entry fits in or int32 does not reach."""
    for name, value, least in (("block_size", block_size, 1), ("blocks", blocks, 1), ("candidates", candidates, 0)):
        if not least <= value <= MAX_DRAFT_OPTION:
            raise RuntimeError(f"{op}: {name} must be within {least}..2^20, got {value}")
    if not 0.0 <= spawn_ratio <= 1.0:
        raise RuntimeError(f"{op}: spawn_ratio must be within 0..1, got {spawn_ratio}")
    if pool.shape[2] < 1 or pool.shape[1] * pool.shape[2] > MAX_TOKEN:
        raise RuntimeError(f"{op}: pool must have shape [B, entries, 1 + width] below 2^31, got {list(pool.shape)}")


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
    check_options(OP, pool, block_size, blocks, candidates, spawn_ratio)
    pool_rows, entry = pool.shape[1:]
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
    names = redraft_kernel.arg_names
    signature = dict.fromkeys(names[:POINTERS], "*i32") | {"fixed_point": "*u8"}
    signature |= dict.fromkeys(names[POINTERS : POINTERS + SIZES], "i32") | dict.fromkeys(constants, "constexpr")
    return [CompileCase(OP, redraft_kernel, signature, constants, NUM_WARPS)]
