"""Offline compile of the package's Triton kernels: no GPU, no driver, no CUDA build of torch."""

from __future__ import annotations

import importlib
import os
import pkgutil
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.gpu.resources import ARCHITECTURE, Compiled, Usage, mma_in_ptx, parse_ptxas, tool

PACKAGE = "jacobi_kernels.triton"
POINTER_ALIGNMENT = 16  # torch's allocations are, and Triton's launcher then specialises on it


def module_names() -> list[str]:
    """Modules of the package, sorted."""
    package = importlib.import_module(PACKAGE)
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__))


@cache
def cases_of(module: str) -> tuple[Any, ...]:
    """What ``module`` says must compile; () for one without ``compile_cases``.

    Raises:
        RuntimeError: it cannot be imported, or cannot make its cases.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET must not be set: interpreted kernels cannot be compiled")
    try:
        imported = importlib.import_module(f"{PACKAGE}.{module}")
        return tuple(imported.compile_cases()) if hasattr(imported, "compile_cases") else ()
    except Exception as error:
        raise RuntimeError(f"{PACKAGE}.{module}: {type(error).__name__}: {error}") from error


def kernels_without_case(modules: Sequence[str]) -> list[str]:
    """Kernels (functions named ``..._kernel``) of importable ``modules`` that no case compiles."""
    from triton.runtime.jit import JITFunction

    covered = {case.kernel.fn for module in modules for case in cases_of(module)}
    missing = []
    for module in modules:
        for name, value in vars(importlib.import_module(f"{PACKAGE}.{module}")).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel") and value.fn not in covered:
                missing.append(f"{PACKAGE}.{module}: {name} is in no module's compile_cases()")
    return missing


def compile_case(module: str, index: int, target: int) -> Compiled:
    """Compile one case for one target; Triton's cache makes a second time short."""
    case = cases_of(module)[index]
    start = time.perf_counter()
    usage, error = None, ""
    try:
        usage = _usage(case, target)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return Compiled(module, case.name, target, usage, error, case.uses_mma, case.may_spill, time.perf_counter() - start)


def _usage(case: Any, target: int) -> Usage:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    if list(case.signature) != list(names):
        raise ValueError(f"the signature names {list(case.signature)}, the kernel takes {list(names)}")
    divisors = {n: POINTER_ALIGNMENT for n, kind in case.signature.items() if kind.startswith("*")}
    divisors |= case.attributes
    source = ASTSource(
        fn=case.kernel,
        signature=dict(case.signature),
        constexprs=dict(case.constexprs),
        attrs={(names.index(n),): [["tt.divisibility", d]] for n, d in divisors.items() if d > 1},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options},
    )
    assert compiled.asm["cubin"]  # ptxas has run
    registers, spills = _registers_and_spills(compiled.asm["ptx"], target)
    return Usage(registers, compiled.metadata.shared, spills, mma_in_ptx(compiled.asm["ptx"]))


def _registers_and_spills(ptx: str, target: int) -> tuple[int, int]:
    """By the assembler that Triton brings, with the options that Triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arch = f"--gpu-name={ARCHITECTURE[target]}"
        log = tool([get_ptxas(target).path, "-v", arch, source, "-o", Path(folder) / "kernel.cubin"])
    (usage,) = parse_ptxas(log).values()
    return usage.registers, usage.spills
