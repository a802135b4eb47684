"""packed_linear on every matrix of SmolLM2-135M, in turn with torch's linear on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.floor import Work
from bench.measure import assert_close
from bench.models import SMOLLM2, random_linear
from jacobi_kernels import ops, reference, unpack_weight

CHECK_COLUMNS = 64


@pytest.mark.parametrize("matrix", SMOLLM2.linears)
def test_packed_linear(measure: Any, dtype: torch.dtype, rows: int, matrix: str) -> None:
    out_features, in_features = SMOLLM2.linears[matrix]
    packed = random_linear(out_features, in_features, dtype)
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    panels = packed[: CHECK_COLUMNS // 16]
    exact = reference.packed_linear(x, panels, None, CHECK_COLUMNS)
    assert_close(ops.packed_linear(x, packed, None, out_features)[:, :CHECK_COLUMNS], exact, matrix)

    weight_bytes = packed.numel() * packed.element_size()
    copies = measure.copies(weight_bytes)
    ours = [packed.clone() for _ in range(copies)]
    plain = unpack_weight(packed, out_features)
    theirs = [plain.clone() for _ in range(copies)]
    with torch.no_grad():
        measure(
            lambda i: ops.packed_linear(x, ours[i], None, out_features),
            Work(weight_bytes, 2 * rows * out_features * in_features),
            copies=copies,
            peer=lambda i: F.linear(x, theirs[i]),
            peer_name="torch.nn.functional.linear",
        )
