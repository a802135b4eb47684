"""Attention of a block layout over the KV cache: append and attend in one launch, and a merge where splits run apart.

The kernels and their order of sums are in split_kv.py. This file chooses what may not change a bit: whether splits of
256 slots run side by side (few rows: decoding) or in turn (rows alone fill the GPU, or the results of all splits would
need too much memory). The choice follows from shapes, so a captured graph stays valid for all lengths: programs behind
a sequence's length return at once.

:func:`attend_with_kvcache` is the inner function for callers that plan once for many layers.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from jacobi_kernels._ops import check_cached_attention
from jacobi_kernels.triton.multi_block_attention import ALL, options
from jacobi_kernels.triton.plan import Plan, plan_rows
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_runs_here, launch
from jacobi_kernels.triton.split_kv import attention_kernel, merge_kernel

OP = "multi_block_attention_with_kvcache"
SPLIT = 256  # slots
PROGRAMS = 128  # with fewer, splits run side by side
PARTIAL_BYTES = 1 << 28  # and in turn where their results would need more
LOG2E = 1.4426950408889634


def _rows_per_tile(dtype: torch.dtype) -> int:
    """M."""
    return 16 if dtype == torch.float32 else 32


def _row_tiles(rows: int, batch: int, group: int, dtype: torch.dtype) -> int:
    """Row tiles of a key/value head, whatever the sequences' shares of the rows are."""
    return rows * group // _rows_per_tile(dtype) + batch if rows else 0


def _parts(rows: int, batch: int, heads: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype) -> int:
    """Splits that run side by side; 0: each program runs all of its rows' splits in turn."""
    parts = max(1, triton.cdiv(capacity, SPLIT))
    full = _row_tiles(rows, batch, heads // kv_heads, dtype) * kv_heads >= PROGRAMS
    return 0 if full or parts * rows * heads * (head_dim + 2) * 4 > PARTIAL_BYTES else parts


def attention_workspace_size(
    rows: int, batch: int, heads: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype
) -> int:
    """Bytes that :func:`attend_with_kvcache` needs; ``capacity``: slots of a sequence, ``dtype``: the cache's."""
    return _parts(rows, batch, heads, kv_heads, head_dim, capacity, dtype) * rows * heads * (head_dim + 2) * 4


def attend_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    plan: Plan,
    *,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Append and attend as :func:`jacobi_kernels.ops.multi_block_attention_with_kvcache`, with a plan that exists.

    Parameters
    ----------
    q, k, v : Tensor
        ``[T, H, D]`` and ``[T, KVH, D]``, dense in the last two dimensions (views of one projection will do); float32
        or the cache's type. They are rounded to the cache's type first.
    k_cache, v_cache : Tensor
        One layer's cache, with the same strides.
    plan : Plan
        Of this layout and these ``cache_seqlens``; holes of the plan write nothing and give 0. ``segments`` and
        ``cu_segments`` are not looked at again.
    out : Tensor, optional
        ``[T, H, D]`` of any floating type, dense in the last two dimensions; by default new, of ``q``'s type.
    workspace : Tensor, optional
        At least :func:`attention_workspace_size` bytes, contiguous and 16-byte aligned; by default allocated.

    Returns
    -------
    Tensor
        ``out``.
    """
    rows, heads, head_dim = q.shape
    kv_heads, batch = k.shape[1], cache_seqlens.shape[0]
    paged = page_table is not None
    page_size, table_width = (k_cache.shape[1], page_table.shape[1]) if page_table is not None else (0, 0)
    capacity = page_size * table_width if paged else k_cache.shape[1]
    group, m, dtype = heads // kv_heads, _rows_per_tile(k_cache.dtype), k_cache.dtype
    scale, softcap, window = options(OP, head_dim, softmax_scale, window_size, softcap)
    block_d = max(16, triton.next_power_of_2(head_dim))
    num_warps, num_stages = _warps_stages(block_d, dtype, paged)
    if out is None:
        out = q.new_empty(q.shape)
    parts = _parts(rows, batch, heads, kv_heads, head_dim, capacity, dtype)
    best = total = sums = None
    if parts:
        count = parts * rows * heads
        if workspace is None:
            workspace = q.new_empty((count * (head_dim + 2),), dtype=torch.float32)
        floats = workspace.view(torch.float32)
        sums, best, total = floats[: count * (head_dim + 2)].split((count * head_dim, count, count))
    else:
        out.zero_()  # holes
    launch(
        OP,
        attention_kernel,
        (_row_tiles(rows, batch, group, dtype), kv_heads, parts or 1),
        q,
        k,
        v,
        k_cache,
        v_cache,
        cache_seqlens,
        cu_seqlens_q,
        plan.row_segment,
        plan.row_position,
        plan.path,
        page_table,
        out,
        best,
        total,
        sums,
        batch,
        rows,
        capacity,
        k_cache.shape[0],
        table_width,
        plan.path.shape[1],
        1 if parts else max(1, triton.cdiv(capacity, SPLIT)),
        window,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        2.0 * LOG2E * scale / softcap if softcap else 0.0,
        LOG2E * (softcap if softcap else scale),
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_B=triton.next_power_of_2(max(batch, 1)),
        M=m,
        PAGE_SIZE=page_size,
        WINDOW=window < ALL,
        SOFTCAP=softcap > 0,
        PARTIAL=parts > 0,
        TILE=_tile(dtype),
        SPLIT=SPLIT,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if parts:
        block_h = triton.next_power_of_2(heads) if INTERPRETED else 4
        launch(
            OP,
            merge_kernel,
            (rows, triton.cdiv(heads, block_h)),
            plan.row_position,
            out,
            best,
            total,
            sums,
            rows,
            parts,
            window,
            out.stride(0),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_H=block_h,
            WINDOW=window < ALL,
            SPLIT=SPLIT,
            num_warps=4,
        )
    return out


def _tile(dtype: torch.dtype) -> int:
    """Slots of a tile. Plain float32 products keep their operands in registers."""
    return 16 if dtype == torch.float32 and not INTERPRETED else 64


def _warps_stages(block_d: int, dtype: torch.dtype, paged: bool) -> tuple[int, int]:
    """(num_warps, num_stages) of the attention kernel: they follow from the head and the types alone.

    Page numbers are loaded ahead of the rows in them, which halves the stages that are left for the rows.
    """
    stages = 2 if block_d > 128 else 3
    return (4 if block_d <= 64 and dtype != torch.float32 else 8), (2 * stages - 1 if paged else stages)


def _check_strides(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    _check_dense_rows(OP, q=q, k=k, v=v)
    check_caches(OP, k_cache, v_cache)


def _check_dense_rows(op: str, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.stride(-1) != 1 or (t.shape[-2] > 1 and t.stride(-2) != t.shape[-1]):
            raise RuntimeError(f"{op}: {name} must be dense in its last two dimensions, got strides {list(t.stride())}")


def check_caches(op: str, k_cache: Tensor, v_cache: Tensor) -> None:
    """RuntimeError unless both caches have the same strides, dense rows, and no two rows in one place."""
    _check_dense_rows(op, k_cache=k_cache, v_cache=v_cache)
    for size, ours, theirs in zip(k_cache.shape[:-2], k_cache.stride()[:-2], v_cache.stride()[:-2], strict=True):
        if size > 1 and ours != theirs:
            raise RuntimeError(
                f"{op}: v_cache must have k_cache's strides {list(k_cache.stride())}, got {list(v_cache.stride())}"
            )
    if k_cache.numel() and k_cache.data_ptr() == v_cache.data_ptr():
        raise RuntimeError(f"{op}: k_cache and v_cache must not share memory, got the same address for both")
    steps = sorted((stride, size) for stride, size in zip(k_cache.stride()[:-2], k_cache.shape[:-2], strict=True))
    extent = k_cache.shape[-2] * k_cache.shape[-1]
    for stride, size in steps:
        if size > 1 and stride < extent:
            raise RuntimeError(
                f"{op}: k_cache must not hold rows that share memory, got shape {list(k_cache.shape)} "
                f"with strides {list(k_cache.stride())}"
            )
        extent += stride * (size - 1)


def multi_block_attention_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
) -> Tensor:
    """As :func:`jacobi_kernels.ops.multi_block_attention_with_kvcache`, on the device.

    Values are not checked on the host: a sequence whose layout, length or pages are out of range is left out as a
    whole, writes nothing and gives 0.
    """
    check_runs_here(OP, q, k, v, k_cache, v_cache)
    check_cached_attention(q, k, v, k_cache, v_cache, cache_seqlens, cu_seqlens_q, segments, cu_segments, page_table)
    options(OP, q.shape[2], softmax_scale, window_size, softcap)
    _check_strides(q, k, v, k_cache, v_cache)
    layout = (cu_seqlens_q, segments, cu_segments)
    for t in (*layout, cache_seqlens, page_table):
        if t is not None and not t.is_contiguous():
            raise RuntimeError(f"{OP}: the layout, cache_seqlens and page_table must be contiguous")
    plan = plan_rows(*layout, cache_seqlens, q.shape[0], k_cache=k_cache, page_table=page_table)
    return attend_with_kvcache(
        q,
        k,
        v,
        k_cache,
        v_cache,
        cache_seqlens,
        *layout,
        plan,
        page_table=page_table,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
    )


SHAPES = {  # name: (heads, kv_heads, head_dim)
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-1.5B": (12, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "head_dim 80": (8, 8, 80),
    "head_dim 256": (8, 4, 256),
}


def attention_case(
    name: str,
    short: str,
    page_size: int = 0,
    partial: bool = True,
    window: bool = False,
    softcap: bool = False,
    inputs: str | None = None,
) -> CompileCase:
    """``short``: type of the cache and the result; ``inputs``: of q, k and v where it is another."""
    heads, kv_heads, head_dim = SHAPES[name]
    dtype = torch.float32 if short == "fp32" else torch.bfloat16
    block_d = triton.next_power_of_2(head_dim)
    signature = dict.fromkeys(("q", "k", "v"), f"*{inputs or short}") | dict.fromkeys(
        ("k_cache", "v_cache"), f"*{short}"
    )
    signature |= dict.fromkeys(
        ("cache_seqlens", "cu_seqlens_q", "row_segment", "row_position", "path", "page_table"), "*i32"
    )
    signature |= {"out": f"*{short}"} | dict.fromkeys(("partial_best", "partial_total", "partial_out"), "*fp32")
    sizes = ("batch", "rows", "capacity", "pages", "table_width", "path_width", "splits_each", "window")
    signature |= dict.fromkeys(sizes, "i32")
    strides = ("q_stride", "k_stride", "v_stride", "out_stride", "slab_stride", "row_stride")
    signature |= dict.fromkeys(strides, "i32") | {"inner": "fp32", "factor": "fp32"}
    constants = {"HEADS": heads, "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_B": 8}
    constants |= {"M": _rows_per_tile(dtype), "PAGE_SIZE": page_size, "WINDOW": window, "SOFTCAP": softcap}
    constants |= {"PARTIAL": partial, "TILE": _tile(dtype), "SPLIT": SPLIT}
    words = [f"from {inputs}" * bool(inputs), "paged" * bool(page_size), "split" * partial]
    words += ["window" * window, "softcap" * softcap]
    return CompileCase(
        " ".join(filter(None, (f"{OP}: {name} {short}", *words))),
        attention_kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constants,
        *_warps_stages(block_d, dtype, page_size > 0),
        uses_mma=short != "fp32",
        may_spill=head_dim > 128,
        attributes=dict.fromkeys((*(a for a, t in signature.items() if t.startswith("*")), *strides), 16),
    )


def compile_cases() -> list[CompileCase]:
    """The kernels for three models and two odd head sizes: types, pages, splits, window and soft cap."""
    cases = [attention_case(name, "bf16", partial=partial) for name in SHAPES for partial in (False, True)]
    cases += [attention_case(name, "fp32") for name in SHAPES]
    for name in ("SmolLM2-135M", "Qwen2.5-7B"):  # as multi_block_step calls it
        cases += [attention_case(name, "bf16", page_size, inputs="fp32") for page_size in (0, 64)]
        cases += [attention_case(name, "bf16", partial=False, inputs="fp32")]
    cases += [
        attention_case("Qwen2.5-7B", "bf16", 16),
        attention_case("Qwen2.5-7B", "bf16", window=True, softcap=True),
        attention_case("Qwen2.5-7B", "fp16"),
        attention_case("SmolLM2-135M", "fp32", 16, partial=False, window=True),
    ]
    for name, (heads, _, head_dim) in SHAPES.items():
        constants = {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_H": 4}
        constants |= {"WINDOW": False, "SPLIT": SPLIT}
        signature = {"row_position": "*i32", "out": "*bf16"}
        signature |= dict.fromkeys(("partial_best", "partial_total", "partial_out"), "*fp32")
        signature |= dict.fromkeys(("rows", "parts", "window", "out_stride"), "i32")
        signature |= dict.fromkeys(constants, "constexpr")
        cases.append(CompileCase(f"{OP}: {name} merge", merge_kernel, signature, constants))
    return cases
