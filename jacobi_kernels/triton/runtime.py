"""How Triton kernels are launched, counted and described for an offline compile.

Every launch goes through :func:`launch`, which counts it under the name of the op that asked for it. With
``TRITON_INTERPRET=1`` (read by Triton when a kernel is decorated, so before the first import of this package) kernels
run on CPU tensors, float32 only: the interpreter's bfloat16 arithmetic is not that of any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)


def _let_loops_have_runtime_bounds() -> None:
    """The interpreter keeps scalars as arrays of one element, which numpy 2.4 no longer takes for a loop's bound."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index_too


def _patch_the_language_once_per_launch() -> None:
    """A call from kernel to kernel patches the language anew, a millisecond each; what the launch patched will do."""
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    patched: set[Any] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in patched:  # functions of triton itself know the language under another name
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _sum_products_in_one_order() -> None:
    """numpy's matmul may sum a row in an order that depends on where in the tile it stands (OpenBLAS on AVX2 does)."""
    import numpy
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        total = numpy.zeros_like(d.data)
        term = numpy.empty_like(total)
        for k in range(a.data.shape[-1]):
            numpy.multiply(a.data[..., k, None], b.data[..., k, None, :], out=term)
            numpy.add(total, term, out=total)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if INTERPRETED:
    _sum_products_in_one_order()
    _let_loops_have_runtime_bounds()
    _patch_the_language_once_per_launch()

launches: Counter[str] = Counter()
"""Launches of every op since the process began; a decoder reports differences."""


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel, as ``make gpu-compile`` compiles it.

    kernel: the function under ``triton.jit``. signature: type of every argument in order ("*bf16", "*fp32", "*i32",
    "*i64", "*u8", "i32", "fp32", "constexpr"). constexprs: the constants. uses_mma: matrix instructions must appear in
    the compiled code. may_spill: registers may spill (kernels that are not on the decode path).
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    uses_mma: bool = False
    may_spill: bool = False
    attributes: Mapping[str, int] = field(default_factory=dict)  # argument -> divisor that its value is known to have
    options: Mapping[str, Any] = field(default_factory=dict)  # further options of its launches


def launch(op: str, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch ``kernel[grid](*args, **options)`` and count it under ``op``; an empty grid launches nothing."""
    if any(size == 0 for size in grid):
        return
    launches[op] += 1
    kernel[grid](*args, **options)


def check_dense(op: str, **tensors: Tensor | None) -> None:
    """Raise RuntimeError in one line for a tensor that is not contiguous: kernels take it as one run of elements."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise RuntimeError(
                f"{op}: {name} must be contiguous, got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            )


def check_runs_here(op: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError in one line when Triton cannot run ``op`` on these tensors."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type == "cpu":
            if not INTERPRETED:
                raise RuntimeError(
                    f"{op}: the Triton backend runs CPU tensors in its interpreter only: set TRITON_INTERPRET=1"
                )
            if tensor.dtype == torch.bfloat16:
                raise RuntimeError(f"{op}: Triton's interpreter computes float32 only: use float32 tensors")


def check_floats(op: str, name: str, weight: Tensor) -> None:
    """Raise RuntimeError in one line for a packed weight of int8 or int4."""
    if weight.dtype == torch.uint8:
        raise RuntimeError(f"{op}: {name} is packed in int8 or int4, which run on CPUs only: pack float32 or bfloat16")
