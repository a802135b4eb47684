"""What one forward pass made final and what it predicted behind: emission, pool entries and unchanged tokens.

Stages of :mod:`jacobi_kernels.triton.redraft`, as csrc/common/redraft.h defines them. Nothing is written but the text
behind its end and the pool's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jacobi_kernels.triton.pool import MATCH_TOKENS, store_entry

STOP_TOKEN, LENGTH = tl.constexpr(1), tl.constexpr(2)  # reasons in the column DONE


@triton.jit
def emit(  # type: ignore[no-untyped-def]
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
def feed_pool(h, slots, predictions, winner, old_length, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
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
def unchanged_tokens(tokens, predictions, start, length, block_size, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the last block_size tokens of the chain are what was predicted for them."""
    count = 0
    for i in range(length - block_size, length, LANES):
        at = i + tl.arange(0, LANES)
        there = at < length
        token = tl.load(tokens + start + at, mask=there, other=0)
        expected = tl.load(predictions + start + at - 1, mask=there & (at > 0), other=0)
        count += tl.sum((there & ((at == 0) | (token == expected))).to(tl.int32), 0)
    return count
