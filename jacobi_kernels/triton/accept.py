"""The longest accepted path of every sequence, csrc/common/accept.h on the device: one program per sequence.

On a path a token is accepted while it is given (one of the first num_final of a root segment) or equals the prediction
of the token before it. A segment's path (plan.py) is read in tiles of BLOCK tokens up to its first rejected one; the
longest accepted prefix of all segments wins, the lowest segment where they tie: what a path accepts of its ancestors,
they have counted themselves. Bytes: some integers per token of every path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.triton.plan import Plan
from jacobi_kernels.triton.runtime import CompileCase, launch

if TYPE_CHECKING:
    from jacobi_kernels.triton.argmax_verify import Verdict


@triton.jit
def accept_kernel(  # type: ignore[no-untyped-def]
    path,
    width,
    row_segment,
    segments,
    cu_segments,
    cu_seqlens_q,
    tokens,
    predictions,
    num_final,
    num_final_stride,
    accepted_rows,
    num_accepted,
    fixed_point,
    rows,
    num_segments,
    HAS_FINAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """csrc/common/accept.h for one sequence: a path's token counts if it is given or predicted by the one before."""
    b = tl.program_id(0)
    final = 1
    if HAS_FINAL:
        final = tl.maximum(tl.load(num_final + b * num_final_stride), 1)
    first = tl.maximum(tl.load(cu_segments + b), 0)
    end = tl.minimum(tl.load(cu_segments + b + 1), num_segments)
    best, winner, fixed = 0, first, 0
    for s in range(first, end):
        line = path + tl.cast(s, tl.int64) * width
        count, going = 0, 1
        for begin in range(0, width, BLOCK):
            if going != 0:
                j = begin + tl.arange(0, BLOCK)
                row = tl.load(line + j, mask=j < width, other=-1)
                on_path = row >= 0
                before = tl.load(line + j - 1, mask=on_path & (j > 0), other=-1)
                token = tl.load(tokens + row, mask=on_path, other=-1)
                predicted = tl.load(predictions + before, mask=before >= 0, other=-2)
                segment = tl.load(row_segment + row, mask=on_path, other=0)
                start = tl.load(segments + 4 * segment, mask=on_path, other=0)
                given = (j < final) & (row - start == j)  # a root's row stands at its own index
                good = on_path & (given | (token == predicted))
                stop = tl.min(tl.where(good, begin + BLOCK, j), 0)
                count = stop
                going = (stop == begin + BLOCK).to(tl.int32)
        if s == first:
            length = tl.load(segments + 4 * s + 1)
            fixed = ((length > 0) & (count == length)).to(tl.int32)
        if count > best:
            best, winner = count, s
    begin_row = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + b), 0), rows)
    end_row = tl.minimum(tl.load(cu_seqlens_q + b + 1), rows)
    for begin in range(0, end_row - begin_row, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        row = tl.load(path + tl.cast(winner, tl.int64) * width + j, mask=j < best, other=-1)
        tl.store(accepted_rows + begin_row + j, row, mask=j < end_row - begin_row)
    tl.store(num_accepted + b, best)
    tl.store(fixed_point + b, tl.cast(fixed, tl.uint8))


def accept(
    op: str,
    plan: Plan,
    tokens: Tensor,
    num_final: Tensor | None,
    layout: tuple[Tensor, Tensor, Tensor],
    verdict: Verdict,
) -> None:
    """Fill the accepted rows, their number and the fixed point of ``verdict`` from its predictions."""
    cu_seqlens_q, segments, cu_segments = layout
    width = plan.path.shape[1]
    launch(
        op,
        accept_kernel,
        (cu_seqlens_q.shape[0] - 1,),
        plan.path,
        width,
        plan.row_segment,
        segments,
        cu_segments,
        cu_seqlens_q,
        tokens,
        verdict.predictions,
        num_final,
        0 if num_final is None else num_final.stride(0),
        verdict.accepted_rows,
        verdict.num_accepted,
        verdict.fixed_point.view(torch.uint8),
        tokens.shape[0],
        segments.shape[0],
        HAS_FINAL=num_final is not None,
        BLOCK=min(1024, max(16, triton.next_power_of_2(width))),
    )


def compile_cases() -> list[CompileCase]:
    """The kernel, with final tokens."""
    names = ("row_segment", "segments", "cu_segments", "cu_seqlens_q", "tokens", "predictions", "num_final")
    signature = {"path": "*i32", "width": "i32"} | dict.fromkeys(names, "*i32") | {"num_final_stride": "i32"}
    signature |= {"accepted_rows": "*i32", "num_accepted": "*i32", "fixed_point": "*u8", "rows": "i32"}
    signature |= {"num_segments": "i32"}
    constants = {"HAS_FINAL": True, "BLOCK": 1024}
    types = signature | dict.fromkeys(constants, "constexpr")
    return [CompileCase("argmax_verify: accept", accept_kernel, types, constants)]
