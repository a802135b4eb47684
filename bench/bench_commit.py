"""commit when a candidate of ``rows`` tokens has won: its keys and values move in all layers of SmolLM2-135M.

Only the rows that move are touched, so the committed length makes no difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.floor import Work
from bench.models import SMOLLM2
from jacobi_kernels import ops, reference


def test_commit(measure: Any, dtype: torch.dtype, rows: int) -> None:
    # The chain's first token, then the candidate behind a chain of `rows` tokens.
    accepted = torch.tensor([0, *range(rows, 2 * rows - 1), *[-1] * rows], dtype=torch.int32)
    cu_seqlens_q = torch.tensor([0, 2 * rows], dtype=torch.int32)
    count = torch.tensor([rows], dtype=torch.int32)
    shape = (2, SMOLLM2.layers, 1, 2 * rows, SMOLLM2.kv_heads, SMOLLM2.head_dim)
    caches = torch.randn(shape, generator=torch.Generator().manual_seed(rows)).to(dtype)

    def run(pair: Tensor) -> Tensor:
        length = torch.zeros(1, dtype=torch.int32)
        ops.commit(pair[0], pair[1], length, accepted, count, cu_seqlens_q)
        return length

    ours, expected, length = caches.clone(), caches.clone(), torch.zeros(1, dtype=torch.int32)
    reference.commit(expected[0], expected[1], length, accepted, count, cu_seqlens_q)
    assert torch.equal(run(ours), length)
    assert torch.equal(ours, expected)

    row_bytes = SMOLLM2.kv_heads * SMOLLM2.head_dim * caches.element_size()
    moved = 2 * 2 * SMOLLM2.layers * (rows - 1) * row_bytes  # keys and values, read and written
    copies = measure.copies(caches.numel() * caches.element_size())
    rotated = caches.repeat(copies, 1, 1, 1, 1, 1, 1)
    measure(lambda i: run(rotated[i]), Work(moved) if moved else None, copies=copies)
