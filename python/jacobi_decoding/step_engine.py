"""The step path: a decoding step is one call of ``torch.ops.jacobi.multi_block_step``, for Llama-like models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobi_decoding.devices import on_device
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.sampling import SamplingParams
from jacobi_decoding.weights_source import weights_source
from jacobi_kernels.ops import step_workspace_size
from jacobi_kernels.state import DecodeState
from jacobi_kernels.step_weights import StepWeights, aligned_bytes


@dataclass
class StepCache:
    """Key and value caches of all layers, and the workspace of the step; made by :meth:`StepEngine.allocate_cache`.

    k_cache, v_cache: [layers, B, capacity, kv_heads, head_dim] of the weights' dtype; workspace: uint8.
    """

    k_cache: Tensor
    v_cache: Tensor
    workspace: Tensor


class StepEngine:
    """Steps a model of the Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM3) without touching its modules.

    model: a transformers causal language model, float32 or bfloat16, or a PackedModel. UnsupportedModelError, with the
    reason, when the op cannot run it. A transformers model's weights are packed at first use, and again after a
    parameter has changed.
    """

    name = "multi_block_step"

    def __init__(self, model: Any) -> None:
        self.model = model
        self._source = weights_source(model)
        self.device = self._source.device
        self._weights: StepWeights | None = None  # of the current run

    @property
    def backend(self) -> str:
        """Whose kernels run."""
        return "cpu"

    @property
    def vocab_size(self) -> int:
        """Columns of the logits V."""
        return self._source.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """Rotary frequencies of these models are the same at every length."""
        return None

    def check_length(self, length: int) -> None:
        """Any length that fits into 31 bits will do."""
        if length >= 2**31:
            raise UnsupportedModelError(f"{length} tokens", "positions are 31-bit", "shorten the prompt")

    def fits(self) -> bool:
        """Whether the model is what it was when the engine was made, weights apart."""
        return self._source.fits()

    def weights(self) -> StepWeights:
        """The packed weights of the model as it is now."""
        self._weights = None  # the source may free them and pack anew
        self._weights = self._source.weights()
        return self._weights

    def allocate_cache(self, batch: int, capacity: int) -> StepCache:
        """A cache of ``capacity`` rows per sequence, at least ``DecodeState.cache_capacity``."""
        k_cache, v_cache = self.weights().allocate_cache(batch, capacity)
        return StepCache(k_cache, v_cache, torch.empty(0, dtype=torch.uint8))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pack the weights once for many steps."""
        with on_device(self.device):
            self.weights()
            yield

    def step_op(self) -> Any:
        """The op that a step calls."""
        return torch.ops.jacobi.multi_block_step.default

    def workspace_size(self, rows: int, batch: int, segments: int) -> int:
        """Bytes of scratch memory that a step over ``rows`` query slots needs."""
        weights = self._weights if self._weights is not None else self.weights()
        return step_workspace_size(weights.descriptor, rows, batch, segments, device=self.device)

    def step(self, state: DecodeState, cache: StepCache, sampling: SamplingParams) -> None:
        """Evaluate the layout of ``state``, verify, commit and lay out the next step; all in place."""
        weights = self._weights if self._weights is not None else self.weights()
        needed = self.workspace_size(state.tokens.shape[0], state.batch, state.segments.shape[0])
        if cache.workspace.numel() < needed:  # the first step, or more threads than before
            cache.workspace = aligned_bytes(needed, self.device)
        self.step_op()(
            weights.blob,
            weights.descriptor,
            cache.k_cache,
            cache.v_cache,
            state.cache_seqlens,
            state.tokens,
            state.segments,
            state.cu_seqlens_q,
            state.cu_segments,
            state.text,
            state.pool,
            state.state,
            state.stop_tokens,
            cache.workspace,
            block_size=state.block_size,
            blocks=state.blocks,
            candidates=state.candidates,
            spawn_ratio=state.spawn_ratio,
            **sampling.op_args(),
        )
