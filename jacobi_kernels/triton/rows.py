"""Row operations of the step: embedding, residual sums and norms, heads with rotation, gated activation.

    residual   x = embedding[token], or x += sum of a product's parts + bias;   y = x / sqrt(mean(x^2) + eps) * w
    heads      qkv = sum of parts + bias; q, k normed per head, rotated by (cos, sin); stored as attention reads them
    gated      silu(gate) * up, both sums of parts + bias

Rows are the live rows of the layout, numbered without holes: row i stands in slot live[i], and only rows below count[0]
exist, which the host does not know. Programs of other rows end at once. The residual stream is float32; what enters a
product is rounded to the weights' type, keys and values to the cache's.

One program per row (residual), per some heads of rows, per 1024 columns of a row (gated); in the interpreter one
program does many rows, which changes no row's sum: a sum over the width is taken within its row, in an order that the
width fixes, float32. Products and sums round one by one, as on the CPU. Bytes: the parts and results once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels.triton.packed_linear import merged
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, launch
from jacobi_kernels.triton.vec_math import EXACT, sigmoid

EMBEDDING, PACKED_EMBEDDING, PARTS_OF_PRODUCT = 0, 1, 2
ROWS = 64 if INTERPRETED else 1
GATED_BLOCK = 1024


@triton.jit
def rotary_kernel(  # type: ignore[no-untyped-def]
    position, live, count, inv_freq, cosine, sine, half, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """cos and sin of position * inv_freq: the angle is a float32 product, as in the models' own code."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    rows = tl.load(count)
    if tl.program_id(0) * ROWS < rows:
        mask = (row < rows) & (column < half)
        slot = tl.load(live + row, mask=row < rows, other=0)
        place = tl.load(position + slot, mask=row < rows, other=0).to(tl.float32)
        angle = (place * tl.load(inv_freq + column, mask=column < half, other=0.0)).to(tl.float64)
        at = row.to(tl.int64) * half + column
        tl.store(cosine + at, tl.cos(angle).to(tl.float32) * scale, mask=mask)
        tl.store(sine + at, tl.sin(angle).to(tl.float32) * scale, mask=mask)


@triton.jit(do_not_specialize=["m"])
def residual_kernel(  # type: ignore[no-untyped-def]
    source,
    bias,
    tokens,
    live,
    count,
    weight,
    x,
    y,
    m,
    n,
    vocab,
    eps,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCATTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [m, n] set or added to; y = norm(x), row i at live[i] with SCATTER."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    rows = tl.load(count)
    if tl.program_id(0) * ROWS < rows:
        mask = (row < rows) & (column < n)
        at = row.to(tl.int64) * n + column
        slot = tl.load(live + row, mask=row < rows, other=0)
        if SOURCE == 2:
            value = tl.load(x + at, mask=mask, other=0.0)
            value += merged(source, bias, row, column, mask, m, n, PARTS, HAS_BIAS)
        else:
            token = tl.load(tokens + slot, mask=row < rows, other=0)
            token = tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64)
            if SOURCE == 1:
                place = token // 16 * 16 * n + column * 16 + token % 16
            else:
                place = token * n + column
            value = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + at, value, mask=mask)
        mean = tl.div_rn(tl.sum(value * value, 1), tl.cast(n, tl.float32))
        scale = tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))
        normed = value * scale[:, None] * tl.load(weight + column, mask=column < n, other=0.0)
        to = row
        if SCATTER:
            to = slot
        tl.store(y + to.to(tl.int64) * n + column, normed.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m"])
def heads_kernel(  # type: ignore[no-untyped-def]
    parts,
    bias,
    live,
    count,
    q_norm,
    k_norm,
    cosine,
    sine,
    q,
    k,
    v,
    m,
    heads,
    kv_heads,
    half,
    eps,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A pair is a row and one of its heads, of q, k or v in this order; results go to the rows' slots."""
    rows, per_row = tl.load(count), heads + 2 * kv_heads
    if tl.program_id(0) * PAIRS < rows * per_row:
        pair, d = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)[:, None], tl.arange(0, BLOCK)[None, :]
        row, head = pair // per_row, pair % per_row
        n, inside = per_row * D, row < rows
        mask = inside & (d < D)
        of_q, of_v = head < heads, head >= heads + kv_heads
        other = tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))  # what d is rotated with
        value = merged(parts, bias, row, head * D + d, mask, m, n, PARTS, HAS_BIAS)
        partner = value
        if ROTATE:
            partner = merged(parts, bias, row, head * D + other, mask, m, n, PARTS, HAS_BIAS)
        if Q_NORM or K_NORM:
            mean = tl.div_rn(tl.sum(value * value, 1), tl.full((PAIRS,), D, tl.float32))
            scale = tl.div_rn(tl.full((PAIRS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
            if Q_NORM:
                value = tl.where(of_q, value * scale * tl.load(q_norm + d, mask=d < D, other=0.0), value)
                partner = tl.where(of_q, partner * scale * tl.load(q_norm + other, mask=d < D, other=0.0), partner)
            if K_NORM:
                of_k = (head >= heads) & (head < heads + kv_heads)
                value = tl.where(of_k, value * scale * tl.load(k_norm + d, mask=d < D, other=0.0), value)
                partner = tl.where(of_k, partner * scale * tl.load(k_norm + other, mask=d < D, other=0.0), partner)
        if ROTATE:
            turned = inside & (d < 2 * half) & (head < heads + kv_heads)
            at = row.to(tl.int64) * half + tl.where(d < half, d, d - half)
            cos, sin = tl.load(cosine + at, mask=turned, other=0.0), tl.load(sine + at, mask=turned, other=0.0)
            first = value * cos - partner * sin
            second = value * cos + partner * sin
            value = tl.where(turned, tl.where(d < half, first, second), value)
        slot = tl.load(live + row, mask=inside, other=0).to(tl.int64)
        tl.store(q + (slot * heads + head) * D + d, value.to(q.dtype.element_ty), mask=mask & of_q)
        kv_head = head - heads
        to_k = k + (slot * kv_heads + kv_head) * D + d
        tl.store(to_k, value.to(k.dtype.element_ty), mask=mask & (kv_head >= 0) & (kv_head < kv_heads))
        to_v = v + (slot * kv_heads + kv_head - kv_heads) * D + d
        tl.store(to_v, value.to(v.dtype.element_ty), mask=mask & of_v)


@triton.jit(do_not_specialize=["m"])
def gated_kernel(  # type: ignore[no-untyped-def]
    parts,
    bias,
    count,
    y,
    m,
    ffn,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [m, ffn] = silu(gate) * up of parts [PARTS, m, 2 ffn]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = tl.load(count)
    if tl.program_id(0) * ROWS < rows:
        mask = (row < rows) & (column < ffn)
        gate = merged(parts, bias, row, column, mask, m, 2 * ffn, PARTS, HAS_BIAS)
        up = merged(parts, bias, row, column + ffn, mask, m, 2 * ffn, PARTS, HAS_BIAS)
        value = gate * sigmoid(gate) * up
        tl.store(y + row.to(tl.int64) * ffn + column, value.to(y.dtype.element_ty), mask=mask)


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8


def rotary_table(
    op: str, position: Tensor, live: Tensor, count: Tensor, inv_freq: Tensor, scale: float, table: Tensor
) -> None:
    """cos and sin of the live rows into ``table [2, T, rotated / 2]`` float32."""
    half, rows = inv_freq.shape[0], position.shape[0]
    block = triton.next_power_of_2(half)
    grid = (triton.cdiv(rows, ROWS),)
    arguments = (position, live, count, inv_freq, table[0], table[1], half, scale)
    launch(op, rotary_kernel, grid, *arguments, ROWS=ROWS, BLOCK=block, num_warps=1, **EXACT)


def residual_norm(
    op: str,
    source: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    eps: float,
    live: Tensor,
    count: Tensor,
    *,
    kind: int = PARTS_OF_PRODUCT,
    bias: Tensor | None = None,
    tokens: Tensor | None = None,
    vocab: int = 1,
    scatter: bool = False,
) -> None:
    """Set or add to the residual stream ``x [T, E]`` float32 and norm it into ``y [T, E]``.

    ``source``: the parts ``[parts, T, E]`` of a product, or embeddings ``[V, E]``, or packed ``[V / 16, E, 16]``.
    """
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    launch(
        op,
        residual_kernel,
        (triton.cdiv(rows, ROWS),),
        source,
        bias,
        tokens,
        live,
        count,
        weight,
        x,
        y,
        rows,
        n,
        vocab,
        eps,
        SOURCE=kind,
        PARTS=source.shape[0] if kind == PARTS_OF_PRODUCT else 1,
        HAS_BIAS=bias is not None,
        SCATTER=scatter,
        ROWS=ROWS,
        BLOCK=block,
        num_warps=_warps(block),
        **EXACT,
    )


def prepare_heads(
    op: str,
    parts: Tensor,
    bias: Tensor | None,
    live: Tensor,
    count: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    table: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    """``parts [parts, T, (H + 2 KVH) D]`` into q ``[T, H, D]``, k, v ``[T, KVH, D]``; ``table`` None: no rotation."""
    (rows, heads, d), kv_heads = q.shape, k.shape[1]
    block = triton.next_power_of_2(d)
    pairs = 512 if INTERPRETED else max(1, 1024 // block)
    launch(
        op,
        heads_kernel,
        (triton.cdiv(rows * (heads + 2 * kv_heads), pairs),),
        parts,
        bias,
        live,
        count,
        *norms,
        None if table is None else table[0],
        None if table is None else table[1],
        q,
        k,
        v,
        rows,
        heads,
        kv_heads,
        0 if table is None else table.shape[2],
        eps,
        D=d,
        PARTS=parts.shape[0],
        HAS_BIAS=bias is not None,
        Q_NORM=norms[0] is not None,
        K_NORM=norms[1] is not None,
        ROTATE=table is not None,
        PAIRS=pairs,
        BLOCK=block,
        **EXACT,
    )


def gated(op: str, parts: Tensor, bias: Tensor | None, count: Tensor, y: Tensor) -> None:
    """``silu(gate) * up`` of ``parts [parts, T, 2 F]`` into ``y [T, F]``."""
    rows, ffn = y.shape
    block = min(4096, triton.next_power_of_2(ffn)) if INTERPRETED else GATED_BLOCK
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(ffn, block))
    constants = {"PARTS": parts.shape[0], "HAS_BIAS": bias is not None, "ROWS": ROWS, "BLOCK": block}
    launch(op, gated_kernel, grid, parts, bias, count, y, rows, ffn, **constants, **EXACT)


def compile_cases() -> list[CompileCase]:
    """Every kernel at the sizes of three models, results in bfloat16 and float32."""
    cases = [
        _case(
            "rotary",
            rotary_kernel,
            {"inv_freq": "*fp32", "cosine": "*fp32", "sine": "*fp32", "half": "i32", "scale": "fp32"},
            {"ROWS": 1, "BLOCK": 64},
            "position live count",
            num_warps=1,
        )
    ]
    for model, width, ffn, d in (("SmolLM2-135M", 576, 1536, 64), ("Qwen2.5-7B", 3584, 18944, 128)):
        for short in ("bf16", "fp32"):
            block = triton.next_power_of_2(width)
            for source, kind in (("embedding", EMBEDDING), ("packed", PACKED_EMBEDDING), ("parts", PARTS_OF_PRODUCT)):
                parts = kind == PARTS_OF_PRODUCT
                types = {"source": "*fp32" if parts else f"*{short}", "bias": "*fp32", "tokens": "*i32", "live": "*i32"}
                types |= {"count": "*i32", "weight": "*fp32", "x": "*fp32", "y": f"*{short}", "m": "i32", "n": "i32"}
                types |= {"vocab": "i32", "eps": "fp32"}
                constants = {"SOURCE": kind, "PARTS": 4 if parts else 1, "HAS_BIAS": False, "SCATTER": False}
                constants |= {"ROWS": 1, "BLOCK": block}
                name = f"residual from {source} {model} {short}"
                cases.append(_case(name, residual_kernel, types, constants, num_warps=_warps(block)))
            types = dict.fromkeys(("parts", "bias"), "*fp32") | dict.fromkeys(("live", "count"), "*i32")
            types |= dict.fromkeys(("q_norm", "k_norm", "cosine", "sine"), "*fp32")
            types |= dict.fromkeys(("q", "k", "v"), f"*{short}")
            types |= dict.fromkeys(("m", "heads", "kv_heads", "half"), "i32") | {"eps": "fp32"}
            constants = {"D": d, "PARTS": 2, "HAS_BIAS": True, "Q_NORM": True, "K_NORM": True, "ROTATE": True}
            constants |= {"PAIRS": 1024 // d, "BLOCK": d}
            cases.append(_case(f"heads {model} {short}", heads_kernel, types, constants))
            types = {"parts": "*fp32", "bias": "*fp32", "count": "*i32", "y": f"*{short}", "m": "i32", "ffn": "i32"}
            constants = {"PARTS": 1 if ffn > 2000 else 2, "HAS_BIAS": False, "ROWS": 1, "BLOCK": GATED_BLOCK}
            cases.append(_case(f"gated {model} {short}", gated_kernel, types, constants))
    return cases


def _case(
    name: str,
    kernel: object,
    types: dict[str, str],
    constants: dict[str, int],
    integers: str = "",
    num_warps: int = 4,
) -> CompileCase:
    signature = dict.fromkeys(integers.split(), "*i32") | types | dict.fromkeys(constants, "constexpr")
    aligned = {a: 16 for a, t in signature.items() if t[0] == "*" or a in ("n", "ffn")}
    return CompileCase(f"rows: {name}", kernel, signature, constants, num_warps, attributes=aligned, options=EXACT)
