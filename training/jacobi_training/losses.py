"""What training minimises, as sums over rows that the caller divides by the row counts of a whole optimizer step.

    loss = ar_weight * (sum of AR terms) / (AR rows) + consistency_weight * (sum of consistency terms) / (their rows)

with both counts taken over the global batch. So the loss depends neither on how the batch is cut into micro-batches and
ranks nor on how many blocks a sample has.

AR term of a row: -log p(target). Consistency term, ``soft``: cross-entropy of the teacher row's distribution (no
gradient into it) and the row's own, both at ``temperature``; ``hard``: -log p(token of the fixed point). There is no
temperature-squared factor: at temperature T the soft gradient is about 1/T^2 of that at 1, which the weight can undo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jacobi_decoding.head import HeadTransform
from jacobi_training.fit_config import check_objective

if TYPE_CHECKING:
    from jacobi_training.batches import Batch


@dataclass(frozen=True)
class Objective:
    """The weights of the two terms; a term of weight 0 is not computed. ValueError for what has no meaning."""

    ar_weight: float = 1.0
    consistency_weight: float = 1.0
    consistency: str = "soft"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_objective(self.ar_weight, self.consistency_weight, self.consistency, self.temperature)

    def total(self, sums: Tensor, ar_rows: int, consistency_rows: int) -> Tensor:
        """The loss of ``sums`` [2], given the row counts of the optimizer step that they are a part of."""
        weights = (self.ar_weight / max(ar_rows, 1), self.consistency_weight / max(consistency_rows, 1))
        return sums @ sums.new_tensor(weights)


def loss_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: HeadTransform, batch: Batch, objective: Objective
) -> Tensor:
    """(sum of AR terms, sum of consistency terms) of a batch: [2] float32.

    hidden [R, E]: the decoder's output for the batch's R rows. weight [V, E], bias [V]: the language-model head.
    """
    none = torch.full_like(batch.targets, -1)
    targets = batch.targets if objective.ar_weight else none
    teachers = batch.teachers if objective.consistency_weight else none
    hard = None
    if objective.consistency == "hard" and objective.consistency_weight:
        # Rows with a hard target are noisy, so none has an AR term as well.
        hard, teachers = batch.hard_targets >= 0, none
        targets = torch.where(hard, batch.hard_targets, targets)
    nll, consistency = torch.ops.jacobi.consistency_loss.default(
        hidden,
        weight,
        bias,
        targets,
        teachers,
        temperature=objective.temperature,
        logit_scale=head.scale,
        softcap=head.softcap,
    )[:2]
    if hard is None:
        return torch.stack([nll.sum(), consistency.sum()])
    return torch.stack([nll.masked_fill(hard, 0.0).sum(), nll.masked_fill(~hard, 0.0).sum()])
