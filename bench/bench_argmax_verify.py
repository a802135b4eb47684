"""argmax_verify on the head of SmolLM2-135M: one chain, greedy; in turn with torch's linear and argmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.floor import Work
from bench.models import SMOLLM2, random_linear
from jacobi_kernels import BlockLayout, ops, reference, unpack_weight

CHECK_VOCAB = 2048


def test_argmax_verify(measure: Any, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, SMOLLM2.hidden, generator=generator).to(dtype)
    tokens = torch.randint(CHECK_VOCAB, (rows,), generator=generator, dtype=torch.int32)
    length, layout = torch.zeros(1, dtype=torch.int32), BlockLayout.chain([rows])

    def verify(head: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layout_args = (layout.cu_seqlens_q, layout.segments, layout.cu_segments)
        return ops.argmax_verify(hidden, head, None, vocab, tokens, None, length, *layout_args)

    head = random_linear(SMOLLM2.vocab, SMOLLM2.hidden, dtype)
    logits = reference.token_logits(hidden, head[: CHECK_VOCAB // 16], None, CHECK_VOCAB)
    predicted = verify(head[: CHECK_VOCAB // 16], CHECK_VOCAB)[0]
    best = logits.max(dim=1).values
    missed = float((best - logits.gather(1, predicted.long()[:, None])[:, 0]).max())
    assert missed <= 1e-4 * float(best.max()), f"a prediction is {missed:.3g} below the reference's best logit"

    head_bytes = head.numel() * head.element_size()
    copies = measure.copies(head_bytes)
    ours = [head.clone() for _ in range(copies)]
    plain = unpack_weight(head, SMOLLM2.vocab)
    theirs = [plain.clone() for _ in range(copies)]
    measure(
        lambda i: verify(ours[i], SMOLLM2.vocab),
        Work(head_bytes, 2 * rows * SMOLLM2.vocab * SMOLLM2.hidden),
        copies=copies,
        peer=lambda i: F.linear(hidden, theirs[i]).argmax(dim=1),
        peer_name="torch.nn.functional.linear, argmax",
    )
