"""What an optimizer step trains on: a run of packed samples in file order, shared out over ranks and micro-batches.

Step t takes samples ``t * batch_size ..`` of the file, over again from the start when it ends; rank r takes every
world-th of them. Every rank counts the rows of the whole step, so normalising a loss needs no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jacobi_training.batches import Batch, RowCounts, count_rows, make_batch, plan_micro_batches
from jacobi_training.distributed import Ranks
from jacobi_training.layout import check_sample
from jacobi_training.shards import ShardReader

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank.

    counts: rows of the whole step. micro_batches: this rank's samples; every rank has as many, and a rank that has too
    few samples ends with empty ones.
    """

    counts: RowCounts
    micro_batches: list[list[Sample]]
    filler: Sample  # what stands in for an empty micro-batch, with weight 0
    ar_only: bool

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """(batch, whether its losses count) of every micro-batch."""
        build = ar_batch if self.ar_only else make_batch
        for samples in self.micro_batches:
            yield build(samples or [self.filler]), bool(samples)


@dataclass(frozen=True)
class Feed:
    """Makes the steps.

    total: samples of the run, of which the last step takes what is left. max_rows: most rows of a micro-batch.
    ar_only: leave the noisy blocks out, since nothing is learned from them.
    """

    samples: ShardReader
    batch_size: int
    total: int
    max_rows: int
    ranks: Ranks
    ar_only: bool

    @property
    def steps(self) -> int:
        return -(-self.total // self.batch_size)

    def step(self, index: int) -> Step:
        """Step ``index``; ValueError, naming shard and line, when a record is not a packed sample."""
        first = index * self.batch_size
        numbers = [i % len(self.samples) for i in range(first, min(first + self.batch_size, self.total))]
        samples: list[Sample] = [self.samples[number] for number in numbers]
        counts = [self._count(number, sample) for number, sample in zip(numbers, samples, strict=True)]
        world = self.ranks.world
        plans = [plan_micro_batches([c.rows for c in counts[r::world]], self.max_rows) for r in range(world)]
        own = samples[self.ranks.rank :: world]
        micro = [[own[i] for i in plan] for plan in plans[self.ranks.rank]]
        micro += [[] for _ in range(max(map(len, plans)) - len(micro))]
        total = RowCounts(*(sum(getattr(c, name) for c in counts) for name in ("rows", "ar", "consistency")))
        return Step(total, micro, samples[0], self.ar_only)

    def _count(self, number: int, sample: Sample) -> RowCounts:
        try:
            counts = count_rows(sample)
        except ValueError as error:
            where = self.samples.where(number)
            raise ValueError(f"{where} is not a packed sample: {error}; pack the trajectories again") from None
        return RowCounts(len(sample["prompt_ids"]) + counts.ar, counts.ar, 0) if self.ar_only else counts


def ar_batch(samples: Sequence[Sample]) -> Batch:
    """Batch of the prompts and answers alone, without noisy blocks."""
    tokens, targets, lengths = [], [], []
    for sample in samples:
        check_sample(sample)
        ids = np.asarray([*sample["prompt_ids"], *sample["answer_ids"]], dtype=np.int64)
        following = np.full(len(ids), -1, dtype=np.int64)
        answer = len(sample["prompt_ids"])
        following[answer - 1 : -1] = ids[answer:]
        tokens.append(ids)
        targets.append(following)
        lengths.append(len(ids))
    starts = np.cumsum([0, *lengths])
    segments = np.array([(start, length, -1, 0) for start, length in zip(starts, lengths, strict=False)], np.int32)
    all_targets = torch.from_numpy(np.concatenate(targets))
    none = torch.full_like(all_targets, -1)
    return Batch(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        cu_seqlens_q=torch.from_numpy(starts.astype(np.int32)),
        segments=torch.from_numpy(segments),
        cu_segments=torch.arange(len(lengths) + 1, dtype=torch.int32),
        targets=all_targets,
        teachers=none,
        hard_targets=none,
        num_ar_rows=int((all_targets >= 0).sum()),
        num_consistency_rows=0,
    )
