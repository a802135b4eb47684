"""Panels of 16 columns: the one weight layout that every linear kernel reads.

``packed[p, k, c] = weight[16 p + c, k]``: a kernel that walks ``k`` reads 16 neighbouring output columns at each
step, so one register lane holds one output and its sum over ``k`` runs in one fixed order. Weights in int8 and int4
are packed by :mod:`jacobi_kernels.grouped`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jacobi_kernels._ops import FLOATS, LANES


def pack_weight(weight: Tensor, name: str = "weight") -> Tensor:
    """Pack the weight of a linear layer for :func:`jacobi_kernels.ops.packed_linear` and ``argmax_verify``.

    Parameters
    ----------
    weight : Tensor
        ``[out_features, in_features]``, float32 or bfloat16, any strides; left unchanged.
    name : str
        The parameter's name, for error messages.

    Returns
    -------
    Tensor
        ``[ceil(out_features / 16), in_features, 16]``, same dtype and device, contiguous; columns past
        ``out_features`` are zero.

    Raises
    ------
    ValueError
        ``weight`` is not a matrix, is neither float32 nor bfloat16, or holds NaN or infinity.
    """
    if weight.dim() != 2:
        raise ValueError(f"{name} must have shape [out_features, in_features], got {list(weight.shape)}")
    if weight.dtype not in FLOATS:
        raise ValueError(f"{name} must be float32 or bfloat16, got {str(weight.dtype)[6:]}")
    weight = weight.detach()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    out_features, in_features = weight.shape
    panels = -(-out_features // LANES)
    packed = weight.new_zeros(panels, in_features, LANES)
    put_rows(packed, 0, weight)
    return packed


def unpack_weight(packed: Tensor, out_features: int) -> Tensor:
    """Undo :func:`pack_weight`.

    Parameters
    ----------
    packed : Tensor
        ``[ceil(out_features / 16), in_features, 16]``.
    out_features : int
        Rows of the original weight.

    Returns
    -------
    Tensor
        ``[out_features, in_features]``, same dtype and device, contiguous.

    Raises
    ------
    ValueError
        ``packed`` is not a packed weight of ``out_features`` rows.
    """
    panels = -(-out_features // LANES)
    if packed.dim() != 3 or packed.shape[0] != panels or packed.shape[2] != LANES:
        raise ValueError(
            f"packed must have shape [ceil(out_features/{LANES}), in_features, {LANES}] = [{panels}, *, {LANES}], "
            f"got {list(packed.shape)}"
        )
    return take_rows(packed, out_features)


def put_rows(panels: Tensor, begin: int, rows: Tensor) -> None:
    """Write rows ``begin``, ``begin + 1``, ... of a matrix into its panels.

    Parameters
    ----------
    panels : Tensor
        ``[ceil(n / 16), *inner, 16]``, changed in place.
    begin : int
        The first row.
    rows : Tensor
        ``[m, *inner]``, any strides; converted to the dtype of ``panels``.
    """
    done, count = 0, rows.shape[0]
    while done < count:
        panel, lane = divmod(begin + done, LANES)
        whole = (count - done) // LANES if lane == 0 else 0
        if whole:
            step = whole * LANES
            chunk = rows[done : done + step].unflatten(0, (whole, LANES))
            panels[panel : panel + whole] = chunk.movedim(1, -1)
        else:
            step = min(LANES - lane, count - done)
            panels[panel, ..., lane : lane + step] = rows[done : done + step].movedim(0, -1)
        done += step


def take_rows(panels: Tensor, count: int) -> Tensor:
    """The first ``count`` rows ``[count, *inner]`` of panels ``[ceil(count / 16), *inner, 16]``, contiguous."""
    return panels.movedim(-1, 1).flatten(0, 1)[:count].contiguous()
