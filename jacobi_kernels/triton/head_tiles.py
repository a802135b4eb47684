"""What consistency_loss and its backward share: rows in the order of their roles, tiles of logits, checked arguments.

Order of rows: students (rows with a teacher), rows with a target alone, rows that only teach, the rest. Tiles of rows
are then of one kind but for one tile, and rows without a part cost nothing; the host reads no count, programs behind
the last row end at once.
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

ORDER_BLOCK = 1024


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


def row_order_cases() -> list[CompileCase]:
    """The kernels of :func:`order_rows`."""
    block = {"BLOCK": ORDER_BLOCK}
    mark = {"teachers": "*i64", "teaches": "*i32", "rows": "i32"}
    order = {
        **dict.fromkeys(("targets", "teachers"), "*i64"),
        **dict.fromkeys(("teaches", "order", "counts"), "*i32"),
        **dict.fromkeys(("rows", "vocab"), "i32"),
    }
    return [
        plain_case("consistency_loss mark", mark_teachers_kernel, mark, block),
        plain_case("consistency_loss order", order_rows_kernel, order, block),
    ]
