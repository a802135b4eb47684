"""redraft on the device: every tensor equals the CPU op's after every call; what that refuses is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels import ops
from jacobi_kernels.state import DecodeState, StateColumn
from jacobi_kernels.triton import redraft as module
from jacobi_kernels.triton.redraft import compile_cases, fewest_unchanged, redraft
from jacobi_kernels.triton.runtime import launches
from tests.kernels.helpers import int32
from tests.kernels.rules_twin import Model, ToyDecoder, hash_model, verify_twin
from tests.kernels.test_toy_decoding import PHRASE, by_position, repeating

MUTATED = ("tokens", "segments", "cache_seqlens", "text", "pool", "state")
GUARD, GUARDS = -77, 40  # around every mutated tensor


def call(state: DecodeState, results: Sequence[Tensor], function: Callable[..., None] = redraft) -> None:
    """The kernel on a state and results that lie on its device."""
    names = ("tokens", "segments", "cu_seqlens_q", "cu_segments", "cache_seqlens", "text", "pool", "state")
    function(
        *results,
        *(getattr(state, name) for name in names),
        state.stop_tokens,
        block_size=state.block_size,
        blocks=state.blocks,
        candidates=state.candidates,
        spawn_ratio=state.spawn_ratio,
    )


def guarded(state: DecodeState, device: str) -> tuple[DecodeState, list[Tensor]]:
    """A copy on the device whose mutated tensors lie between guards, and the memory that holds them."""
    copy: dict[str, Any] = {f.name: getattr(state, f.name) for f in fields(DecodeState)}
    memories = []
    for name, value in copy.items():
        if name in MUTATED:
            memory = torch.full((value.numel() + 2 * GUARDS,), GUARD, dtype=value.dtype, device=device)
            copy[name] = memory[GUARDS:-GUARDS].view(value.shape)
            copy[name].copy_(value)
            memories.append(memory)
        elif isinstance(value, Tensor):
            copy[name] = value.to(device)
    return DecodeState(**copy), memories


def assert_same_state(ours: DecodeState, theirs: DecodeState) -> None:
    """Every tensor but the tokens of holes, which hold no meaning."""
    live = torch.zeros(theirs.tokens.shape[0], dtype=torch.bool)
    for start, length, _, _ in theirs.segments.tolist():
        live[start : start + length] = True
    for name in MUTATED:
        a, b = getattr(ours, name).cpu(), getattr(theirs, name)
        if name == "tokens":
            a, b = a[live], b[live]
        assert torch.equal(a, b), f"{name}: {a.tolist()} is not {b.tolist()}"


def assert_guards(memories: Sequence[Tensor]) -> None:
    assert all(bool((m[:GUARDS] == GUARD).all() & (m[-GUARDS:] == GUARD).all()) for m in memories)


class LockstepState(DecodeState):
    """A state whose redraft runs the kernel on a copy as well, and compares."""

    def redraft(self, *results: Tensor) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        twin, memories = guarded(self, device)
        call(twin, [r.to(device) for r in results])
        super().redraft(*results)
        assert_same_state(twin, self)
        assert_guards(memories)


def lockstep(prompts: Sequence[Sequence[int]], models: Sequence[Model], **options: Any) -> ToyDecoder:
    decoder = ToyDecoder(LockstepState.allocate(prompts, **options), models)
    decoder.run()
    return decoder


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens, so that small cases have several of them."""
    monkeypatch.setattr(module, "LANES", 16)


# Decoding -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=6)
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


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize(
    ("prompt", "model", "options"),
    [
        ([*PHRASE, *PHRASE, 30, *PHRASE[:5]], repeating, {"block_size": 19, "blocks": 2, "candidates": 2}),
        (
            [0, 1, 1, 0, 2] * 7,
            hash_model(5, 3),
            {"block_size": 7, "candidates": 9, "pool_rows": 34, "max_new_tokens": 9},
        ),
        ([1] * 50, hash_model(2, 2, context=6), {"block_size": 5, "candidates": 3, "pool_rows": 2}),
        ([4, 2], by_position, {"block_size": 3, "blocks": 4, "candidates": 1, "pool_rows": 3}),
    ],
    ids=["phrase", "many candidates", "one token", "all right"],
)
def test_long_texts_take_several_tiles(prompt: list[int], model: Model, options: dict[str, Any]) -> None:
    decoder = lockstep([prompt], [model], **({"max_new_tokens": 14, "blocks": 1} | options))
    assert len(decoder.state.generated(0)) >= 9


def test_a_winning_candidate_and_a_stop_token() -> None:
    """Candidates win where the text leaves the phrase and comes back to its start."""
    prompt = [*PHRASE, 30, 31, *PHRASE[:3]]
    other = {30: 7, 31: 3, 32: 9}
    state = LockstepState.allocate(
        [prompt, [5]], max_new_tokens=30, block_size=5, blocks=1, candidates=2, stop_tokens=[[], [1004]]
    )
    decoder = ToyDecoder(state, [lambda tokens: other.get(len(tokens), repeating(tokens)), by_position])
    winners = set()
    while state.running:
        decoder.step()
        winners.add(int(state.state[0, StateColumn.WINNER]))
    assert winners & {1, 2}
    assert state.done == [2, 1]


@given(st.integers(1, 300), st.floats(0, 1))
def test_the_share_of_unchanged_tokens_is_compared_in_float64(block_size: int, ratio: float) -> None:
    fewest = fewest_unchanged(block_size, ratio)
    assert fewest / block_size >= ratio
    assert fewest == 0 or (fewest - 1) / block_size < ratio


# Refusals -------------------------------------------------------------------------------------------------------------


@cache
def running_batch(steps: int = 4) -> tuple[DecodeState, list[Tensor]]:
    """Two sequences (0 steps: in prefill, 4: with filled pools and candidates) and the results of their next step."""
    options = {"block_size": 4, "blocks": 2, "candidates": 2, "chain_capacity": 8, "pool_rows": 5}
    state = DecodeState.allocate([[0, 1, 1, 0, 2] * 3, [2, 1, 2]], max_new_tokens=40, **options)  # type: ignore[arg-type]
    decoder = ToyDecoder(state, [hash_model(4, 3), hash_model(5, 3)])
    for _ in range(steps):
        decoder.step()
    y = decoder.predict()
    rows, counts, fixed = verify_twin(state, y)
    ops.commit(decoder.cache, decoder.cache.clone(), state.cache_seqlens, rows, counts, state.cu_seqlens_q)
    return state, [int32(*y), rows, counts, fixed]


RESULTS = ("predictions", "accepted_rows", "num_accepted", "fixed_point")


def clone_of(state: DecodeState) -> DecodeState:
    return replace(state, **{name: getattr(state, name).clone() for name in MUTATED})


def parts_of(state: DecodeState, b: int) -> list[Tensor]:
    """What belongs to sequence b."""
    rows, first = state.rows_per_sequence, 1 + state.candidates
    own = [state.tokens[b * rows : (b + 1) * rows], state.segments[b * first : (b + 1) * first]]
    own += [state.cache_seqlens[b], state.text[b], state.pool[b], state.state[b, : StateColumn.ERROR]]
    return [part.cpu().clone() for part in own]


def check_refusal(state: DecodeState, results: list[Tensor], device: str) -> list[int]:
    """The CPU op's verdict on a state; returns the error codes of the sequences, none where it has none."""
    twin, memories = guarded(state, device)
    before = [parts_of(twin, b) for b in range(state.batch)]
    call(twin, [r.to(device) for r in results])
    assert_guards(memories)
    errors = twin.state[:, StateColumn.ERROR].tolist()
    try:
        call(state, results, ops.redraft)
    except RuntimeError:
        assert any(errors)
        for b, error in enumerate(errors):
            if error:
                assert all(torch.equal(x, y) for x, y in zip(parts_of(twin, b), before[b], strict=True))
        return errors
    assert not any(errors)
    assert_same_state(twin, state)
    return []


@pytest.fixture(scope="module")
def batch() -> tuple[DecodeState, list[Tensor]]:
    return running_batch()


def test_the_batch_is_worth_damaging(batch: tuple[DecodeState, list[Tensor]], device: str) -> None:
    state, results = batch
    assert int(state.segments[:, 1].min()) > 0
    assert int(state.pool[:, :, 0].min()) > 0
    assert results[2].tolist() == [3, 3]
    assert check_refusal(clone_of(state), results, device) == []


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_refuses_what_the_cpu_op_refuses(seed: int) -> None:
    """One or two values anywhere are changed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = random.Random(seed)
    caught = running_batch(rng.choice((0, 1, 4, 4, 4)))
    state, results = clone_of(caught[0]), [r.clone() for r in caught[1]]
    state = replace(state, cu_seqlens_q=state.cu_seqlens_q.clone())
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(("state", "state", "segments", "cache_seqlens", "pool", *RESULTS[:3], "cu_seqlens_q"))
        tensor = results[RESULTS.index(name)] if name in RESULTS else getattr(state, name)
        view = tensor[..., 0] if name == "pool" else tensor[:, :13] if name == "state" else tensor
        at = tuple(rng.randrange(size) for size in view.shape)
        old = int(view[at])
        view[at] = rng.choice((old + 1, old - 1, 0, -1, 5, 99, 2**31 - 1, -(2**31)))
    check_refusal(state, results, device)


COLUMNS = [
    (StateColumn.TEXT_LEN, 99),
    (StateColumn.PROMPT_LEN, 0),
    (StateColumn.MAX_LEN, 99),
    (StateColumn.NUM_FINAL, 2),
    (StateColumn.ACTIVE, 3),
    (StateColumn.BLOCK_FILL, 4),
    (StateColumn.POOL_NEXT, 5),
    (StateColumn.POOL_START, -1),
    (StateColumn.DONE, 3),
]


@pytest.mark.parametrize(("column", "value"), COLUMNS, ids=lambda v: str(getattr(v, "name", "")))
def test_a_wrong_column_stops_its_sequence_alone(
    column: StateColumn, value: int, batch: tuple[DecodeState, list[Tensor]], device: str
) -> None:
    state = clone_of(batch[0])
    state.state[0, column] = value
    assert check_refusal(state, batch[1], device) == [5, 0]


@pytest.mark.parametrize(
    ("damage", "codes"),
    [
        (lambda s, r: s.segments[1, 1].fill_(-1), [1, 0]),
        (lambda s, r: s.segments[4, 2].fill_(4), [0, 1]),
        (lambda s, r: s.segments[2, 3].fill_(0), [5, 0]),
        (lambda s, r: r[0].fill_(-1), [5, 5]),
        (lambda s, r: r[1][:5].fill_(7), [5, 0]),
        (lambda s, r: s.pool[1, 2, 0].fill_(500), [0, 5]),
    ],
)
def test_codes(
    damage: Callable[..., object], codes: list[int], batch: tuple[DecodeState, list[Tensor]], device: str
) -> None:
    state, results = clone_of(batch[0]), [r.clone() for r in batch[1]]
    damage(state, results)
    assert check_refusal(state, results, device) == codes


@pytest.mark.parametrize("bounds", [[0, 8, 8], [1, 14, 28], [0, 14, 29], [0, 28, 14], [0, -5, 28]])
def test_bounds_that_are_none_stop_all(bounds: list[int], batch: tuple[DecodeState, list[Tensor]], device: str) -> None:
    state = replace(clone_of(batch[0]), cu_seqlens_q=int32(*bounds))
    assert check_refusal(state, batch[1], device) == [1, 1]


def test_a_sequence_with_an_error_is_left_alone(batch: tuple[DecodeState, list[Tensor]], device: str) -> None:
    twin, _ = guarded(batch[0], device)
    twin.state[1, StateColumn.ERROR] = 3
    before = [parts_of(twin, b) for b in range(2)]
    call(twin, [r.to(device) for r in batch[1]])
    assert twin.state[:, StateColumn.ERROR].tolist() == [0, 3]
    assert all(torch.equal(x, y) for x, y in zip(parts_of(twin, 1), before[1], strict=True))
    assert not torch.equal(parts_of(twin, 0)[3], before[0][3])


def test_one_launch_and_named_refusals(batch: tuple[DecodeState, list[Tensor]], device: str) -> None:
    twin, _ = guarded(batch[0], device)
    results = [r.to(device) for r in batch[1]]
    count = launches["redraft"]
    call(twin, results)
    assert launches["redraft"] == count + 1
    with pytest.raises(RuntimeError, match=r"redraft: fixed_point must be contiguous torch\.bool of shape \[2\]"):
        call(twin, [*results[:3], results[2]])
    with pytest.raises(RuntimeError, match=r"redraft: predictions must be .* shape \[28\], got .*\[27\]"):
        call(twin, [results[0][:-1], *results[1:]])
    with pytest.raises(RuntimeError, match=r"redraft: spawn_ratio must be within 0\.\.1, got 1\.5"):
        call(replace(twin, spawn_ratio=1.5), results)


def test_compile_cases_name_every_argument() -> None:
    for case in compile_cases():
        assert list(case.signature) == case.kernel.arg_names
