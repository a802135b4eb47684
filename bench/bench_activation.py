"""The activation of SmolLM2-135M's feed-forward, its input read from memory; in turn with torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bench.floor import Work
from bench.measure import assert_close
from bench.models import SMOLLM2
from jacobi_kernels import ops, reference


def test_activation(measure: Any, dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, SMOLLM2.ffn, generator=torch.Generator().manual_seed(rows)).to(dtype)
    assert_close(ops.activation(x, "silu"), reference.activation(x, "silu"), "silu")
    bytes_read = x.numel() * x.element_size()  # the result may stay in the cache
    copies = measure.copies(bytes_read)
    inputs = x.repeat(copies, 1, 1)
    measure(
        lambda i: ops.activation(inputs[i], "silu"),
        Work(bytes_read),
        copies=copies,
        peer=lambda i: F.silu(inputs[i]),
        peer_name="torch.nn.functional.silu",
    )
