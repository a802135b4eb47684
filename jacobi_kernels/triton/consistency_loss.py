"""Cross-entropy and soft cross-entropy of rows of a language-model head, without their logits.

    z[r][v] = softcap(scale * (h[r] . w[v] + bias[v])),   T the temperature,   t the teacher of r
    nll[r] = lse(z[r]) - z[r][target]
    consistency[r] = lse(z[r] / T) - sum over v of softmax(z[t] / T)[v] z[r][v] / T

Rows are first put in order, students first (:mod:`head_tiles`). Pass 1: a program takes BLOCK_R rows in that order and
a span of the vocabulary, tile by tile in ascending order: one product of rows and BLOCK_V tokens, for students another
one of their teachers' hidden states with the same weights; running maxima and sums (and the sum of exp(z[t] / T) z[r])
stay in registers. Pass 2: a program per rows merges the spans' parts in ascending order. No atomics, no locks: the same
call gives the same bits.

Memory: 24 bytes per row and span, about 512 programs' worth of spans: some 2 MB. Bytes: lm_head once per tile of rows
(from L2 mostly). Operations: 2 * V * E per row, twice that for a student.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.triton.head_tiles import (
    checked,
    dot_tile,
    dot_tiles,
    finish_logits,
    head_case,
    load_index,
    order_rows,
    plain_case,
    row_order_cases,
    tiles,
)
from jacobi_kernels.triton.runtime import CompileCase, launch

OP = "consistency_loss"
PROGRAMS = 512  # of pass 1: enough to fill a GPU several times
SPAN_UNIT = 128
MERGE_ROWS = 64
FIELDS = 6  # of a row's part: largest logit, sum, tempered sum; the teacher's largest logit and sum; the soft sum


@triton.jit
def _larger(top, z):  # type: ignore[no-untyped-def]
    """(largest so far, a finite number to subtract)."""
    now = tl.maximum(top, tl.max(z, 1))
    return now, tl.where(now == float("-inf"), 0.0, now)


@triton.jit
def parts_kernel(  # type: ignore[no-untyped-def]
    hidden,
    lm_head,
    bias,
    targets,
    teachers,
    order,
    counts,
    parts,
    target_logit,
    rows,
    vocab,
    E,
    spans,
    span_tokens,
    inverse_temperature,
    scale,
    softcap,
    TEACH: tl.constexpr,
    TEMPERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    first, span = tl.program_id(0) * BLOCK_R, tl.program_id(1)
    students, end = tl.load(counts), tl.load(counts + 2)
    if first >= end:
        return
    if TEACH:
        if first >= students:
            return
    else:
        if first < students:
            return
    i = first + tl.arange(0, BLOCK_R)
    live = i < end
    row = tl.load(order + i, mask=live, other=0)
    target = load_index(targets, row, live, vocab)
    teacher = load_index(teachers, row, live, rows)
    taught = teacher >= 0
    teacher = tl.where(taught, teacher, 0)

    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    plain = tl.zeros([BLOCK_R], tl.float32)
    tempered = tl.zeros([BLOCK_R], tl.float32)
    goal = tl.zeros([BLOCK_R], tl.float32)
    teacher_top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    teacher_sum = tl.zeros([BLOCK_R], tl.float32)
    soft = tl.zeros([BLOCK_R], tl.float32)
    begin_token = span * span_tokens
    end_token = tl.minimum(begin_token + span_tokens, vocab)
    for begin in range(begin_token, end_token, BLOCK_V):
        token = begin + tl.arange(0, BLOCK_V)
        if TEACH:
            z, y = dot_tiles(
                hidden, row, live, teacher, taught, lm_head, token, vocab, E, BLOCK_R, BLOCK_V, BLOCK_E, EVEN_E, WIDEN
            )
        else:
            z = dot_tile(hidden, row, live, lm_head, token, vocab, E, BLOCK_R, BLOCK_V, BLOCK_E, EVEN_E, WIDEN)
        z = finish_logits(z, bias, token, vocab, scale, softcap, HAS_BIAS, CAPPED)
        goal += tl.sum(tl.where(token[None, :] == target[:, None], z, 0.0), 1)
        now, base = _larger(top, z)
        plain = plain * tl.exp(top - base) + tl.sum(tl.exp(z - base[:, None]), 1)
        if TEMPERED:
            decay = tl.exp((top - base) * inverse_temperature)
            tempered = tempered * decay + tl.sum(tl.exp((z - base[:, None]) * inverse_temperature), 1)
        top = now
        if TEACH:
            y = finish_logits(y, bias, token, vocab, scale, softcap, HAS_BIAS, CAPPED)
            now, base = _larger(teacher_top, y)
            decay = tl.exp((teacher_top - base) * inverse_temperature)
            weights = tl.exp((y - base[:, None]) * inverse_temperature)
            teacher_sum = teacher_sum * decay + tl.sum(weights, 1)
            soft = soft * decay + tl.sum(weights * tl.where((token < vocab)[None, :], z, 0.0), 1)
            teacher_top = now

    field = spans * rows  # parts [FIELDS, spans, rows]
    at = parts + span * rows + i
    tl.store(at, top, mask=live)
    tl.store(at + field, plain, mask=live)
    if TEMPERED:
        tl.store(at + 2 * field, tempered, mask=live)
    if TEACH:
        tl.store(at + 3 * field, teacher_top, mask=live)
        tl.store(at + 4 * field, teacher_sum, mask=live)
        tl.store(at + 5 * field, soft, mask=live)
    tl.store(target_logit + row, goal, mask=live & (target >= begin_token) & (target < end_token))


@triton.jit
def merge_parts_kernel(  # type: ignore[no-untyped-def]
    targets,
    teachers,
    order,
    counts,
    parts,
    target_logit,
    nll,
    consistency,
    lse,
    rows,
    vocab,
    spans,
    inverse_temperature,
    TEMPERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    if first >= tl.load(counts + 2):
        return
    i = first + tl.arange(0, BLOCK)
    live = i < tl.load(counts + 2)
    taught = i < tl.load(counts)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    tempered = tl.zeros([BLOCK], tl.float32)
    teacher_top = tl.full([BLOCK], float("-inf"), tl.float32)
    teacher_sum = tl.zeros([BLOCK], tl.float32)
    soft = tl.zeros([BLOCK], tl.float32)
    field = spans * rows
    for span in range(spans):
        at = parts + span * rows + i
        part = tl.load(at, mask=live, other=0.0)
        now = tl.maximum(top, part)
        base = tl.where(now == float("-inf"), 0.0, now)
        plain = plain * tl.exp(top - base) + tl.load(at + field, mask=live, other=1.0) * tl.exp(part - base)
        if TEMPERED:
            keep, take = tl.exp((top - base) * inverse_temperature), tl.exp((part - base) * inverse_temperature)
            tempered = tempered * keep + tl.load(at + 2 * field, mask=live, other=1.0) * take
        top = now
        part = tl.load(at + 3 * field, mask=taught, other=0.0)
        now = tl.maximum(teacher_top, part)
        base = tl.where(now == float("-inf"), 0.0, now)
        keep, take = tl.exp((teacher_top - base) * inverse_temperature), tl.exp((part - base) * inverse_temperature)
        teacher_sum = teacher_sum * keep + tl.load(at + 4 * field, mask=taught, other=1.0) * take
        soft = soft * keep + tl.load(at + 5 * field, mask=taught, other=0.0) * take
        teacher_top = now
    plain_lse = top + tl.log(plain)
    tempered_lse = plain_lse
    if TEMPERED:
        tempered_lse = top * inverse_temperature + tl.log(tempered)
    row = tl.load(order + i, mask=live, other=0)
    tl.store(lse + row, plain_lse, mask=live)
    tl.store(lse + rows + row, tempered_lse, mask=live)
    has_target = load_index(targets, row, live, vocab) >= 0
    goal = tl.load(target_logit + row, mask=has_target, other=0.0)
    tl.store(nll + row, plain_lse - goal, mask=has_target)
    tl.store(consistency + row, tempered_lse - inverse_temperature * (soft / teacher_sum), mask=taught)


def spans_of(rows: int, vocab: int, block_r: int) -> tuple[int, int]:
    """(spans, tokens of each): the vocabulary cut into multiples of every BLOCK_V, for enough programs."""
    units = triton.cdiv(vocab, SPAN_UNIT)
    span_units = triton.cdiv(units, min(units, triton.cdiv(PROGRAMS, triton.cdiv(rows, block_r))))
    return triton.cdiv(units, span_units), span_units * SPAN_UNIT


def consistency_loss(
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    teachers: Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(nll ``[R]``, consistency ``[R]``, lse ``[2, R]``) of :func:`jacobi_kernels.ops.consistency_loss`; five launches.

    A target or teacher that does not exist counts as none.
    """
    problem = checked(OP, hidden, lm_head, bias, targets, teachers, temperature, logit_scale, softcap)
    rows, vocab, width = problem.sizes
    nll, consistency, target_logit = torch.zeros((3, rows), dtype=torch.float32, device=hidden.device)
    lse = torch.zeros((2, rows), dtype=torch.float32, device=hidden.device)
    if rows == 0:
        return nll, consistency, lse
    ordered = order_rows(OP, targets, teachers, vocab)
    block_r = tiles(problem.narrow, width, teach=False).BLOCK_R
    spans, span_tokens = spans_of(rows, vocab, block_r)
    parts = torch.empty((FIELDS, spans, rows), dtype=torch.float32, device=hidden.device)
    tempered = problem.inverse_temperature != 1.0
    for teach in (True, False):
        chosen = tiles(problem.narrow, width, teach)
        launch(
            OP,
            parts_kernel,
            (triton.cdiv(rows, block_r), spans),
            *(problem.hidden, lm_head, problem.bias_or_any, targets, teachers, *ordered, parts, target_logit),
            *(rows, vocab, width, spans, span_tokens, problem.inverse_temperature, problem.scale, softcap),
            TEACH=teach,
            TEMPERED=tempered,
            **problem.constants(chosen.BLOCK_E),
            **chosen._asdict(),
            num_stages=3,
        )
    launch(
        OP,
        merge_parts_kernel,
        (triton.cdiv(rows, MERGE_ROWS),),
        *(targets, teachers, *ordered, parts, target_logit, nll, consistency, lse),
        *(rows, vocab, spans, problem.inverse_temperature),
        TEMPERED=tempered,
        BLOCK=MERGE_ROWS,
        num_warps=1,
    )
    return nll, consistency, lse


def compile_cases() -> list[CompileCase]:
    """The specialisations that training runs: every option off, and all of them on."""
    cases = []
    for narrow in (True, False):
        kind = "*bf16" if narrow else "*fp32"
        for teach in (True, False):
            chosen = tiles(narrow, 576, teach)
            for on in (False, True):
                signature = {
                    **dict.fromkeys(("hidden", "lm_head", "bias"), kind),
                    **dict.fromkeys(("targets", "teachers"), "*i64"),
                    **dict.fromkeys(("order", "counts"), "*i32"),
                    **dict.fromkeys(("parts", "target_logit"), "*fp32"),
                    **dict.fromkeys(("rows", "vocab", "E", "spans", "span_tokens"), "i32"),
                    **dict.fromkeys(("inverse_temperature", "scale", "softcap"), "fp32"),
                }
                constants = {
                    "TEACH": teach,
                    **dict.fromkeys(("TEMPERED", "HAS_BIAS", "CAPPED"), on),
                    "WIDEN": False,
                    "EVEN_E": True,
                    **{n: v for n, v in chosen._asdict().items() if n.startswith("BLOCK")},
                }
                name = f"{OP} {'students' if teach else 'others'}{' all options' if on else ''}"
                cases.append(head_case(name, parts_kernel, signature, constants, chosen.num_warps, narrow))
    indices: dict[str, str] = dict.fromkeys(("targets", "teachers"), "*i64")
    tables: dict[str, str] = dict.fromkeys(("order", "counts"), "*i32")
    numbers: dict[str, str] = dict.fromkeys(("rows", "vocab"), "i32")
    merge = {
        **indices,
        **tables,
        **dict.fromkeys(("parts", "target_logit", "nll", "consistency", "lse"), "*fp32"),
        **numbers,
        "spans": "i32",
        "inverse_temperature": "fp32",
    }
    cases += row_order_cases()
    merge_constants = {"TEMPERED": True, "BLOCK": MERGE_ROWS}
    cases.append(plain_case(f"{OP} merge", merge_parts_kernel, merge, merge_constants, num_warps=1))
    return cases
