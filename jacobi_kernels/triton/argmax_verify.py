"""Predictions without logits in memory, then the longest accepted path; nothing is read by the host.

    logit = softcap(scale * (x . w + bias));   greedy: argmax logit;   sampling: argmax logit / temperature + gumbel

Launches: ``select`` (one program) lists the rows that need a prediction and their noise keys; ``head`` multiplies a
tile of the vocabulary with up to 64 listed rows (packed_linear.py: same tiles, same order of sums, k whole) and keeps
one (value, lowest id) per row and tile; ``choose`` reduces a row's tiles; accept.py then compares tokens with
predictions. NaN counts as largest; a tie goes to the lowest id. Both reductions are exact, so their order does not
matter. Rows with top-k or top-p are sampled from logits in the caller's scratch (filtered.py).

Bytes: the head's weights once per 64 rows (from L2 beyond the first), 8 bytes per row and tile. Operations: 2 rows V E,
and about 80 per noise value: tiles without a sampling row draw none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import check_argmax_verify
from jacobi_kernels.triton.accept import accept
from jacobi_kernels.triton.filtered import sample_filtered
from jacobi_kernels.triton.noise import gumbel, noise_key
from jacobi_kernels.triton.packed_linear import NUM_STAGES, NUM_WARPS, Tiling, accumulate, tiling
from jacobi_kernels.triton.plan import Plan, plan_rows
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_dense, check_floats, check_runs_here, launch
from jacobi_kernels.triton.vec_math import EXACT, tanh

OP = "argmax_verify"
NO_ID = tl.constexpr(2147483647)
SELECT_BLOCK = 512  # rows at a time; more would spill on sm_80


@triton.jit
def select_kernel(  # type: ignore[no-untyped-def]
    row_sequence,
    row_segment,
    row_position,
    segments,
    cache_seqlens,
    num_final,
    num_final_stride,
    temperature,
    top_k,
    top_p,
    seeds,
    predictions,
    plain,
    filtered,
    counts,
    keys,
    rows,
    HAS_FINAL: tl.constexpr,
    SAMPLING: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lists plain[: counts[0]] and filtered[: counts[1]] of the rows that need a prediction; keys [2, rows]."""
    total, total_filtered = 0, 0
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = row < rows
        b = tl.load(row_sequence + row, mask=inside, other=-1)
        live = b >= 0
        place = tl.load(row_position + row, mask=live, other=0)
        segment = tl.load(row_segment + row, mask=live, other=0)
        index = row - tl.load(segments + 4 * segment, mask=live, other=0)
        root = place - tl.load(cache_seqlens + b, mask=live, other=0) == index  # no query token before the segment
        final = tl.full((BLOCK,), 1, tl.int32)
        if HAS_FINAL:
            final = tl.load(num_final + b * num_final_stride, mask=live, other=1)
        wanted = live & ((index + 1 >= final) | (root == 0))
        tl.store(predictions + row, tl.full((BLOCK,), -1, tl.int32), mask=inside)
        narrowed = wanted & (row < 0)
        if SAMPLING:
            samples = tl.load(temperature + b, mask=live, other=0.0) > 0.0
            if HAS_TOP_K:
                narrowed = narrowed | (tl.load(top_k + b, mask=live, other=0) > 0)
            if HAS_TOP_P:
                narrowed = narrowed | (tl.load(top_p + b, mask=live, other=1.0) < 1.0)
            narrowed = narrowed & wanted & samples
            low, high = noise_key(tl.load(seeds + b, mask=live, other=0), place + 1)
            tl.store(keys + row, low.to(tl.int32, bitcast=True), mask=inside)
            tl.store(keys + rows + row, high.to(tl.int32, bitcast=True), mask=inside)
        one = (wanted & (narrowed == 0)).to(tl.int32)
        tl.store(plain + total + tl.cumsum(one, 0) - 1, row, mask=one != 0)
        total += tl.sum(one, 0)
        if HAS_TOP_K or HAS_TOP_P:
            one = narrowed.to(tl.int32)
            tl.store(filtered + total_filtered + tl.cumsum(one, 0) - 1, row, mask=one != 0)
            total_filtered += tl.sum(one, 0)
    tl.store(counts, total)
    tl.store(counts + 1, total_filtered)


@triton.jit
def best_of(value, id, valid):  # type: ignore[no-untyped-def]
    """Per row of [ROWS, N]: the largest value (NaN counts as largest) and its lowest id."""
    value = tl.where(valid, value, float("-inf"))
    nan = value != value
    any_nan = tl.max(nan.to(tl.int32), 1)[:, None] != 0
    largest = tl.max(tl.where(nan, float("-inf"), value), 1)
    wins = valid & tl.where(any_nan, nan, value == largest[:, None])
    lowest = tl.min(tl.where(wins, id, NO_ID), 1)
    return tl.where(any_nan, float("nan"), largest[:, None]), lowest


@triton.jit
def _tile_best(  # type: ignore[no-untyped-def]
    acc,
    first,
    live,
    tile,
    plain,
    row_sequence,
    bias,
    temperature,
    keys,
    best_value,
    best_id,
    rows,
    n,
    tiles,
    scale,
    softcap,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    SAMPLING: tl.constexpr,
):
    i, id = first + tl.arange(0, ROWS), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, valid = i < live, id < n
    if HAS_BIAS:
        acc += tl.load(bias + id, mask=valid, other=0.0).to(tl.float32)[None, :]
    acc = acc * scale
    if CAPPED:
        acc = tanh(tl.div_rn(acc, tl.zeros_like(acc) + softcap)) * softcap
    if SAMPLING:
        row = tl.load(plain + i, mask=inside, other=0)
        heat = tl.load(temperature + tl.load(row_sequence + row, mask=inside, other=0), mask=inside, other=0.0)
        if tl.max(heat, 0) > 0.0:
            low = tl.load(keys + row, mask=inside, other=0).to(tl.uint32, bitcast=True)
            high = tl.load(keys + rows + row, mask=inside, other=0).to(tl.uint32, bitcast=True)
            noise = gumbel(low[:, None], high[:, None], id[None, :].to(tl.uint32))
            divisor = tl.zeros_like(acc) + tl.where(heat > 0.0, heat, 1.0)[:, None]
            acc = tl.where((heat > 0.0)[:, None], tl.div_rn(acc, divisor) + noise, acc)
    value, lowest = best_of(acc, id[None, :], valid[None, :] & inside[:, None])
    at = i.to(tl.int64)[:, None] * tiles + tile
    tl.store(best_value + at, value, mask=inside[:, None])
    tl.store(best_id + at, lowest[:, None], mask=inside[:, None])


@triton.jit
def head_kernel(  # type: ignore[no-untyped-def]
    x,
    w,
    bias,
    plain,
    counts,
    row_sequence,
    temperature,
    keys,
    best_value,
    best_id,
    rows,
    n,
    k,
    tiles,
    scale,
    softcap,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    SAMPLING: tl.constexpr,
):
    """best_value, best_id [rows, tiles]: entry [i, t] for the i-th listed row and vocabulary tile t."""
    tile, live = tl.program_id(1), tl.load(counts)
    first = tl.program_id(0) * (ROWS * TILES)
    if first < live:
        if TILES == 1 or live - first <= ROWS:
            a, _, _, _ = accumulate(x, plain, first, live, w, n, k, 0, k, tile, ROWS, 1, BLOCK_N, BLOCK_K, EVEN_K, True)
            _tile_best(
                a, first, live, tile, plain, row_sequence, bias, temperature, keys, best_value, best_id, rows, n,
                tiles, scale, softcap, ROWS, BLOCK_N, HAS_BIAS, CAPPED, SAMPLING,
            )  # fmt: skip
        else:
            a, b, c, d = accumulate(
                x, plain, first, live, w, n, k, 0, k, tile, ROWS, TILES, BLOCK_N, BLOCK_K, EVEN_K, True
            )
            for part in tl.static_range(0, TILES):
                acc = a if part == 0 else b if part == 1 else c if part == 2 else d
                _tile_best(
                    acc, first + part * ROWS, live, tile, plain, row_sequence, bias, temperature, keys, best_value,
                    best_id, rows, n, tiles, scale, softcap, ROWS, BLOCK_N, HAS_BIAS, CAPPED, SAMPLING,
                )  # fmt: skip


@triton.jit
def choose_kernel(  # type: ignore[no-untyped-def]
    best_value, best_id, plain, counts, predictions, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """predictions[plain[i]] = the best of row i over all tiles; token 0 when every logit is -inf."""
    live = tl.load(counts)
    if tl.program_id(0) * ROWS < live:
        i, tile = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        mask = (i < live)[:, None] & (tile < tiles)[None, :]
        at = i.to(tl.int64)[:, None] * tiles + tile[None, :]
        value = tl.load(best_value + at, mask=mask, other=float("-inf"))
        _, lowest = best_of(value, tl.load(best_id + at, mask=mask, other=NO_ID), mask)
        row = tl.load(plain + i, mask=i < live, other=0)
        tl.store(predictions + row, tl.where(lowest == NO_ID, 0, lowest), mask=i < live)


@dataclass(frozen=True)
class Head:
    """What a prediction needs of the model: packed weight, bias, sizes, transform of the logits."""

    weight: Tensor
    bias: Tensor | None
    vocab: int
    scale: float = 1.0
    softcap: float = 0.0

    @property
    def cut(self) -> Tiling:
        return tiling(self.vocab, self.weight.shape[1], self.weight.dtype, max_parts=1)


@dataclass(frozen=True)
class Sampling:
    """One value per sequence, as the op takes them; filters need scratch rows."""

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    seeds: Tensor | None = None
    logits_scratch: Tensor | None = None

    def check(self, op: str) -> None:
        """RuntimeError when what sampling needs is not there, or not in one piece."""
        check_dense(op, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seeds=self.seeds)
        check_dense(op, logits_scratch=self.logits_scratch)
        if self.logits_scratch is not None and not 2 <= self.logits_scratch.shape[0] <= 16:
            raise RuntimeError(f"{op}: logits_scratch must have 2 to 16 rows, got {self.logits_scratch.shape[0]}")
        if self.temperature is not None and self.seeds is None:
            raise RuntimeError(f"{op}: seeds must be given with temperature")
        if self.temperature is not None and self.filters and self.logits_scratch is None:
            raise RuntimeError(f"{op}: logits_scratch must be given with top_k or top_p: float32 [2..16, vocab_size]")

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p is not None


@dataclass(frozen=True)
class Verdict:
    """Results of :func:`verify`, and its scratch: sizes by :func:`verdict_shapes`."""

    predictions: Tensor
    accepted_rows: Tensor
    num_accepted: Tensor
    fixed_point: Tensor
    plain: Tensor
    filtered: Tensor
    counts: Tensor
    keys: Tensor
    best_value: Tensor
    best_id: Tensor


def verdict_shapes(head: Head, rows: int, batch: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a :class:`Verdict`."""
    tiles = triton.cdiv(head.vocab, head.cut.block_n)
    integers = dict.fromkeys(("predictions", "accepted_rows", "plain", "filtered"), ((rows,), torch.int32))
    return integers | {
        "num_accepted": ((batch,), torch.int32),
        "fixed_point": ((batch,), torch.bool),
        "counts": ((2,), torch.int32),
        "keys": ((2, rows), torch.int32),
        "best_value": ((rows, tiles), torch.float32),
        "best_id": ((rows, tiles), torch.int32),
    }


def verify(
    op: str,
    hidden: Tensor,
    head: Head,
    plan: Plan,
    tokens: Tensor,
    num_final: Tensor | None,
    cache_seqlens: Tensor,
    layout: tuple[Tensor, Tensor, Tensor],
    sampling: Sampling,
    verdict: Verdict,
) -> None:
    """Fill ``verdict``; ``num_final`` may be a strided column, ``hidden [T, E]`` stands in the layout's slots."""
    segments, (rows, k) = layout[1], hidden.shape
    n, cut = head.vocab, head.cut
    heat = sampling.temperature
    stride = 0 if num_final is None else num_final.stride(0)
    launch(
        op,
        select_kernel,
        (1,),
        plan.row_sequence,
        plan.row_segment,
        plan.row_position,
        segments,
        cache_seqlens,
        num_final,
        stride,
        heat,
        sampling.top_k,
        sampling.top_p,
        sampling.seeds,
        verdict.predictions,
        verdict.plain,
        verdict.filtered,
        verdict.counts,
        verdict.keys,
        rows,
        HAS_FINAL=num_final is not None,
        SAMPLING=heat is not None,
        HAS_TOP_K=heat is not None and sampling.top_k is not None,
        HAS_TOP_P=heat is not None and sampling.top_p is not None,
        BLOCK=min(4096 if INTERPRETED else SELECT_BLOCK, max(16, triton.next_power_of_2(rows))),
    )
    tiles = triton.cdiv(n, cut.block_n)
    launch(
        op,
        head_kernel,
        (triton.cdiv(rows, cut.group), tiles),
        hidden,
        head.weight,
        head.bias,
        verdict.plain,
        verdict.counts,
        plan.row_sequence,
        heat,
        verdict.keys,
        verdict.best_value,
        verdict.best_id,
        rows,
        n,
        k,
        tiles,
        head.scale,
        head.softcap,
        ROWS=cut.rows,
        TILES=cut.tiles,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        EVEN_K=k % cut.block_k == 0,
        HAS_BIAS=head.bias is not None,
        CAPPED=head.softcap > 0,
        SAMPLING=heat is not None,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **EXACT,
    )
    block_rows = 64 if INTERPRETED else 1
    launch(
        op,
        choose_kernel,
        (triton.cdiv(rows, block_rows),),
        verdict.best_value,
        verdict.best_id,
        verdict.plain,
        verdict.counts,
        verdict.predictions,
        tiles,
        ROWS=block_rows,
        BLOCK=triton.next_power_of_2(tiles),
    )
    if heat is not None and sampling.filters and sampling.logits_scratch is not None:
        sample_filtered(op, hidden, head, plan.row_sequence, sampling, verdict)
    accept(op, plan, tokens, num_final, layout, verdict)


def argmax_verify(
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    vocab_size: int,
    tokens: Tensor,
    num_final: Tensor | None,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    seeds: Tensor | None = None,
    logits_scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`jacobi_kernels.ops.argmax_verify`; a sequence whose layout breaks a rule gets no predictions."""
    check_runs_here(OP, hidden, lm_head, bias)
    check_floats(OP, "lm_head", lm_head)
    layout = (cu_seqlens_q, segments, cu_segments)
    samplers = (temperature, top_k, top_p, seeds, logits_scratch)
    rows, batch = check_argmax_verify(
        hidden, lm_head, bias, vocab_size, tokens, num_final, cache_seqlens, *layout, samplers
    )
    check_dense(OP, lm_head=lm_head, bias=bias, tokens=tokens, num_final=num_final, cache_seqlens=cache_seqlens)
    check_dense(OP, cu_seqlens_q=cu_seqlens_q, segments=segments, cu_segments=cu_segments)
    if vocab_size < 1:
        raise RuntimeError(f"{OP}: vocab_size must be at least 1, got {vocab_size}")
    if not logit_scale > 0 or not softcap >= 0:
        raise RuntimeError(f"{OP}: logit_scale must be positive and softcap at least 0, got {logit_scale}, {softcap}")
    sampling = Sampling(*samplers)
    sampling.check(OP)
    head = Head(lm_head, bias, vocab_size, logit_scale, softcap)
    shapes = verdict_shapes(head, rows, batch)
    verdict = Verdict(**{name: tokens.new_empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()})
    plan = plan_rows(*layout, cache_seqlens, rows)
    verify(OP, hidden.contiguous(), head, plan, tokens, num_final, cache_seqlens, layout, sampling, verdict)
    return verdict.predictions, verdict.accepted_rows, verdict.num_accepted, verdict.fixed_point


def compile_cases() -> list[CompileCase]:
    """Every kernel; the head at the sizes of three models, greedy and sampling."""
    pointers = dict.fromkeys(("row_sequence", "row_segment", "row_position", "segments", "cache_seqlens"), "*i32")
    signature = pointers | {"num_final": "*i32", "num_final_stride": "i32", "temperature": "*fp32", "top_k": "*i32"}
    signature |= {"top_p": "*fp32", "seeds": "*i64"}
    signature |= dict.fromkeys(("predictions", "plain", "filtered", "counts", "keys"), "*i32") | {"rows": "i32"}
    constants = dict.fromkeys(("HAS_FINAL", "SAMPLING", "HAS_TOP_K", "HAS_TOP_P"), True) | {"BLOCK": SELECT_BLOCK}
    cases = [_case("select", select_kernel, signature, constants)]
    for model, vocab, width in (
        ("SmolLM2-135M", 49152, 576),
        ("Qwen2.5-1.5B", 151936, 1536),
        ("Qwen2.5-7B", 152064, 3584),
    ):
        for short, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            cut = tiling(vocab, width, dtype, max_parts=1)
            for sampling in (False, True):
                signature = {"x": f"*{short}", "w": f"*{short}", "bias": "*fp32", "plain": "*i32", "counts": "*i32"}
                signature |= {"row_sequence": "*i32", "temperature": "*fp32", "keys": "*i32", "best_value": "*fp32"}
                signature |= {"best_id": "*i32", "rows": "i32", "n": "i32", "k": "i32", "tiles": "i32"}
                signature |= {"scale": "fp32", "softcap": "fp32"}
                constants = {"ROWS": cut.rows, "TILES": cut.tiles, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k}
                constants |= {"EVEN_K": True, "HAS_BIAS": False, "CAPPED": sampling, "SAMPLING": sampling}
                name = f"head {model} {short}{' sampling' * sampling}"
                cases.append(_case(name, head_kernel, signature, constants, short == "bf16"))
    signature = {"best_value": "*fp32"} | dict.fromkeys(("best_id", "plain", "counts", "predictions"), "*i32")
    cases.append(_case("choose", choose_kernel, signature | {"tiles": "i32"}, {"ROWS": 1, "BLOCK": 2048}))
    return cases


def _case(
    name: str, kernel: object, types: dict[str, str], constants: dict[str, int], uses_mma: bool = False
) -> CompileCase:
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = {a: 16 for a, t in signature.items() if t[0] == "*" or a in ("n", "k")}
    stages = NUM_STAGES if uses_mma else 3
    may_spill = "fp32 sampling" in name  # float32 is for checks, not for speed
    options = EXACT if kernel is head_kernel else {}
    return CompileCase(
        f"{OP}: {name}", kernel, signature, constants, NUM_WARPS, stages, uses_mma, may_spill, aligned, options
    )
