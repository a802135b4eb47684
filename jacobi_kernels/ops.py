"""Typed, documented functions for every public ``torch.ops.jacobi`` op.

Each function calls the op of its name and adds nothing; :mod:`jacobi_kernels.reference` defines the results.

Symbols: B sequences, T query rows, S segments, H query heads, KVH key/value heads, D head_dim, E hidden size,
V vocabulary, K blocks of n = ``block_size`` tokens, C candidates, L = ``cache_seqlens[b]`` committed tokens.

Block layout (int32, contiguous), described in :mod:`jacobi_kernels.layout`:

* ``cu_seqlens_q [B+1]``: query rows of sequence b are ``cu_seqlens_q[b] .. cu_seqlens_q[b+1]-1``;
* ``segments [S, 4]``: (start, length, parent or -1, visible tokens of the parent);
* ``cu_segments [B+1]``: segments of sequence b.

A query token sees its *path*: the committed tokens of its sequence, the visible part of every ancestor segment, and
its own segment up to itself. Its position is the number of tokens on its path, less one. Rows that belong to no
segment are holes: they cost nothing.

Every op raises RuntimeError, before anything is written, when an argument has a wrong shape, dtype, device, stride or
value; the message names the op, the argument, what it got and what it expected. ``multi_block_attention`` and
``consistency_loss`` work under autograd; with gradients enabled every other op refuses an input that requires grad.
"""

from __future__ import annotations

import os
from importlib import import_module

import torch
from torch import Tensor

from jacobi_kernels import _ops as _ops  # defines torch.ops.jacobi

__all__ = [
    "activation",
    "argmax_verify",
    "commit",
    "consistency_loss",
    "consistency_loss_backward",
    "multi_block_attention",
    "multi_block_attention_backward",
    "multi_block_attention_with_kvcache",
    "multi_block_step",
    "packed_linear",
    "redraft",
    "step_workspace_size",
]

_jacobi = torch.ops.jacobi


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x @ W.T + bias``, where a row's result does not depend on the other rows.

    float32 accumulation by fused multiply-add, sequentially over ``in_features``, then the bias, then one rounding.

    Parameters
    ----------
    x : Tensor
        ``[..., in_features]`` float32 or bfloat16.
    weight : Tensor
        ``[ceil(out_features / 16), in_features, 16]`` float32 or bfloat16, from
        :func:`jacobi_kernels.packing.pack_weight`; or, on CPUs, uint8 ``[ceil(out_features / 16),
        ceil(in_features / 32), 544 (int8) or 320 (int4)]``, from :func:`jacobi_kernels.grouped.pack_grouped`: the bits
        are those of the dequantised matrix in float32.
    bias : Tensor or None
        ``[out_features]`` float32 or bfloat16.
    out_features : int
        Columns of the result.

    Returns
    -------
    Tensor
        ``[..., out_features]`` in ``x``'s dtype, contiguous.
    """
    return _jacobi.packed_linear.default(x, weight, bias, out_features)


def activation(x: Tensor, kind: str) -> Tensor:
    """An element-wise activation, computed in float32, whose result depends on the element alone.

    Parameters
    ----------
    x : Tensor
        Any shape, float32 or bfloat16.
    kind : str
        ``silu``, ``gelu`` (by erf), ``gelu_tanh``, ``quick_gelu`` (``x * sigmoid(1.702 x)``), ``relu``, ``relu2``
        (``relu(x)**2``), ``sigmoid`` or ``tanh``.

    Returns
    -------
    Tensor
        ``x``'s shape and dtype, contiguous.
    """
    return _jacobi.activation.default(x, kind)


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
) -> tuple[Tensor, Tensor]:
    """Attention of every query row over its path, without a cache (L = 0).

    Online softmax over tiles of 64 path positions in ascending order, float32 accumulation; a row's result depends on
    its path alone. Under autograd both results have gradients to q, k and v, once:
    :func:`multi_block_attention_backward` itself has no backward.

    Parameters
    ----------
    q : Tensor
        ``[T, H, D]`` float32 or bfloat16.
    k, v : Tensor
        ``[T, KVH, D]``, ``q``'s dtype; H is a multiple of KVH.
    cu_seqlens_q, segments, cu_segments : Tensor
        Block layout, see the module's docstring.
    softmax_scale : float, optional
        Factor of the scores, ``1 / sqrt(D)`` by default.
    window_size : int
        A query at position p sees positions ``p - window_size .. p`` (flash-attn's left window); -1: all.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)`` when > 0 (Gemma 2).

    Returns
    -------
    out : Tensor
        ``[T, H, D]`` in ``q``'s dtype; 0 in holes.
    softmax_lse : Tensor
        ``[H, T]`` float32, natural log of the sum of exponentials of the scores; -inf in holes.
    """
    return _jacobi.multi_block_attention.default(
        q,
        k,
        v,
        cu_seqlens_q,
        segments,
        cu_segments,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
    )


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`multi_block_attention`, as autograd asks for them.

    Scores are recomputed from ``softmax_lse``; float32 accumulation in a fixed order, so the bits do not depend on the
    number of threads. Threads share work by sequence and key/value head. Memory is that of the rows: about five rows of
    ``k`` in float32 per row of a sequence and thread (segments are padded to a multiple of 16 rows).

    Parameters
    ----------
    grad_out : Tensor
        ``[T, H, D]`` in ``q``'s dtype, the gradient of ``out``; not read in holes.
    q, k, v, cu_seqlens_q, segments, cu_segments, softmax_scale, window_size, softcap
        What the forward got.
    out, softmax_lse : Tensor
        What the forward returned.
    grad_softmax_lse : Tensor, optional
        ``[H, T]`` float32, the gradient of ``softmax_lse``; not read in holes.

    Returns
    -------
    dq, dk, dv : Tensor
        Shapes and dtype of ``q``, ``k``, ``v``, contiguous; 0 in holes.
    """
    return _jacobi.multi_block_attention_backward.default(
        grad_out,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        segments,
        cu_segments,
        grad_softmax_lse=grad_softmax_lse,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
    )


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
    """Append keys and values to the cache, then attend over committed tokens and paths.

    Row i of sequence b (counted from ``cu_seqlens_q[b]``) is written at cache row ``L + i``; :func:`commit` keeps what
    was accepted. ``cache_seqlens`` is not changed. Bits are those of one token at a time, and of any page size.

    Parameters
    ----------
    q, k, v : Tensor
        As in :func:`multi_block_attention`.
    k_cache, v_cache : Tensor
        Mutated. ``[B, capacity, KVH, D]``, or with ``page_table`` ``[num_pages, page_size, KVH, D]``; ``q``'s dtype;
        the last two dimensions dense, the others may be strided. Room for L plus the sequence's query rows.
    cache_seqlens : Tensor
        ``[B]`` int32, committed tokens L.
    cu_seqlens_q, segments, cu_segments : Tensor
        Block layout, see the module's docstring.
    page_table : Tensor, optional
        ``[B, max_pages]`` int32: cache row r of b is row ``r % page_size`` of page ``page_table[b, r // page_size]``.
    softmax_scale, window_size, softcap
        As in :func:`multi_block_attention`.

    Returns
    -------
    Tensor
        ``[T, H, D]`` in ``q``'s dtype; 0 in holes.
    """
    return _jacobi.multi_block_attention_with_kvcache.default(
        q,
        k,
        v,
        k_cache,
        v_cache,
        cache_seqlens,
        cu_seqlens_q,
        segments,
        cu_segments,
        page_table=page_table,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
    )


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
    """Predict the token after every query row and find the longest accepted path, without writing logits.

    ``logit = softcap(logit_scale * (hidden . lm_head + bias))``. Greedy: the largest logit, ties to the lowest id, NaN
    counts as largest. Sampling: ``z = logit / temperature``; top-k keeps ``z >= k-th largest``; top-p keeps, of these
    by falling z (ties by id), every token before which the mass is below top_p; the sample is the argmax of
    ``z + gumbel`` with noise from (seed, position of the predicted token, id), see
    :func:`jacobi_kernels.reference.gumbel_noise`.

    On a path a token is accepted if it is one of the first ``num_final`` tokens of a root segment, or if its
    predecessor is accepted and predicts it. The longest accepted path wins, ties go to the lowest segment.

    Parameters
    ----------
    hidden : Tensor
        ``[T, E]`` float32 or bfloat16, after the final norm.
    lm_head : Tensor
        ``[ceil(V / 16), E, 16]`` float32 or bfloat16, packed; or int8 or int4 as in :func:`packed_linear`.
    bias : Tensor or None
        ``[V]`` float32 or bfloat16.
    vocab_size : int
        V.
    tokens : Tensor
        ``[T]`` int32: the query tokens.
    num_final : Tensor or None
        ``[B]`` int32: leading root tokens that need no verification (a prompt chunk); None: 1 each.
    cache_seqlens : Tensor
        ``[B]`` int32, committed tokens L (positions of the noise).
    cu_seqlens_q, segments, cu_segments : Tensor
        Block layout, see the module's docstring.
    logit_scale, softcap : float
        See above; softcap 0 is off.
    temperature : Tensor, optional
        ``[B]`` float32; 0 is greedy. None: all greedy.
    top_k : Tensor, optional
        ``[B]`` int32; 0 is off.
    top_p : Tensor, optional
        ``[B]`` float32; 1 is off.
    seeds : Tensor, optional
        ``[B]`` int64, see :func:`jacobi_kernels.sampling.row_seeds`; needed when a temperature is above 0.
    logits_scratch : Tensor, optional
        ``[R, V]`` float32, 2 <= R <= 16, mutated; needed when a row that samples uses top-k or top-p.

    Returns
    -------
    predictions : Tensor
        ``[T]`` int32; -1 in holes and on rows whose successor is final.
    accepted_rows : Tensor
        ``[T]`` int32: from index ``cu_seqlens_q[b]`` on the absolute rows of b's accepted path, then -1.
    num_accepted : Tensor
        ``[B]`` int32: their number.
    fixed_point : Tensor
        ``[B]`` bool: the whole first segment was accepted.
    """
    return _jacobi.argmax_verify.default(
        hidden,
        lm_head,
        bias,
        vocab_size,
        tokens,
        num_final,
        cache_seqlens,
        cu_seqlens_q,
        segments,
        cu_segments,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=seeds,
        logits_scratch=logits_scratch,
    )


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
    """Move the accepted path's keys and values to their committed places and advance the lengths.

    Cache row ``L + accepted_rows[i] - cu_seqlens_q[b]`` moves to ``L + i``, in all layers (nothing moves when the main
    chain won); then ``cache_seqlens[b] += num_accepted[b]``.

    Parameters
    ----------
    k_cache, v_cache : Tensor
        Mutated. ``[layers, B, capacity, KVH, D]``, or with ``page_table`` ``[layers, num_pages, page_size, KVH, D]``.
    cache_seqlens : Tensor
        ``[B]`` int32, mutated.
    accepted_rows, num_accepted : Tensor
        ``[T]`` and ``[B]`` int32, from :func:`argmax_verify`.
    cu_seqlens_q : Tensor
        ``[B+1]`` int32.
    page_table : Tensor, optional
        ``[B, max_pages]`` int32.
    """
    _jacobi.commit.default(
        k_cache, v_cache, cache_seqlens, accepted_rows, num_accepted, cu_seqlens_q, page_table=page_table
    )


def redraft(
    predictions: Tensor,
    accepted_rows: Tensor,
    num_accepted: Tensor,
    fixed_point: Tensor,
    tokens: Tensor,
    segments: Tensor,
    cu_seqlens_q: Tensor,
    cu_segments: Tensor,
    cache_seqlens: Tensor,
    text: Tensor,
    pool: Tensor,
    state: Tensor,
    stop_tokens: Tensor,
    *,
    block_size: int,
    blocks: int,
    candidates: int,
    spawn_ratio: float = 0.85,
) -> None:
    """Emit the tokens that became final, feed the pool, and lay out the next step's chain and candidates.

    :class:`jacobi_kernels.state.DecodeState` allocates the mutated tensors and says what they hold.

    Parameters
    ----------
    predictions, accepted_rows, num_accepted, fixed_point : Tensor
        From :func:`argmax_verify`; ``num_accepted`` 0 lays out a sequence that has not run yet.
    tokens : Tensor
        ``[T]`` int32, mutated: the query tokens.
    segments : Tensor
        ``[S, 4]`` int32, mutated: lengths of the main chain and of the candidates.
    cu_seqlens_q, cu_segments : Tensor
        ``[B+1]`` int32, fixed.
    cache_seqlens : Tensor
        ``[B]`` int32, already advanced by :func:`commit`; mutated: cut at the end of the text when a sequence is done.
    text : Tensor
        ``[B, text_capacity]`` int32, mutated: every final token.
    pool : Tensor
        ``[B, R, 1 + width]`` int32, mutated: ring of (length, tokens...).
    state : Tensor
        ``[B, 16]`` int32, mutated: columns of :class:`jacobi_kernels.state.StateColumn`.
    stop_tokens : Tensor
        ``[B, stops]`` int32, padded with -1.
    block_size, blocks, candidates : int
        n, K and C.
    spawn_ratio : float
        Share of unchanged tokens at which one more block becomes active.
    """
    _jacobi.redraft.default(
        predictions,
        accepted_rows,
        num_accepted,
        fixed_point,
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
    """One whole decoding step of a decoder-only transformer in one call, nothing read back by the host inside.

    Embedding, every layer, final norm, then the rules of :func:`argmax_verify`, :func:`commit` and :func:`redraft`.

    Parameters
    ----------
    weights, descriptor, workspace : Tensor
        The packed model (int8 and int4 on CPUs only), its description and scratch memory, from
        :mod:`jacobi_kernels.step_weights`.
    k_cache, v_cache, page_table
        As in :func:`commit`.
    cache_seqlens, tokens, segments, cu_seqlens_q, cu_segments, text, pool, state, stop_tokens : Tensor
        As in :func:`redraft`.
    block_size, blocks, candidates, spawn_ratio
        As in :func:`redraft`.
    temperature, top_k, top_p, seeds, logits_scratch : Tensor, optional
        As in :func:`argmax_verify`.
    """
    _jacobi.multi_block_step.default(
        weights,
        descriptor,
        k_cache,
        v_cache,
        cache_seqlens,
        tokens,
        segments,
        cu_seqlens_q,
        cu_segments,
        text,
        pool,
        state,
        stop_tokens,
        workspace,
        block_size=block_size,
        blocks=blocks,
        candidates=candidates,
        spawn_ratio=spawn_ratio,
        page_table=page_table,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=seeds,
        logits_scratch=logits_scratch,
    )


def step_workspace_size(
    descriptor: Tensor, rows: int, batch: int, num_segments: int, *, device: torch.device | str = "cpu"
) -> int:
    """Bytes of workspace that :func:`multi_block_step` needs, on CPUs with as many threads as torch has now.

    Parameters
    ----------
    descriptor : Tensor
        ``[words]`` int64, from :func:`jacobi_kernels.step_weights.pack_step_weights`.
    rows, batch, num_segments : int
        T, B and S: the sizes of ``tokens``, ``cache_seqlens`` and ``segments``.
    device : torch.device or str
        Where the step runs.

    Returns
    -------
    int
        The least size of a uint8 tensor.
    """
    interpreted = os.environ.get("JACOBI_BACKEND") == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if torch.device(device).type == "cuda" or interpreted:
        step = import_module("jacobi_kernels.triton.multi_block_step")
        return int(step.step_workspace_size(descriptor, rows, batch, num_segments))
    return int(_jacobi.step_workspace_size.default(descriptor, rows, batch, num_segments))


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
) -> tuple[Tensor, Tensor]:
    """The two losses of training, per row, straight from hidden states: no ``[R, V]`` array exists at any time.

    With ``z[r] = softcap(logit_scale * (lm_head @ hidden[r] + bias))`` and T the temperature::

        nll[r]         = -log softmax(z[r])[targets[r]]
        consistency[r] = -sum over v of softmax(z[teachers[r]] / T)[v] * log softmax(z[r] / T)[v]

    Under autograd both have gradients to hidden, lm_head and bias, once; none flows into the teacher, as if its row
    were detached. (At temperature T the gradient of ``consistency`` is about 1/T^2 of that at 1.) Logits are computed
    256 tokens at a time for the rows that have a target or a teacher or are one, the others cost nothing; the backward
    computes them again. float32 accumulation in a fixed order: bits do not depend on threads, nor a row's losses on
    other rows than its teacher. Scratch in floats: about ``R * (E + 600)``, in the backward ``R * (3 E + 800)``, and up
    to ``1024 E``.

    Parameters
    ----------
    hidden : Tensor
        ``[R, E]`` float32 or bfloat16, after the final norm.
    lm_head : Tensor
        ``[V, E]`` float32 or bfloat16, contiguous: the plain parameter, which may be tied to the embedding.
    bias : Tensor or None
        ``[V]`` float32 or bfloat16, contiguous.
    targets : Tensor
        ``[R]`` int64, contiguous: token that the row should predict, -1 for none.
    teachers : Tensor
        ``[R]`` int64, contiguous: row of ``hidden`` whose distribution the row should predict, -1 for none. A teacher
        may have a target and a teacher of its own.
    temperature : float
        T, above 0; ``nll`` does not use it.
    logit_scale, softcap : float
        See above; ``softcap(z) = softcap * tanh(z / softcap)``, 0 is off.

    Returns
    -------
    nll, consistency : Tensor
        ``[R]`` float32; 0 where a row has no target, or no teacher.
    """
    nll, consistency, _ = _jacobi.consistency_loss.default(
        hidden,
        lm_head,
        bias,
        targets,
        teachers,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
    )
    return nll, consistency


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
    """Gradients of :func:`consistency_loss`, as autograd asks for them.

    Parameters
    ----------
    grad_nll, grad_consistency : Tensor
        ``[R]`` float32, contiguous: gradients of the results.
    hidden, lm_head, bias, targets, teachers, temperature, logit_scale, softcap
        What the forward got.
    lse : Tensor
        ``[2, R]`` float32, third result of ``torch.ops.jacobi.consistency_loss``: log-sum-exp of the logits, and of the
        logits over the temperature, where a loss of the row or of its students needs them.
    hidden_grad, lm_head_grad : bool
        False leaves that gradient out, with its product.

    Returns
    -------
    d_hidden, d_lm_head, d_bias : Tensor
        Shapes and dtypes of ``hidden``, ``lm_head`` and ``bias``, contiguous; ``[0]`` for what was left out.
    """
    return _jacobi.consistency_loss_backward.default(
        grad_nll,
        grad_consistency,
        hidden,
        lm_head,
        bias,
        targets,
        teachers,
        lse,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        hidden_grad=hidden_grad,
        lm_head_grad=lm_head_grad,
    )
