"""Layout of packed samples against brute force: which rows see which, positions, labels, teachers; and batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobi_kernels import ops, reference
from jacobi_kernels.layout import BlockLayout
from jacobi_training.batches import Batch, RowCounts, count_rows, make_batch, plan_micro_batches
from jacobi_training.layout import CONTEXTS, sample_layout

Row = tuple[str, int]  # kind (prompt, clean, noisy, teacher) and place


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Any]:
    """Packed sample records; a vocabulary of three makes equal and different tokens likely."""
    tokens = st.integers(0, 2)
    prompt = draw(st.lists(tokens, min_size=1, max_size=3))
    answer = draw(st.lists(tokens, max_size=11))
    n, local = draw(st.integers(1, 4)), draw(st.booleans())

    def version(clean: list[int]) -> list[int]:
        if draw(st.booleans()):
            return clean
        return [clean[0], *draw(st.lists(tokens, min_size=len(clean) - 1, max_size=len(clean) - 1))]

    cleans = [answer[place : place + n] for place in range(0, len(answer), n)]
    blocks = [
        {"noisy": version(clean), "ratio": 0.5, "target": 0.5, "teacher": version(clean) if local else None}
        for clean in cleans
    ]
    window = draw(st.integers(1, 3))
    phase = draw(st.none() | st.integers(0, window - 1))
    return {
        "index": 0,
        "prompt_ids": prompt,
        "answer_ids": answer,
        "block_size": n,
        "context": draw(st.sampled_from(CONTEXTS)),
        "window": window,
        **({} if phase is None else {"phase": phase}),
        "blocks": blocks,
    }


def row_path(sample: dict[str, Any], kind: str, place: int) -> list[Row]:
    """Rows that a row sees, itself last, straight from what each block continues."""
    n = sample["block_size"]
    if kind == "prompt":
        return [("prompt", i) for i in range(place + 1)]
    j = place // n
    own = [(kind, a) for a in range(j * n, place + 1)]
    if j == 0:
        return row_path(sample, "prompt", len(sample["prompt_ids"]) - 1) + own
    window_starts = sample["context"] == "window" and (j + sample.get("phase", 0)) % sample["window"] == 0
    clean = kind == "clean" or sample["context"] == "clean" or window_starts
    return row_path(sample, "clean" if clean else "noisy", j * n - 1) + own


def row_names(sample: dict[str, Any]) -> list[Row]:
    kinds = ["clean", "noisy"] + ["teacher"] * any(block["teacher"] is not None for block in sample["blocks"])
    names = [("prompt", i) for i in range(len(sample["prompt_ids"]))]
    return names + [(kind, a) for kind in kinds for a in range(len(sample["answer_ids"]))]


def token_of(sample: dict[str, Any], row: Row) -> int:
    kind, place = row
    if kind == "prompt":
        return sample["prompt_ids"][place]
    if kind == "clean":
        return sample["answer_ids"][place]
    return sample["blocks"][place // sample["block_size"]][kind][place % sample["block_size"]]


@given(st.lists(samples(), max_size=3))
def test_rows_see_what_their_blocks_continue(records: list[dict[str, Any]]) -> None:
    batch = make_batch(records)
    BlockLayout(batch.cu_seqlens_q, batch.segments, batch.cu_segments).validate()
    paths = reference.row_paths(batch.segments, batch.cu_segments)
    first = 0
    for record, seen in zip(records, paths, strict=True):
        names = row_names(record)
        assert sorted(seen) == list(range(first, first + len(names)))
        for row, path in seen.items():
            kind, place = names[row - first]
            assert [names[r - first] for r in path] == row_path(record, kind, place)
            assert batch.tokens[row] == token_of(record, (kind, place))
            assert batch.positions[row] == len(path) - 1
        first += len(names)
    assert first == batch.rows


@given(st.lists(samples(), max_size=3))
def test_targets_and_teachers(records: list[dict[str, Any]]) -> None:
    batch = make_batch(records)
    first = 0
    for record in records:
        names, answer = row_names(record), record["answer_ids"]
        rows = {name: first + i for i, name in enumerate(names)}
        local = ("teacher", 0) in rows
        for (kind, place), row in rows.items():
            following = place + 1 if kind != "prompt" else 0
            last = place + 1 == len(record["prompt_ids"] if kind == "prompt" else answer)
            known = following < len(answer) and (last if kind == "prompt" else not last)
            ar = kind in ("prompt", "clean") and known
            assert batch.targets[row] == (answer[following] if ar else -1)
            teacher = ("teacher" if local else "clean", place)
            differs = kind == "noisy" and [token_of(record, r) for r in row_path(record, kind, place)] != [
                token_of(record, r) for r in row_path(record, *teacher)
            ]
            taught = differs and known
            assert batch.teachers[row] == (rows[teacher] if taught else -1)
            assert batch.hard_targets[row] == (answer[following] if taught else -1)
            if taught:
                assert batch.positions[rows[teacher]] == batch.positions[row]
        first += len(names)
    assert batch.num_ar_rows == int((batch.targets >= 0).sum())
    assert batch.num_consistency_rows == int((batch.teachers >= 0).sum())


@given(st.lists(samples(), max_size=3))
def test_counts_need_no_batch(records: list[dict[str, Any]]) -> None:
    counts = [count_rows(record) for record in records]
    batch = make_batch(records)
    assert sum(c.rows for c in counts) == batch.rows
    assert sum(c.ar for c in counts) == batch.num_ar_rows == sum(len(r["answer_ids"]) for r in records)
    assert sum(c.consistency for c in counts) == batch.num_consistency_rows


@given(samples())
def test_one_segment_per_run(record: dict[str, Any]) -> None:
    blocks = len(record["blocks"])
    starts = sum(j == 0 or (j + record.get("phase", 0)) % record["window"] == 0 for j in range(blocks))
    windows = {"all": min(blocks, 1), "window": starts, "clean": blocks}[record["context"]]
    teachers = sum(block["teacher"] is not None for block in record["blocks"])
    assert len(sample_layout(record).segments) == 1 + windows + teachers


def sample(blocks: list[list[int]], answer: list[int], context: str = "clean", window: int = 1) -> dict[str, Any]:
    return {
        "index": 3,
        "prompt_ids": [8, 9],
        "answer_ids": answer,
        "block_size": 2,
        "context": context,
        "window": window,
        "blocks": [{"noisy": block, "ratio": 0.0, "target": None, "teacher": None} for block in blocks],
    }


@pytest.mark.parametrize(
    ("context", "window", "taught"),
    [("clean", 1, [1]), ("window", 2, [1, 2, 3]), ("window", 1, [1]), ("all", 1, [1, 2, 3, 4])],
)
def test_noise_ahead_of_a_block_is_a_difference(context: str, window: int, taught: list[int]) -> None:
    record = sample([[1, 0], [3, 4], [5, 6]], [1, 2, 3, 4, 5, 6], context, window)
    teachers = sample_layout(record).teachers
    assert [row - 8 for row in range(14) if teachers[row] >= 0] == taught


def test_answers_of_no_and_one_token() -> None:
    empty, one = sample([], []), sample([[1]], [1])
    assert count_rows(empty) == RowCounts(2, 0, 0)
    assert count_rows(one) == RowCounts(4, 1, 0)
    batch = make_batch([empty, one])
    assert batch.targets.tolist() == [-1, -1, -1, 1, -1, -1]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 6]


def test_attention_of_noisy_rows_without_noise_is_that_of_clean_rows() -> None:
    """The layout in the op itself: equal paths give equal bits."""
    record = sample([[1, 2], [3, 4], [5]], [1, 2, 3, 4, 5], "window", 2)
    batch = make_batch([record, record])
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 64, 2, 8, generator=generator)
    q, k, v = (table[i, batch.tokens * 4 + batch.positions % 4] for i in range(3))
    out, _ = ops.multi_block_attention(q, k, v, batch.cu_seqlens_q, batch.segments, batch.cu_segments)
    for first in (0, 12):
        assert torch.equal(out[first + 2 : first + 7], out[first + 7 : first + 12])


def test_batch_moves_its_tensors() -> None:
    batch = make_batch([sample([[1, 2]], [1, 2])])
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    assert {t.device.type for t in vars(moved).values() if isinstance(t, torch.Tensor)} == {"meta"}
    assert (moved.num_ar_rows, moved.rows) == (2, 6)
    dtypes = {name: t.dtype for name, t in vars(batch).items() if isinstance(t, torch.Tensor)}
    layout = {"cu_seqlens_q", "segments", "cu_segments"}
    assert all(dtype == (torch.int32 if name in layout else torch.int64) for name, dtype in dtypes.items())


@given(st.lists(st.integers(1, 9)), st.integers(1, 12))
def test_micro_batches_keep_the_order_and_the_budget(rows: list[int], max_rows: int) -> None:
    plan = plan_micro_batches(rows, max_rows)
    assert [i for part in plan for i in part] == list(range(len(rows)))
    assert all(len(part) == 1 or sum(rows[i] for i in part) <= max_rows for part in plan)
    # None could have taken the sample behind it.
    assert all(sum(rows[i] for i in part) + rows[part[-1] + 1] > max_rows for part in plan[:-1])


def test_micro_batches_need_room() -> None:
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        plan_micro_batches([1], 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("answer_ids"), "answer_ids is missing"),
        (lambda r: r.update(prompt_ids=[]), "prompt_ids must hold at least one id"),
        (lambda r: r.update(prompt_ids="1 2"), "prompt_ids must be of type list, got '1 2'"),
        (lambda r: r.update(answer_ids=[1, -2, 3]), r"answer_ids\[1\] must be a token id, got -2"),
        (lambda r: r.update(context="none"), "context must be one of window, all, clean, got 'none'"),
        (lambda r: r.update(window=0), "window must be at least 1, got 0"),
        (lambda r: r.update(phase=1), "phase must be at least 0 and less than the window, 1, got 1"),
        (lambda r: r.update(phase=None), "phase must be at least 0 and less than the window, 1, got None"),
        (lambda r: r["blocks"].pop(), "an answer of 3 ids has 2 blocks of 2, got 1"),
        (lambda r: r["blocks"][1].update(noisy=[3, 4]), r"blocks\[1\].noisy must hold 1 ids, got 2"),
        (lambda r: r["blocks"][1].update(noisy=["a"]), r"blocks\[1\].noisy\[0\] must be a token id, got 'a'"),
        (lambda r: r["blocks"][0].pop("noisy"), r"blocks\[0\]: noisy is missing"),
        (lambda r: r["blocks"][1].update(teacher=[3]), r"blocks\[1\]: teacher must be null, as in the first block"),
        (lambda r: r["blocks"][0].update(teacher=[1, 2]), r"blocks\[1\]: teacher must be of type list, got None"),
    ],
)
def test_a_record_that_is_no_sample(change: Any, message: str) -> None:
    record = copy.deepcopy(sample([[1, 2], [3]], [1, 2, 3]))
    change(record)
    for function in (count_rows, sample_layout):
        with pytest.raises(ValueError, match=message) as caught:
            function(record)
        assert "\n" not in str(caught.value)
