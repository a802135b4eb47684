"""Sampling parameters of a batch, checked once and laid out as the ops take them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobi_kernels.sampling import row_seeds

SCRATCH_ROWS = 16  # rows of logits that top-k and top-p may hold at a time
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny  # a top_p that rounds to 0 would keep no token

PerRow = float | int | Sequence[float] | Sequence[int] | Tensor


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of B rows; every field None means greedy.

    temperature [B] float32 (0: greedy row); top_k [B] int32 (0: off); top_p [B] float32 (1: off); seeds [B] int64;
    logits_scratch [16, V] float32, present only when a row uses top_k or top_p.
    """

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    seeds: Tensor | None = None
    logits_scratch: Tensor | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature is None

    def op_args(self) -> dict[str, Tensor | None]:
        """Keyword arguments of ``argmax_verify`` and ``multi_block_step``."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seeds": self.seeds,
            "logits_scratch": self.logits_scratch,
        }

    @classmethod
    def create(
        cls,
        batch: int,
        vocab_size: int,
        *,
        temperature: PerRow = 0.0,
        top_k: PerRow | None = None,
        top_p: PerRow | None = None,
        seed: int | Sequence[int] | Tensor = 0,
        device: torch.device | str = "cpu",
    ) -> SamplingParams:
        """Check what a user gave, a number or one per row.

        temperature >= 0 (0: greedy); top_k >= 0 (0 or None: off); 0 < top_p <= 1 (1 or None: off); seed: an int, hashed
        with the row number, or one int per row, taken as they are. Raises ValueError naming the argument and the row.
        """
        temperatures = _rows("temperature", temperature, batch, _temperature)
        top_ks = _rows("top_k", 0 if top_k is None else top_k, batch, _top_k)
        top_ps = _rows("top_p", 1.0 if top_p is None else top_p, batch, _top_p)
        seeds = row_seeds(seed, batch, device)
        if not any(temperatures):
            return cls()
        filtered = any(t > 0 and (k > 0 or p < 1.0) for t, k, p in zip(temperatures, top_ks, top_ps, strict=True))
        return cls(
            temperature=torch.tensor(temperatures, dtype=torch.float32, device=device),
            top_k=torch.tensor(top_ks, dtype=torch.int32, device=device) if filtered else None,
            top_p=torch.tensor(top_ps, dtype=torch.float32, device=device).clamp(min=_SMALLEST) if filtered else None,
            seeds=seeds,
            logits_scratch=torch.empty(SCRATCH_ROWS, vocab_size, device=device) if filtered else None,
        )


def _rows(name: str, value: Any, batch: int, check: Callable[[str, Any], float]) -> list[Any]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [check(name, value)] * batch
    if len(value) != batch:
        raise ValueError(f"{name} must be a number or hold one per row: expected {batch}, got {len(value)}")
    return [check(f"{name}[{row}]", v) for row, v in enumerate(value)]


def _number(name: str, value: Any, expected: str) -> Any:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not abs(value) < math.inf:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return value


def _temperature(name: str, value: Any) -> float:
    expected = "a number >= 0 (0 is greedy)"
    if _number(name, value, expected) < 0:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    if value > _LARGEST:
        raise ValueError(f"{name} must be {expected} that float32 can hold, got {value!r}")
    return float(value)


def _top_k(name: str, value: Any) -> int:
    expected = "an integer >= 0 (0 is off)"
    number = _number(name, value, expected)
    if number < 0 or number != int(number) or number >= 2**31:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return int(number)


def _top_p(name: str, value: Any) -> float:
    expected = "a number above 0 and at most 1 (1 is off)"
    if not 0 < _number(name, value, expected) <= 1:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return float(value)
