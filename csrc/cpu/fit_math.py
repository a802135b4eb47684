"""Fit the polynomials of vec_math.h (Chebyshev interpolation in float64) and print their coefficients.

Run `python csrc/cpu/fit_math.py` after changing a range or a degree and paste the output into vec_math.h. Each line
gives the largest relative error of the float64 polynomial over its range; float32 rounding (6e-8) comes on top.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.polynomial import chebyshev, polynomial


def fit(name: str, function: Callable[[float], float], low: float, high: float, degree: int) -> None:
    """Interpolate `function` on [low, high] at Chebyshev nodes and print power-basis coefficients, lowest first."""
    nodes = np.cos((np.arange(degree + 1) + 0.5) * np.pi / (degree + 1))
    x = 0.5 * (high - low) * nodes + 0.5 * (high + low)
    series = chebyshev.Chebyshev.fit(x, [function(v) for v in x], degree, domain=[low, high])
    power = series.convert(kind=polynomial.Polynomial).coef
    grid = np.linspace(low, high, 20001)
    exact = np.array([function(v) for v in grid])
    error = np.max(np.abs(polynomial.polyval(grid, power) - exact) / np.maximum(np.abs(exact), 1e-30))
    print(f"// {name} on [{low:.6g}, {high:.6g}], relative error {error:.1e}")
    print(", ".join(f"{np.float32(c):.9e}f" for c in power))


def series(terms: Callable[[int], float], x: float) -> float:
    """Sum of terms(i) * x**i: exact near 0, where the closed forms divide 0 by 0."""
    return sum(terms(i) * x**i for i in range(40))


def main() -> None:
    half = 0.5 * math.log(2.0)
    fit("(exp(r) - 1 - r) / r^2", lambda r: series(lambda i: 1 / math.factorial(i + 2), r), -half, half, 5)
    low, high = math.sqrt(0.5) - 1.0, math.sqrt(2.0) - 1.0
    fit(
        "(log(1 + r) - r + r^2/2) / r^3",
        lambda r: (math.log1p(r) - r + r * r / 2) / r**3 if abs(r) > 0.05 else series(lambda i: (-1) ** i / (i + 3), r),
        low,
        high,
        8,
    )
    fit(
        "(tanh(x) - x) / x^3 in z = x^2",
        lambda z: (
            (math.tanh(math.sqrt(z)) - math.sqrt(z)) / math.sqrt(z) ** 3
            if z > 1e-3
            else -1 / 3 + 2 * z / 15 - 17 * z * z / 315 + 62 * z**3 / 2835
        ),
        0.0,
        0.39,
        4,
    )
    fit(
        "erf(x) / x in z = x^2",
        lambda z: math.erf(math.sqrt(z)) / math.sqrt(z) if z > 0 else 2 / math.sqrt(math.pi),
        0.0,
        1.0,
        6,
    )
    fit("log(erfc(x)) in x", lambda x: math.log(math.erfc(x)), 1.0, 4.0, 8)


if __name__ == "__main__":
    main()
