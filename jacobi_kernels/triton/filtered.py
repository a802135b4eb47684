"""Samples under top-k and top-p, from logits in the caller's scratch rows: transformers' warpers in their order.

    z = logit / temperature;  top-k keeps z >= k-th largest;  top-p keeps, by falling z (ties by id), every token before
    which the mass exp(z - max) is below top_p of the kept mass;  sample = argmax of z + gumbel over what is kept

The listed rows go through the scratch as many at a time as it holds: a product (packed_linear.py), then a program per
row that reads its logits again and again instead of sorting them. Both thresholds are found by bisection over a float's
order-preserving integer, each half cut back to the nearest value that occurs: some 20 passes per filter, 32 at most.
Masses are float64, blocks in ascending order, so a row's sample depends on the row alone. Beyond the listed rows
programs end at once; launches follow from T and the scratch alone. Bytes: E * V weights per launch, 4 V per row and
pass from L2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.triton.noise import gumbel
from jacobi_kernels.triton.packed_linear import launch_product
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, launch
from jacobi_kernels.triton.vec_math import EXACT, exp, tanh

if TYPE_CHECKING:
    from jacobi_kernels.triton.argmax_verify import Head, Sampling, Verdict

NO_ID = tl.constexpr(2147483647)
LOWEST, HIGHEST = tl.constexpr(-2147483648), tl.constexpr(2147483647)
_INTERPRETED = tl.constexpr(INTERPRETED)
WARPS = 8


@triton.jit
def _scores(logits, id, n, heat, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """z of the ids, and the integers in whose order they stand; what is beyond the vocabulary is below everything."""
    z = tl.load(logits + id, mask=id < n, other=float("-inf")) * scale
    if CAPPED:
        z = tanh(tl.div_rn(z, tl.zeros_like(z) + softcap)) * softcap
    z = tl.div_rn(z, tl.zeros_like(z) + heat) + 0.0  # no negative zero: it would have an integer of its own
    bits = z.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return z, tl.where(id < n, order, LOWEST)


@triton.jit
def _mass(z, largest):  # type: ignore[no-untyped-def]
    """exp(z - largest) as float64."""
    if _INTERPRETED:  # calls are slow there
        e = tl.exp(z - largest)
    else:
        e = exp(z - largest)
    return e.to(tl.float64)


@triton.jit
def _count_from(  # type: ignore[no-untyped-def]
    logits, n, heat, scale, softcap, middle, BLOCK: tl.constexpr, CAPPED: tl.constexpr
):
    """Number of tokens of order >= middle, the lowest order among them and the highest below them."""
    count, up, down = 0, HIGHEST + 0, LOWEST + 0
    for begin in range(0, n, BLOCK):
        id = begin + tl.arange(0, BLOCK)
        _, order = _scores(logits, id, n, heat, scale, softcap, CAPPED)
        above = (id < n) & (order.to(tl.int64) >= middle)
        count += tl.sum(above.to(tl.int32), 0)
        up = tl.minimum(up, tl.min(tl.where(above, order, HIGHEST), 0))
        down = tl.maximum(down, tl.max(tl.where(above, LOWEST, order), 0))
    return count, up, down


@triton.jit
def _mass_above(  # type: ignore[no-untyped-def]
    logits, n, heat, scale, softcap, kth, largest, middle, BLOCK: tl.constexpr, CAPPED: tl.constexpr
):
    """Mass of the tokens of order > middle among those >= kth, blocks in ascending order; the lowest order among them
    and the highest of the others."""
    total, up, down = tl.cast(0.0, tl.float64), HIGHEST + 0, LOWEST + 0
    for begin in range(0, n, BLOCK):
        id = begin + tl.arange(0, BLOCK)
        z, order = _scores(logits, id, n, heat, scale, softcap, CAPPED)
        kept = (id < n) & (order >= kth)
        above = kept & (order.to(tl.int64) > middle)
        total += tl.sum(tl.where(above, _mass(z, largest), 0.0), 0)
        up = tl.minimum(up, tl.min(tl.where(above, order, HIGHEST), 0))
        down = tl.maximum(down, tl.max(tl.where(kept & (above == 0), order, LOWEST), 0))
    return total, up, down


@triton.jit(do_not_specialize=["skip"])
def filter_kernel(  # type: ignore[no-untyped-def]
    scratch,
    listed,
    counts,
    row_sequence,
    temperature,
    top_k,
    top_p,
    keys,
    predictions,
    rows,
    skip,
    n,
    scale,
    softcap,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One listed row: predictions[listed[skip + i]] from scratch row i."""
    i = tl.program_id(0)
    if skip + i < tl.load(counts + 1):
        row = tl.load(listed + skip + i)
        b = tl.load(row_sequence + row)
        heat = tl.load(temperature + b)
        logits = scratch + i.to(tl.int64) * n
        largest, top = tl.cast(float("-inf"), tl.float32), LOWEST + 0
        nan, infinite = NO_ID + 0, NO_ID + 0  # lowest ids
        for begin in range(0, n, BLOCK):
            id = begin + tl.arange(0, BLOCK)
            z, order = _scores(logits, id, n, heat, scale, softcap, CAPPED)
            nan = tl.minimum(nan, tl.min(tl.where((id < n) & (z != z), id, NO_ID), 0))
            infinite = tl.minimum(infinite, tl.min(tl.where(z == float("inf"), id, NO_ID), 0))
            fine = z == z
            largest = tl.maximum(largest, tl.max(tl.where(fine, z, float("-inf")), 0))
            top = tl.maximum(top, tl.max(tl.where(fine, order, LOWEST), 0))
        token = tl.where(nan == NO_ID, infinite, nan)  # NaN counts as the largest; no noise or filter changes infinity
        if token == NO_ID:
            kth = LOWEST + 0
            if HAS_TOP_K:
                wanted_count = tl.load(top_k + b)
                if (wanted_count > 0) & (wanted_count < n):
                    low, high = tl.cast(LOWEST, tl.int64), top.to(tl.int64) + 1
                    while high - low > 1:
                        middle = (low + high) >> 1
                        count, up, down = _count_from(logits, n, heat, scale, softcap, middle, BLOCK, CAPPED)
                        if count >= wanted_count:
                            low = up.to(tl.int64)
                        else:
                            high = down.to(tl.int64) + 1
                    kth = low.to(tl.int32)
            edge, before, wanted = tl.cast(LOWEST, tl.int64) - 1, tl.cast(0.0, tl.float64), tl.cast(1.0, tl.float64)
            if HAS_TOP_P:
                share = tl.load(top_p + b)
                if share < 1.0:
                    least = tl.cast(LOWEST, tl.int64) - 1
                    total, _, _ = _mass_above(logits, n, heat, scale, softcap, kth, largest, least, BLOCK, CAPPED)
                    wanted = tl.maximum(share.to(tl.float64) * total, 1e-300)  # the first token stays in any case
                    low, high = kth.to(tl.int64) - 1, top.to(tl.int64)  # what is above high weighs less than wanted
                    while high - low > 1:
                        middle = (low + high) >> 1
                        mass, up, down = _mass_above(
                            logits, n, heat, scale, softcap, kth, largest, middle, BLOCK, CAPPED
                        )
                        if mass < wanted:
                            high = tl.maximum(down.to(tl.int64), low + 1)
                            before = mass
                        else:
                            low = up.to(tl.int64) - 1
                    edge = high
            noise_low = tl.load(keys + row).to(tl.uint32, bitcast=True)
            noise_high = tl.load(keys + rows + row).to(tl.uint32, bitcast=True)
            best, token, ties = tl.cast(float("-inf"), tl.float32), NO_ID + 0, 0
            for begin in range(0, n, BLOCK):
                id = begin + tl.arange(0, BLOCK)
                z, order = _scores(logits, id, n, heat, scale, softcap, CAPPED)
                kept = (id < n) & (order >= kth)
                at_edge = kept & (order.to(tl.int64) == edge)
                rank = ties + tl.cumsum(at_edge.to(tl.int32), 0) - 1
                reached = before + rank.to(tl.float64) * _mass(z, largest)  # mass before this one of equal tokens
                kept = kept & ((order.to(tl.int64) > edge) | (at_edge & (reached < wanted)))
                ties += tl.sum(at_edge.to(tl.int32), 0)
                score = tl.where(kept, z + gumbel(noise_low, noise_high, id.to(tl.uint32)), float("-inf"))
                block_best = tl.max(score, 0)
                block_id = tl.min(tl.where(kept & (score == block_best), id, NO_ID), 0)
                if (block_best > best) | ((token == NO_ID) & (block_id != NO_ID)):
                    best, token = block_best, block_id
            if token == NO_ID:
                token = 0
        tl.store(predictions + row, token)


def sample_filtered(
    op: str, hidden: Tensor, head: Head, row_sequence: Tensor, sampling: Sampling, verdict: Verdict
) -> None:
    """Set the predictions of the rows that ``verdict`` lists as filtered."""
    scratch = sampling.logits_scratch
    assert scratch is not None
    rows, held = hidden.shape[0], scratch.shape[0]
    block = min(4096, max(16, triton.next_power_of_2(head.vocab)))
    for skip in range(0, rows, held):
        count = min(held, rows - skip)
        part, listed = scratch[:count], verdict.filtered[skip : skip + count]
        launch_product(op, hidden, head.weight, part, head.vocab, head.cut, head.bias, listed, verdict.counts[1:], skip)
        launch(
            op,
            filter_kernel,
            (count,),
            scratch,
            verdict.filtered,
            verdict.counts,
            row_sequence,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            verdict.keys,
            verdict.predictions,
            rows,
            skip,
            head.vocab,
            head.scale,
            head.softcap,
            HAS_TOP_K=sampling.top_k is not None,
            HAS_TOP_P=sampling.top_p is not None,
            CAPPED=head.softcap > 0,
            BLOCK=block,
            num_warps=WARPS,
            **EXACT,
        )


def compile_cases() -> list[CompileCase]:
    """The filter with all it can do."""
    integers = {"listed": "*i32", "counts": "*i32", "row_sequence": "*i32"}
    signature = {"scratch": "*fp32"} | integers | {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32"}
    signature |= {"keys": "*i32", "predictions": "*i32", "rows": "i32", "skip": "i32", "n": "i32"}
    signature |= {"scale": "fp32", "softcap": "fp32"}
    cases = []
    for capped in (False, True):
        constants = {"HAS_TOP_K": True, "HAS_TOP_P": True, "CAPPED": capped, "BLOCK": 4096}
        types = signature | dict.fromkeys(constants, "constexpr")
        aligned = {a: 16 for a, t in types.items() if t[0] == "*" or a == "n"}
        name = f"filtered: top-k and top-p{' capped' * capped}"
        cases.append(
            CompileCase(name, filter_kernel, types, constants, WARPS, may_spill=True, attributes=aligned, options=EXACT)
        )
    return cases
