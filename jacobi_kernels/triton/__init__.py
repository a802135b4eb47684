"""Triton kernels: one module per op, which is imported when the op first meets CUDA tensors.

Importing this package imports no Triton. :func:`register` puts every op under torch's dispatch key CUDA. With
``JACOBI_BACKEND=triton`` and ``TRITON_INTERPRET=1`` it also puts them over the CPU kernels, so that programs run in
Triton's interpreter on a machine without a GPU (float32 only, slow: for tests).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from jacobi_kernels._ops import lib

OPS = (
    "packed_linear",
    "activation",
    "multi_block_attention",
    "multi_block_attention_backward",
    "multi_block_attention_with_kvcache",
    "argmax_verify",
    "commit",
    "redraft",
    "multi_block_step",
    "consistency_loss",
    "consistency_loss_backward",
)
"""Every op has a module of its name, and in it a function of its name with the schema's arguments."""


def _on_first_call(op: str) -> Callable[..., Any]:
    """A function that imports the op's module when it is called."""
    found: list[Callable[..., Any]] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not found:
            try:
                module = import_module(f"{__name__}.{op}")
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
                raise RuntimeError(f"{op}: kernels for GPUs need Triton: pip install 'jacobi-kernels[gpu]'") from None
            found.append(getattr(module, op))
        home = next((a for a in args if isinstance(a, Tensor) and a.is_cuda), None)
        if home is None or home.device.index == torch.cuda.current_device():
            return found[0](*args, **kwargs)
        with torch.cuda.device(home.device):  # Triton launches on the current device
            return found[0](*args, **kwargs)

    return kernel


def register() -> None:
    """Put every op under CUDA, and over CPU where ``JACOBI_BACKEND`` asks for it; ImportError where that cannot be."""
    backend = os.environ.get("JACOBI_BACKEND", "")
    if backend not in ("", "triton"):
        raise ImportError(f"JACOBI_BACKEND must be unset or triton, got {backend!r}")
    interpreted = os.environ.get("TRITON_INTERPRET", "") == "1"
    if backend and not interpreted and not torch.cuda.is_available():
        raise ImportError(
            "JACOBI_BACKEND=triton needs a GPU, and there is none: set TRITON_INTERPRET=1 as well to run the kernels "
            "in Triton's interpreter, or unset JACOBI_BACKEND"
        )
    for op in OPS:
        lib.impl(op, _on_first_call(op), "CUDA")
        if backend and interpreted:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
                lib.impl(op, _on_first_call(op), "CPU", allow_override=True)
