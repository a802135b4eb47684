"""Gradients of consistency_loss, a chunk of the vocabulary at a time.

    dz[r][v] = grad_nll[r] (softmax(z[r])[v] - [v = target])
             + grad_consistency[r] / T (softmax(z[r] / T)[v] - softmax(z[t] / T)[v])
    du = dz (1 - (z / softcap)^2) scale
    dh[r] = sum over v of du[r][v] w[v],   dw[v] = sum over r of du[r][v] h[r],   db[v] = sum over r of du[r][v]

For every chunk of tokens, ascending: (1) logits of the rows with a loss (for students their teachers' too) are computed
again and du is written to scratch, in the type of the products' operands; (2) dh += du . w, a program per tile of rows
and of E, tokens ascending, onto float32; (3) dw = du . h, a program per tile of tokens and of E, rows ascending in the
order of the forward; (4) db. Every element has one writer per launch and chunks follow one another, so the order is
fixed; no atomics.

Scratch: du, at most SCRATCH_BYTES or MIN_COLUMNS tokens, whichever is more; dh in float32, ``4 * R * E``. Operations:
2 * V * E per row with a loss for each of logits, dh, dw, and once more for a student.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import _dtype, _shape
from jacobi_kernels.triton.head_tiles import (
    Problem,
    RowOrder,
    checked,
    dot_tile,
    dot_tiles,
    finish_logits,
    head_case,
    load_index,
    order_rows,
    plain_case,
    tiles,
)
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, launch

OP = "consistency_loss_backward"
SCRATCH_BYTES = 64 * 2**20
MIN_COLUMNS = 1024
COLUMN_UNIT = 128  # chunks are multiples of every tile
BIAS_ROWS, BIAS_COLUMNS = 32, 64


@triton.jit
def du_kernel(  # type: ignore[no-untyped-def]
    grad_nll,
    grad_consistency,
    hidden,
    lm_head,
    bias,
    targets,
    teachers,
    order,
    counts,
    lse,
    du,
    rows,
    vocab,
    E,
    begin,
    columns,
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
    """du ``[R, columns]``, rows in their order, for tokens begin .. begin + columns."""
    first = tl.program_id(0) * BLOCK_R
    students, end = tl.load(counts), tl.load(counts + 1)
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
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = begin + column
    weight = tl.where(target >= 0, tl.load(grad_nll + row, mask=live, other=0.0), 0.0)
    plain_lse = tl.load(lse + row, mask=live, other=0.0)
    if TEACH:
        teacher = load_index(teachers, row, live, rows)
        taught = teacher >= 0
        teacher = tl.where(taught, teacher, 0)
        z, y = dot_tiles(
            hidden, row, live, teacher, taught, lm_head, token, vocab, E, BLOCK_R, BLOCK_V, BLOCK_E, EVEN_E, WIDEN
        )
        y = finish_logits(y, bias, token, vocab, scale, softcap, HAS_BIAS, CAPPED)
        teacher_lse = tl.load(lse + rows + teacher, mask=taught, other=0.0)
        y = tl.exp(y * inverse_temperature - teacher_lse[:, None])
    else:
        z = dot_tile(hidden, row, live, lm_head, token, vocab, E, BLOCK_R, BLOCK_V, BLOCK_E, EVEN_E, WIDEN)
    z = finish_logits(z, bias, token, vocab, scale, softcap, HAS_BIAS, CAPPED)
    p = tl.exp(z - plain_lse[:, None])
    hit = tl.where(token[None, :] == target[:, None], p - 1.0, p)
    gradient = tl.where((target >= 0)[:, None], weight[:, None] * hit, 0.0)
    if TEACH:
        if TEMPERED:
            p = tl.exp(z * inverse_temperature - tl.load(lse + rows + row, mask=live, other=0.0)[:, None])
        pull = tl.load(grad_consistency + row, mask=taught, other=0.0) * inverse_temperature
        gradient += tl.where(taught[:, None], pull[:, None] * (p - y), 0.0)
    if CAPPED:
        share = tl.where((token < vocab)[None, :], z * (1.0 / softcap), 1.0)
        gradient *= 1.0 - share * share
    gradient = tl.where((token < vocab)[None, :], gradient * scale, 0.0)
    at = (du + i.to(tl.int64) * columns)[:, None] + column[None, :]
    tl.store(at, gradient.to(du.dtype.element_ty), mask=live[:, None] & (column < columns)[None, :])


@triton.jit
def dh_kernel(  # type: ignore[no-untyped-def]
    du,
    lm_head,
    order,
    counts,
    dh,
    vocab,
    E,
    begin,
    columns,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_R
    end = tl.load(counts + 1)
    if first >= end:
        return
    i = first + tl.arange(0, BLOCK_R)
    live = i < end
    row = tl.load(order + i, mask=live, other=0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = e < E
    out_at = (dh + row.to(tl.int64) * E)[:, None] + e[None, :]
    out_mask = live[:, None] & inside[None, :]
    column = tl.arange(0, BLOCK_V)
    u_at = (du + i.to(tl.int64) * columns)[:, None] + column[None, :]
    acc = tl.load(out_at, mask=out_mask, other=0.0)
    for done in range(0, columns, BLOCK_V):
        u = tl.load(u_at + done, mask=live[:, None], other=0.0)  # columns is a multiple of BLOCK_V, 0 behind the tokens
        token = begin + done + column
        w_at = (lm_head + token.to(tl.int64) * E)[:, None] + e[None, :]
        w = tl.load(w_at, mask=(token < vocab)[:, None] & inside[None, :], other=0.0)
        if WIDEN:
            u, w = u.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(u, w, acc, input_precision="ieee")
    tl.store(out_at, acc, mask=out_mask)


@triton.jit
def dw_kernel(  # type: ignore[no-untyped-def]
    du,
    hidden,
    order,
    counts,
    dw,
    vocab,
    E,
    begin,
    columns,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    end = tl.load(counts + 1)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = begin + column
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = e < E
    acc = tl.zeros([BLOCK_V, BLOCK_E], tl.float32)
    for first in range(0, end, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        live = i < end
        row = tl.load(order + i, mask=live, other=0).to(tl.int64)
        u = tl.load((du + i.to(tl.int64) * columns)[:, None] + column[None, :], mask=live[:, None], other=0.0)
        h = tl.load((hidden + row * E)[:, None] + e[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        if WIDEN:
            u, h = u.to(tl.float32), h.to(tl.float32)
        acc = tl.dot(tl.trans(u), h, acc, input_precision="ieee")
    at = (dw + token.to(tl.int64) * E)[:, None] + e[None, :]
    tl.store(at, acc.to(dw.dtype.element_ty), mask=(token < vocab)[:, None] & inside[None, :])


@triton.jit
def db_kernel(  # type: ignore[no-untyped-def]
    du, counts, db, vocab, begin, columns, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr
):
    end = tl.load(counts + 1)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, end, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        at = (du + i.to(tl.int64) * columns)[:, None] + column[None, :]
        acc += tl.sum(tl.load(at, mask=(i < end)[:, None], other=0.0).to(tl.float32), 0)
    tl.store(db + begin + column, acc.to(db.dtype.element_ty), mask=begin + column < vocab)


def product_tiles(narrow: bool) -> dict[str, dict[str, int]]:
    """Tiles of dh and dw; the tile of the inner dimension is the short one."""
    if INTERPRETED:  # few large programs
        return {
            "dh": {"BLOCK_R": 64, "BLOCK_V": 128, "BLOCK_E": 64, "num_warps": 4},
            "dw": {"BLOCK_R": 64, "BLOCK_V": 128, "BLOCK_E": 64, "num_warps": 4},
        }
    if narrow:
        return {
            "dh": {"BLOCK_R": 128, "BLOCK_V": 64, "BLOCK_E": 128, "num_warps": 8},
            "dw": {"BLOCK_R": 64, "BLOCK_V": 128, "BLOCK_E": 128, "num_warps": 8},
        }
    return {
        "dh": {"BLOCK_R": 32, "BLOCK_V": 32, "BLOCK_E": 64, "num_warps": 4},
        "dw": {"BLOCK_R": 32, "BLOCK_V": 32, "BLOCK_E": 64, "num_warps": 4},
    }


def chunk_columns(rows: int, vocab: int, itemsize: int) -> int:
    """Tokens whose du is kept at once."""
    fit = max(SCRATCH_BYTES // (rows * itemsize), MIN_COLUMNS) // COLUMN_UNIT
    return min(max(fit, 1), triton.cdiv(vocab, COLUMN_UNIT)) * COLUMN_UNIT


def _du(
    problem: Problem, ordered: RowOrder, gradients: tuple[Tensor, Tensor], lse: Tensor, du: Tensor, begin: int
) -> None:
    """du of one chunk: students, then the others."""
    rows, vocab, width = problem.sizes
    columns = du.shape[1]
    for teach in (True, False):
        chosen = tiles(problem.narrow, width, teach)
        launch(
            OP,
            du_kernel,
            (triton.cdiv(rows, chosen.BLOCK_R), triton.cdiv(columns, chosen.BLOCK_V)),
            *gradients,
            *(problem.hidden, problem.lm_head, problem.bias_or_any, problem.targets, problem.teachers),
            *(*ordered, lse, du, rows, vocab, width, begin, columns),
            *(problem.inverse_temperature, problem.scale, problem.softcap),
            TEACH=teach,
            TEMPERED=problem.inverse_temperature != 1.0,
            **problem.constants(chosen.BLOCK_E),
            **chosen._asdict(),
            num_stages=3,
        )


def consistency_loss_backward(
    grad_nll: Tensor,
    grad_consistency: Tensor,
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    teachers: Tensor,
    lse: Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    hidden_grad: bool = True,
    lm_head_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`jacobi_kernels.ops.consistency_loss_backward`: two launches, and up to five per chunk of tokens."""
    problem = checked(OP, hidden, lm_head, bias, targets, teachers, temperature, logit_scale, softcap)
    rows, vocab, width = problem.sizes
    per_row = (("grad_nll", grad_nll, "[R]", (rows,)), ("grad_consistency", grad_consistency, "[R]", (rows,)))
    for name, t, names, want in (*per_row, ("lse", lse, "[2, R]", (2, rows))):
        _dtype(OP, name, t, torch.float32)
        _shape(OP, name, t, names, want)
    gradients, lse = (grad_nll.contiguous(), grad_consistency.contiguous()), lse.contiguous()
    written = torch.empty if rows else torch.zeros  # the kernels write every element
    dh = torch.zeros((rows, width) if hidden_grad else (0,), dtype=torch.float32, device=hidden.device)
    dw = written(lm_head.shape if lm_head_grad else (0,), dtype=lm_head.dtype, device=hidden.device)
    db = written(
        (0,) if bias is None else (vocab,), dtype=(hidden if bias is None else bias).dtype, device=hidden.device
    )
    if rows and (hidden_grad or lm_head_grad or bias is not None):
        ordered = order_rows(OP, targets, teachers, vocab)
        operand = torch.bfloat16 if problem.narrow else torch.float32
        columns = chunk_columns(rows, vocab, operand.itemsize)
        du = torch.empty((rows, columns), dtype=operand, device=hidden.device)
        chosen, common = product_tiles(problem.narrow), {"WIDEN": problem.constants(1)["WIDEN"], "num_stages": 3}
        for begin in range(0, vocab, columns):
            _du(problem, ordered, gradients, lse, du, begin)
            sizes = (vocab, width, begin, columns)
            if hidden_grad:
                grid = (triton.cdiv(rows, chosen["dh"]["BLOCK_R"]), triton.cdiv(width, chosen["dh"]["BLOCK_E"]))
                launch(OP, dh_kernel, grid, du, lm_head, *ordered, dh, *sizes, **common, **chosen["dh"])
            if lm_head_grad:
                grid = (triton.cdiv(columns, chosen["dw"]["BLOCK_V"]), triton.cdiv(width, chosen["dw"]["BLOCK_E"]))
                launch(OP, dw_kernel, grid, du, problem.hidden, *ordered, dw, *sizes, **common, **chosen["dw"])
            if bias is not None:
                launch(
                    OP,
                    db_kernel,
                    (triton.cdiv(columns, BIAS_COLUMNS),),
                    *(du, ordered.counts, db, vocab, begin, columns),
                    BLOCK_R=BIAS_ROWS,
                    BLOCK_V=BIAS_COLUMNS,
                    num_warps=4,
                )
    return dh.to(hidden.dtype), dw, db


def compile_cases() -> list[CompileCase]:
    """The specialisations that training runs: every option off, and all of them on."""
    cases = []
    for narrow in (True, False):
        kind = "*bf16" if narrow else "*fp32"
        numbers: dict[str, str] = dict.fromkeys(("vocab", "E", "begin", "columns"), "i32")
        for teach in (True, False):
            chosen = tiles(narrow, 576, teach)
            for on in (False, True):
                signature = {
                    **dict.fromkeys(("grad_nll", "grad_consistency"), "*fp32"),
                    **dict.fromkeys(("hidden", "lm_head", "bias"), kind),
                    **dict.fromkeys(("targets", "teachers"), "*i64"),
                    **dict.fromkeys(("order", "counts"), "*i32"),
                    "lse": "*fp32",
                    "du": kind,
                    "rows": "i32",
                    **numbers,
                    **dict.fromkeys(("inverse_temperature", "scale", "softcap"), "fp32"),
                }
                constants: dict[str, Any] = {
                    "TEACH": teach,
                    **dict.fromkeys(("TEMPERED", "HAS_BIAS", "CAPPED"), on),
                    "WIDEN": False,
                    "EVEN_E": True,
                    **{n: v for n, v in chosen._asdict().items() if n.startswith("BLOCK")},
                }
                name = f"{OP} du {'students' if teach else 'others'}{' all options' if on else ''}"
                cases.append(head_case(name, du_kernel, signature, constants, chosen.num_warps, narrow))
        for result, kernel, operand, out in (
            ("dh", dh_kernel, "lm_head", "*fp32"),
            ("dw", dw_kernel, "hidden", kind),
        ):
            signature = {"du": kind, operand: kind, "order": "*i32", "counts": "*i32", result: out, **numbers}
            blocks = dict(product_tiles(narrow)[result])
            num_warps = blocks.pop("num_warps")
            cases.append(head_case(f"{OP} {result}", kernel, signature, {"WIDEN": False, **blocks}, num_warps, narrow))
    signature = {"du": "*bf16", "counts": "*i32", "db": "*bf16", "vocab": "i32", "begin": "i32", "columns": "i32"}
    cases.append(plain_case(f"{OP} db", db_kernel, signature, {"BLOCK_R": BIAS_ROWS, "BLOCK_V": BIAS_COLUMNS}))
    return cases
