"""Layout builders, positions and compaction against path enumeration; every rule of the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_kernels import ops, reference
from jacobi_kernels.layout import BlockLayout
from jacobi_kernels.packing import pack_weight
from tests.kernels.test_rules import layouts

RULES = settings(deadline=None, max_examples=60)


def test_chain() -> None:
    layout = BlockLayout.chain([3, 0, 2])
    assert layout.cu_seqlens_q.tolist() == [0, 3, 3, 5]
    assert layout.segments.tolist() == [[0, 3, -1, 0], [3, 0, -1, 0], [3, 2, -1, 0]]
    assert layout.cu_segments.tolist() == [0, 1, 2, 3]
    assert (layout.batch, layout.rows) == (3, 5)
    assert {t.dtype for t in (layout.cu_seqlens_q, layout.segments, layout.cu_segments)} == {torch.int32}


@RULES
@given(layouts(), st.integers(0, 9))
def test_positions_count_the_path(layout: BlockLayout, cached: int) -> None:
    lengths = torch.arange(layout.batch, dtype=torch.int32) + cached
    expected = [-1] * layout.rows
    for b, seen in enumerate(reference.row_paths(layout.segments, layout.cu_segments)):
        for row, path in seen.items():
            expected[row] = cached + b + len(path) - 1
    assert layout.positions(lengths).tolist() == expected
    assert layout.positions(lengths).dtype == torch.int32


@RULES
@given(layouts())
def test_compact_keeps_every_path(layout: BlockLayout) -> None:
    compact = layout.compact()
    compact.layout.validate()
    assert compact.rows.dtype == torch.int64
    assert compact.layout.rows == int(layout.segments[:, 1].sum())
    small = reference.segment_paths(compact.layout.segments, compact.layout.cu_segments)
    large = reference.segment_paths(layout.segments, layout.cu_segments)
    assert [[[int(compact.rows[r]) for r in path] for path in paths] for paths in small] == large


@RULES
@given(layouts(), st.randoms(use_true_random=False))
def test_results_of_a_compact_layout_expand(layout: BlockLayout, random: object) -> None:
    compact = layout.compact()
    live, rows = compact.layout.rows, layout.rows
    tokens = torch.tensor([random.randrange(2) for _ in range(rows)], dtype=torch.int32)  # type: ignore[attr-defined]
    y = torch.tensor([random.randrange(2) for _ in range(rows)], dtype=torch.int32)  # type: ignore[attr-defined]
    full = reference.accept(y, tokens, None, layout.cu_seqlens_q, layout.segments, layout.cu_segments)
    small_layout = compact.layout
    small = reference.accept(
        y[compact.rows],
        tokens[compact.rows],
        None,
        small_layout.cu_seqlens_q,
        small_layout.segments,
        small_layout.cu_segments,
    )
    assert torch.equal(compact.expand_accepted(small[0]), full[0])
    assert torch.equal(small[1], full[1])
    expanded = compact.expand(y[compact.rows])
    assert torch.equal(expanded[compact.rows], y[compact.rows])
    assert int((expanded != -1).sum()) == live


RULE_BREAKS = [
    ([0, 5], [(0, 3, -1, 0), (2, 2, 0, 1)], [0, 2], "segments[1]", "behind the segment before it"),
    ([0, 5], [(0, 6, -1, 0)], [0, 1], "segments[0]", "rows must lie"),
    ([0, 5], [(-1, 2, -1, 0)], [0, 1], "segments[0]", "rows must lie"),
    ([0, 5], [(0, -1, -1, 0)], [0, 1], "segments[0]", "length must not be negative"),
    ([0, 5], [(0, 3, 0, 1)], [0, 1], "segments[0]", "parent must be"),
    ([0, 5], [(0, 3, -2, 0)], [0, 1], "segments[0]", "parent must be"),
    ([0, 2, 5], [(0, 2, -1, 0), (2, 3, 0, 1)], [0, 1, 2], "segments[1]", "parent must be"),
    ([0, 5], [(0, 3, -1, 0), (3, 2, 0, 4)], [0, 2], "segments[1]", "visible must be"),
    ([0, 5], [(0, 3, -1, 1)], [0, 1], "segments[0]", "visible must be"),
    ([1, 5], [(1, 3, -1, 0)], [0, 1], "cu_seqlens_q", "must start at 0"),
    ([0, 6, 5], [(0, 3, -1, 0)], [0, 1, 1], "cu_seqlens_q", "must start at 0"),
    ([0, 5], [(0, 3, -1, 0)], [0, 2], "cu_segments", "must start at 0"),
]


@pytest.mark.parametrize(("rows", "segments", "counts", "name", "rule"), RULE_BREAKS)
def test_every_rule_is_checked_here_and_by_the_ops(
    rows: list[int], segments: list[tuple[int, ...]], counts: list[int], name: str, rule: str
) -> None:
    layout = BlockLayout(*(torch.tensor(t, dtype=torch.int32) for t in (rows, segments, counts)))
    with pytest.raises(ValueError) as python_error:
        layout.validate()
    hidden, tokens = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int32)
    cached = torch.zeros(len(rows) - 1, dtype=torch.int32)
    with pytest.raises(RuntimeError) as op_error:
        ops.argmax_verify(
            hidden,
            pack_weight(torch.eye(3)),
            None,
            3,
            tokens,
            None,
            cached,
            layout.cu_seqlens_q,
            layout.segments,
            layout.cu_segments,
        )
    for error in (python_error, op_error):
        assert name in str(error.value)
    assert rule in str(python_error.value)
