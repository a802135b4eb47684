"""redraft on the device: every tensor equals the CPU op's after every call; what that refuses is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels.state import DecodeState, StateColumn
from jacobi_kernels.triton.redraft import compile_cases, fewest_unchanged, redraft
from jacobi_kernels.triton.runtime import launches
from tests.kernels.rules_twin import Model, ToyDecoder, hash_model

LOCKSTEP = settings(deadline=None, max_examples=12)
MUTATED = ("tokens", "segments", "cache_seqlens", "text", "pool", "state")
PHRASE = [7, 3, 9, 1, 8, 2, 6, 4, 5, 0, 11, 13, 12, 10]


def device_redraft(state: DecodeState, results: Sequence[Tensor]) -> None:
    """The kernel on a state and results that lie on its device."""
    names = ("tokens", "segments", "cu_seqlens_q", "cu_segments", "cache_seqlens", "text", "pool", "state")
    redraft(
        *results,
        *(getattr(state, name) for name in names),
        state.stop_tokens,
        block_size=state.block_size,
        blocks=state.blocks,
        candidates=state.candidates,
        spawn_ratio=state.spawn_ratio,
    )


def copy_of(state: DecodeState) -> DecodeState:
    """On the device of the kernels, with tensors of its own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return DecodeState(**{k: v.clone().to(device) if isinstance(v, Tensor) else v for k, v in vars(state).items()})


def live_rows(state: DecodeState) -> Tensor:
    rows = torch.zeros(state.tokens.shape[0], dtype=torch.bool)
    for start, length, _, _ in state.segments.tolist():
        rows[start : start + length] = True
    return rows


class LockstepState(DecodeState):
    """A state whose redraft runs the kernel on a copy as well, and compares."""

    def redraft(self, *results: Tensor) -> None:  # type: ignore[override]
        twin = copy_of(self)
        device_redraft(twin, [r.to(twin.tokens.device) for r in results])
        super().redraft(*results)
        for name in MUTATED:
            ours, theirs = getattr(twin, name).cpu(), getattr(self, name)
            if name == "tokens":
                ours, theirs = ours[live_rows(self)], theirs[live_rows(self)]
            assert torch.equal(ours, theirs), f"{name}: {ours.tolist()} is not {theirs.tolist()}"


def lockstep(prompts: Sequence[Sequence[int]], models: Sequence[Model], **options: Any) -> ToyDecoder:
    decoder = ToyDecoder(LockstepState.allocate(prompts, **options), models)
    decoder.run()
    return decoder


@LOCKSTEP
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=2),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 12),
    st.sampled_from([0, 1, 3, 32]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.85, 1.0]),
    st.integers(0, 2**16),
)
def test_whole_decodings(
    prompts: list[list[int]],
    block_size: int,
    blocks: int,
    candidates: int,
    max_new: int,
    pool_rows: int,
    from_prompt: bool,
    spawn_ratio: float,
    seed: int,
) -> None:
    lockstep(
        prompts,
        [hash_model(seed + b, 4, context=1 + seed % 3) for b in range(len(prompts))],
        max_new_tokens=[max_new + 2 * b for b in range(len(prompts))],
        block_size=block_size,
        blocks=blocks,
        candidates=candidates,
        chain_capacity=blocks * block_size + seed % 2,
        pool_rows=pool_rows,
        pool_from_prompt=from_prompt,
        stop_tokens=[3] if seed % 3 == 0 else [],
        spawn_ratio=spawn_ratio,
    )
