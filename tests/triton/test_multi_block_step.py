"""multi_block_step on Triton: the CPU op's tokens and state after every step, bits of one token a step, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jacobi_kernels import DecodeState, StateColumn, StepWeights, ops, pack_step_weights, reference
from jacobi_kernels.sampling import row_seeds
from jacobi_kernels.state import StepError
from jacobi_kernels.triton.multi_block_step import multi_block_step, step_workspace_size
from tests.kernels.helpers import assert_equal
from tests.kernels.test_multi_block_step import VOCAB, Run, make_model, model_with_every_option

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 8, 7, 8, 7]]
STATE = ("segments", "cache_seqlens", "text", "pool", "state")


def pack(name: str, dtype: torch.dtype = torch.float32) -> StepWeights:
    model = model_with_every_option() if name == "every option" else make_model(name)
    return pack_step_weights(model.tensors, model.config, dtype)


class Decoding:
    """A batch that is decoded step by step, on the CPU's kernels (device None) or on Triton's."""

    def __init__(
        self,
        weights: StepWeights,
        run: Run,
        device: str | None,
        prompts: list[list[int]] = PROMPTS,
        new_tokens: int = 6,
    ) -> None:
        self.triton, where = device is not None, device or "cpu"
        self.weights = weights.to(where)
        self.state = DecodeState.allocate(
            prompts,
            max_new_tokens=new_tokens,
            block_size=run.block_size,
            blocks=run.blocks,
            candidates=run.candidates,
            chain_capacity=run.chain_capacity or run.block_size * run.blocks,
            pool_rows=4,
        ).to(where)
        state, batch = self.state, self.state.batch
        self.k, self.v = (torch.full_like(t, float("nan")) for t in self.weights.allocate_cache(batch, self.capacity))
        self.table = None
        if run.page_size is not None:
            pages = -(-self.capacity // run.page_size)
            order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
            self.table = order.int().view(batch, pages).to(where)
            shape = (weights.num_layers, batch * pages, run.page_size, *self.k.shape[3:])
            self.k, self.v = self.k.new_full(shape, float("nan")), self.k.new_full(shape, float("nan"))
        temperature, top_k, top_p = run.sampler
        self.sampling: dict[str, Tensor] = {}
        if temperature > 0:
            self.sampling = {
                "temperature": torch.full((batch,), temperature, device=where),
                "seeds": row_seeds(3, batch, where),
            }
        if temperature > 0 and (top_k or top_p < 1.0):
            self.sampling["top_k"] = torch.full((batch,), top_k, dtype=torch.int32, device=where)
            self.sampling["top_p"] = torch.full((batch,), top_p, device=where)
            self.sampling["logits_scratch"] = torch.empty(16, VOCAB, device=where)
        sizes = (weights.descriptor, state.tokens.numel(), batch, state.segments.shape[0])
        size = step_workspace_size(*sizes) if self.triton else ops.step_workspace_size(*sizes)
        self.workspace = torch.full((size,), 255, dtype=torch.uint8, device=where)

    @property
    def capacity(self) -> int:
        return self.state.cache_capacity

    def step(self, **changes: Any) -> None:
        s = self.state
        op: Any = multi_block_step if self.triton else torch.ops.jacobi.multi_block_step.default
        arguments = {
            "weights": self.weights.blob,
            "descriptor": self.weights.descriptor,
            "k_cache": self.k,
            "v_cache": self.v,
            "cache_seqlens": s.cache_seqlens,
            "tokens": s.tokens,
            "segments": s.segments,
            "cu_seqlens_q": s.cu_seqlens_q,
            "cu_segments": s.cu_segments,
            "text": s.text,
            "pool": s.pool,
            "state": s.state,
            "stop_tokens": s.stop_tokens,
            "workspace": self.workspace,
            "block_size": s.block_size,
            "blocks": s.blocks,
            "candidates": s.candidates,
            "page_table": self.table,
            **self.sampling,
        }
        op(**(arguments | changes))

    def finish(self) -> None:
        for _ in range(100):
            if not self.state.running:
                return
            self.step()
        raise AssertionError("decoding does not end")

    def cached(self, b: int) -> Tensor:
        """Committed keys and values of sequence b: [2, layers, rows, KVH, D]."""
        rows = list(range(int(self.state.cache_seqlens[b])))
        table = None if self.table is None else self.table.cpu()
        k, v = self.k.cpu(), self.v.cpu()
        slots = reference.cache_slots(rows, b, k.shape[2], table)
        return torch.stack([torch.stack([layer[slots] for layer in cache]) for cache in (k, v)])

    def live_tokens(self) -> list[int]:
        tokens, s = self.state.tokens.tolist(), self.state.segments.tolist()
        return [t for start, length, _, _ in s for t in tokens[start : start + length]]


CASES = [
    ("llama", Run(4, 2, 2)),
    ("qwen2", Run(5)),
    ("qwen3", Run(3, 1, 2, page_size=5)),
    ("mistral", Run(4, 2, chain_capacity=9)),
    ("every option", Run(4, 1, 1)),
    ("llama", Run(3, 1, 1, sampler=(0.8, 0, 1.0))),
]


@pytest.mark.parametrize(("name", "run"), CASES, ids=str)
def test_state_after_every_step_is_the_cpu_op_s(name: str, run: Run, device: str) -> None:
    """Tokens, layout, pool and state, float32; committed keys and values up to rounding."""
    weights = pack(name)
    expected, ours = Decoding(weights, run, None), Decoding(weights, run, device)
    while expected.state.running:
        expected.step()
        ours.step()
        for field in STATE:
            assert_equal(getattr(ours.state, field).cpu(), getattr(expected.state, field), field)
        assert ours.live_tokens() == expected.live_tokens()
        for b in range(expected.state.batch):
            torch.testing.assert_close(ours.cached(b), expected.cached(b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_any_blocks_give_the_bits_of_one_token_a_step(name: str, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    runs = [Run(4, 2, 2, page_size=5)] if device == "cpu" else [Run(4), Run(5, 2), Run(8, 3, 2), Run(3, 1, 4, 9, 5)]
    for dtype in dtypes:
        weights = pack(name, dtype)
        slow = Decoding(weights, Run(chain_capacity=4), device)
        slow.finish()
        for run in runs:
            fast = Decoding(weights, run, device)
            fast.finish()
            for b in range(slow.state.batch):
                assert fast.state.generated(b) == slow.state.generated(b), run
                shared = min(fast.cached(b).shape[2], slow.cached(b).shape[2])
                assert_equal(fast.cached(b)[:, :, :shared], slow.cached(b)[:, :, :shared], f"{run}, sequence {b}")


def test_filtered_sampling_gives_the_cpu_op_s_text(device: str) -> None:
    weights, run = pack("llama"), Run(2, sampler=(1.0, 20, 0.9))
    expected, ours = (Decoding(weights, run, d, PROMPTS[1:], 3) for d in (None, device))
    expected.finish()
    ours.finish()
    assert ours.state.generated(0) == expected.state.generated(0)


@pytest.mark.parametrize("length", [-1, 10**6])
def test_a_cache_length_out_of_range_is_named(length: int, device: str) -> None:
    ours = Decoding(pack("llama"), Run(3, 1, 1), device)
    ours.step()
    ours.state.cache_seqlens[1] = length
    ours.step()
    assert ours.state.state[:, StateColumn.ERROR].tolist() == [0, StepError.CACHE_LENGTH]
    assert int(ours.state.cache_seqlens[1]) == length


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5])
def test_errors_stop_a_sequence_and_no_other(code: int, device: str) -> None:
    """What the CPU op raises for sets the column; the sequence stays as it is, the other one goes on."""
    weights, run = pack("llama"), Run(3, 1, 1, page_size=4)
    fine, ours = Decoding(weights, run, device), Decoding(weights, run, device)
    for decoding in (fine, ours):
        decoding.step()
    s, broken = ours.state, 1
    if code == 1:
        s.segments[2, 1] = 99
    elif code == 2:
        s.tokens[s.cu_seqlens_q[broken].item()] = VOCAB
    elif code == 3:
        assert ours.table is not None
        ours.table = ours.table[:, :1].contiguous()
        fine.table = ours.table
    elif code == 4:
        assert ours.table is not None
        ours.table[broken, 0] = 10_000
    else:
        s.state[broken, StateColumn.ACTIVE] = 7
    before = {field: getattr(s, field).clone() for field in (*STATE, "tokens")}
    for _ in range(2):
        ours.step()
        fine.step()
    assert int(s.state[broken, StateColumn.ERROR]) == code
    assert s.segments[2:].tolist() == before["segments"][2:].tolist()
    assert s.tokens[len(s.tokens) // 2 :].tolist() == before["tokens"][len(s.tokens) // 2 :].tolist()
    assert int(s.cache_seqlens[broken]) == int(before["cache_seqlens"][broken])
    for field in ("text", "pool"):
        assert_equal(getattr(s, field)[broken], before[field][broken], field)
    unchanged = [c for c in range(16) if c != StateColumn.ERROR]
    assert s.state[broken, unchanged].tolist() == before["state"][broken, unchanged].tolist()
    if code != 3:  # both sequences were too long for the cache
        assert int(s.state[0, StateColumn.ERROR]) == 0
        assert s.generated(0) == fine.state.generated(0)


def test_refusals(device: str) -> None:
    decoding = Decoding(pack("llama"), Run(2), device)
    workspace = decoding.workspace
    decoding.workspace = workspace[: workspace.numel() // 2]
    with pytest.raises(RuntimeError, match=r"multi_block_step: workspace must have at least \d+ bytes"):
        decoding.step()
    decoding.workspace = workspace
    before = {name: getattr(decoding.state, name).clone() for name in (*STATE, "tokens")}
    for change, message in (
        ({"block_size": 0}, "block_size must be within"),
        ({"spawn_ratio": 2.0}, "spawn_ratio must be within 0..1"),
        ({"tokens": decoding.state.tokens.long()}, "tokens must be int32"),
        ({"text": decoding.state.text[:1]}, r"text must have shape \[B, text_capacity\]"),
        ({"state": decoding.state.state[:, :12]}, r"state must have shape \[B, 16\]"),
        ({"pool": decoding.state.pool[:, :, :0]}, "pool must have shape"),
        ({"text": decoding.state.text.T.contiguous().T}, "text must be contiguous"),
        ({"cu_segments": decoding.state.cu_segments[:-1]}, r"cu_segments must have shape \[B\+1\]"),
        ({"weights": decoding.weights.blob[:-64]}, r"descriptor of shape .*|weights must have the descriptor's"),
        ({"v_cache": decoding.k}, "k_cache and v_cache must not share memory"),
        ({"k_cache": decoding.k.transpose(3, 4).contiguous().transpose(3, 4)}, "k_cache must be dense"),
        ({"temperature": torch.ones(3, device=device)}, r"temperature must have shape \[B\]"),
    ):
        with pytest.raises(RuntimeError, match="multi_block_step: (" + message + ")"):
            decoding.step(**change)
    for name, value in before.items():
        assert_equal(getattr(decoding.state, name), value, name)
    decoding.v = decoding.v[:, :, 1:]
    with pytest.raises(RuntimeError, match="multi_block_step: v_cache must have shape k_cache's shape"):
        decoding.step()
    decoding.k, decoding.v = decoding.k[1:, :, 1:], decoding.v[1:]
    with pytest.raises(RuntimeError, match="multi_block_step: k_cache and v_cache must have shape"):
        decoding.step()
