"""The path rule on the device: against the reference's paths."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from jacobi_kernels import reference
from tests.kernels.helpers import Layout, assert_equal, chain_with_candidates, chains, int32, make_layout, random_layout


def plan(layout: Layout, lengths: list[int], device: str, **options: object) -> tuple[torch.Tensor, ...]:
    from jacobi_kernels.triton.plan import plan_rows

    tensors = [t.to(device) for t in (*layout, int32(*lengths))]
    made = plan_rows(*tensors, layout.rows, **options)
    return tuple(t.cpu() for t in (made.row_sequence, made.row_segment, made.row_position, made.path, made.error))


def expected_plan(layout: Layout, lengths: list[int], width: int) -> tuple[torch.Tensor, ...]:
    sequence, segment, position = (torch.full((layout.rows,), -1, dtype=torch.int32) for _ in range(3))
    paths = torch.full((layout.segments.shape[0], width), -1, dtype=torch.int32)
    for b, (first, end) in enumerate(pairwise(layout.cu_segments.tolist())):
        whole = reference.segment_paths(layout.segments, layout.cu_segments)[b]
        for s in range(first, end):
            path = whole[s - first]
            paths[s, : len(path)] = torch.tensor(path, dtype=torch.int32)
            length = int(layout.segments[s, 1])
            for index in range(len(path) - length, len(path)):
                sequence[path[index]], segment[path[index]], position[path[index]] = b, s, lengths[b] + index
    return sequence, segment, position, paths, torch.zeros(layout.batch, dtype=torch.int32)


LAYOUTS = {
    "chain": chains(7),
    "batch": chains(3, 1, 70),
    "candidates": chain_with_candidates(16, 3, 15, gap=2),
    "deep": make_layout([[(2 * i, 2, i - 1, i % 3 if i else 0) for i in range(12)], [(0, 1, -1, 0), (1, 4, 0, 0)]]),
    "empty": make_layout([[], [(0, 0, -1, 0)], []], row_counts=[3, 1, 0]),
    "ones": make_layout([[(i, 1, i - 1, int(i > 0)) for i in range(40)]]),
    "no rows": make_layout([[]]),
} | {f"random {seed}": random_layout(seed, 3) for seed in range(6)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_and_paths(name: str, device: str) -> None:
    layout = LAYOUTS[name]
    lengths = [5, 0, 300][: layout.batch]
    assert_equal(plan(layout, lengths, device), expected_plan(layout, lengths, layout.rows))


def test_narrow_paths(device: str) -> None:
    layout = make_layout([[(0, 5, -1, 0)], [(0, 2, -1, 0), (3, 2, 0, 1)]], row_counts=[5, 5])
    assert_equal(plan(layout, [1, 2], device, max_rows=5), expected_plan(layout, [1, 2], 5))


BROKEN = {
    "length": (1, 1, -1),
    "row in front": (1, 0, 3),
    "row behind": (2, 1, 9),
    "overlap": (2, 0, 6),
    "own parent": (2, 2, 2),
    "parent of another sequence": (2, 2, 0),
    "parent below -1": (2, 2, -2),
    "visible": (2, 3, 4),
    "negative visible": (2, 3, -1),
    "visible without a parent": (1, 3, 1),
    "huge start": (2, 0, 2**31 - 1),
    "huge length": (2, 1, 2**31 - 1),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_sequence_with_a_broken_layout_is_left_out(rule: str, device: str) -> None:
    layout = make_layout([[(0, 4, -1, 0)], [(0, 3, -1, 0), (4, 4, 0, 2)], [(0, 2, -1, 0)]], row_counts=[4, 9, 2])
    segment, column, value = BROKEN[rule]
    expected = list(expected_plan(layout, [1, 2, 3], layout.rows))
    for i, fill in ((0, -1), (1, -1), (2, -1)):
        expected[i][4:13] = fill
    expected[3][1:3], expected[4][1] = -1, 1
    layout.segments[segment, column] = value
    assert_equal(plan(layout, [1, 2, 3], device), tuple(expected))


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        ("cu_seqlens_q", (1, 4, 13, 15)),
        ("cu_seqlens_q", (0, 13, 4, 15)),
        ("cu_seqlens_q", (0, 4, 13, 16)),
        ("cu_segments", (0, 1, 3, 5)),
        ("cu_segments", (0, 3, 1, 4)),
        ("cu_segments", (-1, 1, 3, 4)),
    ],
)
def test_broken_bounds_leave_all_out(tensor: str, values: tuple[int, ...], device: str) -> None:
    layout = make_layout([[(0, 4, -1, 0)], [(0, 3, -1, 0), (4, 4, 0, 2)], [(0, 2, -1, 0)]], row_counts=[4, 9, 2])
    layout = layout._replace(**{tensor: int32(*values)})
    from jacobi_kernels.triton.plan import plan_rows

    made = plan_rows(*(t.to(device) for t in (*layout, int32(0, 0, 0))), 15)
    assert made.error.tolist() == [1, 1, 1]
    for t in (made.row_sequence, made.row_segment, made.row_position, made.path):
        assert bool((t == -1).all())


def test_lengths_and_pages_are_checked(device: str) -> None:
    layout = chains(3, 3, 3, 3)
    k_cache = torch.zeros(4, 10, 1, 8, device=device)
    assert plan(layout, [7, 8, -1, 0], device, k_cache=k_cache)[4].tolist() == [0, 3, 3, 0]
    pages = torch.tensor([[0, 1, 2], [3, 4, 9], [3, 4, 9], [-1, 1, 2]], dtype=torch.int32, device=device)
    errors = plan(layout, [7, 5, 9, 0], device, k_cache=torch.zeros(5, 4, 1, 8, device=device), page_table=pages)[4]
    assert errors.tolist() == [0, 0, 4, 4]
