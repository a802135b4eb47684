"""Matches of the latest tokens in a sequence's text and pool, as csrc/common/pool.h defines them, searched in parallel.

Lanes take positions of the text, or of the pool's rows, and count how many of the query's last 8 tokens agree going
back: 8 shifted loads that do not wait for one another. A match is a ``place``: the index of its last token in the text,
or -1 - index in the pool, where index = age * width + end puts the oldest row first, so that in both a greater index is
the more recent one. So the best match is one maximum of (length, index), and the text's wins a tie.

Ranking needs the 16 latest matches of every length. Lanes run from the most recent position on; a prefix sum of packed
counters, 16 bits for each length, gives every match its rank among those of its length, and the first 16 are written to
``ranked [8, 16]``. One pass: 8 loads and two sums per position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

MATCH_TOKENS = tl.constexpr(8)  # as in csrc/common/pool.h
LOOKUP_TOKENS = tl.constexpr(3)
KEPT = tl.constexpr(16)
TILE = tl.constexpr(32)  # pool rows, and tokens of a row, that are compared at once
_LENGTH_SHIFT = tl.constexpr(32)
_INDEX_MASK = tl.constexpr(2**31 - 1)


class History(NamedTuple):
    """One sequence's final tokens and pool, as in csrc/common/pool.h: addresses and scalars on the device."""

    text: Any  # [text_length]
    text_begin: Any  # matches lie in text[text_begin:]
    text_length: Any
    pool: Any  # [rows, 1 + width]
    rows: Any
    width: Any
    next_row: Any  # the row that the next entry will take


@triton.jit
def run_token(text, text_length, guesses, i, mask):  # type: ignore[no-untyped-def]
    """Token i of the final text and the guesses behind it, read as one run."""
    final = tl.load(text + i, mask=mask & (i < text_length), other=0)
    guess = tl.load(guesses + (i - text_length), mask=mask & (i >= text_length), other=0)
    return tl.where(i < text_length, final, guess)


@triton.jit
def last_token(text, text_length, guesses, size, k: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token k of the run's last tokens, latest first; 0 where the run is shorter."""
    return run_token(text, text_length, guesses, size - 1 - k, size > k)


@triton.jit
def last_tokens(text, text_length, guesses, size):  # type: ignore[no-untyped-def]
    """The last MATCH_TOKENS tokens of a run of ``size`` tokens, latest first."""
    return (
        last_token(text, text_length, guesses, size, 0),
        last_token(text, text_length, guesses, size, 1),
        last_token(text, text_length, guesses, size, 2),
        last_token(text, text_length, guesses, size, 3),
        last_token(text, text_length, guesses, size, 4),
        last_token(text, text_length, guesses, size, 5),
        last_token(text, text_length, guesses, size, 6),
        last_token(text, text_length, guesses, size, 7),
    )


@triton.jit
def match_lengths(tokens, begin, end, inside, suffix, suffix_length):  # type: ignore[no-untyped-def]
    """Tokens that agree with the suffix going back from tokens[end], not before tokens[begin]; 0 where not inside."""
    length = tl.zeros_like(end)
    agree = inside
    for k in tl.static_range(MATCH_TOKENS):
        there = inside & (end - k >= begin) & (k < suffix_length)
        token = tl.load(tokens + (end - k), mask=there, other=0)
        agree = agree & there & (token == suffix[k])
        length += agree.to(tl.int32)
    return length


@triton.jit
def pool_match_lengths(h, index, suffix, suffix_length):  # type: ignore[no-untyped-def]
    """match_lengths at indices of the pool; 0 where no token follows."""
    inside = (index >= 0) & (index < h.rows * h.width)
    entry = h.pool + (h.next_row + index // h.width) % h.rows * (1 + h.width)
    end = index % h.width
    stored = tl.load(entry, mask=inside, other=0)
    return match_lengths(entry + 1, 0, end, inside & (end < stored - 1), suffix, suffix_length)


@triton.jit
def best_match(h, guesses, num_guesses, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(length, place) of the longest match of the run's last tokens, the latest of its length; length 0: none."""
    size = h.text_length + num_guesses
    suffix = last_tokens(h.text, h.text_length, guesses, size)
    suffix_length = tl.minimum(size, MATCH_TOKENS)
    lanes = tl.arange(0, LANES)

    best = tl.zeros([LANES], tl.int64)
    end_of_search = tl.minimum(h.text_length, size - 1)
    for i in range(h.text_begin, end_of_search, LANES):
        end = i + lanes
        length = match_lengths(h.text, h.text_begin, end, end < end_of_search, suffix, suffix_length)
        best = tl.maximum(best, (length.to(tl.int64) << _LENGTH_SHIFT) + end)
    found = tl.max(best, 0)
    longest = (found >> _LENGTH_SHIFT).to(tl.int32)
    place = (found & _INDEX_MASK).to(tl.int32)

    if longest < suffix_length:
        best = tl.zeros([LANES], tl.int64)
        for i in range(0, h.rows * h.width, LANES):
            index = i + lanes
            length = pool_match_lengths(h, index, suffix, suffix_length)
            best = tl.maximum(best, (length.to(tl.int64) << _LENGTH_SHIFT) + index)
        found = tl.max(best, 0)
        length = (found >> _LENGTH_SHIFT).to(tl.int32)
        place = tl.where(length > longest, -1 - (found & _INDEX_MASK).to(tl.int32), place)
        longest = tl.maximum(length, longest)
    return longest, place


@triton.jit
def locate(h, place):  # type: ignore[no-untyped-def]
    """(offset in the pool of the token behind a match, tokens that follow); means nothing for a match in the text."""
    index = tl.maximum(-1 - place, 0)
    entry = (h.next_row + index // tl.maximum(h.width, 1)) % tl.maximum(h.rows, 1) * (1 + h.width)
    end = index % tl.maximum(h.width, 1)
    stored = tl.load(h.pool + entry, mask=place < 0, other=0)
    return entry + 2 + end, stored - (end + 1)


@triton.jit
def continuation(h, guesses, size, place, offset, i, mask):  # type: ignore[no-untyped-def]
    """Token i behind a match; one that reaches the end of the run goes on at its own start."""
    period = tl.maximum(size - (place + 1), 1)
    own = run_token(h.text, h.text_length, guesses, place + 1 + i % period, mask & (place >= 0))
    pooled = tl.load(h.pool + (offset + i), mask=mask & (place < 0), other=0)
    return tl.where(place >= 0, own, pooled)


@triton.jit
def count_of(low, high, length):  # type: ignore[no-untyped-def]
    """The counter of a match length 1..8: 1..4 are packed into ``low``, 5..8 into ``high``."""
    at = tl.maximum(length - 1, 0)
    packed = tl.where(at < 4, low, high)
    return ((packed >> (at % 4 * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)


@triton.jit
def _capped(packed):  # type: ignore[no-untyped-def]
    """Every counter at most KEPT."""
    result = packed & 0
    for k in tl.static_range(4):
        result += tl.minimum((packed >> (16 * k)) & 0xFFFF, KEPT) << (16 * k)
    return result


@triton.jit
def _keep(ranked, length, place, low, high):  # type: ignore[no-untyped-def]
    """Writes the matches of one tile, most recent lane first; returns the counters behind them."""
    if tl.max(length, 0) > 0:
        one = (length > 0).to(tl.int64) << (tl.maximum(length - 1, 0) % 4 * 16).to(tl.int64)
        own_low, own_high = tl.where(length <= 4, one, 0), tl.where(length > 4, one, 0)
        rank = count_of(low + tl.cumsum(own_low, 0), high + tl.cumsum(own_high, 0), length) - 1
        tl.store(ranked + (length - 1) * KEPT + rank, place, mask=(length > 0) & (rank < KEPT))
        low, high = _capped(low + tl.sum(own_low, 0)), _capped(high + tl.sum(own_high, 0))
    return low, high


@triton.jit
def rank_matches(h, ranked, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of the latest matches of the text's last tokens to ranked [8, 16], row by length less one.

    Returns their packed counters and prompt lookup's choice: the place of the first occurrence of the longest final
    n-gram (n <= 3) in the searched text, or -1.
    """
    suffix = last_tokens(h.text, h.text_length, h.text, h.text_length)
    suffix_length = tl.minimum(h.text_length, MATCH_TOKENS)
    lanes = tl.arange(0, LANES)
    low = tl.zeros([], tl.int64)
    high = low
    lookup = tl.zeros([LANES], tl.int64)
    for i in range(0, h.text_length - 1 - h.text_begin, LANES):
        end = h.text_length - 2 - i - lanes
        length = match_lengths(h.text, h.text_begin, end, end >= h.text_begin, suffix, suffix_length)
        low, high = _keep(ranked, length, end, low, high)
        shown = tl.minimum(length, LOOKUP_TOKENS).to(tl.int64)
        lookup = tl.maximum(lookup, tl.where(length > 0, (shown << _LENGTH_SHIFT) + (_INDEX_MASK - end), 0))
    for i in range(0, h.rows * h.width, LANES):
        index = h.rows * h.width - 1 - i - lanes
        length = pool_match_lengths(h, index, suffix, suffix_length)
        low, high = _keep(ranked, length, -1 - index, low, high)
    first = tl.max(lookup, 0)
    return low, high, tl.where(first > 0, _INDEX_MASK - (first & _INDEX_MASK).to(tl.int32), -1)


@triton.jit
def store_entry(pool, rows, width, next_row, context, context_length, tail, tail_length):  # type: ignore[no-untyped-def]
    """Stores (context, tail) as the newest entry unless the tail is empty or an equal entry is there.

    The tail is cut to the row's width. Returns the ring index behind it. Ends with a barrier when something is stored.
    """
    tail_length = tl.minimum(tail_length, width - context_length)
    lanes = tl.arange(0, TILE)
    if (tail_length > 0) & (rows > 0):
        length = context_length + tail_length
        equal = 0
        for r in range(0, rows, TILE):
            entry = pool + (r + lanes) * (1 + width)
            alike = r + lanes < rows
            alike = alike & (tl.load(entry, mask=alike, other=0) == length)
            if tl.sum(alike.to(tl.int32), 0) > 0:
                differing = tl.zeros([TILE], tl.int32)
                for i in range(0, length, TILE):
                    at = i + lanes
                    token = run_token(context, context_length, tail, at, at < length)
                    compared = alike[:, None] & (at < length)[None, :]
                    stored = tl.load(entry[:, None] + 1 + at[None, :], mask=compared, other=0)
                    differing += tl.sum((compared & (stored != token[None, :])).to(tl.int32), 1)
                equal += tl.sum((alike & (differing == 0)).to(tl.int32), 0)
        if equal == 0:
            tl.debug_barrier()  # all rows have been read before one is overwritten
            entry = pool + next_row * (1 + width)
            tl.store(entry, length)
            for i in range(0, length, TILE):
                at = i + lanes
                token = run_token(context, context_length, tail, at, at < length)
                tl.store(entry + 1 + at, token, mask=at < length)
            next_row = (next_row + 1) % rows
            tl.debug_barrier()  # the next reader may be another thread
    return next_row
