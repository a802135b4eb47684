"""The blob of packed step weights in two passes: where every part lies, then the parts, one tensor at a time.

The first pass reads no tensor (it asks only of what kind a matrix is), so that memory never holds more than the blob
and the tensor that is being packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from jacobi_kernels._ops import GROUP, LANES, RECORD_BYTES
from jacobi_kernels.grouped import GroupedMatrix, put_grouped, quantize
from jacobi_kernels.packing import put_rows

ALIGNMENT = 64
CHUNK = 1 << 20  # values converted at a time
FLOAT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Weights = Mapping[str, "Tensor | GroupedMatrix"]


def aligned_bytes(size: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [size], zeroed, starting at a multiple of 64 bytes."""
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]


def kind_of(tensors: Weights, name: str) -> str:
    """ "float", "int8" or "int4": what ``tensors.kind(name)`` says, or the value itself."""
    kind = getattr(tensors, "kind", None)
    if kind is not None:
        return str(kind(name))
    value = tensors[name]
    return value.format if isinstance(value, GroupedMatrix) else "float"


class BlobPlan:
    """Parts at aligned offsets, and how each is filled from ``tensors``.

    ``format`` is what was asked for, one of :data:`jacobi_kernels.grouped.FORMATS`.
    """

    def __init__(self, tensors: Weights, format: str) -> None:
        self.tensors, self.format, self.size = tensors, format, 0
        self._parts: list[tuple[int, int, Callable[[Tensor], object]]] = []

    def fill(self, device: torch.device) -> Tensor:
        """The blob, uint8 [size]: the second pass."""
        blob = aligned_bytes(self.size, device)
        for offset, size, write in self._parts:
            write(blob[offset : offset + size])
        return blob

    def constant(self, values: Tensor) -> int:
        """Offset of float32 values."""
        return self._reserve(4 * values.numel(), lambda part: part.view(torch.float32).copy_(values))

    def vectors(self, names: Sequence[str], sizes: Sequence[int], required: bool = False) -> int:
        """Offset of float32 vectors one behind the other, zeros for a missing one; -1 when all are missing."""
        if not required and not any(name in self.tensors for name in names):
            return -1

        def write(part: Tensor) -> None:
            for name, to in zip(names, part.view(torch.float32).split(list(sizes)), strict=True):
                if name in self.tensors:
                    to.copy_(self._floats(name, (to.numel(),)))
                    if not bool(torch.isfinite(to).all()):
                        raise ValueError(f"{name} holds NaN or infinity")

        if required:
            self._check_present(names)
        return self._reserve(4 * sum(sizes), write)

    def format_of(self, names: Sequence[str], floats: str | None = None) -> str:
        """The format in which matrices are packed as one.

        Values that are int8 or int4 already are kept where int4 is asked for, and int8 where int8 is. Stacked matrices
        that would need several formats become float32. ``floats``: the format of float matrices, by default the one
        that was asked for.
        """
        self._check_present(names)
        if self.format in FLOAT_TYPES:
            return self.format
        formats = set()
        for name in names:
            kind = kind_of(self.tensors, name)
            formats.add((floats or self.format) if kind == "float" else "int8" if self.format == "int8" else kind)
        return formats.pop() if len(formats) == 1 else "float32"

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int, format: str) -> int:
        """Offset of matrices ``[rows[i], columns]`` stacked and packed in panels of 16 rows."""
        self._check_present(names)
        shape: tuple[int, ...] = (-(-sum(rows) // LANES), columns, LANES)
        if format not in FLOAT_TYPES:
            shape = (shape[0], -(-columns // GROUP), RECORD_BYTES[format])

        def write(part: Tensor) -> None:
            panels, begin = _view(part, shape, format), 0
            for name, count in zip(names, rows, strict=True):
                self._pack(panels, begin, name, (count, columns), format)
                begin += count

        return self._reserve(_bytes(shape, format), write)

    def plain(self, name: str, rows: int, columns: int, format: str) -> int:
        """Offset of a matrix of floats ``[rows, columns]`` as it is."""
        self._check_present([name])

        def write(part: Tensor) -> None:
            matrix, begin = _view(part, (rows, columns), format), 0
            for chunk in self._chunks(name, (rows, columns), format):
                assert isinstance(chunk, Tensor)
                matrix[begin : begin + chunk.shape[0]] = chunk
                begin += chunk.shape[0]

        return self._reserve(_bytes((rows, columns), format), write)

    def _reserve(self, size: int, write: Callable[[Tensor], object]) -> int:
        offset = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        self._parts.append((offset, size, write))
        return offset

    def _check_present(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.tensors:
                raise ValueError(f"pack_step_weights: tensor {name} is missing")

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor | GroupedMatrix:
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"pack_step_weights: {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        return tensor

    def _floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        value = self._read(name, shape)
        return value.dequantize() if isinstance(value, GroupedMatrix) else value.detach()

    def _pack(self, panels: Tensor, begin: int, name: str, shape: tuple[int, int], format: str) -> None:
        for chunk in self._chunks(name, shape, format):
            if isinstance(chunk, GroupedMatrix):
                put_grouped(panels, begin, chunk)
            else:
                put_rows(panels, begin, chunk)
            begin += chunk.shape[0]

    def _chunks(self, name: str, shape: tuple[int, int], format: str) -> Iterator[Tensor | GroupedMatrix]:
        """The rows of a matrix in ``format``, some at a time."""
        value = self._read(name, shape)
        step = LANES * max(1, CHUNK // (LANES * shape[1]))
        for begin in range(0, shape[0], step):
            if isinstance(value, GroupedMatrix):
                chunk: Tensor | GroupedMatrix = value.rows(begin, min(begin + step, shape[0]))
            else:
                chunk = value.detach()[begin : begin + step]
            yield _convert(chunk, format, name)


def _convert(chunk: Tensor | GroupedMatrix, format: str, name: str) -> Tensor | GroupedMatrix:
    if isinstance(chunk, GroupedMatrix):
        if chunk.format == format:
            return chunk
        chunk = chunk.dequantize()
    if format not in FLOAT_TYPES:
        return quantize(chunk, format, name)
    chunk = chunk.to(FLOAT_TYPES[format])
    if not bool(torch.isfinite(torch.stack(torch.aminmax(chunk))).all()):  # a NaN is both
        raise ValueError(f"{name} holds NaN or infinity")
    return chunk


def _bytes(shape: tuple[int, ...], format: str) -> int:
    return prod(shape) * (FLOAT_TYPES[format].itemsize if format in FLOAT_TYPES else 1)


def _view(part: Tensor, shape: tuple[int, ...], format: str) -> Tensor:
    return part.view(FLOAT_TYPES.get(format, torch.uint8)).view(shape)
