"""How the ops stand in torch: schemas, fakes, torch.compile, refusals and error messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import jacobi_kernels
from jacobi_kernels import StepConfig, ops, pack_step_weights
from jacobi_kernels._ops import SCHEMAS
from jacobi_kernels.grouped import pack_grouped
from jacobi_kernels.state import DecodeState
from tests.kernels.helpers import (
    assert_equal,
    chain_with_candidates,
    chains,
    int32,
    make_cache,
    make_layout,
    random_grouped,
    random_linear,
    random_tensor,
)

FLOATS = [torch.float32, torch.bfloat16]


class Call(NamedTuple):
    """Arguments of an op by name: positional ones first."""

    op: str
    args: dict[str, Any]
    options: dict[str, Any]

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.jacobi, self.op).default

    def run(self, **changed: Any) -> Any:
        args = {name: changed.pop(name, value) for name, value in self.args.items()}
        return self.overload(*args.values(), **{**self.options, **changed})

    def fresh(self) -> Call:
        """A copy that may be mutated."""

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value._base is None:
                return value.clone()
            return value._base.clone().as_strided(value.size(), value.stride(), value.storage_offset())

        args, options = ({n: copied(v) for n, v in values.items()} for values in (self.args, self.options))
        return Call(self.op, args, options)


def arguments(op: str, *values: Any, **options: Any) -> Call:
    names = [a.name for a in getattr(torch.ops.jacobi, op).default._schema.arguments if not a.kwarg_only]
    return Call(op, dict(zip(names, values, strict=True)), options)


def attention_call(dtype: torch.dtype) -> Call:
    layout = chain_with_candidates(4, 1, 3, gap=1)
    q, k, v = (random_tensor(i, layout.rows, h, 32, dtype=dtype) for i, h in ((1, 4), (2, 2), (3, 2)))
    return arguments("multi_block_attention", q, k, v, *layout, window_size=5, softcap=3.0)


def attention_backward_call(dtype: torch.dtype) -> Call:
    call = attention_call(dtype)
    q, k, v, *layout = call.args.values()
    out, lse = call.run()
    return arguments("multi_block_attention_backward", out, q, k, v, out, lse, *layout, **call.options)


def cached_attention_call(dtype: torch.dtype, page_size: int | None = None) -> Call:
    plain, lengths = attention_call(dtype), [6]
    cache = make_cache(4, lengths, 8, 2, 32, dtype, page_size)
    q, k, v, *layout = plain.args.values()
    values = (q, k, v, cache.k.nan_to_num(), cache.v.nan_to_num(), cache.lengths, *layout)
    return arguments("multi_block_attention_with_kvcache", *values, page_table=cache.page_table, softmax_scale=0.2)


def cached_attention_of_views_call(dtype: torch.dtype) -> Call:
    """q, k and v are slices of one projection, the caches one layer of a larger tensor."""
    call = cached_attention_call(dtype)
    fused = torch.cat([call.args[name] for name in "qkv"], 1)
    caches = torch.stack([call.args["k_cache"], call.args["v_cache"]], 2)
    views = {"q": fused[:, :4], "k": fused[:, 4:6], "v": fused[:, 6:]}
    views |= {"k_cache": caches[:, :, 0], "v_cache": caches[:, :, 1]}
    return call._replace(args={name: views.get(name, value) for name, value in call.args.items()})


def verify_call(dtype: torch.dtype, sampling: bool = False) -> Call:
    layout = chain_with_candidates(4, 1, 3)
    options = {
        "temperature": torch.tensor([0.7]),
        "top_k": int32(5),
        "top_p": torch.tensor([0.9]),
        "seeds": torch.tensor([3]),
        "logits_scratch": torch.zeros(4, 40),
    }
    hidden, head = random_tensor(5, layout.rows, 16, dtype=dtype), random_linear(6, 40, 16, dtype)
    tokens = torch.arange(layout.rows, dtype=torch.int32)
    values = (hidden, head, None, 40, tokens, int32(1), int32(6), *layout)
    return arguments("argmax_verify", *values, **(options if sampling else {}))


def grouped_verify_call(dtype: torch.dtype) -> Call:
    call = verify_call(dtype)
    return call._replace(args=call.args | {"lm_head": pack_grouped(random_grouped(6, 40, 16, "int8"))})


def commit_call(dtype: torch.dtype, page_size: int | None = None) -> Call:
    cache = make_cache(7, [6], 8, 2, 8, dtype, page_size)
    k = torch.stack([cache.k, cache.k]).nan_to_num(1.0)
    rows, count = int32(0, 4, 5, -1, -1, -1, -1), int32(3)
    return arguments("commit", k, 2 * k, int32(6), rows, count, int32(0, 7), page_table=cache.page_table)


def decode_state() -> DecodeState:
    return DecodeState.allocate(
        [[1, 2, 3, 1, 2, 3, 1], [4, 5]], max_new_tokens=9, block_size=4, blocks=2, candidates=1, pool_rows=3
    )


DRAFT = {"block_size": 4, "blocks": 2, "candidates": 1}


def redraft_call() -> Call:
    state = decode_state()
    rows = state.tokens.numel()
    predictions, accepted = torch.full((rows,), 2, dtype=torch.int32), torch.full((rows,), -1, dtype=torch.int32)
    starts, counts = state.cu_seqlens_q[:-1].tolist(), state.num_final
    for start, count in zip(starts, counts.tolist(), strict=True):
        accepted[start : start + count] = torch.arange(start, start + count, dtype=torch.int32)
    state.cache_seqlens += counts
    values = (predictions, accepted, counts, torch.tensor([True, True]), state.tokens, state.segments)
    values += (state.cu_seqlens_q, state.cu_segments, state.cache_seqlens, state.text, state.pool, state.state)
    return arguments("redraft", *values, state.stop_tokens, **DRAFT)


def step_call(dtype: torch.dtype, form: str | None = None) -> Call:
    config = StepConfig(
        num_layers=1,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        vocab_size=20,
        inv_freq=torch.tensor([1.0, 0.1, 0.01, 0.001]),
    )
    shapes = {
        "model.embed_tokens": (20, 16),
        "model.norm": (16,),
        "model.layers.0.input_layernorm": (16,),
        "model.layers.0.post_attention_layernorm": (16,),
        "model.layers.0.self_attn.q_proj": (16, 16),
        "model.layers.0.self_attn.k_proj": (8, 16),
        "model.layers.0.self_attn.v_proj": (8, 16),
        "model.layers.0.self_attn.o_proj": (16, 16),
        "model.layers.0.mlp.gate_proj": (24, 16),
        "model.layers.0.mlp.up_proj": (24, 16),
        "model.layers.0.mlp.down_proj": (16, 24),
    }
    tensors = {name + ".weight": random_tensor(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    weights, state = pack_step_weights(tensors, config, form or dtype), decode_state()
    caches = weights.allocate_cache(2, state.cache_capacity)
    values = (weights.blob, weights.descriptor, *caches, state.cache_seqlens, state.tokens, state.segments)
    values += (state.cu_seqlens_q, state.cu_segments, state.text, state.pool, state.state, state.stop_tokens)
    size = ops.step_workspace_size(weights.descriptor, state.tokens.numel(), state.batch, state.segments.shape[0])
    return arguments("multi_block_step", *values, torch.zeros(size, dtype=torch.uint8), **DRAFT)


def linear_call(dtype: torch.dtype) -> Call:
    bias = random_tensor(8, 21, dtype=dtype)
    return arguments("packed_linear", random_tensor(9, 2, 3, 24, dtype=dtype), random_linear(10, 21, 24), bias, 21)


def grouped_linear_call(dtype: torch.dtype, form: str) -> Call:
    call = linear_call(dtype)
    return call._replace(args=call.args | {"weight": pack_grouped(random_grouped(10, 21, 24, form))})


def loss_call(dtype: torch.dtype) -> Call:
    hidden, head, bias = (
        random_tensor(i, *shape, dtype=dtype) for i, shape in ((12, (5, 8)), (13, (40, 8)), (14, (40,)))
    )
    targets, teachers = torch.tensor([3, -1, -1, 39, -1]), torch.tensor([-1, 0, 4, 1, -1])
    return arguments("consistency_loss", hidden, head, bias, targets, teachers, temperature=0.7, softcap=3.0)


def loss_backward_call(dtype: torch.dtype) -> Call:
    call = loss_call(dtype)
    values = (torch.ones(5), torch.ones(5), *call.args.values(), call.run()[2])
    return arguments("consistency_loss_backward", *values, **call.options)


CALLS: dict[str, Callable[[torch.dtype], Call]] = {
    "packed_linear": linear_call,
    "packed_linear_without_rows": lambda d: linear_call(d)._replace(
        args={"x": torch.empty(0, 8, dtype=d), "weight": random_linear(1, 5, 8), "bias": None, "out_features": 5}
    ),
    "packed_linear_int8": lambda d: grouped_linear_call(d, "int8"),
    "packed_linear_int4": lambda d: grouped_linear_call(d, "int4"),
    "activation": lambda d: arguments("activation", random_tensor(11, 5, 7, dtype=d), "gelu"),
    "activation_of_a_transposed_view": lambda d: arguments("activation", random_tensor(11, 5, 7, dtype=d).T, "silu"),
    "activation_of_nothing": lambda d: arguments("activation", torch.empty(0, 3, dtype=d), "tanh"),
    "multi_block_attention": attention_call,
    "multi_block_attention_without_rows": lambda d: arguments(
        "multi_block_attention", *(torch.empty(0, h, 16, dtype=d) for h in (4, 2, 2)), *make_layout([[]])
    ),
    "multi_block_attention_backward": attention_backward_call,
    "cached_attention": cached_attention_call,
    "cached_attention_of_views": cached_attention_of_views_call,
    "cached_attention_in_pages": lambda d: cached_attention_call(d, 4),
    "argmax_verify": verify_call,
    "argmax_verify_int8": grouped_verify_call,
    "argmax_verify_sampling": lambda d: verify_call(d, sampling=True),
    "commit": commit_call,
    "commit_in_pages": lambda d: commit_call(d, 4),
    "redraft": lambda d: redraft_call(),
    "consistency_loss": loss_call,
    "consistency_loss_backward": loss_backward_call,
    "multi_block_step": step_call,
    "multi_block_step_int4": lambda d: step_call(d, "int4"),
}


def test_every_op_is_called_here() -> None:
    called = {make(torch.float32).op for make in CALLS.values()}
    public = {op for op in SCHEMAS if not op.startswith("_")}
    assert called == public - {"step_workspace_size"}  # which takes and gives no data


def test_schemas_declare_what_changes() -> None:
    mutated = {
        op: {a.name for a in getattr(torch.ops.jacobi, op).default._schema.arguments if a.alias_info is not None}
        for op in SCHEMAS
    }
    drafted = {"tokens", "segments", "cache_seqlens", "text", "pool", "state"}
    assert mutated["multi_block_attention_with_kvcache"] == {"k_cache", "v_cache"}
    assert mutated["argmax_verify"] == {"logits_scratch"}
    assert mutated["commit"] == {"k_cache", "v_cache", "cache_seqlens"}
    assert mutated["redraft"] == drafted
    assert mutated["multi_block_step"] == drafted | {"k_cache", "v_cache", "workspace", "logits_scratch"}
    assert not mutated["packed_linear"] | mutated["activation"]
    assert not mutated["multi_block_attention"] | mutated["multi_block_attention_backward"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    call = CALLS[name](dtype)
    torch.library.opcheck(call.overload, tuple(call.args.values()), call.options)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_graph_breaks(name: str) -> None:
    call = CALLS[name](torch.float32)
    eager, compiled = call.fresh(), call.fresh()
    expected = eager.run()
    torch.compiler.reset()
    # The closure holds no tensors: all of them are inputs of the compiled function.
    function = torch.compile(lambda args, options: call.overload(*args, **options), fullgraph=True, backend="aot_eager")
    result = function(tuple(compiled.args.values()), compiled.options)
    assert (result is None) == (expected is None)
    if expected is not None:
        assert_equal(result, expected)
    for before, after in ((eager.args, compiled.args), (eager.options, compiled.options)):
        for key, value in before.items():
            if isinstance(value, Tensor) and key != "workspace":
                assert_equal(after[key], value, f"{key} as changed by the compiled function")


def test_inductor_with_dynamic_rows() -> None:
    weight, head = random_linear(1, 24, 24), random_linear(2, 40, 24)

    def model(x: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *layout: Tensor) -> tuple[Tensor, Tensor]:
        q = ops.activation(ops.packed_linear(x, weight, None, 24), "silu").view(-1, 3, 8)
        out = ops.multi_block_attention_with_kvcache(q, q, q, k, v, lengths, *layout).flatten(1)
        tokens = torch.zeros(x.shape[0], dtype=torch.int32)
        return out + x, ops.argmax_verify(out + x, head, None, 40, tokens, None, lengths, *layout)[0]

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (4, 7):
        x, cache = random_tensor(3, rows, 24), make_cache(4, [5], rows, 3, 8)
        twin = cache.clone()
        expected = model(x, cache.k, cache.v, cache.lengths, *chains(rows))
        assert_equal(compiled(x, twin.k, twin.v, twin.lengths, *chains(rows)), expected, f"{rows} rows")
        assert_equal((twin.k, twin.v), (cache.k, cache.v), f"caches after {rows} rows")


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("packed_linear", "x"),
        ("packed_linear", "weight"),
        ("activation", "x"),
        ("multi_block_attention_backward", "grad_out"),
        ("cached_attention", "q"),
        ("cached_attention", "k_cache"),
        ("argmax_verify", "hidden"),
        ("commit", "v_cache"),
        ("multi_block_step", "k_cache"),
        ("consistency_loss_backward", "grad_nll"),
    ],
)
def test_requires_grad_is_refused(name: str, argument: str) -> None:
    call = CALLS[name](torch.float32).fresh()
    call.args[argument].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{call.op}: {argument} requires grad"):
        call.run()
    with torch.no_grad():
        call.run()


def test_optional_arguments_that_require_grad_are_refused() -> None:
    call = verify_call(torch.float32, sampling=True)
    call.options["temperature"].requires_grad_()
    with pytest.raises(RuntimeError, match="argmax_verify: temperature requires grad"):
        call.run()


REFUSALS: list[tuple[str, str, Any, str]] = [
    ("packed_linear", "x", torch.zeros(2, 23), r"weight must have shape .* = \[2, 23, 16\], got \[2, 24, 16\]"),
    ("packed_linear", "x", torch.zeros(2, 24).half(), "x must be float32 or bfloat16, got float16"),
    (
        "packed_linear",
        "weight",
        torch.zeros(3, 24, 16),
        r"weight must have shape .* = \[2, 24, 16\], got \[3, 24, 16\]",
    ),
    (
        "packed_linear",
        "weight",
        torch.zeros(2, 1, 500, dtype=torch.uint8),
        r"weight of uint8 must hold records of 544",
    ),
    (
        "packed_linear",
        "weight",
        torch.zeros(2, 2, 544, dtype=torch.uint8),
        r"weight must have shape .* = \[2, 1, \*\], got \[2, 2, 544\]",
    ),
    ("packed_linear", "bias", torch.zeros(20), r"bias must have shape \[out_features\] = \[21\], got \[20\]"),
    ("activation", "kind", "swish", "kind must be one of silu, .*, got 'swish'"),
    ("activation", "x", torch.zeros(3).double(), "x must be float32 or bfloat16, got float64"),
    ("multi_block_attention", "k", torch.zeros(8, 3, 16), r"k must have shape .* = \[8, \*, 32\], got \[8, 3, 16\]"),
    ("multi_block_attention", "k", torch.zeros(8, 3, 32), r"v must have shape .* = \[8, 3, 32\], got \[8, 2, 32\]"),
    ("multi_block_attention", "v", torch.zeros(8, 2, 32).bfloat16(), "v must be float32, got bfloat16"),
    ("multi_block_attention", "q", torch.zeros(8, 64), r"q must have shape \[T, num_heads, head_dim\]"),
    ("multi_block_attention", "cu_seqlens_q", torch.tensor([0, 8]), "cu_seqlens_q must be int32, got int64"),
    ("multi_block_attention", "segments", int32(0, 8, -1, 0), r"segments must have shape \[num_segments, 4\]"),
    ("multi_block_attention", "cu_segments", int32(0), r"cu_segments must have shape .* = \[2\], got \[1\]"),
    ("cached_attention", "k_cache", torch.zeros(2, 14, 2, 32), r"k_cache must have shape .* = \[1, \*, 2, 32\]"),
    ("cached_attention", "v_cache", torch.zeros(1, 13, 2, 32), r"v_cache must have shape"),
    ("cached_attention", "k_cache", torch.zeros(1, 14, 2, 32).bfloat16(), "k_cache must be float32, got bfloat16"),
    ("cached_attention", "cache_seqlens", int32(7), r"k_cache must have room for cache_seqlens\[0\]"),
    ("cached_attention", "cache_seqlens", int32(-1), r"cache_seqlens\[0\] must be at least 0, got -1"),
    ("cached_attention_in_pages", "page_table", int32(0, 1, 2, 5)[None], r"page_table\[0, 3\] must be within 0\.\.4"),
    ("argmax_verify", "hidden", torch.zeros(7, 15), r"lm_head must have shape .* = \[3, 15, 16\], got \[3, 16, 16\]"),
    ("argmax_verify", "vocab_size", 50, r"lm_head must have shape .* = \[4, 16, 16\], got \[3, 16, 16\]"),
    (
        "argmax_verify",
        "lm_head",
        torch.zeros(3, 1, 100, dtype=torch.uint8),
        "lm_head of uint8 must hold records of 544",
    ),
    (
        "argmax_verify",
        "lm_head",
        torch.zeros(3, 2, 320, dtype=torch.uint8),
        r"lm_head must have shape .* = \[3, 1, \*\], got \[3, 2, 320\]",
    ),
    ("argmax_verify", "tokens", int32(1, 2), r"tokens must have shape \[T\] = \[7\], got \[2\]"),
    ("argmax_verify", "num_final", int32(1, 2), r"num_final must have shape .* = \[1\], got \[2\]"),
    ("argmax_verify_sampling", "temperature", torch.tensor([-1.0]), r"temperature\[0\] must be"),
    ("argmax_verify_sampling", "top_p", torch.tensor([0.0]), r"top_p\[0\] must be above 0 and at most 1"),
    ("argmax_verify_sampling", "top_k", int32(-1), r"top_k\[0\] must be at least 0"),
    ("argmax_verify_sampling", "seeds", None, "seeds must be given"),
    ("argmax_verify_sampling", "logits_scratch", None, "logits_scratch must be given with top_k or top_p"),
    ("argmax_verify_sampling", "logits_scratch", torch.zeros(4, 39), r"logits_scratch must have shape"),
    ("commit", "num_accepted", int32(8), r"num_accepted\[0\] must be within 0\.\.7"),
    ("commit", "accepted_rows", int32(0, 4, 4, -1, -1, -1, -1), r"accepted_rows\[2\] must ascend"),
    ("commit", "cache_seqlens", int32(9), r"k_cache must hold cache_seqlens\[0\] \+ query rows = 15 rows, got 14"),
    ("redraft", "state", torch.zeros(2, 15, dtype=torch.int32), r"state must have shape .* = \[2, 16\], got \[2, 15\]"),
    ("multi_block_step", "workspace", torch.zeros(64, dtype=torch.uint8), "workspace must have at least"),
    ("multi_block_step", "weights", torch.zeros(64, dtype=torch.uint8), "descriptor of shape .* with weights of shape"),
]


@pytest.mark.parametrize(("name", "argument", "value", "message"), REFUSALS)
def test_refusals_name_the_argument_and_change_nothing(name: str, argument: str, value: Any, message: str) -> None:
    call = CALLS[name](torch.float32)
    before = call.fresh()
    with pytest.raises(RuntimeError, match=f"^{call.op}: {message}"):
        call.run(**{argument: value})
    for old, new in ((before.args, call.args), (before.options, call.options)):
        for key, tensor in old.items():
            if isinstance(tensor, Tensor):
                assert_equal(new[key], tensor, f"{key} after a refused call")


CACHED = ["cached_attention", "cached_attention_in_pages", "commit", "commit_in_pages", "multi_block_step"]


@pytest.mark.parametrize("name", CACHED)
def test_caches_that_share_memory_are_refused(name: str) -> None:
    call = CALLS[name](torch.float32).fresh()
    k, v = call.args["k_cache"], call.args["v_cache"]
    before = k.clone()
    with pytest.raises(RuntimeError, match=f"^{call.op}: k_cache and v_cache must not share memory, got"):
        call.run(v_cache=k)
    assert_equal(k, before, "k_cache")
    for dim in range(k.dim() - 2):
        rows = [t.narrow(dim, 0, 1).expand_as(t) for t in (k, v)]
        if k.shape[dim] > 1:
            with pytest.raises(RuntimeError, match=f"^{call.op}: k_cache must not hold rows that share memory, got"):
                call.run(k_cache=rows[0], v_cache=rows[1])
    assert_equal(k, before, "k_cache")


def paged_pair_call(op: str) -> Call:
    """Two sequences with 6 committed rows and 3 query rows each, in pages of 4 rows; so they write pages 1 and 2."""
    cache = make_cache(4, [6, 6], 6, 2, 8, page_size=4)
    k, v = cache.k.nan_to_num(), cache.v.nan_to_num()
    if op == "commit":
        rows = int32(0, 1, 2, 3, 4, 5)
        k, v = k[None], v[None]
        return arguments(op, k, v, cache.lengths, rows, int32(3, 3), int32(0, 3, 6), page_table=cache.page_table)
    q = random_tensor(1, 6, 2, 8)
    return arguments(op, q, q, q, k, v, cache.lengths, *chains(3, 3), page_table=cache.page_table)


@pytest.mark.parametrize("op", ["commit", "multi_block_attention_with_kvcache"])
def test_a_page_is_written_once(op: str) -> None:
    call = paged_pair_call(op)
    table = call.options["page_table"]
    assert table.shape == (2, 3)
    shared = table.clone()
    shared[1, 0] = table[0, 0]  # a prefix that both only read
    call.fresh().run(page_table=shared)
    for b, page, other in ((1, 1, (0, 1)), (1, 2, (0, 1)), (1, 2, (1, 1)), (0, 2, (0, 1))):
        wrong = table.clone()
        wrong[b, page] = table[other]
        before = call.fresh()
        message = rf"^{op}: page_table\[{b}, {page}\] must be a page that no other row of this call is written to"
        with pytest.raises(RuntimeError, match=message):
            call.run(page_table=wrong)
        for key, value in before.args.items():
            assert_equal(call.args[key], value, f"{key} after a refused call")


def test_a_page_is_written_once_by_a_step() -> None:
    call = step_call(torch.float32)
    k, v = (call.args[name].flatten(1, 2).unflatten(1, (-1, 1)) for name in ("k_cache", "v_cache"))
    table = torch.arange(k.shape[1], dtype=torch.int32).view(2, -1)
    call.fresh().run(k_cache=k.clone(), v_cache=v.clone(), page_table=table)
    table[1, 0] = 1
    with pytest.raises(RuntimeError, match=r"^multi_block_step: page_table\[1, 0\] must be a page that no other row"):
        call.run(k_cache=k, v_cache=v, page_table=table)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ((0, 9, -1, 0), "rows must lie inside the rows of its sequence"),
        ((0, -1, -1, 0), "length must not be negative"),
        ((0, 4, 0, 0), "parent must be -1 or an earlier segment"),
        ((0, 4, -1, 2), "visible must be within 0..length of the parent"),
    ],
)
def test_broken_layouts_are_refused(segment: tuple[int, ...], message: str) -> None:
    for call in (attention_call(torch.float32), cached_attention_call(torch.float32)):
        segments = call.args["segments"].clone()
        segments[0] = int32(*segment)
        with pytest.raises(RuntimeError, match=rf"{call.op}: segments\[0\] = \(start 0, .*\): {message}"):
            call.run(segments=segments)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    call = CALLS[name](torch.float32)
    first, *others = [key for key, value in call.args.items() if isinstance(value, Tensor)]
    for key in others:
        with pytest.raises(RuntimeError, match=rf"^{call.op}: {key} must be on {first}'s device cpu, got meta"):
            call.run(**{key: call.args[key].to("meta")})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "name",
    [
        "packed_linear",
        "packed_linear_int8",
        "activation",
        "multi_block_attention",
        "multi_block_attention_backward",
        "argmax_verify",
        "consistency_loss",
        "consistency_loss_backward",
    ],
)
def test_fakes_tell_shapes_and_dtypes(name: str, dtype: torch.dtype) -> None:
    call = CALLS[name](dtype)
    real = call.run()
    fake = Call(
        call.op, {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in call.args.items()}, call.options
    ).run()
    pairs = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for r, f in pairs:
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@pytest.mark.parametrize("shape", [(2, 1, 500), (2, 2, 544), (1, 1, 320)])
def test_fakes_check_records(shape: tuple[int, ...]) -> None:
    call = linear_call(torch.float32)
    meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in call.args.items()}
    weight = torch.empty(shape, dtype=torch.uint8, device="meta")
    with pytest.raises(RuntimeError, match=r"packed_linear: weight (of uint8 must hold records|must have shape)"):
        call._replace(args=meta).run(weight=weight)


def test_fakes_check_too() -> None:
    call = attention_call(torch.float32)
    meta = {n: v.to("meta") for n, v in call.args.items()} | {"k": torch.empty(8, 3, 16, device="meta")}
    with pytest.raises(
        RuntimeError, match=r"multi_block_attention: k must have shape .* = \[8, \*, 32\], got \[8, 3, 16\]"
    ):
        call.overload(*meta.values())


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    root = Path(jacobi_kernels.__file__).parent.parent
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_environment_chooses_the_instruction_set() -> None:
    ask = "import jacobi_kernels, torch; print(torch.ops.jacobi._cpu_isa(''))"
    assert python(ask, JACOBI_CPU_ISA="scalar") == "scalar\n"
    warned = python(ask, JACOBI_CPU_ISA="mmx")
    assert "JACOBI_CPU_ISA=mmx is not available here" in warned


@pytest.mark.parametrize("name", ["packed_linear_int8", "argmax_verify_int8", "multi_block_step_int4"])
def test_triton_refuses_int8_and_int4(name: str) -> None:
    code = f"""
import torch
from tests.kernels.test_registration import CALLS
CALLS[{name!r}](torch.float32).run()
"""
    output = python(code, JACOBI_BACKEND="triton", TRITON_INTERPRET="1")
    assert re.fullmatch(
        r"RuntimeError: \w+: (the weights are|weight is|lm_head is) packed in int.*, which runs? on CPUs only: pack .*",
        output.splitlines()[-1],
    )


def test_a_missing_binary_says_how_to_build_it() -> None:
    output = python("import sys; sys.modules['jacobi_kernels._C'] = None; import jacobi_kernels")
    assert output.splitlines()[-1].startswith("ImportError: jacobi_kernels._C is not built: run `python setup.py")


def test_instruction_sets_can_be_asked_and_refused() -> None:
    name = torch.ops.jacobi._cpu_isa("")
    assert torch.ops.jacobi._cpu_isa(name) == name
    with pytest.raises(RuntimeError, match=r"_cpu_isa: name must be one of .* got 'mmx'"):
        torch.ops.jacobi._cpu_isa("mmx")
