"""What every op computes, in plain torch: short, obvious, slow. Backends are tested against this file.

Functions carry the names and arguments of :mod:`jacobi_kernels.ops` plus ``dtype``, the floating type that the whole
computation uses; results stay in it (float64 by default), so a test sees the rounding error of the op alone. Index
results and mutations of caller tensors are exactly the op's. ``redraft`` is integer rules without arithmetic: its
definition is the brute-force twin in its own tests. ``multi_block_step`` is :func:`hidden_states`, then
:func:`argmax_verify`, :func:`commit` and those rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobi_kernels.grouped import dequantize_packed
from jacobi_kernels.packing import unpack_weight
from jacobi_kernels.sampling import splitmix64

if TYPE_CHECKING:
    from jacobi_kernels.step_weights import StepConfig

NEG_INF = -math.inf

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """``x @ W.T + bias``: ``[..., out_features]``."""
    grouped = weight.dtype == torch.uint8
    w = dequantize_packed(weight, out_features, x.shape[-1]) if grouped else unpack_weight(weight, out_features)
    y = x.to(dtype) @ w.to(dtype).T
    return y if bias is None else y + bias.to(dtype)


def activation(x: Tensor, kind: str, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The activation of every element."""
    return _ACTIVATIONS[kind](x.to(dtype))


# Block layout ---------------------------------------------------------------------------------------------------------


def segment_paths(segments: Tensor, cu_segments: Tensor) -> list[list[list[int]]]:
    """Per sequence and segment, the query rows on the path of the segment's last token, in order.

    A segment continues its parent's path cut after ``visible`` of the parent's tokens; ``visible`` 0 therefore
    continues where the parent itself began.
    """
    rows, bounds = segments.tolist(), cu_segments.tolist()
    before: list[list[int]] = []  # path in front of each segment
    for _, _, parent, visible in rows:
        begin = rows[parent][0]
        before.append(before[parent] + list(range(begin, begin + visible)) if parent >= 0 else [])
    paths = [ahead + list(range(r[0], r[0] + r[1])) for ahead, r in zip(before, rows, strict=True)]
    return [paths[first:end] for first, end in pairwise(bounds)]


def row_paths(segments: Tensor, cu_segments: Tensor) -> list[dict[int, list[int]]]:
    """Per sequence, ``{row: query rows it sees, itself last}``; holes are absent."""
    lengths, bounds = segments[:, 1].tolist(), cu_segments.tolist()
    result = []
    for first, paths in zip(bounds[:-1], segment_paths(segments, cu_segments), strict=True):
        seen: dict[int, list[int]] = {}
        for s, path in enumerate(paths, first):
            seen.update({path[i]: path[: i + 1] for i in range(len(path) - lengths[s], len(path))})
        result.append(seen)
    return result


# Attention ------------------------------------------------------------------------------------------------------------


def attend(
    q: Tensor, keys: Tensor, values: Tensor, softmax_scale: float | None, window_size: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """One query ``[H, D]`` over the tokens of its path ``[P, KVH, D]``: (out ``[H, D]``, lse ``[H]``)."""
    if window_size >= 0:
        keys, values = keys[-window_size - 1 :], values[-window_size - 1 :]
    group = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scale = 1.0 / math.sqrt(q.shape[1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("hd,phd->hp", q, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    lse = torch.logsumexp(scores, 1)
    return torch.einsum("hp,phd->hd", torch.exp(scores - lse[:, None]), values), lse


def multi_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(out ``[T, H, D]``, softmax_lse ``[H, T]``); holes: 0 and -inf."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), NEG_INF)
    for paths in row_paths(segments, cu_segments):
        for row, path in paths.items():
            out[row], lse[:, row] = attend(q[row], k[path], v[path], softmax_scale, window_size, softcap)
    return out, lse


def multi_block_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    grad_softmax_lse: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """What autograd gives for :func:`multi_block_attention`; ``out`` and ``softmax_lse`` are computed anew."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return multi_block_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            segments,
            cu_segments,
            softmax_scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
            dtype=dtype,
        )

    if grad_softmax_lse is None:
        grad_softmax_lse = torch.zeros_like(softmax_lse)
    pull_back = torch.func.vjp(forward, q.to(dtype), k.to(dtype), v.to(dtype))[1]
    return pull_back((grad_out.to(dtype), grad_softmax_lse.to(dtype)))


def cache_slots(rows: list[int], b: int, page_size: int, page_table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Index of cache rows of sequence b in the cache's first two dimensions."""
    index = torch.tensor(rows, dtype=torch.int64)
    if page_table is None:
        return torch.full_like(index, b), index
    return page_table[b].long()[index // page_size], index % page_size


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
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """out ``[T, H, D]``; row i of a sequence is appended to the caches at L + i, holes are not."""
    out = torch.zeros_like(q, dtype=dtype)
    lengths, starts = cache_seqlens.tolist(), cu_seqlens_q.tolist()
    for b, paths in enumerate(row_paths(segments, cu_segments)):
        offset = lengths[b] - starts[b]
        live = list(paths)
        slots = cache_slots([row + offset for row in live], b, k_cache.shape[1], page_table)
        k_cache[slots], v_cache[slots] = k[live], v[live]
        for row, path in paths.items():
            seen = [*range(lengths[b]), *(r + offset for r in path)]
            slots = cache_slots(seen, b, k_cache.shape[1], page_table)
            keys, values = k_cache[slots].to(dtype), v_cache[slots].to(dtype)
            out[row], _ = attend(q[row].to(dtype), keys, values, softmax_scale, window_size, softcap)
    return out


# Head, sampling, acceptance -------------------------------------------------------------------------------------------


def token_logits(
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    vocab_size: int,
    *,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``softcap(logit_scale * (hidden . lm_head + bias))``: ``[T, V]``."""
    logits = logit_scale * packed_linear(hidden, lm_head, bias, vocab_size, dtype=dtype)
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(nll ``[R]``, consistency ``[R]``) by materialised logits; autograd gives the gradients."""
    logits = hidden.to(dtype) @ lm_head.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logit_scale * logits
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    nll = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    tempered = logits / temperature
    student = teachers >= 0
    teacher = torch.softmax(tempered.detach()[teachers[student]], 1)
    soft = F.cross_entropy(tempered[student], teacher, reduction="none")
    return nll, torch.zeros_like(nll).masked_scatter(student, soft)


def first_argmax(values: Tensor) -> int:
    """Lowest index of the largest value of ``[V]``; a NaN is the largest."""
    nan = torch.isnan(values)
    return int((nan if nan.any() else values == values.max()).nonzero()[0])


def token_hash(seed: int, position: int, ids: Tensor) -> Tensor:
    """32 hashed bits per token id, as int64 in ``[0, 2**32)``.

    ``key = splitmix64(splitmix64(seed) ^ position)``; its low and high word enter before the first and the second of
    two rounds of a multiply-xorshift hash (the constants are Wellons' lowbias32).
    """
    key = splitmix64(splitmix64(seed & (2**64 - 1)) ^ position)
    low = 0xFFFFFFFF
    h = (ids.long() * 0x9E3779B9 + (key & low)) & low
    for word in (0, key >> 32):
        h = h ^ word
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & low
        h = ((h ^ (h >> 15)) * 0x846CA68B) & low  # the int64 product wraps, its low 32 bits are right
        h = h ^ (h >> 16)
    return h


def gumbel_noise(seed: int, position: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of token ``ids`` as candidates for ``position``: float64, shape of ``ids``.

    ``v = (hash + 1/2) / 2**32``; ``-log(1 - v)`` is exponentially distributed; minus its logarithm is Gumbel. The
    argmax of z + noise then has the probabilities ``softmax(z)``. (Where v >= 1/2 the difference ``1 - v`` is exact.)
    """
    v = (token_hash(seed, position, ids).double() + 0.5) * 2.0**-32
    return -torch.log(torch.where(v < 0.5, -torch.log1p(-v), -torch.log(1.0 - v)))


def warp_logits(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """``[V]`` logits divided by the temperature, -inf where top-k or top-p drop a token.

    top-k keeps all ties of the k-th largest; top-p goes through the kept by (z falling, id rising) and keeps the first
    token and every token before which the mass is below top_p.
    """
    z = logits / temperature
    if 0 < top_k < z.numel():
        z = z.masked_fill(z < z.topk(top_k).values[-1], NEG_INF)
    if top_p < 1.0:
        order = torch.sort(z, descending=True, stable=True).indices
        mass = torch.softmax(z, 0)[order]
        dropped = mass.cumsum(0) - mass >= top_p
        dropped[0] = False
        z = z.index_fill(0, order[dropped], NEG_INF)
    return z


def accept(
    predictions: Tensor,
    tokens: Tensor,
    num_final: Tensor | None,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(accepted_rows ``[T]``, num_accepted ``[B]``, fixed_point ``[B]``) for given predictions."""
    y, x, bounds = predictions.tolist(), tokens.tolist(), cu_segments.tolist()
    accepted_rows = torch.full_like(tokens, -1)
    num_accepted = torch.zeros_like(cu_seqlens_q[1:])
    fixed_point = torch.zeros_like(num_accepted, dtype=torch.bool)
    for b, paths in enumerate(segment_paths(segments, cu_segments)):
        lengths = segments[bounds[b] : bounds[b + 1], 1].tolist()
        final = 1 if num_final is None else max(int(num_final[b]), 1)
        given = {row for path in root_paths(paths, lengths) for row in path[:final]}
        best: list[int] = []
        for s, path in enumerate(paths):
            count = 0
            while count < len(path) and (path[count] in given or (count > 0 and x[path[count]] == y[path[count - 1]])):
                count += 1
            if count > len(best):
                best = path[:count]
            if s == 0:
                fixed_point[b] = 0 < count == lengths[0]
        start = int(cu_seqlens_q[b])
        accepted_rows[start : start + len(best)] = torch.tensor(best, dtype=tokens.dtype)
        num_accepted[b] = len(best)
    return accepted_rows, num_accepted, fixed_point


def root_paths(paths: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """The rows of each root, a segment with no query token before it."""
    return [path for path, length in zip(paths, lengths, strict=True) if len(path) == length]


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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(predictions ``[T]``, accepted_rows ``[T]``, num_accepted ``[B]``, fixed_point ``[B]``)."""
    logits = token_logits(hidden, lm_head, bias, vocab_size, logit_scale=logit_scale, softcap=softcap, dtype=dtype)
    ids = torch.arange(vocab_size)
    predictions = torch.full_like(tokens, -1)
    bounds = cu_segments.tolist()
    all_paths = segment_paths(segments, cu_segments)
    for b, seen in enumerate(row_paths(segments, cu_segments)):
        lengths = segments[bounds[b] : bounds[b + 1], 1].tolist()
        final = 1 if num_final is None else max(int(num_final[b]), 1)
        silent = {row for path in root_paths(all_paths[b], lengths) for row in path[: final - 1]}
        for row, path in seen.items():
            if row in silent:
                continue
            values = logits[row]
            if temperature is not None and temperature[b] > 0 and seeds is not None:
                values = warp_logits(
                    values,
                    float(temperature[b]),
                    int(top_k[b]) if top_k is not None else 0,
                    float(top_p[b]) if top_p is not None else 1.0,
                )
                predicted = int(cache_seqlens[b]) + len(path)  # the query is at this position less one
                values = values + gumbel_noise(int(seeds[b]), predicted, ids)
            predictions[row] = first_argmax(values)
    return predictions, *accept(predictions, tokens, num_final, cu_seqlens_q, segments, cu_segments)


# Cache ----------------------------------------------------------------------------------------------------------------


def commit(
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    accepted_rows: Tensor,
    num_accepted: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_table: Tensor | None = None,
) -> None:
    """Moves cache rows ``L + accepted_rows[i] - cu_seqlens_q[b]`` to ``L + i`` in every layer, then advances L."""
    for b, count in enumerate(num_accepted.tolist()):
        length, start = int(cache_seqlens[b]), int(cu_seqlens_q[b])
        rows = accepted_rows[start : start + count].tolist()
        source = cache_slots([length + row - start for row in rows], b, k_cache.shape[2], page_table)
        target = cache_slots(list(range(length, length + count)), b, k_cache.shape[2], page_table)
        for cache in (k_cache, v_cache):
            for layer in cache:
                layer[target] = layer[source]  # the right side is a copy
        cache_seqlens[b] += count


# Transformer ----------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    """Rotary embedding of ``[T, H, D]``: the halves of the first ``2 len(inv_freq)`` dimensions turn by the angles."""
    angles = (positions[:, None] * inv_freq.to(x.dtype))[:, None, :]
    cos, sin = scale * torch.cos(angles), scale * torch.sin(angles)
    half = inv_freq.numel()
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def hidden_states(
    tensors: Mapping[str, Tensor],
    config: StepConfig,
    tokens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``[T, E]``: what enters the head of ``multi_block_step`` for query tokens ``[T]``.

    There is no cache: committed tokens are the first tokens of a sequence's root segment. ``tensors`` and ``config``
    are those of :func:`jacobi_kernels.step_weights.pack_step_weights`.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ tensors[name + ".weight"].to(dtype).T
        return y + tensors[name + ".bias"].to(dtype) if name + ".bias" in tensors else y

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, tensors[name + ".weight"].to(dtype), config.norm_eps) if name + ".weight" in tensors else x

    layout = (cu_seqlens_q, segments, cu_segments)
    positions = torch.zeros(tokens.numel(), dtype=dtype)
    for seen in row_paths(segments, cu_segments):
        for row, path in seen.items():
            positions[row] = len(path) - 1
    x = tensors["model.embed_tokens.weight"].to(dtype)[tokens.long()]
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        h = norm(x, f"model.layers.{i}.input_layernorm")
        q, k, v = (linear(h, attention + p + "_proj").unflatten(-1, (-1, config.head_dim)) for p in "qkv")
        q, k = norm(q, attention + "q_norm"), norm(k, attention + "k_norm")
        if not config.use_rope or config.use_rope[i]:
            q, k = (rotate(t, positions, config.inv_freq, config.rope_scale) for t in (q, k))
        window = config.windows[i] if config.windows else -1
        scale = config.softmax_scale
        out, _ = multi_block_attention(q, k, v, *layout, softmax_scale=scale, window_size=window, dtype=dtype)
        x = x + linear(out.flatten(1), attention + "o_proj")
        h = norm(x, f"model.layers.{i}.post_attention_layernorm")
        x = x + linear(F.silu(linear(h, mlp + "gate_proj")) * linear(h, mlp + "up_proj"), mlp + "down_proj")
    return norm(x, "model.norm")
