"""The controller cuts layouts to what pays; it must never change a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_decoding import JacobiDecoder
from jacobi_decoding.controller import FEW_ROWS, MEASURED_ROWS, Controller, StepCost, measure_step_cost
from jacobi_decoding.step_engine import StepEngine
from jacobi_kernels.state import DecodeState, StateColumn
from tests.decoding.helpers import VOCAB, family, prompts

FREE = StepCost((1, 64), [1.0, 1.0])  # more query tokens cost nothing
DEAR = StepCost((1, 64), [1.0, 64.0])  # every query token costs as much as the first


@pytest.fixture(scope="module")
def engine() -> StepEngine:
    return StepEngine(family("llama"))


@pytest.mark.parametrize("path", ["step", "modules"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_auto_gives_the_tokens_of_one_by_one(name: str, path: Any) -> None:
    decoder = JacobiDecoder(family(name), path=path)
    for ids in prompts(3):
        for sampling in ({}, {"do_sample": True, "temperature": 0.8, "seed": 3}):
            options: dict[str, Any] = {"max_new_tokens": 40, **sampling}
            wanted = decoder.generate(torch.tensor([ids]), block_size=1, blocks=1, candidates=0, **options)
            assert torch.equal(decoder.generate(torch.tensor([ids]), block_size="auto", **options), wanted)


def decoding_state(engine: StepEngine, batch: int = 1, **options: Any) -> tuple[DecodeState, Any]:
    """A state a few steps into decoding a repetitive prompt, and its cache."""
    ids = [5, 17, 230, 4, 99] * 6
    sizes: dict[str, Any] = {"block_size": 8, "blocks": 2, "candidates": 3, **options}
    state = DecodeState.allocate([ids] * batch, max_new_tokens=60, **sizes)
    cache = engine.allocate_cache(batch, state.cache_capacity)
    for _ in range(3):
        engine.step(state, cache, sampling())
    return state, cache


def sampling() -> Any:
    from jacobi_decoding.sampling import SamplingParams

    return SamplingParams()


def test_nothing_is_cut_when_tokens_are_free(engine: StepEngine) -> None:
    state, _ = decoding_state(engine)
    before = state.segments.clone()
    Controller(FREE).trim(state)
    assert torch.equal(state.segments, before)


def test_everything_is_cut_when_tokens_are_dear(engine: StepEngine) -> None:
    state, cache = decoding_state(engine, batch=2)
    Controller(DEAR).trim(state)
    assert state.segments.view(2, 4, 4)[:, :, 1].tolist() == [[1, 0, 0, 0]] * 2
    engine.step(state, cache, sampling())
    assert state.state[:, StateColumn.EMITTED].tolist() == [1, 1]


def test_prompts_in_prefill_are_left_alone() -> None:
    state = DecodeState.allocate([[3] * 40], max_new_tokens=4, block_size=4, blocks=1, candidates=1)
    before = state.segments.clone()
    Controller(DEAR).trim(state)
    assert torch.equal(state.segments, before)


@settings(max_examples=20)
@given(seconds=st.lists(st.floats(0.001, 1.0), min_size=4, max_size=4), seed=st.integers(0, 5))
def test_any_cost_gives_the_tokens_of_one_by_one(engine: StepEngine, seconds: list[float], seed: int) -> None:
    ids = prompts(2, seed)
    texts = []
    for controller in (None, Controller(StepCost((1, 4, 16, 64), sorted(seconds)))):
        sizes: dict[str, Any] = {"block_size": 1, "blocks": 1, "candidates": 0}
        if controller is not None:
            sizes = {"block_size": 9, "blocks": 2, "candidates": 3}
        state = DecodeState.allocate(ids, max_new_tokens=30, **sizes)
        cache = engine.allocate_cache(2, state.cache_capacity)
        while state.running:
            if controller is not None:
                controller.trim(state)
            engine.step(state, cache, sampling())
            if controller is not None:
                controller.observe(state, 0.01)
        texts.append([state.generated(b) for b in range(2)])
    assert texts[0] == texts[1]


@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=20), token=st.integers(0, 2))
def test_context_against_brute_force(text: list[int], token: int) -> None:
    state = DecodeState.allocate([text], max_new_tokens=3, block_size=2, blocks=1, candidates=0)
    longest = 0
    for end in range(len(text) - 1):
        if text[end + 1] != token:
            continue
        k = 0
        while k < 8 and k <= end and text[end - k] == text[-1 - k]:
            k += 1
        longest = max(longest, k)
    assert Controller._context(state, 0, len(text), [token]) == longest


def test_it_learns_what_is_accepted(engine: StepEngine) -> None:
    controller = Controller(FREE)
    state, cache = decoding_state(engine)
    before = list(controller._seen)
    while state.running:
        controller.trim(state)
        engine.step(state, cache, sampling())
        controller.observe(state, 1.0)
    assert controller._seen != before
    assert all(0 < right <= seen for right, seen in zip(controller._right, controller._seen, strict=True))


def test_cost_follows_what_steps_take() -> None:
    cost = StepCost((1, 8, 64), [1.0, 2.0, 9.0])
    assert [cost(m) for m in (1, 8, 36, 64, 100)] == pytest.approx([1.0, 2.0, 5.5, 9.0, 13.5])
    for _ in range(60):
        cost.observe(8, 4.0)
    assert cost(8) == pytest.approx(4.0, rel=0.05)
    assert cost(1) == pytest.approx(1.0)
    cost.observe(8, 1e9)  # a disturbed step
    assert cost(8) < 4.5


def test_measured_cost(engine: StepEngine) -> None:
    cost = measure_step_cost(engine)
    assert cost.rows in (MEASURED_ROWS, FEW_ROWS)
    assert all(0 < a <= b for a, b in zip(cost.seconds, cost.seconds[1:], strict=False))
    assert engine.vocab_size == VOCAB
