"""The next guesses of one sequence: its chain and its candidates, as csrc/common/redraft.h defines them.

Searches are those of :mod:`jacobi_kernels.triton.pool`; a continuation is a function of its place in text or pool, both
of which are only read here, so lanes make its tokens wherever they are compared or stored, and nothing is buffered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jacobi_kernels.triton.pool import (
    KEPT,
    MATCH_TOKENS,
    TILE,
    best_match,
    continuation,
    count_of,
    locate,
    rank_matches,
)

MANY = tl.constexpr(8)  # of the chain and the candidates, compared with a continuation at once
REFILL_SEARCHES = tl.constexpr(4)  # as kRefillSearches of csrc/common/redraft.h


class Slots(NamedTuple):
    """Where one sequence's query tokens lie."""

    tokens: Any  # of all sequences
    segments: Any  # its own: the main chain, then one for each candidate
    begin: Any  # first row of the chain
    candidate_row: Any  # first row of candidate 0
    stride: Any  # rows of a candidate
    candidates: Any


@triton.jit
def draft_chain(  # type: ignore[no-untyped-def]
    h, chain, target, predictions, accepted, last_row, winner_end, main_start, main_length, LANES: tl.constexpr
):
    """Writes ``target`` tokens over the old chain; last_row is the last accepted one, accepted 0: there is none."""
    lanes = tl.arange(0, LANES)
    tl.store(chain, tl.load(h.text + h.text_length - 1))
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
        length, place = best_match(h, chain + 1, count - 1, LANES)
        searches = tl.where(length > 0, searches + 1, REFILL_SEARCHES)
        if length > 0:
            offset, left = locate(h, place)
            added = tl.where(place >= 0, target - count, tl.minimum(left, target - count))
            size = h.text_length + count - 1
            for i in range(0, added, LANES):
                at = i + lanes
                token = continuation(h, chain + 1, size, place, offset, at, at < added)
                tl.store(chain + count + at, token, mask=at < added)
            count += added
            tl.debug_barrier()

    if count < target:
        last = tl.load(chain + count - 1)
        for i in range(count, target, LANES):
            tl.store(chain + i + lanes, tl.zeros_like(lanes) + last, mask=i + lanes < target)


@triton.jit
def _choose(h, slots, place, limit, chosen):  # type: ignore[no-untyped-def]
    """Adds the continuation of a match unless it says nothing new; returns the number of chosen candidates.

    It is compared with the chain's guesses (who = 0) and the chosen candidates (who = 1 + c) side by side. The first
    that begins with it, or that it begins with, decides: a longer one makes it vain, a shorter candidate is extended.
    """
    columns = tl.arange(0, TILE)
    offset, left = locate(h, place)
    length = tl.where(place >= 0, limit, tl.minimum(left, limit))
    found = chosen + 1
    for r in range(0, chosen + 1, MANY):
        who = r + tl.arange(0, MANY)
        there = who <= chosen
        row = tl.where(who == 0, slots.begin + 1, slots.candidate_row + (who - 1) * slots.stride)
        known = tl.load(slots.segments + 4 * who + 1, mask=there, other=0) - (who == 0).to(tl.int32)
        differing = tl.zeros([MANY], tl.int32)
        for i in range(0, length, TILE):
            at = i + columns
            token = continuation(h, h.text, h.text_length, place, offset, at, at < length)
            compared = there[:, None] & (at[None, :] < tl.minimum(known, length)[:, None])
            other = tl.load(slots.tokens + row[:, None] + at[None, :], mask=compared, other=0)
            differing += tl.sum((compared & (other != token[None, :])).to(tl.int32), 1)
        related = there & (differing == 0) & ((who > 0) | (known >= length))
        found = tl.minimum(found, tl.min(tl.where(related, who, chosen + 1), 0))
    known = tl.load(slots.segments + 4 * found + 1, mask=found <= chosen, other=0) - (found == 0).to(tl.int32)
    if known < length:
        tl.debug_barrier()  # what is about to change has been read by all threads
        target = slots.tokens + (slots.candidate_row + (found - 1) * slots.stride)
        for i in range(known, length, TILE):
            at = i + columns
            token = continuation(h, h.text, h.text_length, place, offset, at, at < length)
            tl.store(target + at, token, mask=at < length)
        tl.store(slots.segments + 4 * found + 1, length)
        chosen = tl.maximum(chosen, found)
        tl.debug_barrier()
    return chosen


@triton.jit
def draft_candidates(h, slots, limit, ranked, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chooses candidates of at most ``limit`` tokens: prompt lookup's, then by longer match and recency.

    ``ranked [8, 16]`` is scratch. The segments of candidates must be empty.
    """
    low, high, lookup = rank_matches(h, ranked, LANES)
    tl.debug_barrier()
    has_lookup = ((lookup >= 0) & (h.text_begin == 0)).to(tl.int32)
    chosen, i = 0, 0
    length = MATCH_TOKENS + 1  # of the matches that come next; one more than the longest stands for prompt lookup
    while (length > 0) & (chosen < slots.candidates):
        looked_up = length > MATCH_TOKENS
        count = tl.where(looked_up, has_lookup, count_of(low, high, tl.minimum(length, MATCH_TOKENS)))
        if i < count:
            place = tl.load(ranked + (length - 1) * KEPT + i, mask=length <= MATCH_TOKENS, other=0)
            chosen = _choose(h, slots, tl.where(looked_up, lookup, place), limit, chosen)
            i += 1
        else:
            length -= 1
            i = 0
