"""exp, log, tanh, sigmoid and erf in float32, the twins of csrc/cpu/vec_math.h: same coefficients, same order.

So sampling noise and activations do not hang on a platform's own functions: on a GPU (fma as one instruction, compiled
without contraction of other products: :data:`EXACT`) they have the CPU kernels' bits. The interpreter has no fma; there
the product is taken in float64, which rounds otherwise in one case of 2**29.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jacobi_kernels.triton.runtime import INTERPRETED

EXACT = {"enable_fp_fusion": False}
"""Launch options of kernels whose products and sums must round one by one."""

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def fma(a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c with one rounding."""
    if _INTERPRETED:
        zero = tl.zeros_like(a)  # rounds constants to float32
        return (a.to(tl.float64) * (zero + b) + (zero + c)).to(tl.float32)
    return tl.math.fma(a, b, c)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """Within two roundings of e**x; 0 below -87.33."""
    y = tl.where(x > 88.37, 88.37, tl.where(x < -87.33, -87.33, x))
    t = fma(y, 1.44269504, 12582912.0)  # 1.5 * 2**23 rounds to integers
    n = t - 12582912.0
    r = fma(n, -0.693145752, y)
    r = fma(n, -1.42860677e-6, r)
    p = fma(r, 1.989098091e-04, 1.393364160e-03)
    p = fma(p, r, 8.333310485e-03)
    p = fma(p, r, 4.166646674e-02)
    p = fma(p, r, 1.666666716e-01)
    p = fma(p, r, 5.000000000e-01)
    p = fma(p, r * r, r) + 1.0
    result = (p.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    result = tl.where(x < -87.33, 0.0, result)
    result = tl.where(x > 88.37, float("inf"), result)
    return tl.where(x != x, x, result)


@triton.jit
def log(x):  # type: ignore[no-untyped-def]
    """log of positive normal x = 2**n m, m in [sqrt(1/2), sqrt(2))."""
    offset = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # bits of sqrt(1/2): the exponent field now counts n
    n = ((offset + 0x40000000) >> 23).to(tl.float32) - 128.0
    r = ((offset & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    square = r * r
    p = fma(r, 6.971611083e-02, -1.147973388e-01)
    p = fma(p, r, 1.168541983e-01)
    p = fma(p, r, -1.242568716e-01)
    p = fma(p, r, 1.424905807e-01)
    p = fma(p, r, -1.666780263e-01)
    p = fma(p, r, 2.000071555e-01)
    p = fma(p, r, -2.499999702e-01)
    p = fma(p, r, 3.333333135e-01)
    p = p * r * square
    p = fma(n, -2.12194440e-4, p)
    p = fma(square, -0.5, p)
    return fma(n, 0.693359375, r + p)


@triton.jit
def log_one_minus(v):  # type: ignore[no-untyped-def]
    """log(1 - v) for 0 < v <= 1/2, accurate for small v."""
    u = 1.0 - v
    lost = (1.0 - u) - v
    return log(u) + tl.div_rn(lost, u)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    a, z = tl.abs(x), x * x
    p = fma(z, -6.100170780e-03, 2.099955268e-02)
    p = fma(p, z, -5.385141075e-02)
    p = fma(p, z, 1.333277375e-01)
    p = fma(p, z, -3.333332837e-01)
    near = fma(p * z, x, x)
    far = 1.0 - tl.div_rn(tl.full(x.shape, 2.0, tl.float32), exp(a + a) + 1.0)
    return tl.where(a > 0.6245, tl.where(x < 0.0, -far, far), near)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@triton.jit
def one_plus_erf(x):  # type: ignore[no-untyped-def]
    """1 + erf(x), without cancellation on the negative side."""
    a = tl.where(tl.abs(x) < 4.0, tl.abs(x), 4.0)
    z = a * a
    p = fma(z, 7.875874871e-05, -8.016864303e-04)
    p = fma(p, z, 5.189087242e-03)
    p = fma(p, z, -2.685421146e-02)
    p = fma(p, z, 1.128359437e-01)
    p = fma(p, z, -3.761262596e-01)
    p = fma(p, z, 1.128379107e00)
    near = fma(p, x, 1.0)
    t = fma(a, 1.637151513e-06, -4.605804497e-05)
    t = fma(t, a, 5.968056503e-04)
    t = fma(t, a, -4.759596195e-03)
    t = fma(t, a, 2.642113529e-02)
    t = fma(t, a, -1.100800857e-01)
    t = fma(t, a, -6.318260431e-01)
    t = fma(t, a, -1.130233407e00)
    t = fma(t, a, 3.201380896e-04)
    tail = tl.where(tl.abs(x) > 4.0, 0.0, exp(t))
    far = tl.where(x < 0.0, tail, 2.0 - tail)
    return tl.where(x != x, x, tl.where(a > 1.0, far, near))
