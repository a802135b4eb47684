"""Exact kernels for Jacobi decoding as ``torch.ops.jacobi``."""

from jacobi_kernels import _ops as _ops
