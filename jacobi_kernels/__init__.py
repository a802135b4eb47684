"""Exact kernels for Jacobi decoding, registered as ``torch.ops.jacobi``.

``ops`` holds the typed functions, ``reference`` defines what they compute, :class:`BlockLayout` describes what one
forward pass evaluates and :class:`DecodeState` what a decoder carries from step to step.
"""

from importlib import import_module
from importlib.util import find_spec

import torch

from jacobi_kernels import _ops as _ops  # defines the ops that _C implements

try:
    import_module("jacobi_kernels._C")
except ModuleNotFoundError as error:
    raise ImportError(
        "jacobi_kernels._C is not built: run `python setup.py build_ext --inplace` (or `make build`) in the sources"
    ) from error
if torch.version.cuda is not None and find_spec("jacobi_kernels._C_cuda") is not None:
    import_module("jacobi_kernels._C_cuda")

from jacobi_kernels import ops, triton
from jacobi_kernels.grouped import GroupedMatrix
from jacobi_kernels.layout import BlockLayout
from jacobi_kernels.packing import pack_weight, unpack_weight
from jacobi_kernels.sampling import row_seeds
from jacobi_kernels.state import DecodeState, StateColumn
from jacobi_kernels.step_weights import (
    StepConfig,
    StepWeights,
    load_step_weights,
    pack_step_weights,
    save_step_weights,
)

triton.register()

__all__ = [
    "BlockLayout",
    "DecodeState",
    "GroupedMatrix",
    "StateColumn",
    "StepConfig",
    "StepWeights",
    "load_step_weights",
    "ops",
    "pack_step_weights",
    "pack_weight",
    "row_seeds",
    "save_step_weights",
    "unpack_weight",
]
