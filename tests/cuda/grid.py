"""The GPU step's program, interpreted on the host, with the signature of multi_block_step; and models to run it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobi_kernels import DecodeState, StepConfig, StepWeights, _host, ops, pack_step_weights
from jacobi_kernels.sampling import row_seeds
from tests.kernels.helpers import random_tensor


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def aligned(size: int) -> Tensor:
    """uint8 memory that starts at a multiple of 256 bytes, full of ones."""
    memory = torch.full((size + 256,), 255, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][:size]


def grid_step(
    weights: StepWeights,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    blocks: int,
    backwards: bool = False,
    page_table: Tensor | None = None,
    **sampling: Tensor,
) -> int:
    """One step on a grid of ``blocks`` blocks; returns the number of its phases."""
    s = state
    rows, batch, segments = s.tokens.numel(), s.batch, s.segments.shape[0]
    words = weights.descriptor
    size = _host.grid_workspace(words.data_ptr(), words.numel(), rows, batch, segments)
    assert size >= 0
    workspace = aligned(size)
    arguments: dict[str, float] = {
        "descriptor_words": words.numel(),
        "weight_bytes": weights.blob.numel(),
        "cache_is_float": int(k.dtype == torch.float32),
        "layer_stride": k.stride(0),
        "slab_stride": k.stride(1),
        "row_stride": k.stride(2),
        "slabs": k.shape[1],
        "slab_rows": k.shape[2],
        "max_pages": 0 if page_table is None else page_table.shape[1],
        "rows": rows,
        "batch": batch,
        "num_segments": segments,
        "text_capacity": s.text.shape[1],
        "pool_rows": s.pool.shape[1],
        "pool_width": s.pool.shape[2] - 1,
        "num_stop_tokens": s.stop_tokens.shape[1],
        "block_size": s.block_size,
        "blocks": s.blocks,
        "candidates": s.candidates,
        "spawn_ratio": s.spawn_ratio,
        "workspace_bytes": size,
    }
    tensors = {"descriptor": words, "weights": weights.blob, "k_cache": k, "v_cache": v, "page_table": page_table}
    tensors |= {name: getattr(s, name) for name in ("cache_seqlens", "tokens", "segments", "cu_seqlens_q")}
    tensors |= {name: getattr(s, name) for name in ("cu_segments", "text", "pool", "state", "stop_tokens")}
    tensors |= {name: sampling.get(name) for name in ("temperature", "top_k", "top_p", "seeds")}
    tensors["workspace"] = workspace
    return _host.grid_step(arguments | {name: address(t) for name, t in tensors.items()}, blocks, backwards)


def cpu_step(
    weights: StepWeights, k: Tensor, v: Tensor, state: DecodeState, page_table: Tensor | None = None, **sampling: Tensor
) -> None:
    s = state
    size = ops.step_workspace_size(weights.descriptor, s.tokens.numel(), s.batch, s.segments.shape[0])
    ops.multi_block_step(
        weights.blob,
        weights.descriptor,
        k,
        v,
        s.cache_seqlens,
        s.tokens,
        s.segments,
        s.cu_seqlens_q,
        s.cu_segments,
        s.text,
        s.pool,
        s.state,
        s.stop_tokens,
        torch.empty(size, dtype=torch.uint8),
        block_size=s.block_size,
        blocks=s.blocks,
        candidates=s.candidates,
        spawn_ratio=s.spawn_ratio,
        page_table=page_table,
        **sampling,
    )


@dataclass(frozen=True)
class Case:
    """How to decode."""

    block_size: int = 1
    blocks: int = 1
    candidates: int = 0
    chain_capacity: int | None = None
    page_size: int | None = None
    temperature: float = 0.0
    new_tokens: int = 24


@dataclass
class Run:
    """A decode state with its caches."""

    state: DecodeState
    k: Tensor
    v: Tensor
    page_table: Tensor | None
    sampling: dict[str, Tensor]

    @classmethod
    def start(cls, weights: StepWeights, prompts: list[list[int]], case: Case) -> Run:
        state = DecodeState.allocate(
            prompts,
            max_new_tokens=case.new_tokens,
            block_size=case.block_size,
            blocks=case.blocks,
            candidates=case.candidates,
            chain_capacity=case.chain_capacity,
        )
        batch, capacity = state.batch, state.cache_capacity
        k, v = (torch.full_like(t, float("nan")) for t in weights.allocate_cache(batch, capacity))
        table = None
        if case.page_size is not None:
            pages = -(-capacity // case.page_size)
            table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)).int().view(batch, pages)
            shape = (weights.num_layers, batch * pages, case.page_size, *k.shape[3:])
            k, v = k.new_full(shape, float("nan")), v.new_full(shape, float("nan"))
        sampling = {}
        if case.temperature > 0:
            sampling = {"temperature": torch.full((batch,), case.temperature), "seeds": row_seeds(7, batch)}
        return cls(state, k, v, table, sampling)

    def step(self, weights: StepWeights, blocks: int | None = None, backwards: bool = False) -> int:
        """On the CPU, or on a grid of so many blocks."""
        if blocks is None:
            cpu_step(weights, self.k, self.v, self.state, self.page_table, **self.sampling)
            return 0
        options: dict[str, Any] = {"page_table": self.page_table, **self.sampling}
        return grid_step(weights, self.k, self.v, self.state, blocks=blocks, backwards=backwards, **options)

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that a step may change, of sequences that run."""
        s = self.state
        return s.cache_seqlens, s.segments, s.text, s.pool, s.state, s.tokens, self.k.float(), self.v.float()


def random_model(
    config: dict[str, Any], dtype: torch.dtype, *, biases: bool = False, head_norms: bool = False, tied: bool = False
) -> StepWeights:
    """A random model of the Llama kind."""
    c = StepConfig(**config)
    heads, kv, hidden = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (c.vocab_size, hidden), "model.norm": (hidden,)}
    if not tied:
        shapes["lm_head"] = (c.vocab_size, hidden)
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm": (hidden,), at + "post_attention_layernorm": (hidden,)}
        if head_norms:
            shapes |= {at + f"self_attn.{p}_norm": (c.head_dim,) for p in "qk"}
        shapes |= {at + f"self_attn.{p}_proj": (n, hidden) for p, n in (("q", heads), ("k", kv), ("v", kv))}
        shapes |= {at + "self_attn.o_proj": (hidden, heads), at + "mlp.down_proj": (hidden, c.intermediate_size)}
        shapes |= {at + f"mlp.{p}_proj": (c.intermediate_size, hidden) for p in ("gate", "up")}
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        spread = 0.2 if len(shape) == 1 else 2.0 / shape[1] ** 0.5
        tensors[name + ".weight"] = spread * random_tensor(seed, *shape) + (1.0 if len(shape) == 1 else 0.0)
        if biases and (name.endswith("_proj") or name == "lm_head"):
            tensors[name + ".bias"] = 0.3 * random_tensor(100 + seed, shape[0])
    return pack_step_weights(tensors, c, dtype)
