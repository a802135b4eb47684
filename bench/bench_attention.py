"""Attention of one layer of SmolLM2-135M, with torch's SDPA.

multi_block_attention_with_kvcache: a chain behind cached tokens. Ours appends the chain's keys and values as well; SDPA
gets them in place, and a mask that is ready. multi_block_attention: one packed training sample, forward and backward;
SDPA gets a ready mask of all pairs of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bench.floor import Work
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


def training_sample(prompt: int, block: int, blocks: int) -> BlockLayout:
    """A prompt, then for each block a noisy and a clean segment behind the clean block before."""
    segments, clean = [(0, prompt, -1, 0)], 0
    for _ in range(blocks):
        start, behind = sum(segments[-1][:2]), (clean, segments[clean][1])
        segments += [(start, block, *behind), (start + block, block, *behind)]
        clean = len(segments) - 1
    return BlockLayout.from_segments([segments])


def test_attention_training(measure: Any, dtype: torch.dtype) -> None:
    layout = training_sample(prompt=128, block=16, blocks=24)
    rows, heads, kv_heads, dim = layout.rows, SMOLLM2.heads, SMOLLM2.kv_heads, SMOLLM2.head_dim
    generator = torch.Generator().manual_seed(rows)
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for row, path in reference.row_paths(layout.segments, layout.cu_segments)[0].items():
        mask[row, path] = True

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.multi_block_attention(q, k, v, layout.cu_seqlens_q, layout.segments, layout.cu_segments)[0]

    weight = torch.randn(rows, heads, dim, generator=generator).to(dtype)
    inputs = [torch.randn(rows, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]
    leaves = [t.clone().requires_grad_() for t in inputs]
    wide = [t.double().requires_grad_() for t in inputs]

    def gradients(attend: Any) -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, weight)

    exact = torch.autograd.grad(sdpa(*wide), wide, weight.double())
    for name, attend in (("ours", ours), ("SDPA", sdpa)):
        for actual, expected in zip(gradients(attend), exact, strict=True):
            assert_close(actual, expected, f"gradient of {name}")
    elements = 6 * (heads + kv_heads)  # q, k, v twice; out, written and read, and its gradient; dq, dk, dv
    work = Work(elements * rows * dim * weight.element_size(), 14 * heads * dim * float(mask.sum()))
    measure(
        lambda i: gradients(ours),
        work,
        peer=lambda i: gradients(sdpa),
        peer_name="torch.nn.functional.scaled_dot_product_attention, mask of all pairs",
    )
