"""Which attention pattern a transformers mask function describes: full causal, or a causal window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jacobi_decoding.errors import UnsupportedModelError

_REMEDY = "decode this model with model.generate"


def window_of_mask(mask_function: Callable[..., Any] | None, sliding_window: int | None) -> int:
    """Our ``window_size`` of a mask function: -1 for full causal attention, w - 1 for a window of w tokens.

    mask_function: transformers' (batch, head, query position, key position) -> visible. sliding_window: the window
    transformers names beside it, or None. The function is evaluated at positions on both sides of every border, so
    chunked, bidirectional or custom patterns are refused (UnsupportedModelError) instead of being taken for causal.
    """
    if mask_function is None:
        raise UnsupportedModelError("attention mask", "the model asks for one without a mask function", _REMEDY)
    queries, keys = _probe_points(sliding_window or 0)
    expected = keys <= queries
    if sliding_window is not None:
        expected &= keys > queries - sliding_window
    zero = torch.zeros((), dtype=torch.int64)
    try:
        visible = mask_function(zero, zero, queries, keys)
    except Exception as error:
        raise UnsupportedModelError("attention mask", f"its function cannot be evaluated ({error})", _REMEDY) from error
    if not torch.equal(torch.as_tensor(visible).expand_as(expected).bool(), expected):
        pattern = "causal" if sliding_window is None else f"a causal window of {sliding_window}"
        raise UnsupportedModelError("attention mask", f"the model's pattern is not {pattern}", _REMEDY)
    return -1 if sliding_window is None else sliding_window - 1


def _probe_points(window: int) -> tuple[Tensor, Tensor]:
    """Query and key positions [N]: around the diagonal, the window's end, and the ends of chunks of powers of two."""
    queries = {0, 1, 2, 7, 8, 100, window, window + 1, 3 * window + 5}
    queries |= {2**e + d for e in range(4, 21) for d in (-1, 0, 1)}
    pairs = set()
    for q in queries:
        for border in (0, q, q - window, q // 2, *(q - 2**e for e in range(21))):
            pairs |= {(q, k) for k in (border - 1, border, border + 1) if k >= 0}
    points = torch.tensor(sorted(pairs), dtype=torch.int64)
    return points[:, 0], points[:, 1]
