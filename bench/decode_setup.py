"""A decode state in the middle of a generation, and steps from it, each from the same place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jacobi_kernels import BlockLayout, DecodeState, StateColumn, StepWeights, ops
from jacobi_kernels.step_weights import DescriptorField, aligned_bytes

MUTABLE = ("tokens", "segments", "cache_seqlens", "text", "pool", "state")


class DecodeSetup:
    """``cached`` committed tokens and a chain of ``blocks`` * ``rows`` tokens, wrong guesses but for the first.

    candidates: how many full ones (``rows`` - 1 tokens) are tried beside the chain.
    """

    column = StateColumn

    def __init__(self, weights: StepWeights, *, rows: int, cached: int, blocks: int = 1, candidates: int = 0) -> None:
        generator = torch.Generator().manual_seed(rows + cached)
        vocab, device = weights[DescriptorField.VOCAB], weights.blob.device
        # Few different tokens, so that the search for continuations finds many.
        text = torch.randint(min(vocab, 64), (cached + 1,), generator=generator).tolist()
        chain = blocks * rows
        state = DecodeState.allocate(
            [text],
            max_new_tokens=chain + rows + 1,
            block_size=rows,
            blocks=blocks,
            candidates=candidates,
            chain_capacity=chain,
        )
        state.tokens.copy_(torch.randint(vocab, state.tokens.shape, generator=generator))
        state.tokens[0] = text[-1]
        state.segments[0, 1] = chain
        state.segments[1:, 1] = rows - 1
        state.segments[1:, 3] = 1
        state.cache_seqlens[0] = cached
        row = state.state[0]
        row[StateColumn.PROMPT_LEN] = max(cached, 1)
        row[StateColumn.NUM_FINAL], row[StateColumn.ACTIVE] = 1, blocks
        self.weights, self.state, self.cached = weights, state.to(device), cached
        self.k_cache, self.v_cache = weights.allocate_cache(1, state.cache_capacity)
        for cache in (self.k_cache, self.v_cache):
            cache[:, :, :cached] = torch.randn(cache[0, :, :cached].shape, generator=generator).to(cache)
        sizes = (state.tokens.numel(), 1, state.segments.shape[0])
        size = ops.step_workspace_size(weights.descriptor, *sizes, device=device)
        self.workspace = aligned_bytes(size, device)
        self._saved = {name: getattr(self.state, name).clone() for name in MUTABLE}

    @property
    def rows(self) -> int:
        """Query tokens of a step."""
        return int(self._saved["segments"][:, 1].sum())

    @property
    def visible(self) -> int:
        """Keys that they see, all together."""
        layout = (self.state.cu_seqlens_q, self._saved["segments"], self.state.cu_segments)
        positions = BlockLayout(*(t.cpu() for t in layout)).positions(self._saved["cache_seqlens"].cpu())
        return int((positions + 1).sum())

    @property
    def one_chain(self) -> tuple[Tensor, Tensor, Tensor]:
        """The layout of the main chain alone."""
        layout = BlockLayout.chain([int(self._saved["segments"][0, 1])])
        return layout.cu_seqlens_q, layout.segments, layout.cu_segments

    def restore(self) -> None:
        """Back to the place before the step; the caches' committed rows never change."""
        for name, saved in self._saved.items():
            getattr(self.state, name).copy_(saved)

    def step(self, op: Callable[..., None] = ops.multi_block_step) -> None:
        """One call of ``multi_block_step``, or of another op with its arguments."""
        s = self.state
        op(
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
            spawn_ratio=s.spawn_ratio,
        )
