"""Packed samples as tensors: several samples one behind another, split into micro-batches by rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jacobi_kernels.layout import BlockLayout
from jacobi_training.layout import RowCounts, count_rows, sample_layout

__all__ = ["Batch", "RowCounts", "count_rows", "make_batch", "plan_micro_batches"]


@dataclass(frozen=True)
class Batch:
    """B samples, R rows, S segments; see :mod:`jacobi_training.layout`.

    Attributes
    ----------
    tokens, positions : Tensor
        ``[R]`` int64.
    cu_seqlens_q : Tensor
        ``[B + 1]`` int32, first row of every sample and R.
    segments : Tensor
        ``[S, 4]`` int32, rows (start, length, parent, visible); start and parent count over the whole batch.
    cu_segments : Tensor
        ``[B + 1]`` int32.
    targets : Tensor
        ``[R]`` int64: token that a prompt or clean row predicts, -1 where there is no AR term.
    teachers : Tensor
        ``[R]`` int64: row of this batch whose prediction a noisy row must give, -1 where there is no consistency term.
    hard_targets : Tensor
        ``[R]`` int64: token of the fixed point that a noisy row must predict, -1 where ``teachers`` is.
    num_ar_rows, num_consistency_rows : int
        Rows with a term.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    segments: Tensor
    cu_segments: Tensor
    targets: Tensor
    teachers: Tensor
    hard_targets: Tensor
    num_ar_rows: int
    num_consistency_rows: int

    @property
    def rows(self) -> int:
        """R."""
        return self.tokens.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on ``device``."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "Tensor"}
        return replace(self, **{name: t.to(device, non_blocking=non_blocking) for name, t in tensors.items()})


def make_batch(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Batch of packed sample records on the CPU; ValueError, in one line, when a record is not one."""
    layouts = [sample_layout(sample) for sample in samples]
    counts = [len(layout.tokens) for layout in layouts]
    offsets = list(accumulate(counts, initial=0))
    layout = BlockLayout.from_segments([sample.segments for sample in layouts], rows=counts)
    teachers = [np.where(s.teachers < 0, -1, s.teachers + row) for s, row in zip(layouts, offsets, strict=False)]
    targets = _joined([sample.targets for sample in layouts])
    teacher_rows = _joined(teachers)
    return Batch(
        tokens=_joined([sample.tokens for sample in layouts]),
        positions=layout.positions(torch.zeros(len(layouts), dtype=torch.int32)).to(torch.int64),
        cu_seqlens_q=layout.cu_seqlens_q,
        segments=layout.segments,
        cu_segments=layout.cu_segments,
        targets=targets,
        teachers=teacher_rows,
        hard_targets=_joined([sample.hard_targets for sample in layouts]),
        num_ar_rows=int((targets >= 0).sum()),
        num_consistency_rows=int((teacher_rows >= 0).sum()),
    )


def plan_micro_batches(rows: Sequence[int], max_rows: int) -> list[list[int]]:
    """Split samples, in order, into micro-batches of at most ``max_rows`` rows.

    Parameters
    ----------
    rows : sequence of int
        Rows of every sample, see :func:`count_rows`.
    max_rows : int
        Rows of a micro-batch; a sample that is larger makes one by itself.

    Returns
    -------
    list of list of int
        Indices of the samples of every micro-batch; all together ``0 .. len(rows) - 1`` in order.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    plan: list[list[int]] = []
    filled = 0
    for index, count in enumerate(rows):
        if not plan or filled + count > max_rows:
            plan.append([])
            filled = 0
        plan[-1].append(index)
        filled += count
    return plan


def _joined(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *arrays]))
