"""Gumbel noise keyed by (seed, position, token id): csrc/common/sampling.h, hash bits and logarithms alike."""

from __future__ import annotations

import triton
import triton.language as tl

from jacobi_kernels.triton.vec_math import log, log_one_minus


@triton.jit
def _splitmix64(x):  # type: ignore[no-untyped-def]
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, position):  # type: ignore[no-untyped-def]
    """Low and high word, uint32, of the key of int64 seeds and positions of at least 0."""
    mixed = _splitmix64(seed.to(tl.uint64, bitcast=True))
    key = _splitmix64(mixed ^ position.to(tl.uint64))
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def gumbel(low, high, id):  # type: ignore[no-untyped-def]
    """-log(-log(1 - v)), v = (hash + 1/2) / 2**32, float32; all arguments uint32."""
    h = id * 0x9E3779B9 + low
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16) ^ high
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    upper = h >= 0x80000000  # v >= 1/2: use 1 - v, whose low bits are exact
    folded = tl.where(upper, h ^ 0xFFFFFFFF, h).to(tl.int32)
    v = (folded.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = -tl.where(upper, log(v), log_one_minus(v))
    return -log(exponential)
