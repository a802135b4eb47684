"""Whole decodes with toy models through the real commit and redraft: exact text, no wasted forward, no lost guess."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_kernels.state import DecodeState, StateColumn
from tests.kernels.rules_twin import Model, ToyDecoder, greedy, hash_model

PHRASE = [7, 3, 9, 1, 8, 2, 6, 4, 5, 0, 11, 13, 12, 10]


def decode(prompt: Sequence[int], model: Model, max_new: int, **options: object) -> ToyDecoder:
    defaults: dict[str, object] = {"block_size": 4, "blocks": 2, "candidates": 2}
    state = DecodeState.allocate([prompt], max_new_tokens=max_new, **(defaults | options))  # type: ignore[arg-type]
    decoder = ToyDecoder(state, [model])
    decoder.run()
    return decoder


def by_position(tokens: Sequence[int]) -> int:
    """Right whatever stands to the left, and never seen before: consistency training at its best, no pool hit."""
    return 1000 + len(tokens)


def repeating(tokens: Sequence[int]) -> int:
    """Goes on with PHRASE after each of its tokens; an untrained model otherwise: wrong behind anything wrong."""
    context = list(tokens[-3:])
    for i in range(len(PHRASE)):
        if [*PHRASE, *PHRASE][i : i + 3] == context:
            return [*PHRASE, *PHRASE][i + 3]
    return 20 + sum(context) % 7


# Exactness ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=20), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 9),
    st.integers(0, 40),
    st.sampled_from([0, 2, 32]),
    st.booleans(),
    st.lists(st.integers(0, 5), max_size=2),
    st.integers(0, 2**16),
)
def test_text_equals_autoregressive_text(
    prompts: list[list[int]],
    block_size: int,
    blocks: int,
    candidates: int,
    extra_capacity: int,
    max_new: int,
    pool_rows: int,
    from_prompt: bool,
    stop: list[int],
    seed: int,
) -> None:
    limits = [max_new + 3 * b for b in range(len(prompts))]
    state = DecodeState.allocate(
        prompts,
        max_new_tokens=limits,
        block_size=block_size,
        blocks=blocks,
        candidates=candidates,
        chain_capacity=block_size * blocks + extra_capacity,
        pool_rows=pool_rows,
        pool_from_prompt=from_prompt,
        stop_tokens=[stop] * len(prompts),
    )
    models = [hash_model(seed + b, 5) for b in range(len(prompts))]
    texts = ToyDecoder(state, models).run()
    for b, text in enumerate(texts):
        expected = greedy(models[b], prompts[b], limits[b], stop)
        assert text == expected
        stopped = bool(expected) and expected[-1] in stop
        assert state.done[b] == (1 if stopped else 2)
        assert int(state.cache_seqlens[b]) <= len(prompts[b]) + len(expected)


@pytest.mark.parametrize("base", [hash_model(3, 97), by_position], ids=["hash", "by_position"])
@pytest.mark.parametrize("candidates", [0, 3])
@pytest.mark.parametrize("place", range(0, 40, 2))
def test_stop_token_cuts_at_every_place(place: int, candidates: int, base: Model) -> None:
    """The prompt's own stop tokens and its length play no part; nothing runs after the cut or stays in the cache."""
    full = greedy(base, PHRASE, 40)
    stop = full[place]
    prompt = [stop, *PHRASE]
    model = lambda tokens: base(tokens[1:])  # noqa: E731
    decoder = decode(prompt, model, 40, stop_tokens=[stop], candidates=candidates, chain_capacity=8)
    first = full.index(stop)
    assert decoder.state.generated(0) == full[: first + 1]
    assert decoder.state.done == [1]
    assert decoder.forwards <= first
    text_len = len(prompt) + first + 1
    assert text_len - 1 <= int(decoder.state.cache_seqlens[0]) <= text_len


@pytest.mark.parametrize("max_new", range(20))
def test_max_new_tokens_cuts_exactly(max_new: int) -> None:
    decoder = decode(PHRASE, repeating, max_new)
    assert decoder.state.generated(0) == greedy(repeating, PHRASE, max_new)
    assert decoder.state.done == [2]
    assert len(decoder.accepted) <= max_new


@pytest.mark.parametrize("capacity", [8, 9, 13, 30, 31, 100])
def test_prefill_takes_the_prompt_in_pieces(capacity: int) -> None:
    prompt = [(7 * i) % 31 for i in range(30)]
    state = DecodeState.allocate(
        [prompt], max_new_tokens=5, block_size=4, blocks=2, candidates=1, chain_capacity=capacity
    )
    decoder = ToyDecoder(state, [hash_model(2, 31)])
    pieces = -(-30 // capacity)
    for piece in range(pieces):
        assert state.emitted(0) == []
        assert int(state.num_final[0]) == min(capacity, 30 - piece * capacity)
        decoder.step()
    assert state.emitted(0) == greedy(hash_model(2, 31), prompt, 1)
    assert int(state.cache_seqlens[0]) == 30


def test_sequences_do_not_see_one_another() -> None:
    prompts, models = [PHRASE, PHRASE[3:], [5]], [repeating, hash_model(9, 6), by_position]
    options: dict[str, object] = {"block_size": 4, "blocks": 2, "candidates": 2, "chain_capacity": 14}
    state = DecodeState.allocate(prompts, max_new_tokens=[30, 50, 40], **options)  # type: ignore[arg-type]
    together = ToyDecoder(state, models)
    together.run()
    for b, (prompt, model) in enumerate(zip(prompts, models, strict=True)):
        alone = decode(prompt, model, [30, 50, 40][b], **options)
        assert alone.state.generated(0) == state.generated(b)
        assert [row[0] for row in alone.accepted] == [row[b] for row in together.accepted if row[b]]


# Forwards -------------------------------------------------------------------------------------------------------------


def forwards_when_all_is_right(n: int, blocks: int, tokens: int) -> int:
    """Decode steps for ``tokens`` new tokens: guesses without value, then a step that accepts its whole chain, in turn.

    A chain spans the open blocks; every n committed tokens close one, and a whole accept opens one.
    """
    active, fill, right, steps = 1, 0, False, 0
    while tokens > 0:
        accepted = n * active if right else 1
        tokens -= accepted
        steps += 1
        fill += accepted
        active = max(1, active - fill // n)
        fill %= n
        active = min(blocks, active + right)
        right = not right
    return steps


@pytest.mark.parametrize("block_size", [2, 5, 8, 16])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_right_predictions_are_all_used(block_size: int, blocks: int) -> None:
    """Promoted blocks keep their tokens and a full accept does not waste its last prediction."""
    bare = decode([5], by_position, 201, block_size=block_size, blocks=blocks, candidates=0, pool_rows=0)
    assert bare.state.generated(0) == [1001 + i for i in range(201)]
    assert bare.forwards == forwards_when_all_is_right(block_size, blocks, 200)
    pooled = decode([5], by_position, 201, block_size=block_size, blocks=blocks)
    assert pooled.forwards <= bare.forwards


@pytest.mark.parametrize("candidates", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_second_block_does_not_cost_forwards(seed: int, candidates: int) -> None:
    model = hash_model(seed, 40, context=1)
    prompt = [(seed * i) % 40 for i in range(12)]
    one, two = (decode(prompt, model, 90, block_size=8, blocks=K, candidates=candidates).forwards for K in (1, 2))
    assert two <= one


def test_one_token_blocks_are_autoregressive_decoding() -> None:
    decoder = decode(PHRASE, hash_model(4, 50), 30, block_size=1, blocks=1, candidates=3)
    assert decoder.forwards == 29
    assert all(count == [1] for count in decoder.accepted[1:])


def test_a_full_accept_starts_from_its_last_prediction() -> None:
    state = DecodeState.allocate([[5]], max_new_tokens=60, block_size=6, blocks=1, candidates=0)
    decoder = ToyDecoder(state, [by_position])
    full = 0
    while state.running:
        chain_length = int(state.segments[0, 1])
        decode_step = int(state.state[0, StateColumn.TEXT_LEN]) > 1
        decoder.step()
        if decode_step and state.state[0, StateColumn.FIXED_POINT] and state.running:
            full += 1
            assert len(state.emitted(0)) == chain_length
            assert int(state.tokens[0]) == state.generated(0)[-1]
    assert full > 5


def test_stable_tails_open_blocks_and_closed_blocks_go() -> None:
    state = DecodeState.allocate([[5]], max_new_tokens=200, block_size=4, blocks=3, candidates=0, spawn_ratio=1.0)
    decoder = ToyDecoder(state, [by_position])
    active = []
    while state.running:
        decoder.step()
        active.append(int(state.state[0, StateColumn.ACTIVE]))
        assert 0 <= int(state.state[0, StateColumn.BLOCK_FILL]) < 4
    assert set(active) == {1, 2}


# Candidates and pool --------------------------------------------------------------------------------------------------


def test_copied_text_is_accepted_from_candidates() -> None:
    """The prompt's phrase comes again: prompt lookup finds it although the main chain's own guesses are wrong."""
    prompt = [*PHRASE, 30, 31, *PHRASE[:3]]
    plain = decode(prompt, repeating, 60, block_size=8, blocks=1, candidates=0)
    helped = decode(prompt, repeating, 60, block_size=8, blocks=1, candidates=1)
    assert plain.state.generated(0) == helped.state.generated(0) == greedy(repeating, prompt, 60)
    assert helped.forwards <= 60 // 8 + 2 < plain.forwards


def test_the_pool_without_the_prompt_learns_from_generated_text() -> None:
    prompt = [*PHRASE, 30, 31, *PHRASE[:3]]
    options: dict[str, object] = {"block_size": 8, "blocks": 1, "candidates": 1, "pool_from_prompt": False}
    state = DecodeState.allocate([prompt], max_new_tokens=60, **options)  # type: ignore[arg-type]
    decoder = ToyDecoder(state, [repeating])
    lengths = []
    while state.running:
        decoder.step()
        lengths.append(len(state.emitted(0)))
    assert sum(lengths[:4]) < 8, "the prompt is not looked at"
    assert max(lengths) == 8, "the generated period is"


def test_a_candidate_that_wins_moves_its_rows() -> None:
    prompt = [*PHRASE, 30, 31, *PHRASE[:3]]
    state = DecodeState.allocate([prompt], max_new_tokens=40, block_size=5, blocks=1, candidates=2)
    other = {30: 7, 31: 3, 32: 9}  # the text leaves the phrase at some places and comes back to its start
    decoder = ToyDecoder(state, [lambda tokens: other.get(len(tokens), repeating(tokens))])
    winners = set()
    while state.running:
        decoder.step()  # compares every committed cache row with the text
        winners.add(int(state.state[0, StateColumn.WINNER]))
    assert winners & {1, 2}


def test_rejected_tails_and_losing_candidates_feed_the_pool() -> None:
    state = DecodeState.allocate(
        [PHRASE[:5]], max_new_tokens=40, block_size=4, blocks=1, candidates=1, chain_capacity=5, pool_rows=3
    )
    decoder = ToyDecoder(state, [hash_model(1, 3)])
    seen = 0
    while state.running:
        decoder.step()
        seen = max(seen, int((state.pool[0, :, 0] > 0).sum()))
    assert seen == 3


# Allocation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts must hold at least one sequence"),
        ({"prompts": [[1], []]}, r"prompts\[1\] must hold at least one token"),
        ({"prompts": [[1, -4]]}, r"prompts\[0\] must hold token ids within 0\.\.2\*\*31 - 1, got -4"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer of at least 0 .*, got -1"),
        ({"max_new_tokens": [1, 2, 3]}, r"max_new_tokens must be one value or one per sequence \(1\), got 3"),
        ({"block_size": 0}, "block_size must be an integer of at least 1 .*, got 0"),
        ({"block_size": 2.0}, "block_size must be an integer .*, got 2.0"),
        ({"blocks": "2"}, "blocks must be an integer .*, got '2'"),
        ({"candidates": -1}, "candidates must be an integer of at least 0 .*, got -1"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be an integer of at least 0 and at most 2147483645"),
        ({"block_size": 2**30}, "block_size must be an integer of at least 1 and at most 1048576"),
        (
            {"max_new_tokens": 9, "chain_capacity": 7},
            r"chain_capacity must be at least blocks \* block_size = 8, got 7",
        ),
        ({"pool_rows": -1}, "pool_rows must be an integer of at least 0 .*, got -1"),
        ({"spawn_ratio": 1.1}, r"spawn_ratio must be within 0\.\.1, got 1\.1"),
        ({"stop_tokens": [-2]}, r"stop_tokens\[0\] must hold token ids"),
        ({"stop_tokens": [[1], [2]]}, r"one list per sequence \(1\), got 2 lists"),
        (
            {"block_size": 2**20, "candidates": 2**20, "max_new_tokens": 2**20},
            "do not fit into 31 bits",
        ),
    ],
)
def test_allocate_refuses(change: dict[str, object], message: str) -> None:
    options: dict[str, object] = {
        "prompts": [[1, 2]],
        "max_new_tokens": 3,
        "block_size": 4,
        "blocks": 2,
        "candidates": 1,
    }
    options |= change
    with pytest.raises(ValueError, match=message):
        DecodeState.allocate(options.pop("prompts"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [0, 1, 4, [2, 7]])
@pytest.mark.parametrize(("block_size", "blocks"), [(2**18, 2), (3, 2**18), (2**20, 2**20), (1, 50)])
def test_memory_follows_the_limits(limits: object, block_size: int, blocks: int) -> None:
    most = max(limits) if isinstance(limits, list) else limits
    prompts = [[3, 1], [2, 5, 2, 5]]
    options: dict[str, object] = {"max_new_tokens": limits, "candidates": 3, "pool_rows": 4}
    state = DecodeState.allocate(prompts, block_size=block_size, blocks=blocks, **options)  # type: ignore[arg-type]
    assert state.block_size == min(block_size, most + 1)
    assert state.blocks * state.block_size >= min(most, block_size * blocks)
    assert state.rows_per_sequence <= 2 * (most + 1) + 3 * most + 4
    assert state.pool.shape[2] <= 2 * (most + 1) + 9


def test_a_huge_block_decodes_the_same() -> None:
    found = decode([5, 7], by_position, 20, block_size=2**20, blocks=2**20, candidates=2)
    assert found.state.generated(0) == [by_position([0] * n) for n in range(2, 22)]


def test_allocate_sizes() -> None:
    state = DecodeState.allocate(
        [[1, 2, 3], list(range(300))], max_new_tokens=[10, 20], block_size=8, blocks=2, candidates=3
    )
    assert state.rows_per_sequence == 256 + 3 * 7
    assert state.tokens.shape == (2 * state.rows_per_sequence,)
    assert state.text.shape == (2, 320)
    assert state.cache_capacity == 320 + state.rows_per_sequence
    state.layout.validate()
    assert state.layout.segments[:, 1].tolist() == [3, 0, 0, 0, 256, 0, 0, 0]
    assert state.running
    assert state.done == [0, 0]
    assert torch.equal(state.tokens[:3], torch.tensor([1, 2, 3], dtype=torch.int32))
