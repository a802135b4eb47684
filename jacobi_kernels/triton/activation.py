"""``y[i] = f(x[i])``: one element per lane, computed in float32 by the CPU kernels' formulas (vec_math.py).

An element's bits depend on the element alone. Bytes: x once, y once. Operations: about 30 per element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jacobi_kernels._ops import ACTIVATIONS, FLOATS, _dtype
from jacobi_kernels.triton.runtime import INTERPRETED, CompileCase, check_runs_here, launch
from jacobi_kernels.triton.vec_math import EXACT, fma, one_plus_erf, sigmoid, tanh

OP = "activation"
BLOCK = 65536 if INTERPRETED else 1024


@triton.jit
def activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of float32 values; KIND counts in ACTIVATIONS."""
    if KIND == 0:  # silu
        y = x * sigmoid(x)
    elif KIND == 1:  # gelu: x/2 (1 + erf(x / sqrt(2)))
        y = x * 0.5 * one_plus_erf(x * 0.707106781)
    elif KIND == 2:  # gelu_tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 ...)
        y = x * sigmoid(fma(x * x * x, 0.044715, x) * 1.595769122)
    elif KIND == 3:  # quick_gelu
        y = x * sigmoid(x * 1.702)
    elif KIND == 4:  # relu
        y = tl.where(x < 0.0, 0.0, x)
    elif KIND == 5:  # relu2
        y = tl.where(x < 0.0, 0.0, x)
        y = y * y
    elif KIND == 6:  # sigmoid
        y = sigmoid(x)
    else:
        y = tanh(x)
    return y


@triton.jit
def activation_kernel(x, y, size, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, KIND).to(y.dtype.element_ty), mask=at < size)


def activation(x: Tensor, kind: str) -> Tensor:
    """``kind`` of every element as :func:`jacobi_kernels.ops.activation`: ``x``'s shape and dtype, contiguous."""
    check_runs_here(OP, x)
    _dtype(OP, "x", x, *FLOATS)
    if kind not in ACTIVATIONS:
        raise RuntimeError(f"{OP}: kind must be one of {', '.join(ACTIVATIONS)}, got '{kind}'")
    x = x.contiguous()
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    launch(OP, activation_kernel, grid, x, y, x.numel(), KIND=ACTIVATIONS.index(kind), BLOCK=BLOCK, **EXACT)
    return y


def compile_cases() -> list[CompileCase]:
    """Every activation in bfloat16 and float32."""
    cases = []
    for kind, name in enumerate(ACTIVATIONS):
        for short in ("bf16", "fp32"):
            constants = {"KIND": kind, "BLOCK": BLOCK}
            signature = {"x": f"*{short}", "y": f"*{short}", "size": "i32"} | dict.fromkeys(constants, "constexpr")
            aligned = {"x": 16, "y": 16, "size": 16}
            cases.append(
                CompileCase(
                    f"{OP}: {name} {short}", activation_kernel, signature, constants, attributes=aligned, options=EXACT
                )
            )
    return cases
