"""Seeds of the counter-based noise that makes sampling exact.

The noise of a candidate token depends on (seed of its row, position, token id) alone, never on the order of
evaluation; so a run that verifies many tokens per step draws what a run of one token per step draws.
:func:`jacobi_kernels.reference.gumbel_noise` states the noise itself, ``csrc/common/sampling.h`` is its twin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jacobi_kernels.checks import whole_number

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(x: int) -> int:
    """Mix 64 bits (Steele, Lea and Flood 2014): a bijection on ``0..2**64-1`` in which every bit matters."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _as_int64(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def row_seeds(seed: int | Sequence[int] | Tensor, batch: int, device: torch.device | str = "cpu") -> Tensor:
    """One seed per row of a batch.

    An int is hashed with the row number: row ``b`` gets ``splitmix64(seed + b * 0x9E3779B97F4A7C15)``, so rows draw
    independently and row 0 of any batch draws what a batch of one draws. A sequence or tensor holds the rows' own
    seeds and is taken as it is: a request that keeps its seed draws the same text in any row of any batch.

    Parameters
    ----------
    seed : int, sequence of int or Tensor
        Any int (taken modulo ``2**64``), or ``batch`` of them.
    batch : int
        Rows B.
    device : torch.device or str
        Where the result lives.

    Returns
    -------
    Tensor
        ``[B]`` int64 (the unsigned 64 bits, reinterpreted).

    Raises
    ------
    ValueError
        Not integers, or a sequence or tensor without exactly ``batch`` seeds.
    """
    if isinstance(seed, Tensor):
        seed = seed.tolist()
    if isinstance(seed, str) or not isinstance(seed, Sequence):
        first = whole_number("seed", seed, others=", or a list with one per row")
        rows = [_as_int64(splitmix64(first + b * _GOLDEN)) for b in range(batch)]
    else:
        rows = [_as_int64(whole_number(f"seed[{b}]", s)) for b, s in enumerate(seed)]
        if len(rows) != batch:
            raise ValueError(f"seed must be an int or hold one int per row: expected {batch}, got {len(rows)}")
    return torch.tensor(rows, dtype=torch.int64, device=device)
