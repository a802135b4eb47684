"""Decoding a small random model on any device, by single calls or by replays of one captured graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu.measure import capture
from bench.models import Shape
from jacobi_kernels import DecodeState, StateColumn, StepWeights, ops, pack_step_weights, reference
from jacobi_kernels.step_weights import aligned_bytes

SMALL = Shape(layers=3, hidden=128, ffn=192, heads=4, kv_heads=2, head_dim=64, vocab=300)
PROMPTS = [[5, 9, 5, 9, 5, 7, 5, 9, 5], [1], [11, 12, 13] * 7]
MUTABLE = ("tokens", "segments", "cache_seqlens", "text", "pool", "state")

Step = Callable[..., None]


@lru_cache(maxsize=4)
def small_weights(dtype: torch.dtype, device: str) -> StepWeights:
    """Weights large enough that greedy text is not one repeated token."""
    tensors = {n: 3 * t if t.dim() == 2 else t for n, t in SMALL.random_tensors(torch.float32).items()}
    return pack_step_weights(tensors, SMALL.step_config(), dtype).to(device)


def need_cooperative() -> None:
    """Skip without nvcc; where it is, the cooperative step must have been built."""
    if not cooperative_is_built():
        if shutil.which("nvcc") is not None:
            pytest.fail("nvcc is here, but jacobi_kernels._C_cuda is not built: run make build again")
        pytest.skip("needs nvcc, without which the cooperative step is not built: install CUDA's compiler, make build")


def cooperative_is_built() -> bool:
    """Whether _C_cuda is there."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("jacobi::_cooperative_step", "CUDA"))


@dataclass(frozen=True)
class Drafting:
    """How many guesses a step verifies."""

    block_size: int = 1
    blocks: int = 1
    candidates: int = 0
    page_size: int | None = None


class Decoder:
    """State, caches and workspace of a batch on the weights' device; ``step()`` is one call of ``op``."""

    def __init__(
        self, weights: StepWeights, drafting: Drafting, new_tokens: int, op: Step = ops.multi_block_step
    ) -> None:
        d, device = drafting, weights.blob.device
        self.weights, self.op = weights, op
        self.state = DecodeState.allocate(
            PROMPTS,
            max_new_tokens=new_tokens,
            block_size=d.block_size,
            blocks=d.blocks,
            candidates=d.candidates,
            chain_capacity=max(d.block_size * d.blocks, 16),
        ).to(device)
        s = self.state
        self.k_cache, self.v_cache = weights.allocate_cache(s.batch, s.cache_capacity)
        self.page_table: Tensor | None = None
        if d.page_size is not None:
            pages = -(-s.cache_capacity // d.page_size)
            order = torch.randperm(s.batch * pages, generator=torch.Generator().manual_seed(1))
            self.page_table = order.int().view(s.batch, pages).to(device)
            shape = (weights.num_layers, s.batch * pages, d.page_size, *self.k_cache.shape[3:])
            self.k_cache, self.v_cache = (cache.new_zeros(shape) for cache in (self.k_cache, self.v_cache))
        sizes = (s.tokens.numel(), s.batch, s.segments.shape[0])
        size = ops.step_workspace_size(weights.descriptor, *sizes, device=device)
        if cooperative_is_built():
            size = max(size, torch.ops.jacobi._cooperative_workspace_size(weights.descriptor, *sizes))
        self.workspace = aligned_bytes(size, device)
        self.saved: dict[str, Tensor] = {}

    def mutable(self) -> dict[str, Tensor]:
        """Every tensor that a step changes and that means something between steps."""
        return {n: getattr(self.state, n) for n in MUTABLE} | {"k": self.k_cache, "v": self.v_cache}

    def save(self) -> None:
        self.saved = {name: tensor.clone() for name, tensor in self.mutable().items()}

    def restore(self) -> None:
        for name, tensor in self.mutable().items():
            tensor.copy_(self.saved[name])

    def step(self) -> None:
        s = self.state
        self.op(
            self.weights.blob,
            self.weights.descriptor,
            self.k_cache,
            self.v_cache,
            s.cache_seqlens,
            s.tokens,
            s.segments,
            s.cu_seqlens_q,
            s.cu_segments,
            s.text,
            s.pool,
            s.state,
            s.stop_tokens,
            self.workspace,
            block_size=s.block_size,
            blocks=s.blocks,
            candidates=s.candidates,
            page_table=self.page_table,
        )

    def captured(self) -> Callable[[], None]:
        """Replays one captured step; the state is what it was before."""
        self.save()
        replay = capture(self.step, self.restore)
        self.restore()
        return replay

    def run(self, step: Callable[[], None] | None = None) -> int:
        """Steps until every sequence is done; their number."""
        step, count = step or self.step, 0
        while self.state.running:
            step()
            count += 1
            assert count < 1000, "decoding does not end"
        assert not self.state.state[:, StateColumn.ERROR].any(), "a step found an error in its arguments"
        return count

    def texts(self) -> list[list[int]]:
        return [self.state.generated(b) for b in range(self.state.batch)]

    def committed(self, b: int) -> Tensor:
        """Keys and values ``[2, layers, L, heads, dim]`` of sequence ``b``."""
        length, table = int(self.state.cache_seqlens[b]), self.page_table
        table = None if table is None else table.cpu()
        slots = reference.cache_slots(list(range(length)), b, self.k_cache.shape[2], table)
        on = [index.to(self.k_cache.device) if isinstance(index, Tensor) else index for index in slots]
        return torch.stack([cache[:, on[0], on[1]] for cache in (self.k_cache, self.v_cache)])


def decode(weights: StepWeights, drafting: Drafting, new_tokens: int = 24, **options: Any) -> Decoder:
    """A decoder that has run to the end."""
    decoder = Decoder(weights, drafting, new_tokens, **options)
    decoder.run()
    return decoder


def assert_same_decoding(a: Decoder, b: Decoder, what: str) -> None:
    """The same text, and the same bits in every key and value that both have committed."""
    assert a.texts() == b.texts(), what
    for i in range(a.state.batch):
        x, y = a.committed(i), b.committed(i)
        length = min(x.shape[2], y.shape[2])
        assert torch.equal(x[:, :, :length], y[:, :, :length]), f"{what}: keys or values of sequence {i}"
