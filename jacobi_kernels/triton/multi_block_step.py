"""One decode step of a decoder-only transformer as a fixed row of launches: nothing is read by the host in between.

    check, plan, settle                      which sequences and rows take part
    rotary, residual (embedding, first norm)
    per layer: product qkv, heads, attention (append and attend), product out, residual, product gate_up, gated,
               product down, residual (next norm)
    verify, commit, redraft

Grids follow from the slots T and the descriptor alone, so a captured graph of a step stays valid whatever the layout
becomes. Live rows are numbered without holes (``settle``): programs beyond them end at once, so a step costs its live
rows. Attention and verification work in the layout's slots; q, k, v, the attention's output and the last norm stand
there. Split products leave their parts to the next row operation, which adds them in order: no launch merges.

A sequence that breaks a rule gets its code into state[b, ERROR] before anything of it is written; it is laid out as
empty for this step, and redraft leaves it alone from then on.

Launches: 9 + 8 or 9 per layer (attention in one or two). Bytes: weights once per 64 live rows from memory or L2,
the caches' rows up to every length, and the activations (csrc/cpu/step.h has the same formulas).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import check_multi_block_step
from jacobi_kernels.state import STATE_COLUMNS, StateColumn, StepError
from jacobi_kernels.triton import rows as row_ops
from jacobi_kernels.triton.argmax_verify import Sampling, verify
from jacobi_kernels.triton.commit import commit
from jacobi_kernels.triton.multi_block_attention_with_kvcache import (
    attend_with_kvcache,
    attention_workspace_size,
    check_caches,
)
from jacobi_kernels.triton.packed_linear import launch_product
from jacobi_kernels.triton.plan import Plan, plan_rows
from jacobi_kernels.triton.redraft import check_options, redraft
from jacobi_kernels.triton.redraft_check import NUM_FINAL, TEXT_LEN, check_sequence
from jacobi_kernels.triton.runtime import CompileCase, check_dense, check_runs_here, launch
from jacobi_kernels.triton.step_model import (
    F,
    Matrix,
    Scratch,
    StepBuffers,
    StepModel,
    checked_size,
    step_workspace_size,
)

__all__ = ["compile_cases", "multi_block_step", "step_workspace_size"]

OP = "multi_block_step"
ERROR = tl.constexpr(int(StateColumn.ERROR))
TOKEN_ERROR, STATE_ERROR = tl.constexpr(int(StepError.TOKEN)), tl.constexpr(int(StepError.STATE))
LENGTH_ERROR = tl.constexpr(int(StepError.CACHE_LENGTH))
LANES = 64


@triton.jit
def check_kernel(  # type: ignore[no-untyped-def]
    tokens,
    segments,
    cu_seqlens_q,
    cu_segments,
    cache_seqlens,
    pool,
    state,
    nothing_accepted,
    effective,
    batch,
    rows,
    num_segments,
    least_rows,
    text_capacity,
    pool_rows,
    pool_width,
    vocab,
    block_size,
    blocks,
    candidates,
    STATE_COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tokens and state of one sequence; ``effective``, a copy of ``segments``, loses the lengths of a bad one's."""
    b = tl.program_id(0)
    state += b * STATE_COLUMNS
    tl.store(nothing_accepted + b, 0)
    tl.debug_barrier()
    error = check_sequence(
        tokens,
        tokens,
        nothing_accepted,
        segments,
        cu_seqlens_q,
        cu_segments,
        cache_seqlens,
        pool + b.to(tl.int64) * pool_rows * (1 + pool_width),
        state,
        b,
        batch,
        rows,
        num_segments,
        least_rows,
        text_capacity,
        pool_rows,
        pool_width,
        block_size,
        blocks,
        candidates,
        LANES,
    )
    first = tl.minimum(tl.maximum(tl.load(cu_segments + b), 0), num_segments)
    end = tl.minimum(tl.load(cu_segments + b + 1), num_segments)
    if (error == 0) | (error == STATE_ERROR):  # the check of the state has looked at the layout before
        length, num_final = tl.load(segments + 4 * first + 1), tl.load(state + NUM_FINAL)
        used = tl.load(cache_seqlens + b).to(tl.int64)
        if (length > 0) & ((num_final < 1) | (num_final > length)):
            error = STATE_ERROR + 0
        elif (used < 0) | ((length > 0) & (used + num_final > tl.load(state + TEXT_LEN))):
            error = LENGTH_ERROR + 0
    if error == 0:
        strange = 0
        for s in range(first, end):
            start, length = tl.load(segments + 4 * s), tl.load(segments + 4 * s + 1)
            for i in range(0, length, LANES):
                at = i + tl.arange(0, LANES)
                token = tl.load(tokens + start + at, mask=at < length, other=0)
                strange += tl.sum(((token < 0) | (token >= vocab)).to(tl.int32), 0)
        if (error == 0) & (strange > 0):
            error = TOKEN_ERROR + 0
    before = tl.load(state + ERROR)
    if (before == 0) & (error != 0):
        tl.store(state + ERROR, error)
    if (before != 0) | (error != 0):
        for s in range(first, end):
            tl.store(effective + 4 * s + 1, 0)


@triton.jit
def settle_kernel(  # type: ignore[no-untyped-def]
    error, state, row_segment, live, count, batch, rows, STATE_COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the plan's errors into the state; live[: count[0]] = slots of the live rows, ascending."""
    for begin in range(0, batch, BLOCK):
        b = begin + tl.arange(0, BLOCK)
        at = state + b * STATE_COLUMNS + ERROR
        found = tl.load(error + b, mask=b < batch, other=0)
        tl.store(at, found, mask=(b < batch) & (found != 0) & (tl.load(at, mask=b < batch, other=1) == 0))
    total = 0
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        one = (tl.load(row_segment + row, mask=row < rows, other=-1) >= 0).to(tl.int32)
        tl.store(live + total + tl.cumsum(one, 0) - 1, row, mask=one != 0)
        total += tl.sum(one, 0)
    tl.store(count, total)


def _product(buffers: StepBuffers, x: Tensor, matrix: Matrix, rows: Tensor | None = None) -> Tensor:
    """Parts of ``x @ W.T`` for the live rows; ``rows``: where they stand in x."""
    parts = buffers.parts(matrix)
    flat = x.view(x.shape[0], -1)
    launch_product("packed_linear", flat, matrix.weight, parts, matrix.n, matrix.cut, rows=rows, count=buffers.count)
    return parts


def _hidden_states(
    model: StepModel,
    buffers: StepBuffers,
    plan: Plan,
    tokens: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    layout: tuple[Tensor, Tensor, Tensor],
    page_table: Tensor | None,
) -> None:
    """``buffers.normed`` = what enters the head, in the live rows' slots."""
    live, count, x, normed, eps = buffers.live, buffers.count, buffers.x, buffers.normed, model.eps
    rows, batch = tokens.shape[0], cache_seqlens.shape[0]
    if model.rotated:
        row_ops.rotary_table(OP, plan.row_position, live, count, model.inv_freq, model.rope_scale, buffers.table)
    layers = [model.layer(i) for i in range(model.layers)]
    q, k, v = buffers.heads(model, k_cache.dtype)
    capacity = k_cache.shape[2] * (1 if page_table is None else page_table.shape[1])
    sizes = (rows, batch, model.heads, model.kv_heads, model.head_dim, capacity, k_cache.dtype)
    memory = torch.empty((attention_workspace_size(*sizes),), dtype=torch.uint8, device=x.device)
    embedding = model.embedding
    row_ops.residual_norm(
        OP,
        model.head.weight if embedding is None else embedding,
        x,
        normed,
        layers[0].attention_norm,
        eps,
        live,
        count,
        kind=row_ops.PACKED_EMBEDDING if embedding is None else row_ops.EMBEDDING,
        tokens=tokens,
        vocab=model.vocab,
    )
    for i, layer in enumerate(layers):
        parts = _product(buffers, normed, layer.qkv)
        table = buffers.table if layer.use_rope else None
        row_ops.prepare_heads(OP, parts, layer.qkv.bias, live, count, layer.head_norms, eps, table, q, k, v)
        attend_with_kvcache(
            q,
            k,
            v,
            k_cache[i],
            v_cache[i],
            cache_seqlens,
            *layout,
            plan,
            page_table=page_table,
            softmax_scale=model.softmax_scale,
            window_size=layer.window,
            out=buffers.attended,
            workspace=memory,
        )
        parts = _product(buffers, buffers.attended, layer.attention_out, rows=live)
        out_bias, down_bias = layer.attention_out.bias, layer.down.bias
        row_ops.residual_norm(OP, parts, x, normed, layer.ffn_norm, eps, live, count, bias=out_bias)
        parts = _product(buffers, normed, layer.gate_up)
        row_ops.gated(OP, parts, layer.gate_up.bias, count, buffers.product)
        parts = _product(buffers, buffers.product, layer.down)
        last = i + 1 == len(layers)
        norm = model.final_norm if last else layers[i + 1].attention_norm
        row_ops.residual_norm(OP, parts, x, normed, norm, eps, live, count, bias=down_bias, scatter=last)


def multi_block_step(
    weights: Tensor,
    descriptor: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    tokens: Tensor,
    segments: Tensor,
    cu_seqlens_q: Tensor,
    cu_segments: Tensor,
    text: Tensor,
    pool: Tensor,
    state: Tensor,
    stop_tokens: Tensor,
    workspace: Tensor,
    *,
    block_size: int,
    blocks: int,
    candidates: int,
    spawn_ratio: float = 0.85,
    page_table: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    seeds: Tensor | None = None,
    logits_scratch: Tensor | None = None,
) -> None:
    """One step as :func:`jacobi_kernels.ops.multi_block_step`; ``descriptor`` is a CPU tensor, all others are not.

    ``workspace``: :func:`step_workspace_size` bytes. What the CPU op refuses by value sets a sequence's column ERROR;
    such a sequence is left as it is. RuntimeError for what the shapes and the descriptor show.
    """
    check_runs_here(OP, weights, k_cache)
    checked_size(descriptor)
    model = StepModel(weights, descriptor)
    layout, samplers = (cu_seqlens_q, segments, cu_segments), (temperature, top_k, top_p, seeds, logits_scratch)
    drafts = (text, pool, state, stop_tokens)
    check_multi_block_step(k_cache, v_cache, cache_seqlens, tokens, *layout, *drafts, page_table, samplers, model.vocab)
    check_dense(OP, cache_seqlens=cache_seqlens, tokens=tokens, cu_seqlens_q=cu_seqlens_q, segments=segments)
    check_dense(OP, cu_segments=cu_segments, text=text, pool=pool, state=state, stop_tokens=stop_tokens)
    check_dense(OP, weights=weights, workspace=workspace, page_table=page_table)
    check_options(OP, pool, block_size, blocks, candidates, spawn_ratio)
    rows, batch, num_segments = tokens.shape[0], cu_seqlens_q.shape[0] - 1, segments.shape[0]
    _check_shapes(model, weights, descriptor, k_cache, v_cache, workspace, page_table, batch)
    sampling = Sampling(*samplers)
    sampling.check(OP)
    scratch = Scratch(workspace)
    buffers = StepBuffers(model, rows, batch, num_segments, scratch)
    if buffers.verdict.best_id.is_meta:
        raise RuntimeError(
            f"{OP}: workspace must have at least {scratch.used + 64} bytes (step_workspace_size), "
            f"got {workspace.numel()}"
        )
    if batch == 0:
        return
    verdict = buffers.verdict
    buffers.segments.copy_(segments)
    pool_rows, pool_width = pool.shape[1], pool.shape[2] - 1
    launch(
        OP,
        check_kernel,
        (batch,),
        tokens,
        segments,
        cu_seqlens_q,
        cu_segments,
        cache_seqlens,
        pool,
        state,
        verdict.num_accepted,
        buffers.segments,
        batch,
        rows,
        num_segments,
        min(blocks * block_size + candidates * (block_size - 1), 2**31 - 1),
        text.shape[1],
        pool_rows,
        pool_width,
        model.vocab,
        block_size,
        blocks,
        candidates,
        STATE_COLUMNS=STATE_COLUMNS,
        LANES=LANES,
    )
    layout = (cu_seqlens_q, buffers.segments, cu_segments)  # of what takes part
    plan = plan_rows(*layout, cache_seqlens, rows, k_cache=k_cache[0], page_table=page_table)
    launch(
        OP,
        settle_kernel,
        (1,),
        plan.error,
        state,
        plan.row_segment,
        buffers.live,
        buffers.count,
        batch,
        rows,
        STATE_COLUMNS=STATE_COLUMNS,
        BLOCK=min(4096, max(16, triton.next_power_of_2(rows))),
    )
    _hidden_states(model, buffers, plan, tokens, k_cache, v_cache, cache_seqlens, layout, page_table)
    num_final = state[:, StateColumn.NUM_FINAL]
    verify(
        "argmax_verify", buffers.normed, model.head, plan, tokens, num_final, cache_seqlens, layout, sampling, verdict
    )
    results = (verdict.predictions, verdict.accepted_rows, verdict.num_accepted, verdict.fixed_point)
    commit(k_cache, v_cache, cache_seqlens, *results[1:3], cu_seqlens_q, page_table=page_table)
    redraft(
        *results,
        tokens,
        segments,
        cu_seqlens_q,
        cu_segments,
        cache_seqlens,
        text,
        pool,
        state,
        stop_tokens,
        block_size=block_size,
        blocks=blocks,
        candidates=candidates,
        spawn_ratio=spawn_ratio,
    )


def _check_shapes(
    model: StepModel,
    weights: Tensor,
    descriptor: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    workspace: Tensor,
    page_table: Tensor | None,
    batch: int,
) -> None:
    for name, t in (("weights", weights), ("workspace", workspace)):
        if t.dim() != 1 or t.dtype != torch.uint8:
            raise RuntimeError(f"{OP}: {name} must be uint8 [bytes], got {t.dtype} of shape {list(t.shape)}")
    if weights.data_ptr() % 16:
        raise RuntimeError(f"{OP}: weights must start at a multiple of 16 bytes")
    if weights.numel() < descriptor[F.BLOB_BYTES]:
        raise RuntimeError(
            f"{OP}: weights must have the descriptor's {int(descriptor[F.BLOB_BYTES])} bytes, got {weights.numel()}"
        )
    slabs = k_cache.shape[1] if page_table is not None else batch
    shape = (model.layers, slabs, k_cache.shape[2], model.kv_heads, model.head_dim)
    if tuple(k_cache.shape) != shape:
        raise RuntimeError(f"{OP}: k_cache and v_cache must have shape {list(shape)}, got {list(k_cache.shape)}")
    check_caches(OP, k_cache, v_cache)


def compile_cases() -> list[CompileCase]:
    """The step's own kernels; the others are in the modules that it calls."""
    pointers = "tokens segments cu_seqlens_q cu_segments cache_seqlens pool state nothing_accepted effective"
    numbers = "batch rows num_segments least_rows text_capacity pool_rows pool_width vocab block_size blocks candidates"
    constants = {"STATE_COLUMNS": STATE_COLUMNS, "LANES": LANES}
    signature = dict.fromkeys(pointers.split(), "*i32") | dict.fromkeys(numbers.split(), "i32")
    cases = [CompileCase(f"{OP}: check", check_kernel, signature | dict.fromkeys(constants, "constexpr"), constants)]
    constants = {"STATE_COLUMNS": STATE_COLUMNS, "BLOCK": 1024}
    signature = dict.fromkeys(("error", "state", "row_segment", "live", "count"), "*i32")
    signature |= {"batch": "i32", "rows": "i32"} | dict.fromkeys(constants, "constexpr")
    cases.append(CompileCase(f"{OP}: settle", settle_kernel, signature, constants))
    return cases
