"""Acceptance, commit and redraft against brute force; their argument checks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_kernels import _host, ops, reference
from jacobi_kernels.layout import BlockLayout
from jacobi_kernels.packing import pack_weight
from jacobi_kernels.state import DecodeState, StateColumn, StepError
from tests.kernels.rules_twin import ToyDecoder, accept_twin, hash_model

RULES = settings(deadline=None, max_examples=60)


def test_python_and_cpp_name_the_same_columns_and_errors() -> None:
    assert _host.state_columns() == {column.name: int(column) for column in StateColumn}
    assert _host.step_errors() == {error.name: int(error) for error in StepError}


@st.composite
def layouts(draw: st.DrawFn, most_segments: int = 6) -> BlockLayout:
    """Trees of segments with empty ones, holes and several roots, in up to three sequences."""
    sequences, rows = [], []
    for _ in range(draw(st.integers(1, 3))):
        segments: list[tuple[int, int, int, int]] = []
        row = 0
        for s in range(draw(st.integers(1, most_segments))):
            parent = draw(st.integers(-1, s - 1))
            visible = draw(st.integers(0, segments[parent][1])) if parent >= 0 else 0
            row += draw(st.integers(0, 2))
            length = draw(st.integers(0, 4))
            segments.append((row, length, parent, visible))
            row += length
        sequences.append(segments)
        rows.append(row + draw(st.integers(0, 2)))
    return BlockLayout.from_segments(sequences, rows)


# Acceptance -----------------------------------------------------------------------------------------------------------


@RULES
@given(layouts(), st.data())
def test_acceptance_is_the_longest_accepted_path(layout: BlockLayout, data: st.DataObject) -> None:
    vocab, rows = 3, layout.rows
    tokens = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), dtype=torch.int32)
    y = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), dtype=torch.int32)
    final = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=layout.batch, max_size=layout.batch)))
    num_final = final.to(torch.int32)
    hidden = torch.nn.functional.one_hot(y.long(), vocab).float()  # with the unit head, row r predicts y[r]
    lengths = torch.zeros(layout.batch, dtype=torch.int32)
    got_y, got_rows, got_count, got_fixed = ops.argmax_verify(
        hidden,
        pack_weight(torch.eye(vocab)),
        None,
        vocab,
        tokens,
        num_final,
        lengths,
        layout.cu_seqlens_q,
        layout.segments,
        layout.cu_segments,
    )
    sizes, x = layout.segments[:, 1].tolist(), tokens.tolist()
    for b, paths in enumerate(reference.segment_paths(layout.segments, layout.cu_segments)):
        first, start, end = int(layout.cu_segments[b]), int(layout.cu_seqlens_q[b]), int(layout.cu_seqlens_q[b + 1])
        roots = [path for s, path in enumerate(paths) if len(path) == sizes[first + s]]
        free = {row for path in roots for row in path[: max(1, int(num_final[b]))]}
        best = accept_twin(paths, free, x, got_y.tolist())
        assert got_rows[start:end].tolist() == best + [-1] * (end - start - len(best))
        assert int(got_count[b]) == len(best)
        assert bool(got_fixed[b]) == (0 < len(paths[0]) == len(accept_twin(paths[:1], free, x, got_y.tolist())))
        for path in roots:  # a prediction that nobody needs is not made
            silent = path[: max(1, int(num_final[b])) - 1][: len(path) - 1]
            assert (got_y[silent] == -1).all()
    live = torch.zeros(rows, dtype=torch.bool)
    live[layout.compact().rows] = True
    assert (got_y[~live] == -1).all()
    assert ((got_y == y) | (got_y == -1)).all()


# Commit ---------------------------------------------------------------------------------------------------------------


@RULES
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 8))), min_size=1, max_size=3),
    st.sampled_from([None, 1, 3, 4]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_commit_moves_rows(
    sequences: list[tuple[int, set[int]]], page_size: int | None, strided: bool, dtype: torch.dtype
) -> None:
    batch, layers, capacity, query_rows = len(sequences), 2, 15, 9
    lengths = torch.tensor([length for length, _ in sequences], dtype=torch.int32)
    accepted = torch.full((batch * query_rows,), -1, dtype=torch.int32)
    counts = torch.tensor([len(rows) for _, rows in sequences], dtype=torch.int32)
    for b, (_, rows) in enumerate(sequences):
        own = torch.tensor(sorted(rows), dtype=torch.int32) + b * query_rows
        accepted[b * query_rows : b * query_rows + len(own)] = own
    offsets = torch.arange(batch + 1, dtype=torch.int32) * query_rows
    shape, table = [layers, batch, capacity, 2, 3], None
    if page_size is not None:
        pages = -(-capacity // page_size)
        shape[1:3] = batch * pages + 1, page_size
        table = torch.randperm(batch * pages + 1)[: batch * pages].to(torch.int32).view(batch, pages)
    caches = []
    for _ in range(2):
        wide = torch.randn([*shape[:2], shape[2] * 2 if strided else shape[2], *shape[3:]]).to(dtype)
        caches.append(wide[:, :, ::2] if strided else wide)
    expected = [cache.clone() for cache in caches]
    expected_lengths = lengths.clone()
    reference.commit(*expected, expected_lengths, accepted, counts, offsets, page_table=table)
    ops.commit(*caches, lengths, accepted, counts, offsets, page_table=table)
    assert torch.equal(lengths, expected_lengths)
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got, want)


def test_commit_leaves_a_winning_main_chain_alone() -> None:
    """Rows are in place already: not one is copied, and only the length moves."""
    cache = torch.arange(12.0).view(1, 1, 12, 1, 1)
    before = cache.clone()
    lengths = torch.tensor([3], dtype=torch.int32)
    rows = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    ops.commit(cache, cache.clone(), lengths, rows, torch.tensor([3], dtype=torch.int32), torch.tensor([0, 4]).int())
    assert torch.equal(cache, before)
    assert lengths.tolist() == [6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": [20]}, r"cache_seqlens\[0\] must be within 0\.\.12, got 20"),
        ({"num_accepted": [5]}, r"num_accepted\[0\] must be within 0\.\.4"),
        ({"accepted_rows": [0, 2, 1, -1]}, r"accepted_rows\[2\] must ascend within the query rows 0\.\.3"),
        ({"accepted_rows": [0, 2, 9, -1]}, r"accepted_rows\[2\] must ascend"),
        ({"cache_seqlens": [10]}, r"k_cache must hold cache_seqlens\[0\] \+ query rows = 14 rows, got 12"),
        ({"cu_seqlens_q": [0, 3]}, r"cu_seqlens_q\[1\] = 3: must start at 0, ascend and end at"),
        ({"page_table": [[0, 7]]}, r"page_table\[0, 1\] must be a page of k_cache \(0\.\.0\), got 7"),
    ],
)
def test_commit_refuses_what_lies_outside(change: dict[str, list[int]], message: str) -> None:
    arguments = {"cache_seqlens": [9], "accepted_rows": [0, 2, 3, -1], "num_accepted": [3], "cu_seqlens_q": [0, 4]}
    arguments |= change
    if "page_table" in change:
        arguments["cache_seqlens"] = [11]
    cache = torch.arange(12.0).view(1, 1, 12, 1, 1)
    values = cache.clone()
    if "page_table" not in change and "cache_seqlens" not in change:
        arguments["cache_seqlens"] = [8]
    tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in arguments.items()}
    before = [t.clone() for t in (cache, tensors["cache_seqlens"])]
    with pytest.raises(RuntimeError, match=message):
        ops.commit(cache, values, **tensors)
    assert torch.equal(cache, before[0])
    assert torch.equal(tensors["cache_seqlens"], before[1])


# Redraft --------------------------------------------------------------------------------------------------------------


@RULES
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=2),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 24),
    st.sampled_from([0, 1, 3, 32]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.85, 1.0]),
    st.integers(0, 2**16),
)
def test_redraft_equals_its_twin(
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
    state = DecodeState.allocate(
        prompts,
        max_new_tokens=max_new,
        block_size=block_size,
        blocks=blocks,
        candidates=candidates,
        chain_capacity=blocks * block_size + seed % 2,
        pool_rows=pool_rows,
        pool_from_prompt=from_prompt,
        stop_tokens=[3] if seed % 3 == 0 else [],
        spawn_ratio=spawn_ratio,
    )
    models = [hash_model(seed + b, 4, context=1 + seed % 3) for b in range(len(prompts))]
    ToyDecoder(state, models, twin=True).run()


def decoding_state(**changes: object) -> tuple[DecodeState, dict[str, torch.Tensor]]:
    """A state right before redraft of its first decode step, with the results of that step."""
    state = DecodeState.allocate([[1, 2, 3]], max_new_tokens=9, block_size=4, blocks=1, candidates=1)
    decoder = ToyDecoder(state, [hash_model(1, 5)])
    decoder.step()
    state.cache_seqlens += 1
    rows = torch.full_like(state.tokens, -1)
    rows[0] = 0
    results = {
        "predictions": torch.ones_like(state.tokens),
        "accepted_rows": rows,
        "num_accepted": torch.tensor([1], dtype=torch.int32),
        "fixed_point": torch.tensor([False]),
    }
    return state, results


COLUMN_ERRORS = [
    (StateColumn.TEXT_LEN, 99, r"state\[0, TEXT_LEN\] must be within 1\.\.text_capacity = 12, got 99"),
    (StateColumn.PROMPT_LEN, 0, r"PROMPT_LEN\] must be within"),
    (StateColumn.MAX_LEN, 13, r"MAX_LEN\] must be within TEXT_LEN\.\.text_capacity = 4\.\.12, got 13"),
    (StateColumn.NUM_FINAL, 2, r"NUM_FINAL\] must be 1 in decode"),
    (StateColumn.ACTIVE, 2, r"ACTIVE\] must be within 1\.\.blocks = 1, got 2"),
    (StateColumn.BLOCK_FILL, 4, r"BLOCK_FILL\] must be within 0\.\.block_size - 1 = 3, got 4"),
    (StateColumn.POOL_NEXT, 32, r"POOL_NEXT\] must be a row of the pool"),
    (StateColumn.POOL_START, -1, r"POOL_START\] must be within"),
    (StateColumn.DONE, 3, r"DONE\] must be 0, 1 or 2, got 3"),
]


@pytest.mark.parametrize(("column", "value", "message"), COLUMN_ERRORS, ids=lambda v: str(getattr(v, "name", "")))
def test_redraft_checks_every_column_before_it_writes(column: StateColumn, value: int, message: str) -> None:
    state, results = decoding_state()
    state.state[0, column] = value
    before = [t.clone() for t in (state.tokens, state.segments, state.text, state.pool, state.state)]
    with pytest.raises(RuntimeError, match=r"redraft: state\[0, .*" + message.split("]", 1)[-1]):
        state.redraft(**results)
    for got, want in zip((state.tokens, state.segments, state.text, state.pool, state.state), before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s, r: r["num_accepted"].fill_(99), r"num_accepted\[0\] must be within 0\.\."),
        (lambda s, r: r["accepted_rows"].fill_(77), r"accepted_rows\[0\] must ascend"),
        (lambda s, r: r["predictions"].fill_(-1), r"predictions\[0\] must be a token, got -1"),
        (lambda s, r: s.cache_seqlens.fill_(3), r"cache_seqlens\[0\] = 3 does not agree with num_accepted = 1"),
        (lambda s, r: s.pool[0, 2].fill_(500), r"pool\[0, 2, 0\] must be a length within 0\.\.12, got 500"),
        (lambda s, r: s.segments[1].copy_(torch.tensor([5, 1, 0, 1])), r"segments\[1\] = \(start 5.*candidate 0"),
        (lambda s, r: s.segments[1, 2].fill_(1), r"segments\[1\].*parent must be -1 or an earlier segment"),
        (lambda s, r: s.cu_seqlens_q.mul_(2), r"cu_seqlens_q\[1\] = 14"),
    ],
)
def test_redraft_refuses_what_does_not_fit(damage: object, message: str) -> None:
    state, results = decoding_state()
    damage(state, results)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="redraft: " + message):
        state.redraft(**results)


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([1], 0),  # not the chain's start
        ([0, 2], 1),  # a gap
        ([4, 5], 0),  # a candidate without the chain's first row
        ([0, 5], 1),  # not the candidate's start
        ([0, 1, 4], 1),  # a candidate behind two rows of the chain
        ([0, 4, 5, 6], 1),  # row 6 is a hole
        ([0, 3], 1),  # and so is row 3
    ],
)
def test_redraft_refuses_rows_that_are_no_path(rows: list[int], wrong: int) -> None:
    state, results = decoding_state()
    state.segments[:, 1] = torch.tensor([3, 2], dtype=torch.int32)
    state.segments[1, 3] = 1
    state.cache_seqlens += len(rows) - 1
    results["num_accepted"].fill_(len(rows))
    results["accepted_rows"][: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    before = [t.clone() for t in (state.tokens, state.segments, state.text, state.pool, state.state)]
    with pytest.raises(RuntimeError, match=rf"redraft: accepted_rows\[{wrong}\] must ascend along the main chain"):
        state.redraft(**results)
    for got, want in zip((state.tokens, state.segments, state.text, state.pool, state.state), before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_redraft_ends_a_sequence_whose_limit_is_its_length(accepted: int) -> None:
    """MAX_LEN = TEXT_LEN says 'stop here': nothing is emitted, whatever was accepted, and nothing written behind it."""
    state, results = decoding_state()
    length = int(state.state[0, StateColumn.TEXT_LEN])
    memory = torch.cat([state.text[0, :length], torch.full((8,), -7, dtype=torch.int32)])
    state.text = memory[:length].view(1, length)
    state.state[0, StateColumn.MAX_LEN] = length
    state.cache_seqlens += accepted - 1
    results["num_accepted"].fill_(accepted)
    results["accepted_rows"][:accepted] = torch.arange(accepted, dtype=torch.int32)
    expected = memory.clone()
    state.redraft(**results)
    assert torch.equal(memory, expected)
    assert state.done == [2]
    assert state.emitted(0) == []
    assert int(state.state[0, StateColumn.TEXT_LEN]) == length
    assert int(state.cache_seqlens[0]) <= length
    assert not state.segments[:, 1].any()


def test_the_pool_s_context_ends_with_the_text() -> None:
    """Fewer rows are accepted than the chain's tokens and predictions allow: the pool reads nothing behind the text."""
    state, results = decoding_state()
    length = int(state.state[0, StateColumn.TEXT_LEN])
    memory = torch.cat([state.text[0, :length], torch.full((20,), -7, dtype=torch.int32)])
    state.text = memory[: length + 2].view(1, length + 2)
    state.state[0, StateColumn.MAX_LEN] = length + 2
    results["predictions"][:4] = torch.cat([state.tokens[1:3], torch.tensor([9, 9], dtype=torch.int32)])
    state.pool.zero_()
    state.redraft(**results)
    assert int(state.state[0, StateColumn.TEXT_LEN]) == length + 1
    entry = state.pool[0, int(state.state[0, StateColumn.POOL_NEXT]) - 1]
    assert entry[: 1 + int(entry[0])].tolist() == [length + 2, *state.text[0, : length + 1].tolist(), 9]


def test_redraft_names_shapes_and_types() -> None:
    state, results = decoding_state()
    with pytest.raises(RuntimeError, match=r"redraft: fixed_point must be bool, got int32 of shape \[1\]"):
        state.redraft(**{**results, "fixed_point": results["num_accepted"]})
    with pytest.raises(RuntimeError, match=r"redraft: predictions must have shape \[T\] = \[7\], got \[6\]"):
        state.redraft(**{**results, "predictions": results["predictions"][:6]})
    state.spawn_ratio = 1.5
    with pytest.raises(RuntimeError, match=r"redraft: spawn_ratio must be within 0\.\.1, got 1\.5"):
        state.redraft(**results)


def test_redraft_is_fast_enough_to_run_every_step() -> None:
    """Text of 4000 tokens, full pool of 32 rows: ten times what it takes (30 us with the call) is allowed here."""
    prompt = [hash_model(5, 50)([i]) for i in range(4000)]
    state = DecodeState.allocate(
        [prompt], max_new_tokens=500, block_size=16, blocks=2, candidates=4, chain_capacity=4096
    )
    decoder = ToyDecoder(state, [hash_model(7, 50)])
    for _ in range(40):
        decoder.step()
    nothing = torch.full_like(state.tokens, -1)
    none = torch.zeros(1, dtype=torch.int32)
    times = []
    for _ in itertools.repeat(None, 50):
        begin = time.perf_counter()
        state.redraft(nothing, nothing, none, none.bool())
        times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 2] < 300e-6
