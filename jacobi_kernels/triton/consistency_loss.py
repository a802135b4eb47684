"""Cross-entropy and soft cross-entropy of rows of a language-model head, without their logits.

    z[r][v] = softcap(scale * (h[r] . w[v] + bias[v])),   T the temperature,   t the teacher of r
    nll[r] = lse(z[r]) - z[r][target]
    consistency[r] = lse(z[r] / T) - sum over v of softmax(z[t] / T)[v] z[r][v] / T

Rows are first put in order: students (rows with a teacher), rows with a target alone, rows that only teach, the rest,
which costs nothing. Pass 1: a program takes BLOCK_R rows in that order and a span of the vocabulary, tile by tile in
ascending order: one product of rows and BLOCK_V tokens, for students another one of their teachers' hidden states with
the same weights; running maxima and sums (and sum of exp(z[t] / T) z[r]) stay in registers. Pass 2: a program per rows
merges the spans' parts in ascending order. No atomics, no locks: the same call gives the same bits.

Memory: 24 bytes per row and span, about 512 programs' worth of spans: some 2 MB. Bytes: lm_head once per tile of rows
(from L2 mostly). Operations: 2 * V * E per row, twice that for a student.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import _head_rows
from jacobi_kernels.triton.path_tiles import capped
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_runs_here, launch

OP = "consistency_loss"
PROGRAMS = 512  # of pass 1: enough to fill a GPU several times
SPAN_UNIT = 128
ORDER_BLOCK = 1024
MERGE_ROWS = 64
FIELDS = 6  # of a row's part: largest logit, sum, tempered sum; the teacher's largest logit and sum; the soft sum


@triton.jit
def load_index(pointer, row, mask, end):  # type: ignore[no-untyped-def]
    """A target or teacher, -1 where there is none or it does not exist."""
    value = tl.load(pointer + row, mask=mask, other=-1)
    return tl.where((value >= 0) & (value < end), value, -1).to(tl.int32)


@triton.jit
def mark_teachers_kernel(teachers, teaches, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    teacher = load_index(teachers, row, row < rows, rows)
    tl.store(teaches + teacher, tl.zeros_like(teacher) + 1, mask=teacher >= 0)  # all write the same


@triton.jit
def _role(targets, teachers, teaches, row, rows, vocab):  # type: ignore[no-untyped-def]
    """0 student, 1 target alone, 2 teacher alone, 3 none; 4 behind the rows."""
    mask = row < rows
    has_target = load_index(targets, row, mask, vocab) >= 0
    has_teacher = load_index(teachers, row, mask, rows) >= 0
    teacher = tl.load(teaches + row, mask=mask, other=0) != 0
    role = tl.where(has_teacher, 0, tl.where(has_target, 1, tl.where(teacher, 2, 3)))
    return tl.where(mask, role, 4)


@triton.jit
def order_rows_kernel(  # type: ignore[no-untyped-def]
    targets, teachers, teaches, order, counts, rows, vocab, BLOCK: tl.constexpr
):
    """One program: counts = (students, rows with a loss, rows with logits); order = rows by role, then by index."""
    lanes = tl.arange(0, BLOCK)
    students, hard, alone = 0, 0, 0
    for i in range(0, rows, BLOCK):
        role = _role(targets, teachers, teaches, i + lanes, rows, vocab)
        students += tl.sum((role == 0).to(tl.int32), 0)
        hard += tl.sum((role == 1).to(tl.int32), 0)
        alone += tl.sum((role == 2).to(tl.int32), 0)
    tl.store(counts, students)
    tl.store(counts + 1, students + hard)
    tl.store(counts + 2, students + hard + alone)
    for wanted in tl.static_range(4):
        if wanted == 0:
            begin = students * 0
        elif wanted == 1:
            begin = students
        elif wanted == 2:
            begin = students + hard
        else:
            begin = students + hard + alone
        for i in range(0, rows, BLOCK):
            mine = (_role(targets, teachers, teaches, i + lanes, rows, vocab) == wanted).to(tl.int32)
            tl.store(order + begin + tl.cumsum(mine, 0) - 1, i + lanes, mask=mine != 0)
            begin += tl.sum(mine, 0)


@triton.jit
def dot_tile(  # type: ignore[no-untyped-def]
    hidden, row, live, lm_head, token, vocab, E, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr,
    EVEN_E: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_R, BLOCK_V]`` products of hidden rows and rows of lm_head, E in ascending order."""
    width = tl.arange(0, BLOCK_E)
    h_at = (hidden + row.to(tl.int64) * E)[:, None] + width[None, :]
    w_at = (lm_head + token.to(tl.int64) * E)[:, None] + width[None, :]
    exists = token < vocab
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for e in range(0, E, BLOCK_E):
        if EVEN_E:
            h = tl.load(h_at + e, mask=live[:, None], other=0.0)
            w = tl.load(w_at + e, mask=exists[:, None], other=0.0)
        else:
            h = tl.load(h_at + e, mask=live[:, None] & (width < E - e)[None, :], other=0.0)
            w = tl.load(w_at + e, mask=exists[:, None] & (width < E - e)[None, :], other=0.0)
        if WIDEN:
            h, w = h.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def dot_tiles(  # type: ignore[no-untyped-def]
    hidden, row, live, teacher, taught, lm_head, token, vocab, E, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr, EVEN_E: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The same for rows and for their teachers, with one load of the weights."""
    width = tl.arange(0, BLOCK_E)
    h_at = (hidden + row.to(tl.int64) * E)[:, None] + width[None, :]
    t_at = (hidden + teacher.to(tl.int64) * E)[:, None] + width[None, :]
    w_at = (lm_head + token.to(tl.int64) * E)[:, None] + width[None, :]
    exists = token < vocab
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    acc_t = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for e in range(0, E, BLOCK_E):
        inside = (width < E - e)[None, :]
        if EVEN_E:
            h = tl.load(h_at + e, mask=live[:, None], other=0.0)
            t = tl.load(t_at + e, mask=taught[:, None], other=0.0)
            w = tl.load(w_at + e, mask=exists[:, None], other=0.0)
        else:
            h = tl.load(h_at + e, mask=live[:, None] & inside, other=0.0)
            t = tl.load(t_at + e, mask=taught[:, None] & inside, other=0.0)
            w = tl.load(w_at + e, mask=exists[:, None] & inside, other=0.0)
        if WIDEN:
            h, t, w = h.to(tl.float32), t.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
        acc_t = tl.dot(t, tl.trans(w), acc_t, input_precision="ieee")
    return acc, acc_t


@triton.jit
def finish_logits(  # type: ignore[no-untyped-def]
    product, bias, token, vocab, scale, softcap, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr
):
    """Final logits of a tile of products; -inf behind the vocabulary."""
    if HAS_BIAS:
        product += tl.load(bias + token, mask=token < vocab, other=0.0).to(tl.float32)[None, :]
    z = product * scale
    if CAPPED:
        z = softcap * capped(z, softcap)
    return tl.where((token < vocab)[None, :], z, float("-inf"))


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


class RowOrder(NamedTuple):
    """order : ``[R]`` int32, rows by role; counts : ``[3]`` int32 (students, rows with a loss, rows with logits)."""

    order: Tensor
    counts: Tensor


def order_rows(op: str, targets: Tensor, teachers: Tensor, vocab: int) -> RowOrder:
    """Put rows in the order in which the kernels go through them; two launches."""
    rows = targets.shape[0]
    teaches = torch.zeros(rows, dtype=torch.int32, device=targets.device)
    order, counts = torch.empty_like(teaches), torch.zeros(3, dtype=torch.int32, device=targets.device)
    grid = (triton.cdiv(rows, ORDER_BLOCK),)
    launch(op, mark_teachers_kernel, grid, teachers, teaches, rows, BLOCK=ORDER_BLOCK)
    launch(op, order_rows_kernel, (1,), targets, teachers, teaches, order, counts, rows, vocab, BLOCK=ORDER_BLOCK)
    return RowOrder(order, counts)


class Tiles(NamedTuple):
    """Sizes of the tiles of products of rows and tokens."""

    BLOCK_R: int
    BLOCK_V: int
    BLOCK_E: int
    num_warps: int


@dataclass(frozen=True)
class Problem:
    """Checked arguments that the op and its backward share, as the kernels take them."""

    hidden: Tensor
    lm_head: Tensor
    bias: Tensor | None
    targets: Tensor
    teachers: Tensor
    inverse_temperature: float
    scale: float
    softcap: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        """R, V, E."""
        return self.hidden.shape[0], self.lm_head.shape[0], self.hidden.shape[1]

    @property
    def bias_or_any(self) -> Tensor:
        return self.lm_head if self.bias is None else self.bias

    @property
    def narrow(self) -> bool:
        """Products take bfloat16 operands."""
        return self.hidden.dtype == self.lm_head.dtype == torch.bfloat16

    def constants(self, block_e: int) -> dict[str, Any]:
        return {
            "HAS_BIAS": self.bias is not None,
            "CAPPED": self.softcap > 0,
            "WIDEN": self.hidden.dtype != self.lm_head.dtype,
            "EVEN_E": self.hidden.shape[1] % block_e == 0,
        }


def checked(
    op: str,
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    teachers: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float,
) -> Problem:
    """Raise RuntimeError for wrong shapes, dtypes, strides and numbers; values on the device are guarded there."""
    check_runs_here(op, hidden, lm_head, bias, targets, teachers)
    _head_rows(op, hidden, lm_head, bias, targets, teachers)
    for name, t in (("lm_head", lm_head), ("bias", bias), ("targets", targets), ("teachers", teachers)):
        if t is not None and not t.is_contiguous():
            raise RuntimeError(f"{op}: {name} must be contiguous, got strides {list(t.stride())}")
    if lm_head.shape[0] < 1:
        raise RuntimeError(f"{op}: number of rows of lm_head must be at least 1, got 0")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise RuntimeError(f"{op}: temperature must be above 0, got {temperature:g}")
    if not (logit_scale > 0 and math.isfinite(logit_scale)):
        raise RuntimeError(f"{op}: logit_scale must be positive, got {logit_scale:g}")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise RuntimeError(f"{op}: softcap must be at least 0 (0: off), got {softcap:g}")
    return Problem(hidden.contiguous(), lm_head, bias, targets, teachers, 1.0 / temperature, logit_scale, softcap)


def tiles(narrow: bool, width: int, teach: bool) -> Tiles:
    """Tiles of pass 1; students keep two sums per logit and take fewer tokens. BLOCK_R is the same for all."""
    if INTERPRETED:  # few large programs
        return Tiles(64, 128, min(128, max(16, triton.next_power_of_2(width))), 4)
    if narrow:
        return Tiles(128, 64 if teach else 128, 64, 8)
    return Tiles(32, 64, 32, 4)


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


def head_case(
    name: str, kernel: object, signature: dict[str, str], constants: dict[str, Any], num_warps: int, narrow: bool
) -> CompileCase:
    """A kernel over a head, with sizes that 16 divides."""
    return CompileCase(
        name=f"{name} {'bfloat16' if narrow else 'float32'}",
        kernel=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        num_warps=num_warps,
        num_stages=3,
        uses_mma=narrow,
        may_spill=not narrow,
        attributes={n: 16 for n in ("E", "rows", "columns") if n in signature},
    )


def plain_case(
    name: str, kernel: object, signature: dict[str, str], constants: dict[str, Any], num_warps: int = 4
) -> CompileCase:
    """A kernel without products."""
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    return CompileCase(name=name, kernel=kernel, signature=signature, constexprs=constants, num_warps=num_warps)


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
    block = {"BLOCK": ORDER_BLOCK}
    mark = {"teachers": "*i64", "teaches": "*i32", "rows": "i32"}
    cases.append(plain_case(f"{OP} mark", mark_teachers_kernel, mark, block))
    cases.append(
        plain_case(f"{OP} order", order_rows_kernel, {**indices, "teaches": "*i32", **tables, **numbers}, block)
    )
    merge = {
        **indices,
        **tables,
        **dict.fromkeys(("parts", "target_logit", "nll", "consistency", "lse"), "*fp32"),
        **numbers,
        "spans": "i32",
        "inverse_temperature": "fp32",
    }
    merge_constants = {"TEMPERED": True, "BLOCK": MERGE_ROWS}
    cases.append(plain_case(f"{OP} merge", merge_parts_kernel, merge, merge_constants, num_warps=1))
    return cases
