"""consistency_loss on a training batch, alone and with its gradients; in turn with torch on materialised logits.

Half of the rows have a target, the other half learn from them. The floor of a training step counts three products: the
fourth, logits computed again in the backward, is what not keeping them costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.floor import Work
from bench.measure import assert_close
from jacobi_kernels import ops, reference

CHECK_ROWS, CHECK_VOCAB = 64, 2048
TEMPERATURE = 2.0
SHAPES = {"2048x256x4096": (2048, 256, 4096), "1024x576x49152": (1024, 576, 49152)}  # rows, width, vocabulary

Losses = Callable[..., tuple[Tensor, Tensor]]


def materialised(
    hidden: Tensor, lm_head: Tensor, bias: None, targets: Tensor, teachers: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The plain torch formulation: sums over rows of the two losses."""
    logits = F.linear(hidden, lm_head, bias).float()
    students = (teachers >= 0).nonzero()[:, 0]
    teacher = torch.softmax(logits.detach()[teachers[students]] / temperature, 1)
    nll = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    return nll, F.cross_entropy(logits[students] / temperature, teacher, reduction="sum")


def total(losses: Losses, hidden: Tensor, lm_head: Tensor, targets: Tensor, teachers: Tensor) -> Tensor:
    nll, consistency = losses(hidden, lm_head, None, targets, teachers, temperature=TEMPERATURE)
    return nll.sum() + consistency.sum()


def gradients(losses: Losses, hidden: Tensor, lm_head: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Of the total, to hidden states and head."""
    leaves = [t.detach().requires_grad_() for t in (hidden, lm_head)]
    return torch.autograd.grad(total(losses, *leaves, *rows), leaves)


def roles(rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Targets of the first half of the rows, and the second half's teachers among them."""
    half = rows // 2
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[half:] = -1
    teachers = torch.arange(rows) - half
    return targets, teachers.clamp(min=-1)


@pytest.mark.parametrize("what", ["forward", "training"])
@pytest.mark.parametrize("shape", SHAPES)
def test_consistency_loss(measure: Any, dtype: torch.dtype, shape: str, what: str) -> None:
    rows, width, vocab = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    lm_head = (torch.randn(vocab, width, generator=generator) / width**0.5).to(dtype)
    run = total if what == "forward" else gradients

    small = (hidden[:CHECK_ROWS], lm_head[:CHECK_VOCAB], *roles(CHECK_ROWS, CHECK_VOCAB))
    ours, exact = run(ops.consistency_loss, *small), run(reference.consistency_loss, *small)
    for actual, expected in zip(*((r,) if isinstance(r, Tensor) else r for r in (ours, exact)), strict=True):
        assert_close(actual, expected, what)

    arguments = (hidden, lm_head, *roles(rows, vocab))
    item, products = hidden.element_size(), 1 if what == "forward" else 3
    work = Work((rows + vocab) * width * item * (1 if what == "forward" else 2), products * 2 * rows * vocab * width)
    measure(
        lambda _: run(ops.consistency_loss, *arguments),
        work,
        peer=lambda _: run(materialised, *arguments),
        peer_name="torch linear, softmax and cross_entropy",
        logits_mb=4e-6 * rows * vocab,
    )
