"""Many prompts decoded in one way: the tokens, the steps that each took, and intervals of what they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

RESAMPLES = 2000
Interval = tuple[float, float]

# Options of JacobiDecoder.generate.
AR: dict[str, Any] = {"block_size": 1, "blocks": 1, "candidates": 0, "pool_rows": 0, "pool_from_prompt": False}
# Candidates come from rejected tails and generated text, not from the prompt.
MULTI_BLOCK: dict[str, Any] = {"block_size": 32, "blocks": 2, "candidates": 4, "pool_from_prompt": False}


def plain(block_size: int) -> dict[str, Any]:
    """Jacobi decoding of one block, without candidates and pool."""
    return AR | {"block_size": block_size}


@dataclass(frozen=True)
class Decoded:
    """One prompt's new tokens. decode_tokens: those that decode steps emitted, so without the first."""

    tokens: list[int]
    decode_tokens: int
    decode_steps: int


@dataclass(frozen=True)
class Run:
    """Prompts in their order."""

    decoded: list[Decoded]

    @property
    def tokens(self) -> list[list[int]]:
        return [d.tokens for d in self.decoded]

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens emitted by decode steps / decode steps, of all prompts; None when no prompt needed one."""
        steps = sum(d.decode_steps for d in self.decoded)
        return sum(d.decode_tokens for d in self.decoded) / steps if steps else None

    def interval(self, seed: int) -> Interval | None:
        """95% interval of tokens_per_forward over prompts."""
        return ratio_interval([d.decode_tokens for d in self.decoded], [d.decode_steps for d in self.decoded], seed)


def decode(
    decoder: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    options: dict[str, Any],
    *,
    stops: Sequence[int] = (),
    batch_size: int = 8,
    order: Sequence[int] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Run:
    """Decode greedily, ``batch_size`` prompts at a time.

    decoder: a JacobiDecoder. limits: most new tokens of each prompt. options: of its generate. stops: tokens that end
    an answer. order: in which prompts are put into batches, so that a batch's answers have about one length (it changes
    no result: rows do not depend on one another). advance: called with the number of prompts done.
    """
    decoded: list[Decoded | None] = [None] * len(prompts)
    order = range(len(prompts)) if order is None else order
    for start in range(0, len(order), batch_size):
        chosen = list(order[start : start + batch_size])
        ids, mask = left_padded([prompts[i] for i in chosen])
        _, stats = decoder.generate(
            ids,
            mask,
            max_new_tokens=[limits[i] for i in chosen],
            eos_token_id=list(stops),
            pad_token_id=0,
            do_sample=False,
            return_stats=True,
            **options,
        )
        for i, row in zip(chosen, stats.rows, strict=True):
            decoded[i] = Decoded(row.text[len(prompts[i]) :], row.decode_tokens, row.decode_steps)
        advance(len(chosen))
    return Run([d for d in decoded if d is not None])


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, [batch, longest] int64 each."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval | None:
    """Bootstrap 95% interval of sum(numerators) / sum(denominators) over pairs; None when every denominator is 0."""
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if not below.sum():
        return None
    draws = np.random.default_rng(seed).integers(len(above), size=(RESAMPLES, len(above)))
    sums = below[draws].sum(1)
    ratios = above[draws].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
