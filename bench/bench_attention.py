"""multi_block_attention_with_kvcache: one layer of SmolLM2-135M, a chain behind cached tokens; with torch's SDPA.

Ours appends the chain's keys and values as well; SDPA gets them in place, and a mask that is ready.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bench.measure import assert_close
from bench.models import SMOLLM2
from jacobi_kernels import BlockLayout, ops, reference


def test_attention(measure: Any, dtype: torch.dtype, rows: int, cached: int) -> None:
    heads, kv_heads, dim = SMOLLM2.heads, SMOLLM2.kv_heads, SMOLLM2.head_dim
    generator = torch.Generator().manual_seed(rows + cached)
    q, k, v = (torch.randn(rows, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads))
    visible = rows * cached + rows * (rows + 1) // 2
    work = SMOLLM2.attention_work(visible, cached, rows, q.element_size())
    copies = measure.copies(work.bytes)
    caches = (
        torch.randn(2, 1, cached + rows, kv_heads, dim, generator=generator).to(dtype).repeat(copies, 1, 1, 1, 1, 1)
    )
    lengths = torch.tensor([cached], dtype=torch.int32)
    layout = BlockLayout.chain([rows])

    def ours(i: int) -> torch.Tensor:
        return ops.multi_block_attention_with_kvcache(
            q, k, v, caches[i, 0], caches[i, 1], lengths, layout.cu_seqlens_q, layout.segments, layout.cu_segments
        )

    out = ours(0)
    keys, values = caches[0, :, 0].double()
    exact, _ = reference.attend(q[-1].double(), keys, values, None, -1, 0.0)
    assert_close(out[-1], exact, "attention")

    mask = torch.ones(rows, cached + rows, dtype=torch.bool).tril(cached)
    queries = q.transpose(0, 1)[None]
    caches[:] = caches[0].clone()  # with the chain's rows

    def sdpa(i: int) -> torch.Tensor:
        k_heads, v_heads = caches[i].transpose(2, 3)
        return F.scaled_dot_product_attention(queries, k_heads, v_heads, mask, enable_gqa=True)

    assert_close(sdpa(0)[0, :, -1], exact, "SDPA")
    measure(ours, work, copies=copies, peer=sdpa, peer_name="torch.nn.functional.scaled_dot_product_attention")
