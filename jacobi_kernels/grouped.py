"""Weights in int8 and int4: groups of 32 values of k with a float16 scale each, and their packed form.

=======  ======================  =================================================================
format   value                   packed: uint8 ``[ceil(n / 16), ceil(k / 32), record]``
=======  ======================  =================================================================
int8     ``scale * q``           544: float16 scale[16], int8 q[32][16]
int4     ``scale * q + min``     320: float16 scale[16], float16 min[16], uint8 q[16][16], whose low
                                 four bits are those of an even k, high of the odd k behind it
=======  ======================  =================================================================

``scale * q`` is exact in float32, so an int8 value is not rounded and an int4 value once. These are the values of
GGUF's Q8_0, Q4_0 (``min = -8 scale``) and Q4_1. Kernels sum in float32 and give the bits of the float32 kernel over
the dequantised matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jacobi_kernels._ops import GROUP, LANES, RECORD_BYTES
from jacobi_kernels.packing import put_rows, take_rows

FORMATS = ("float32", "bfloat16", "int8", "int4")  # in the order of WeightType (csrc/common/packed.h)
_Q_TYPES = {"int8": torch.int8, "int4": torch.uint8}
_HALVES = 2 * LANES  # bytes of 16 float16
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


@dataclass(frozen=True, eq=False)
class GroupedMatrix:
    """A matrix ``[n, k]`` of int8 or int4 values in ``g = ceil(k / 32)`` groups a row.

    Attributes:
        format: ``int8`` or ``int4``.
        scale: ``[n, g]`` float16, finite.
        min: ``[n, g]`` float16, finite, of int4; None of int8.
        q: ``[n, 32 g]``, int8, or uint8 within 0..15. What is past k is not used.
        in_features: k.

    Raises:
        ValueError: a tensor has another shape or dtype, or values that the format does not have.
    """

    format: str
    scale: Tensor
    min: Tensor | None
    q: Tensor
    in_features: int

    def __post_init__(self) -> None:
        if self.format not in RECORD_BYTES:
            raise ValueError(f"GroupedMatrix: format must be int8 or int4, got {self.format!r}")
        rows, groups = self.scale.shape[0], -(-self.in_features // GROUP)
        wanted = [("scale", self.scale, torch.float16, groups), ("q", self.q, _Q_TYPES[self.format], GROUP * groups)]
        if (self.min is None) != (self.format == "int8"):
            raise ValueError(f"GroupedMatrix: int4 has a min and int8 has none, got {self.format} and {self.min}")
        if self.min is not None:
            wanted.append(("min", self.min, torch.float16, groups))
        for name, tensor, dtype, columns in wanted:
            if tensor.dtype != dtype or list(tensor.shape) != [rows, columns]:
                raise ValueError(
                    f"GroupedMatrix: {name} must be {str(dtype)[6:]} [{rows}, {columns}], "
                    f"got {str(tensor.dtype)[6:]} {list(tensor.shape)}"
                )
            if tensor.dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"GroupedMatrix: {name} holds NaN or infinity")
        if self.format == "int4" and self.q.numel() and int(self.q.max()) > 15:
            raise ValueError(f"GroupedMatrix: q of int4 must be within 0..15, got {int(self.q.max())}")

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.scale.shape[0], self.in_features

    @property
    def device(self) -> torch.device:
        return self.q.device

    def rows(self, begin: int, end: int) -> GroupedMatrix:
        """Rows begin..end-1 as a view."""
        low = None if self.min is None else self.min[begin:end]
        return GroupedMatrix(self.format, self.scale[begin:end], low, self.q[begin:end], self.in_features)

    def dequantize(self) -> Tensor:
        """float32 ``[n, k]``, the values that the kernels multiply with."""
        values = self.q.float().unflatten(1, (-1, GROUP)).mul_(self.scale.float()[:, :, None])
        if self.min is not None:
            values += self.min.float()[:, :, None]
        return values.flatten(1)[:, : self.in_features]


def from_gguf(blocks: Tensor, kind: str, in_features: int) -> GroupedMatrix:
    """The matrix of a GGUF tensor, values taken as they are.

    Args:
        blocks: ``[n, row_bytes]`` uint8, the tensor's rows as the file holds them.
        kind: ``Q8_0``, ``Q4_0`` or ``Q4_1``.
        in_features: k, a multiple of 32.

    Raises:
        ValueError: another kind or shape, a scale that is NaN or infinite, or a Q4_0 scale above 8188, of which
            float16 has no eightfold (dequantise such a matrix, then :func:`quantize`).
    """
    if kind not in _BLOCK_BYTES:
        raise ValueError(f"from_gguf: kind must be one of {', '.join(_BLOCK_BYTES)}, got {kind!r}")
    width, groups = _BLOCK_BYTES[kind], in_features // GROUP
    if in_features % GROUP or blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] != groups * width:
        raise ValueError(
            f"from_gguf: blocks must be uint8 [n, {width} k / 32] with k a multiple of 32, "
            f"got {str(blocks.dtype)[6:]} {list(blocks.shape)} and k = {in_features}"
        )
    records = blocks.unflatten(1, (groups, width))
    scale = _halves(records[..., :2])
    if kind == "Q8_0":
        return GroupedMatrix(
            "int8", scale, None, records[..., 2:].contiguous().view(torch.int8).flatten(1), in_features
        )
    low = -8 * scale if kind == "Q4_0" else _halves(records[..., 2:4])
    pairs = records[..., width - GROUP // 2 :]  # of value j and value j + 16
    return GroupedMatrix("int4", scale, low, torch.cat([pairs & 15, pairs >> 4], -1).flatten(1), in_features)


def _halves(pairs: Tensor) -> Tensor:
    """float16 ``[n, g]`` of their bytes ``[n, g, 2]``."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def quantize(weight: Tensor, format: str, name: str = "weight") -> GroupedMatrix:
    """The nearest int8 or int4 matrix, group by group.

    int8: ``scale = max |w| / 127``; int4: ``min`` and ``scale = (max - min) / 15``; both rounded to float16 before q
    is chosen, so an error is at most half a scale beside what the rounding of scale and min costs.

    Args:
        weight: ``[n, k]``, any float dtype and strides; left unchanged.
        format: ``int8`` or ``int4``.
        name: the parameter's name, for error messages.

    Raises:
        ValueError: ``weight`` is no matrix of floats, or holds NaN, infinity or what float16 scales do not reach.
    """
    if format not in RECORD_BYTES:
        raise ValueError(f"quantize: format must be int8 or int4, got {format!r}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{name} must be floats [out_features, in_features], got {str(weight.dtype)[6:]} {list(weight.shape)}"
        )
    weight = weight.detach().float()
    in_features = weight.shape[1]
    padding = -in_features % GROUP
    if padding:  # with a value that changes neither a maximum nor a minimum
        weight = torch.cat([weight, weight[:, -1:].expand(-1, padding)], 1)
    values = weight.unflatten(1, (-1, GROUP))
    low, high = torch.aminmax(values, dim=2)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    if format == "int8":
        scale, shift = (torch.maximum(high, -low) / 127).half(), None
        q = _divide(values, scale).clamp_(-127, 127)
    else:
        shift = low.half()
        scale = ((high - shift.float()) / 15).half()
        q = _divide(values - shift.float()[:, :, None], scale).clamp_(0, 15)
    if not bool(torch.isfinite(scale).all() and (shift is None or torch.isfinite(shift).all())):
        raise ValueError(f"{name} holds values too large for {format}, whose scales are float16: use float32")
    return GroupedMatrix(format, scale, shift, q.to(_Q_TYPES[format]).flatten(1), in_features)


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """``values / scale`` rounded to whole numbers; 0 where the scale is 0."""
    divisor = scale.float()[:, :, None]
    return (values / torch.where(divisor == 0, torch.inf, divisor)).round_()


def _views(packed: Tensor, format: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scales and mins ``[panels, g, 16]`` and bytes of q ``[panels, g, 32 or 16, 16]`` of packed records."""
    halves = [packed[..., i * _HALVES : (i + 1) * _HALVES].view(torch.float16) for i in range(2)]
    if format == "int8":
        return halves[0], None, packed[..., _HALVES:].view(torch.int8).unflatten(-1, (GROUP, LANES))
    return halves[0], halves[1], packed[..., 2 * _HALVES :].unflatten(-1, (GROUP // 2, LANES))


def put_grouped(packed: Tensor, begin: int, matrix: GroupedMatrix) -> None:
    """Write ``matrix`` as rows ``begin``, ``begin + 1``, ... of ``packed``, records of its format and its k."""
    scale, low, q = _views(packed, matrix.format)
    put_rows(scale, begin, matrix.scale)
    values = matrix.q
    if matrix.in_features < values.shape[1]:
        values = values.clone()
        values[:, matrix.in_features :] = 0
    if low is None or matrix.min is None:
        put_rows(q, begin, values.unflatten(1, (-1, GROUP)))
    else:
        put_rows(low, begin, matrix.min)
        pairs = values.unflatten(1, (-1, GROUP // 2, 2))
        put_rows(q, begin, pairs[..., 0] | pairs[..., 1] << 4)


def pack_grouped(matrix: GroupedMatrix) -> Tensor:
    """Pack for ``packed_linear`` and ``argmax_verify``.

    Returns:
        uint8 ``[ceil(n / 16), ceil(k / 32), 544 (int8) or 320 (int4)]``; columns past n and q past k are zero.
    """
    rows, columns = matrix.shape
    shape = (-(-rows // LANES), -(-columns // GROUP), RECORD_BYTES[matrix.format])
    packed = torch.zeros(shape, dtype=torch.uint8, device=matrix.q.device)
    put_grouped(packed, 0, matrix)
    return packed


def unpack_grouped(packed: Tensor, out_features: int, in_features: int) -> GroupedMatrix:
    """Undo :func:`pack_grouped`.

    Args:
        packed: uint8 ``[ceil(out_features / 16), ceil(in_features / 32), 544 or 320]``; the record tells the format.

    Raises:
        ValueError: ``packed`` is not a packed matrix of this size.
    """
    shape = [-(-out_features // LANES), -(-in_features // GROUP)]
    formats = [f for f, record in RECORD_BYTES.items() if list(packed.shape) == [*shape, record]]
    if packed.dtype != torch.uint8 or not formats:
        raise ValueError(
            f"packed must be uint8 [ceil(out_features/{LANES}), ceil(in_features/{GROUP}), record] = "
            f"[{shape[0]}, {shape[1]}, 544 or 320], got {str(packed.dtype)[6:]} {list(packed.shape)}"
        )
    scales, lows, bytes_of_q = _views(packed, formats[0])
    q = take_rows(bytes_of_q, out_features)
    if formats[0] == "int4":
        q = torch.stack([q & 15, q >> 4], -1)
    low = None if lows is None else take_rows(lows, out_features)
    return GroupedMatrix(formats[0], take_rows(scales, out_features), low, q.flatten(1), in_features)


def dequantize_packed(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """float32 ``[out_features, in_features]`` of a packed matrix, see :func:`unpack_grouped`."""
    return unpack_grouped(packed, out_features, in_features).dequantize()
