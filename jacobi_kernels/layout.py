"""The block layout: what one forward pass evaluates, as three int32 tensors.

Query rows of sequence b are ``cu_seqlens_q[b] .. cu_seqlens_q[b + 1]``, its segments ``cu_segments[b] ..
cu_segments[b + 1]``. A segment ``(start, length, parent, visible)`` is a causal run of rows that continues from the
first ``visible`` tokens of its parent segment, or from the committed tokens when ``parent`` is -1. The path of a query
token is: the committed tokens, the visible part of every ancestor (outermost first), its own segment up to itself. A
segment with ``visible`` 0 continues from its parent's own start.

Inside a sequence parents come first and segments lie in ascending rows without overlap. Rows that no segment covers
are holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """A block layout, made and changed on the CPU; :meth:`to` gives a copy for kernels elsewhere.

    Attributes
    ----------
    cu_seqlens_q : Tensor
        ``[B + 1]`` int32.
    segments : Tensor
        ``[S, 4]`` int32, rows (start, length, parent, visible); start and parent count over the whole batch.
    cu_segments : Tensor
        ``[B + 1]`` int32.
    """

    cu_seqlens_q: Tensor
    segments: Tensor
    cu_segments: Tensor

    @classmethod
    def chain(cls, lengths: Sequence[int]) -> BlockLayout:
        """One segment per sequence: prefill, AR decoding, Jacobi decoding without candidates."""
        return cls.from_segments([[(0, length, -1, 0)] for length in lengths])

    @classmethod
    def from_segments(
        cls, sequences: Sequence[Sequence[tuple[int, int, int, int]]], rows: Sequence[int] | None = None
    ) -> BlockLayout:
        """Segments (start, length, parent, visible) per sequence, with start and parent counted inside the sequence.

        ``rows`` gives the query rows of every sequence; by default they end with its last segment. Raises ValueError
        when the layout breaks a rule.
        """
        if rows is None:
            rows = [max((start + length for start, length, _, _ in segments), default=0) for segments in sequences]
        elif len(rows) != len(sequences):
            raise ValueError(f"rows must have one entry per sequence ({len(sequences)}), got {len(rows)}")
        offsets = [0, *accumulate(rows)]
        counts = [0, *accumulate(map(len, sequences))]
        table = [
            (row + start, length, first + parent if parent >= 0 else parent, visible)
            for segments, row, first in zip(sequences, offsets[:-1], counts[:-1], strict=True)
            for start, length, parent, visible in segments
        ]
        layout = cls(_int32(offsets), _int32(table).reshape(-1, 4), _int32(counts))
        layout.validate()
        return layout

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout with its tensors on ``device``."""
        return BlockLayout(self.cu_seqlens_q.to(device), self.segments.to(device), self.cu_segments.to(device))

    @property
    def batch(self) -> int:
        """B."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def rows(self) -> int:
        """T, holes included."""
        return int(self.cu_seqlens_q[-1])

    def validate(self) -> None:
        """Raise ValueError, naming the entry and the rule, unless the layout keeps every rule of this module."""
        if self.cu_seqlens_q.dim() != 1 or self.cu_seqlens_q.numel() < 1:
            raise ValueError(f"cu_seqlens_q must have shape [B + 1], got {list(self.cu_seqlens_q.shape)}")
        if self.segments.dim() != 2 or self.segments.shape[1] != 4:
            raise ValueError(f"segments must have shape [S, 4], got {list(self.segments.shape)}")
        if self.cu_segments.shape != self.cu_seqlens_q.shape:
            raise ValueError(
                f"cu_segments must have cu_seqlens_q's shape {list(self.cu_seqlens_q.shape)}, "
                f"got {list(self.cu_segments.shape)}"
            )
        rows, counts = self.cu_seqlens_q.tolist(), self.cu_segments.tolist()
        table = self.segments.tolist()
        for name, offsets, total in (("cu_seqlens_q", rows, rows[-1]), ("cu_segments", counts, len(table))):
            if offsets[0] != 0 or offsets[-1] != total or any(b < a for a, b in pairwise(offsets)):
                raise ValueError(f"{name} must start at 0, ascend and end at {total}, got {offsets}")
        for (first, end), (row, row_end) in zip(pairwise(counts), pairwise(rows), strict=True):
            for s in range(first, end):
                start, length, parent, visible = table[s]
                if length < 0:
                    rule = "length must not be negative"
                elif start < row or start + length > row_end:
                    rule = f"rows must lie within {row}..{row_end}, behind the segment before it"
                elif parent < -1 or parent >= s or -1 < parent < first:
                    rule = f"parent must be -1 or an earlier segment of the sequence ({first}..{s - 1})"
                elif not 0 <= visible <= (table[parent][1] if parent >= 0 else 0):
                    rule = "visible must be within 0..length of the parent, and 0 without a parent"
                else:
                    row = start + length
                    continue
                raise ValueError(f"segments[{s}] = {tuple(table[s])}: {rule}")

    def positions(self, cache_seqlens: Tensor) -> Tensor:
        """``[T]`` int32: position of each row when ``cache_seqlens`` ``[B]`` tokens are committed; -1 in holes."""
        table, counts, cached = self.segments.tolist(), self.cu_segments.tolist(), cache_seqlens.tolist()
        result = np.full(self.rows, -1, np.int32)
        before = [0] * len(table)
        for b, (first, end) in enumerate(pairwise(counts)):
            for s in range(first, end):
                start, length, parent, visible = table[s]
                before[s] = before[parent] + visible if parent >= 0 else cached[b]
                result[start : start + length] = np.arange(before[s], before[s] + length, dtype=np.int32)
        return torch.from_numpy(result)

    def compact(self) -> CompactLayout:
        """The same layout without holes."""
        table, counts = self.segments.tolist(), self.cu_segments.tolist()
        runs, offsets, total = [], [0], 0
        for first, end in pairwise(counts):
            for segment in table[first:end]:
                start, length = segment[0], segment[1]
                segment[0] = total
                if length:
                    runs.append(np.arange(start, start + length))
                    total += length
            offsets.append(total)
        rows = np.concatenate(runs) if runs else np.zeros(0, np.int64)
        layout = BlockLayout(_int32(offsets), _int32(table).reshape(-1, 4), self.cu_segments)
        return CompactLayout(layout, torch.from_numpy(rows), self)


@dataclass(frozen=True)
class CompactLayout:
    """A layout without holes, and the way back.

    Attributes
    ----------
    layout : BlockLayout
        The same segments with their rows renumbered. ``commit`` needs its ``cu_seqlens_q`` with ``accepted_rows`` as
        verified on it, since keys and values are appended in its row order.
    rows : Tensor
        ``[layout.rows]`` int64, the full layout's row of each row.
    full : BlockLayout
        The layout with holes.
    """

    layout: BlockLayout
    rows: Tensor
    full: BlockLayout

    def expand(self, values: Tensor, fill: int = -1) -> Tensor:
        """``[layout.rows, ...]`` values at the rows of the full layout; ``fill`` in the holes."""
        result = values.new_full((self.full.rows, *values.shape[1:]), fill)
        result[self.rows] = values
        return result

    def expand_accepted(self, accepted_rows: Tensor) -> Tensor:
        """``accepted_rows`` of this layout as the full layout has them: ``[full.rows]`` int32, as ``redraft`` takes."""
        result = np.full(self.full.rows, -1, np.int32)
        accepted, rows = accepted_rows.numpy(), self.rows.numpy()
        offsets = zip(pairwise(self.layout.cu_seqlens_q.tolist()), self.full.cu_seqlens_q.tolist(), strict=False)
        for (first, end), start in offsets:
            own = accepted[first:end]
            own = own[own >= 0]
            result[start : start + len(own)] = rows[own]
        return torch.from_numpy(result)


def _int32(values: Sequence[object]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))
