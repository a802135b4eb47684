"""multi_block_step: block sizes, graphs and the cooperative launch give one result, and no step waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.helpers import Decoder, Drafting, assert_same_decoding, decode, need_cooperative, small_weights

FLOATS = [torch.float32, torch.bfloat16]
WAYS = [
    Drafting(4),
    Drafting(16),
    Drafting(33),
    Drafting(5, blocks=2, candidates=3),
    Drafting(16, blocks=2, candidates=4, page_size=16),
]


@pytest.mark.parametrize("dtype", FLOATS)
def test_block_sizes(device: str, dtype: torch.dtype) -> None:
    weights = small_weights(dtype, device)
    one_by_one = decode(weights, Drafting())
    assert len({token for text in one_by_one.texts() for token in text}) > 8, "the model says too little to compare"
    for way in WAYS:
        assert_same_decoding(decode(weights, way), one_by_one, str(way))


def test_float32_agrees_with_the_cpu(gpu: str) -> None:
    """Sums are taken in another order there, so only the tokens are compared; none of these is a near tie."""
    on_cpu = decode(small_weights(torch.float32, "cpu"), WAYS[-1])
    assert decode(small_weights(torch.float32, gpu), WAYS[-1]).texts() == on_cpu.texts()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("way", WAYS[-2:], ids=str)
def test_graph_replay_equals_launches(gpu: str, dtype: torch.dtype, way: Drafting) -> None:
    """Replays of one graph from the first piece of the prompts on: every tensor after every step."""
    weights = small_weights(dtype, gpu)
    launched, replayed = Decoder(weights, way, 24), Decoder(weights, way, 24)
    replay = replayed.captured()
    for step in range(1000):
        launched.step()
        replay()
        for name, tensor in launched.mutable().items():
            if name not in ("k", "v"):  # rows behind the committed ones hold what was guessed, in holes nothing
                assert torch.equal(tensor, replayed.mutable()[name]), f"{name} after step {step}"
        if not launched.state.running:
            break
    assert_same_decoding(replayed, launched, str(way))


@pytest.mark.parametrize("way", [Drafting(), *WAYS], ids=str)
def test_cooperative_equals_launches(gpu: str, way: Drafting) -> None:
    need_cooperative()
    weights = small_weights(torch.float32, gpu)
    cooperative = decode(weights, way, op=torch.ops.jacobi._cooperative_step.default)
    assert cooperative.texts() == decode(weights, way).texts()


def test_cooperative_block_sizes(gpu: str) -> None:
    need_cooperative()
    weights, op = small_weights(torch.bfloat16, gpu), torch.ops.jacobi._cooperative_step.default
    one_by_one = decode(weights, Drafting(), op=op)
    for way in WAYS:
        assert_same_decoding(decode(weights, way, op=op), one_by_one, str(way))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_reads_nothing_back(gpu: str) -> None:
    decoder = Decoder(small_weights(torch.bfloat16, gpu), WAYS[-1], 24)
    decoder.step()  # compiles
    with no_waiting():
        for _ in range(3):
            decoder.step()


def test_waiting_is_noticed(gpu: str) -> None:
    value = torch.zeros(1, device=gpu)
    with no_waiting(), pytest.raises(RuntimeError, match="synchron"):
        value.item()


def test_restored_state_decodes_the_same(device: str) -> None:
    """What the graph test relies on: steps that are taken back leave no trace."""
    weights = small_weights(torch.float32, device)
    decoder = Decoder(weights, WAYS[-1], 24)
    decoder.save()
    for _ in range(2):
        decoder.step()
    decoder.restore()
    decoder.run()
    assert_same_decoding(decoder, decode(weights, WAYS[-1]), "after steps taken back")
