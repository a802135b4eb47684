"""``redraft``: what one forward pass made final is emitted, then the next query layout is written.

The rules are those of csrc/common/redraft.h, stage by stage: emission, pool, blocks, chain, candidates. One program per
sequence. Scalars (lengths, counters, the state's columns) live in registers and are the same in all threads; lanes take
tokens: comparisons are counts or minima of mismatches, copies are masked stores of up to LANES tokens, searches are in
:mod:`jacobi_kernels.triton.pool`. Loops over lanes' tiles end at the sequence's own lengths.

A token that one thread stores may be loaded by another, so a barrier stands behind every stage that writes what a later
one reads, and in front of every one that overwrites what an earlier one reads: text after emission, pool rows, the new
chain over the old one, guesses before they are searched, candidates before they are compared.

A sequence whose layout or state is out of range is left as it is but for its column ERROR; one whose ERROR is set
already is left alone. Bytes: one to seven passes over the text and the pool (4 bytes a token, from L1 and L2), the
query rows and two rows of the pool; nothing else is touched.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.state import MAX_DRAFT_OPTION, MAX_TOKEN, STATE_COLUMNS, StateColumn
from jacobi_kernels.triton.pool import (
    KEPT,
    MATCH_TOKENS,
    TILE,
    best_match,
    continuation,
    count_of,
    locate,
    rank_matches,
    store_entry,
)
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
LANES, NUM_WARPS = 512, 4

ACCEPTED = tl.constexpr(int(StateColumn.ACCEPTED))
WINNER = tl.constexpr(int(StateColumn.WINNER))
EMITTED = tl.constexpr(int(StateColumn.EMITTED))
FIXED_POINT = tl.constexpr(int(StateColumn.FIXED_POINT))
ERROR = tl.constexpr(int(StateColumn.ERROR))
STOP_TOKEN, LENGTH = tl.constexpr(1), tl.constexpr(2)  # reasons in DONE
REFILL_SEARCHES = tl.constexpr(4)  # as kRefillSearches of csrc/common/redraft.h


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
def _feed_pool(  # type: ignore[no-untyped-def]
    predictions,
    tokens,
    segments,
    candidates,
    winner,
    old_length,
    text,
    text_len,
    pool,
    pool_rows,
    pool_width,
    pool_next,
    LANES: tl.constexpr,
):
    """Stores what the chain and the losing candidates predicted behind their accepted part; returns POOL_NEXT."""
    chain_start = tl.load(segments)
    for s in range(candidates + 1):
        start, length = tl.load(segments + 4 * s), tl.load(segments + 4 * s + 1)
        if (length > 0) & ((s == 0) | (s != winner)):
            final = tl.where(s == 0, 1, 0)
            accepted = _accepted_run(tokens, predictions, start, length, chain_start, final, LANES)
            # The token behind the accepted part is final: it ends the context. The context never passes the text.
            context_end = tl.minimum(old_length + 1 - final + accepted + 1, text_len)
            context_length = tl.minimum(MATCH_TOKENS, context_end)
            pool_next = store_entry(
                pool,
                pool_rows,
                pool_width,
                pool_next,
                text + (context_end - context_length),
                context_length,
                predictions + (start + accepted),
                length - accepted,
            )
    return pool_next


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
def _draft_chain(  # type: ignore[no-untyped-def]
    predictions,
    chain,
    last_row,
    winner_end,
    main_start,
    main_length,
    accepted,
    target,
    text,
    text_begin,
    text_len,
    pool,
    pool_rows,
    pool_width,
    pool_next,
    LANES: tl.constexpr,
):
    """Writes ``target`` tokens over the old chain; last_row -1: nothing was predicted."""
    lanes = tl.arange(0, LANES)
    tl.store(chain, tl.load(text + text_len - 1))
    count = 1
    if accepted > 0:
        # Row last_row + i, and main row accepted - 1 + i, predict place i of the new chain.
        winner_count = tl.minimum(winner_end - last_row, target)
        count = tl.minimum(tl.maximum(winner_count, main_length - accepted + 1), target)
        for i in range(1, count, LANES):
            at = i + lanes
            row = tl.where(at < winner_count, last_row + at, main_start + accepted - 1 + at)
            tl.store(chain + at, tl.load(predictions + row, mask=at < count, other=0), mask=at < count)
    tl.debug_barrier()

    searches = 0
    while (searches < REFILL_SEARCHES) & (count < target):
        length, place = best_match(
            text, text_begin, text_len, chain + 1, count - 1, pool, pool_rows, pool_width, pool_next, LANES
        )
        searches = tl.where(length > 0, searches + 1, REFILL_SEARCHES)
        if length > 0:
            address, left = locate(place, pool, pool_rows, pool_width, pool_next)
            added = tl.where(place >= 0, target - count, tl.minimum(left, target - count))
            size = text_len + count - 1
            for i in range(0, added, LANES):
                at = i + lanes
                token = continuation(text, text_len, chain + 1, size, pool, place, address, at, at < added)
                tl.store(chain + count + at, token, mask=at < added)
            count += added
            tl.debug_barrier()

    if count < target:
        last = tl.load(chain + count - 1)
        for i in range(count, target, LANES):
            tl.store(chain + i + lanes, tl.zeros_like(lanes) + last, mask=i + lanes < target)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    place,
    limit,
    text,
    text_len,
    pool,
    pool_rows,
    pool_width,
    pool_next,
    tokens,
    segments,
    chain_row,
    candidate_row,
    stride,
    chosen,
    MANY: tl.constexpr,
):
    """Adds the continuation of a match unless it says nothing new; returns the number of chosen candidates.

    It is compared with the chain's guesses (who = 0) and the chosen candidates (who = 1 + c) side by side. The first
    that begins with it, or that it begins with, decides: a longer one makes it vain, a shorter candidate is extended.
    """
    columns = tl.arange(0, TILE)
    address, left = locate(place, pool, pool_rows, pool_width, pool_next)
    length = tl.where(place >= 0, limit, tl.minimum(left, limit))
    found = chosen + 1
    for r in range(0, chosen + 1, MANY):
        who = r + tl.arange(0, MANY)
        there = who <= chosen
        row = tl.where(who == 0, chain_row + 1, candidate_row + (who - 1) * stride)
        known = tl.load(segments + 4 * who + 1, mask=there, other=0) - (who == 0).to(tl.int32)
        differing = tl.zeros([MANY], tl.int32)
        for i in range(0, length, TILE):
            at = i + columns
            token = continuation(text, text_len, text, text_len, pool, place, address, at, at < length)
            compared = there[:, None] & (at[None, :] < tl.minimum(known, length)[:, None])
            other = tl.load(tokens + row[:, None] + at[None, :], mask=compared, other=0)
            differing += tl.sum((compared & (other != token[None, :])).to(tl.int32), 1)
        related = there & (differing == 0) & ((who > 0) | (known >= length))
        found = tl.minimum(found, tl.min(tl.where(related, who, chosen + 1), 0))
    known = tl.load(segments + 4 * found + 1, mask=found <= chosen, other=0) - (found == 0).to(tl.int32)
    if known < length:
        tl.debug_barrier()  # what is about to change has been read by all threads
        target = tokens + (candidate_row + (found - 1) * stride)
        for i in range(known, length, TILE):
            at = i + columns
            token = continuation(text, text_len, text, text_len, pool, place, address, at, at < length)
            tl.store(target + at, token, mask=at < length)
        tl.store(segments + 4 * found + 1, length)
        chosen = tl.maximum(chosen, found)
        tl.debug_barrier()
    return chosen


@triton.jit
def _draft_candidates(  # type: ignore[no-untyped-def]
    text,
    text_begin,
    text_len,
    pool,
    pool_rows,
    pool_width,
    pool_next,
    tokens,
    segments,
    chain_row,
    candidate_row,
    stride,
    limit,
    candidates,
    ranked,
    LANES: tl.constexpr,
    MANY: tl.constexpr,
):
    """Prompt lookup's choice, then continuations by longer match and recency, until there are ``candidates``."""
    low, high, lookup = rank_matches(text, text_begin, text_len, pool, pool_rows, pool_width, pool_next, ranked, LANES)
    tl.debug_barrier()
    has_lookup = ((lookup >= 0) & (text_begin == 0)).to(tl.int32)
    chosen, i = 0, 0
    length = MATCH_TOKENS + 1  # of the matches that come next; one more than the longest stands for prompt lookup
    while (length > 0) & (chosen < candidates):
        looked_up = length > MATCH_TOKENS
        count = tl.where(looked_up, has_lookup, count_of(low, high, tl.minimum(length, MATCH_TOKENS)))
        if i < count:
            place = tl.load(ranked + (length - 1) * KEPT + i, mask=length <= MATCH_TOKENS, other=0)
            chosen = _choose(
                tl.where(looked_up, lookup, place),
                limit,
                text,
                text_len,
                pool,
                pool_rows,
                pool_width,
                pool_next,
                tokens,
                segments,
                chain_row,
                candidate_row,
                stride,
                chosen,
                MANY,
            )
            i += 1
        else:
            length -= 1
            i = 0


@triton.jit
def _lay_out(  # type: ignore[no-untyped-def]
    segments, first, begin, candidate_row, stride, candidates, chain_length, LANES: tl.constexpr
):
    """The chain of the given length and empty candidates, at their fixed starts."""
    for i in range(0, candidates + 1, LANES):
        s = i + tl.arange(0, LANES)
        there = s <= candidates
        candidate = s > 0
        tl.store(segments + 4 * s, tl.where(candidate, candidate_row + (s - 1) * stride, begin), mask=there)
        tl.store(segments + 4 * s + 1, tl.where(candidate, 0, chain_length), mask=there)
        tl.store(segments + 4 * s + 2, tl.where(candidate, first, -1), mask=there)
        tl.store(segments + 4 * s + 3, (candidate & (chain_length > 0)).to(tl.int32), mask=there)


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
    MANY: tl.constexpr,
):
    """One checked sequence; segments, cache_seqlen, text, pool, state, stops and ranked point to its own."""
    stride = block_size - 1
    candidate_row = end - candidates * stride
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
            pool_next = _feed_pool(
                predictions,
                tokens,
                segments,
                candidates,
                winner,
                cached - accepted,
                text,
                text_len,
                pool,
                pool_rows,
                pool_width,
                pool_next,
                LANES,
            )
            fill += accepted
            active = tl.maximum(1, active - fill // block_size)
            fill = fill % block_size
            if (main_length >= block_size) & (active < blocks):
                unchanged = _unchanged(tokens, predictions, main_start, main_length, block_size, LANES)
                active += (unchanged >= spawn_unchanged).to(tl.int32)

    tl.debug_barrier()  # tokens, segments and state have been read by all threads
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
        _draft_chain(
            predictions,
            tokens + begin,
            last_row,
            winner_end,
            main_start,
            main_length,
            accepted,
            chain_length,
            text,
            text_begin,
            text_len,
            pool,
            pool_rows,
            pool_width,
            pool_next,
            LANES,
        )
    _lay_out(segments, first, begin, candidate_row, stride, candidates, chain_length, LANES)
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
        _draft_candidates(
            text,
            text_begin,
            text_len,
            pool,
            pool_rows,
            pool_width,
            pool_next,
            tokens,
            segments,
            begin,
            candidate_row,
            stride,
            limit,
            candidates,
            ranked,
            LANES,
            MANY,
        )


@triton.jit
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
    MANY: tl.constexpr,
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
                MANY,
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
        MANY=many(candidates),
        num_warps=NUM_WARPS,
    )


def many(candidates: int) -> int:
    """Candidates that a continuation is compared with at once, the chain among them."""
    return min(16, triton.next_power_of_2(max(2, candidates + 1)))


def compile_cases() -> list[CompileCase]:
    """The kernel for 1, 4 and many candidates."""
    pointers = (
        "predictions accepted_rows num_accepted fixed_point tokens segments cu_seqlens_q cu_segments cache_seqlens"
    )
    pointers += " text pool state stop_tokens ranked"
    sizes = "batch total_rows num_segments least_rows text_capacity pool_rows pool_width num_stops block_size blocks"
    sizes += " candidates spawn_unchanged"
    cases = []
    for candidates in (1, 4, 16):
        constants = {"STATE_COLUMNS": STATE_COLUMNS, "LANES": LANES, "MANY": many(candidates)}
        signature = dict.fromkeys(pointers.split(), "*i32") | {"fixed_point": "*u8"}
        signature |= dict.fromkeys(sizes.split(), "i32") | dict.fromkeys(constants, "constexpr")
        cases.append(CompileCase(f"{OP}: {candidates} candidates", redraft_kernel, signature, constants, NUM_WARPS))
    return cases
