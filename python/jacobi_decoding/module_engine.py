"""The module path: one decoding step as a forward of the wrapped transformers model and three ops.

The decode state stays on the CPU, where layouts are made; on a GPU the model's forward, verification and the cache run
there, and a step reads the verified tokens back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from jacobi_decoding.adapter import adapt
from jacobi_decoding.devices import runs_triton
from jacobi_decoding.layout_cache import LayoutCache
from jacobi_decoding.sampling import SamplingParams
from jacobi_kernels.state import DecodeState


class ModuleEngine:
    """Steps a transformers causal language model through its own modules.

    model: as :func:`jacobi_decoding.adapter.adapt` takes it; UnsupportedModelError when it cannot be decoded exactly.
    The engine keeps the model alive; the model itself is wrapped only inside :meth:`running` or a step.
    """

    name = "modules"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.adapter = adapt(model)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.adapter.device

    @property
    def backend(self) -> str:
        """Whose kernels run."""
        return "triton" if runs_triton(self.device) else "cpu"

    @property
    def vocab_size(self) -> int:
        """Columns of the logits V."""
        return self.adapter.vocab_size

    @property
    def max_length(self) -> int | None:
        """Most tokens that prompt and new tokens may have together; None: any number."""
        return self.adapter.limit.tokens

    def check_length(self, length: int) -> None:
        """Raise UnsupportedModelError, with the reason, when sequences of ``length`` tokens are too long."""
        self.adapter.limit.check(length)

    def allocate_cache(self, batch: int, capacity: int) -> LayoutCache:
        """A cache of ``capacity`` rows per sequence, at least ``DecodeState.cache_capacity``."""
        return self.adapter.allocate_cache(batch, capacity)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wrap the model once for many steps; it is as found afterwards."""
        with self.adapter.wrapped():
            yield

    def step(self, state: DecodeState, cache: LayoutCache, sampling: SamplingParams) -> None:
        """Evaluate the layout of ``state``, verify, commit and lay out the next step; all in place."""
        with self.running():
            self._step(state, cache, sampling)

    def _step(self, state: DecodeState, cache: LayoutCache, sampling: SamplingParams) -> None:
        compact = state.layout.compact()
        layout = compact.layout
        if layout.rows == 0:
            return
        cache.begin(layout, state.cache_seqlens)
        tokens, there = state.tokens[compact.rows].to(self.device), layout.to(self.device)
        hidden = self.adapter.forward(tokens.long(), cache)
        head = self.adapter.packed_head()
        predictions, accepted, num_accepted, fixed_point = torch.ops.jacobi.argmax_verify.default(
            hidden,
            head.weight,
            head.bias,
            head.out_features,
            tokens,
            state.num_final.to(self.device),
            cache.cache_seqlens,
            there.cu_seqlens_q,
            there.segments,
            there.cu_segments,
            logit_scale=self.adapter.head_transform.scale,
            softcap=self.adapter.head_transform.softcap,
            **sampling.op_args(),
        )
        torch.ops.jacobi.commit.default(
            cache.k_cache, cache.v_cache, cache.cache_seqlens, accepted, num_accepted, there.cu_seqlens_q
        )
        state.cache_seqlens.copy_(cache.cache_seqlens)
        predictions, accepted, num_accepted = (t.cpu() for t in (predictions, accepted, num_accepted))
        state.redraft(compact.expand(predictions), compact.expand_accepted(accepted), num_accepted, fixed_point.cpu())
