"""transformers' own prompt lookup decoding, with its forwards counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Lookup:
    """tokens: the new ones. forward_tokens: query tokens of each forward, the prompt's first."""

    tokens: list[int]
    forward_tokens: list[int]
    seconds: float

    @property
    def decode_tokens(self) -> int:
        """New tokens without the first, which the prompt's forward gives."""
        return len(self.tokens) - 1

    @property
    def decode_forwards(self) -> int:
        return len(self.forward_tokens) - 1

    @property
    def decode_positions(self) -> int:
        """Query tokens that the decode forwards evaluated."""
        return sum(self.forward_tokens[1:])


def prompt_lookup(model: Any, ids: Sequence[int], max_new_tokens: int, **options: Any) -> Lookup:
    """Greedy ``model.generate(prompt_lookup_num_tokens=10)`` on one prompt.

    options: more arguments of generate, such as the stop tokens, which are otherwise the model's own. transformers
    verifies guesses in the prompt's forward already; what it gains there counts for it.
    """
    x = torch.tensor([list(ids)], device=model.device)
    rows: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: rows.append(output.shape[1])
    )
    start = time.perf_counter()
    try:
        output = model.generate(
            x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            prompt_lookup_num_tokens=LOOKUP_TOKENS,
            **options,
        )
    finally:
        hook.remove()
    return Lookup(output[0, len(ids) :].tolist(), rows, time.perf_counter() - start)
