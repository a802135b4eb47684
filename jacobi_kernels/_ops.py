"""Schemas and fake (meta) kernels of every ``torch.ops.jacobi`` op.

The ops exist as soon as this module is imported; backends only add implementations (``csrc/ops`` for CPUs).
Documented, typed functions that call the ops are in :mod:`jacobi_kernels.ops`.

Symbols: B sequences, T query rows, S segments, H heads, KVH key/value heads, D head_dim, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LANES = 16  # columns of one packed weight panel
GROUP = 32  # values of k that share a scale in an int8 or int4 weight
RECORD_BYTES = {"int8": 544, "int4": 320}  # of one panel and group

_LAYOUT = "Tensor cu_seqlens_q, Tensor segments, Tensor cu_segments"
_SAMPLING = (
    "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? seeds=None, "
    "Tensor({})? logits_scratch=None"
)

SCHEMAS = {
    "packed_linear": "(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    "activation": "(Tensor x, str kind) -> Tensor",
    "multi_block_attention": (
        f"(Tensor q, Tensor k, Tensor v, {_LAYOUT}, *, float? softmax_scale=None, int window_size=-1, "
        "float softcap=0.0) -> (Tensor out, Tensor softmax_lse)"
    ),
    "multi_block_attention_backward": (
        f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {_LAYOUT}, *, "
        "Tensor? grad_softmax_lse=None, float? softmax_scale=None, int window_size=-1, float softcap=0.0) -> "
        "(Tensor dq, Tensor dk, Tensor dv)"
    ),
    "multi_block_attention_with_kvcache": (
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, "
        f"{_LAYOUT}, *, Tensor? page_table=None, float? softmax_scale=None, int window_size=-1, "
        "float softcap=0.0) -> Tensor"
    ),
    "argmax_verify": (
        "(Tensor hidden, Tensor lm_head, Tensor? bias, int vocab_size, Tensor tokens, Tensor? num_final, "
        f"Tensor cache_seqlens, {_LAYOUT}, *, float logit_scale=1.0, float softcap=0.0, {_SAMPLING.format('a!')}) -> "
        "(Tensor predictions, Tensor accepted_rows, Tensor num_accepted, Tensor fixed_point)"
    ),
    "commit": (
        "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) cache_seqlens, Tensor accepted_rows, "
        "Tensor num_accepted, Tensor cu_seqlens_q, *, Tensor? page_table=None) -> ()"
    ),
    "redraft": (
        "(Tensor predictions, Tensor accepted_rows, Tensor num_accepted, Tensor fixed_point, Tensor(a!) tokens, "
        "Tensor(b!) segments, Tensor cu_seqlens_q, Tensor cu_segments, Tensor(c!) cache_seqlens, Tensor(d!) text, "
        "Tensor(e!) pool, Tensor(f!) state, Tensor stop_tokens, *, int block_size, int blocks, int candidates, "
        "float spawn_ratio=0.85) -> ()"
    ),
    "multi_block_step": (
        "(Tensor weights, Tensor descriptor, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) cache_seqlens, "
        "Tensor(d!) tokens, Tensor(e!) segments, Tensor cu_seqlens_q, Tensor cu_segments, Tensor(f!) text, "
        "Tensor(g!) pool, Tensor(h!) state, Tensor stop_tokens, Tensor(i!) workspace, *, int block_size, int blocks, "
        f"int candidates, float spawn_ratio=0.85, Tensor? page_table=None, {_SAMPLING.format('j!')}) -> ()"
    ),
    "consistency_loss": (
        "(Tensor hidden, Tensor lm_head, Tensor? bias, Tensor targets, Tensor teachers, *, float temperature=1.0, "
        "float logit_scale=1.0, float softcap=0.0) -> (Tensor nll, Tensor consistency, Tensor lse)"
    ),
    "consistency_loss_backward": (
        "(Tensor grad_nll, Tensor grad_consistency, Tensor hidden, Tensor lm_head, Tensor? bias, Tensor targets, "
        "Tensor teachers, Tensor lse, *, float temperature=1.0, float logit_scale=1.0, float softcap=0.0, "
        "bool hidden_grad=True, bool lm_head_grad=True) -> (Tensor d_hidden, Tensor d_lm_head, Tensor d_bias)"
    ),
    "step_workspace_size": "(Tensor descriptor, int rows, int batch, int num_segments) -> int",
    "_phase_seconds": "() -> Tensor",  # of multi_block_step since the last call
    "_cpu_isa": "(str name) -> str",  # '' asks, a name switches; raises when this CPU lacks the set
}

# The same as one CUDA launch, and its size of workspace: in _C_cuda.
SCHEMAS["_cooperative_step"] = SCHEMAS["multi_block_step"]
SCHEMAS["_cooperative_workspace_size"] = SCHEMAS["step_workspace_size"]

FLOATS = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh")

lib = torch.library.Library("jacobi", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    lib.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))


DIFFERENTIABLE = ("multi_block_attention", "consistency_loss")


def _refuse_grad(name: str) -> None:
    """An op without a backward says so instead of returning results cut off from the graph."""
    op = getattr(torch.ops.jacobi, name).default
    names = [a.name for a in op._schema.arguments]

    def below_autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for arg, value in [*zip(names, args, strict=False), *kwargs.items()]:
                if isinstance(value, Tensor) and value.requires_grad:
                    raise RuntimeError(f"{name}: {arg} requires grad but the op has no backward: use no_grad or detach")
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    lib.impl(name, below_autograd, "Autograd", with_keyset=True)


for _name in SCHEMAS:
    if not _name.startswith("_") and _name not in DIFFERENTIABLE:
        _refuse_grad(_name)


def _fake(name: str) -> Callable[[Callable[..., Any]], None]:
    """Register the fake kernel of an op; it first checks that all tensors live on one device (but a descriptor, which
    the host reads)."""
    names = [a.name for a in getattr(torch.ops.jacobi, name).default._schema.arguments]

    def register(kernel: Callable[..., Any]) -> None:
        def checked(*args: Any, **kwargs: Any) -> Any:
            tensors = [
                (arg, t) for arg, t in [*zip(names, args, strict=False), *kwargs.items()] if isinstance(t, Tensor)
            ]
            first, device = tensors[0][0], tensors[0][1].device
            for arg, t in tensors:
                if t.device != device and not (arg == "descriptor" and t.device.type == "cpu"):
                    raise RuntimeError(f"{name}: {arg} must be on {first}'s device {device}, got {t.device}")
            return kernel(*args, **kwargs)

        torch.library.register_fake(f"jacobi::{name}", checked, lib=lib)

    return register


def _shape(op: str, arg: str, t: Tensor, names: str, want: tuple[Any, ...]) -> None:
    """Check ``t.shape`` against ``want`` ('*' in ``want`` accepts any size)."""
    torch._check(
        t.dim() == len(want),
        lambda: f"{op}: {arg} must have shape {names} = [{', '.join(map(str, want))}], got {list(t.shape)}",
    )
    for size, expected in zip(t.shape, want, strict=True):
        if not isinstance(expected, str):
            torch._check(
                size == expected,
                lambda: f"{op}: {arg} must have shape {names} = [{', '.join(map(str, want))}], got {list(t.shape)}",
            )


def _dtype(op: str, arg: str, t: Tensor, *allowed: torch.dtype) -> None:
    torch._check(
        t.dtype in allowed,
        lambda: f"{op}: {arg} must be {' or '.join(str(d)[6:] for d in allowed)}, got {str(t.dtype)[6:]}",
    )


def _int32(op: str, arg: str, t: Tensor, names: str, want: tuple[Any, ...]) -> None:
    _dtype(op, arg, t, torch.int32)
    _shape(op, arg, t, names, want)


def _layout(op: str, cu_seqlens_q: Tensor, segments: Tensor, cu_segments: Tensor) -> Any:
    """Check the three layout tensors and return B."""
    _int32(op, "cu_seqlens_q", cu_seqlens_q, "[B+1]", ("*",))
    torch._check(cu_seqlens_q.shape[0] >= 1, lambda: f"{op}: cu_seqlens_q must have shape [B+1], got [0]")
    _int32(op, "segments", segments, "[S, 4]", ("*", 4))
    _int32(op, "cu_segments", cu_segments, "[B+1]", (cu_seqlens_q.shape[0],))
    return cu_seqlens_q.shape[0] - 1


def _qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    _dtype(op, "q", q, *FLOATS)
    _shape(op, "q", q, "[T, num_heads, head_dim]", ("*", "*", "*"))
    _shape(op, "k", k, "[T, num_kv_heads, head_dim]", (q.shape[0], "*", q.shape[2]))
    _shape(op, "v", v, "[T, num_kv_heads, head_dim]", (q.shape[0], k.shape[1], q.shape[2]))
    _dtype(op, "k", k, q.dtype)
    _dtype(op, "v", v, q.dtype)
    torch._check(
        q.shape[1] > 0 and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        lambda: (
            f"{op}: q's num_heads must be a positive multiple of k's num_kv_heads, got {q.shape[1]} and {k.shape[1]}"
        ),
    )


def _linear(op: str, arg: str, weight: Tensor, bias: Tensor | None, inner: Any, outer: Any, name: str) -> None:
    panels = (outer + LANES - 1) // LANES
    if weight.dtype == torch.uint8:
        groups, records = (inner + GROUP - 1) // GROUP, tuple(RECORD_BYTES.values())
        _shape(op, arg, weight, f"[ceil({name}/{LANES}), ceil(in_features/{GROUP}), record]", (panels, groups, "*"))
        torch._check(
            weight.shape[2] in records,
            lambda: f"{op}: {arg} of uint8 must hold records of 544 (int8) or 320 bytes (int4), got {weight.shape[2]}",
        )
    else:
        _dtype(op, arg, weight, *FLOATS)
        _shape(op, arg, weight, f"[ceil({name}/{LANES}), in_features, {LANES}]", (panels, inner, LANES))
    if bias is not None:
        _dtype(op, "bias", bias, *FLOATS)
        _shape(op, "bias", bias, f"[{name}]", (outer,))


def check_packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: Any) -> None:
    """Check shapes and dtypes of packed_linear."""
    _dtype("packed_linear", "x", x, *FLOATS)
    torch._check(x.dim() >= 1, lambda: "packed_linear: x must have shape [..., in_features], got []")
    _linear("packed_linear", "weight", weight, bias, x.shape[-1], out_features, "out_features")


@_fake("packed_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    check_packed_linear(x, weight, bias, out_features)
    return x.new_empty((*x.shape[:-1], out_features))


@_fake("activation")
def _(x: Tensor, kind: str) -> Tensor:
    _dtype("activation", "x", x, *FLOATS)
    torch._check(kind in ACTIVATIONS, lambda: f"activation: kind must be one of {', '.join(ACTIVATIONS)}, got '{kind}'")
    return x.new_empty(x.shape)


@_fake("multi_block_attention")
def _(
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
    _qkv("multi_block_attention", q, k, v)
    _layout("multi_block_attention", cu_seqlens_q, segments, cu_segments)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_fake("multi_block_attention_backward")
def _(
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
    op = "multi_block_attention_backward"
    _qkv(op, q, k, v)
    _layout(op, cu_seqlens_q, segments, cu_segments)
    for arg, t in (("grad_out", grad_out), ("out", out)):
        _dtype(op, arg, t, q.dtype)
        _shape(op, arg, t, "[T, num_heads, head_dim]", tuple(q.shape))
    for arg, lse in (("softmax_lse", softmax_lse), ("grad_softmax_lse", grad_softmax_lse)):
        if lse is not None:
            _dtype(op, arg, lse, torch.float32)
            _shape(op, arg, lse, "[num_heads, T]", (q.shape[1], q.shape[0]))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_attention_backward(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _attention_backward(ctx: Any, grad_out: Tensor | None, grad_softmax_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, *layout, out, softmax_lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
    if grad_softmax_lse is not None:
        grad_softmax_lse = grad_softmax_lse.contiguous()
    gradients = torch.ops.jacobi.multi_block_attention_backward.default(
        grad_out, q, k, v, out, softmax_lse, *layout, grad_softmax_lse=grad_softmax_lse, **ctx.options
    )
    return (*gradients, None, None, None)


torch.library.register_autograd(
    "jacobi::multi_block_attention", _attention_backward, setup_context=_keep_for_attention_backward, lib=lib
)


def check_cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    page_table: Tensor | None,
) -> None:
    """Check shapes and dtypes of multi_block_attention_with_kvcache."""
    op = "multi_block_attention_with_kvcache"
    _qkv(op, q, k, v)
    batch = _layout(op, cu_seqlens_q, segments, cu_segments)
    _int32(op, "cache_seqlens", cache_seqlens, "[B]", (batch,))
    heads, head_dim = k.shape[1], k.shape[2]
    if page_table is None:
        _shape(op, "k_cache", k_cache, "[B, capacity, num_kv_heads, head_dim]", (batch, "*", heads, head_dim))
    else:
        _shape(op, "k_cache", k_cache, "[num_pages, page_size, num_kv_heads, head_dim]", ("*", "*", heads, head_dim))
        _int32(op, "page_table", page_table, "[B, max_pages]", (batch, "*"))
        torch._check(k_cache.shape[1] >= 1, lambda: f"{op}: page_size must be at least 1, got 0")
    _shape(op, "v_cache", v_cache, "k_cache's shape", tuple(k_cache.shape))
    _dtype(op, "k_cache", k_cache, q.dtype)
    _dtype(op, "v_cache", v_cache, q.dtype)


@_fake("multi_block_attention_with_kvcache")
def _(
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
    check_cached_attention(q, k, v, k_cache, v_cache, cache_seqlens, cu_seqlens_q, segments, cu_segments, page_table)
    return q.new_empty(q.shape)


def _sampling(op: str, batch: Any, vocab: Any, args: tuple[Tensor | None, ...]) -> None:
    temperature, top_k, top_p, seeds, logits_scratch = args
    for arg, t, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("seeds", seeds, torch.int64),
    ):
        if t is not None:
            _dtype(op, arg, t, dtype)
            _shape(op, arg, t, "[B]", (batch,))
    if logits_scratch is not None:
        _dtype(op, "logits_scratch", logits_scratch, torch.float32)
        _shape(op, "logits_scratch", logits_scratch, "[rows, vocab_size]", ("*", vocab))


def check_argmax_verify(
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    vocab_size: Any,
    tokens: Tensor,
    num_final: Tensor | None,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    sampling: tuple[Tensor | None, ...],
) -> tuple[Any, Any]:
    """Check shapes and dtypes of argmax_verify and return (T, B); ``sampling``: its five tensors in order."""
    op = "argmax_verify"
    _dtype(op, "hidden", hidden, *FLOATS)
    _shape(op, "hidden", hidden, "[T, hidden_size]", ("*", "*"))
    _linear(op, "lm_head", lm_head, bias, hidden.shape[1], vocab_size, "vocab_size")
    rows, batch = hidden.shape[0], _layout(op, cu_seqlens_q, segments, cu_segments)
    _int32(op, "tokens", tokens, "[T]", (rows,))
    if num_final is not None:
        _int32(op, "num_final", num_final, "[B]", (batch,))
    _int32(op, "cache_seqlens", cache_seqlens, "[B]", (batch,))
    _sampling(op, batch, vocab_size, sampling)
    return rows, batch


@_fake("argmax_verify")
def _(
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
    sampling = (temperature, top_k, top_p, seeds, logits_scratch)
    rows, batch = check_argmax_verify(
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
        sampling,
    )
    return (
        tokens.new_empty((rows,)),
        tokens.new_empty((rows,)),
        tokens.new_empty((batch,)),
        tokens.new_empty((batch,), dtype=torch.bool),
    )


def _layer_caches(op: str, k_cache: Tensor, v_cache: Tensor, batch: Any, page_table: Tensor | None) -> None:
    _dtype(op, "k_cache", k_cache, *FLOATS)
    if page_table is None:
        _shape(op, "k_cache", k_cache, "[layers, B, capacity, num_kv_heads, head_dim]", ("*", batch, "*", "*", "*"))
    else:
        _shape(op, "k_cache", k_cache, "[layers, num_pages, page_size, num_kv_heads, head_dim]", ("*",) * 5)
        _int32(op, "page_table", page_table, "[B, max_pages]", (batch, "*"))
        torch._check(k_cache.shape[2] >= 1, lambda: f"{op}: page_size must be at least 1, got 0")
    _shape(op, "v_cache", v_cache, "k_cache's shape", tuple(k_cache.shape))
    _dtype(op, "v_cache", v_cache, k_cache.dtype)


@_fake("commit")
def _(
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    accepted_rows: Tensor,
    num_accepted: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_table: Tensor | None = None,
) -> None:
    _int32("commit", "cu_seqlens_q", cu_seqlens_q, "[B+1]", ("*",))
    batch = cu_seqlens_q.shape[0] - 1
    _layer_caches("commit", k_cache, v_cache, batch, page_table)
    _int32("commit", "cache_seqlens", cache_seqlens, "[B]", (batch,))
    _int32("commit", "accepted_rows", accepted_rows, "[T]", ("*",))
    _int32("commit", "num_accepted", num_accepted, "[B]", (batch,))


def _decode_state(op: str, batch: Any, tokens: Tensor, text: Tensor, pool: Tensor, state: Tensor, stop: Tensor) -> None:
    _int32(op, "tokens", tokens, "[T]", ("*",))
    _int32(op, "text", text, "[B, text_capacity]", (batch, "*"))
    _int32(op, "pool", pool, "[B, entries, 1+width]", (batch, "*", "*"))
    _int32(op, "state", state, "[B, 16]", (batch, 16))
    _int32(op, "stop_tokens", stop, "[B, stops]", (batch, "*"))


@_fake("redraft")
def _(
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
    batch = _layout("redraft", cu_seqlens_q, segments, cu_segments)
    _decode_state("redraft", batch, tokens, text, pool, state, stop_tokens)
    _int32("redraft", "predictions", predictions, "[T]", (tokens.shape[0],))
    _int32("redraft", "accepted_rows", accepted_rows, "[T]", (tokens.shape[0],))
    _int32("redraft", "num_accepted", num_accepted, "[B]", (batch,))
    _dtype("redraft", "fixed_point", fixed_point, torch.bool)
    _shape("redraft", "fixed_point", fixed_point, "[B]", (batch,))
    _int32("redraft", "cache_seqlens", cache_seqlens, "[B]", (batch,))


def check_multi_block_step(
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    tokens: Tensor,
    cu_seqlens_q: Tensor,
    segments: Tensor,
    cu_segments: Tensor,
    text: Tensor,
    pool: Tensor,
    state: Tensor,
    stop_tokens: Tensor,
    page_table: Tensor | None,
    sampling: tuple[Tensor | None, ...],
    vocab: Any = "*",
) -> None:
    """Check what shapes and dtypes say without the descriptor."""
    op = "multi_block_step"
    batch = _layout(op, cu_seqlens_q, segments, cu_segments)
    _layer_caches(op, k_cache, v_cache, batch, page_table)
    _int32(op, "cache_seqlens", cache_seqlens, "[B]", (batch,))
    _decode_state(op, batch, tokens, text, pool, state, stop_tokens)
    _sampling(op, batch, vocab, sampling)


@_fake("multi_block_step")
def _(
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
    sampling = (temperature, top_k, top_p, seeds, logits_scratch)
    layout = (cu_seqlens_q, segments, cu_segments)
    check_multi_block_step(
        k_cache, v_cache, cache_seqlens, tokens, *layout, text, pool, state, stop_tokens, page_table, sampling
    )


def _head_rows(op: str, hidden: Tensor, lm_head: Tensor, bias: Tensor | None, targets: Tensor, teachers: Tensor) -> Any:
    """Check what consistency_loss and its backward share and return R."""
    _dtype(op, "hidden", hidden, *FLOATS)
    _shape(op, "hidden", hidden, "[R, E]", ("*", "*"))
    _dtype(op, "lm_head", lm_head, *FLOATS)
    _shape(op, "lm_head", lm_head, "[V, E]", ("*", hidden.shape[1]))
    if bias is not None:
        _dtype(op, "bias", bias, *FLOATS)
        _shape(op, "bias", bias, "[V]", (lm_head.shape[0],))
    for arg, t in (("targets", targets), ("teachers", teachers)):
        _dtype(op, arg, t, torch.int64)
        _shape(op, arg, t, "[R]", (hidden.shape[0],))
    return hidden.shape[0]


@_fake("consistency_loss")
def _(
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
    rows = _head_rows("consistency_loss", hidden, lm_head, bias, targets, teachers)
    per_row = [hidden.new_empty(shape, dtype=torch.float32) for shape in ((rows,), (rows,), (2, rows))]
    return per_row[0], per_row[1], per_row[2]


@_fake("consistency_loss_backward")
def _(
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
    op = "consistency_loss_backward"
    rows = _head_rows(op, hidden, lm_head, bias, targets, teachers)
    per_row = (("grad_nll", grad_nll, "[R]", (rows,)), ("grad_consistency", grad_consistency, "[R]", (rows,)))
    for arg, t, names, want in (*per_row, ("lse", lse, "[2, R]", (2, rows))):
        _dtype(op, arg, t, torch.float32)
        _shape(op, arg, t, names, want)
    return (
        hidden.new_empty(hidden.shape if hidden_grad else (0,)),
        lm_head.new_empty(lm_head.shape if lm_head_grad else (0,)),
        hidden.new_empty((0,)) if bias is None else bias.new_empty(bias.shape),
    )


def _keep_for_loss_backward(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.options = keyword_only_inputs


def _loss_backward(ctx: Any, grad_nll: Tensor, grad_consistency: Tensor, _: Tensor) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad
    gradients = torch.ops.jacobi.consistency_loss_backward.default(
        grad_nll.contiguous(),
        grad_consistency.contiguous(),
        *ctx.saved_tensors,
        **ctx.options,
        hidden_grad=needed[0],
        lm_head_grad=needed[1],
    )
    return (*(g if wanted else None for g, wanted in zip(gradients, needed, strict=False)), None, None)


torch.library.register_autograd(
    "jacobi::consistency_loss", _loss_backward, setup_context=_keep_for_loss_backward, lib=lib
)
