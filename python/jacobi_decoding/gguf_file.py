"""Tensors of a GGUF file, found by its header alone.

gguf's own reader makes an array of every string of the vocabulary: two seconds and 60 MB that tensors do not need. Here
arrays are stepped over, and a tensor's bytes are read when they are asked for.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from jacobi_decoding.errors import LoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 30  # bytes of a value; longer ones mean a damaged file
_MOST_DIMENSIONS = 4  # ggml's


@dataclass(frozen=True)
class GgufTensor:
    """kind: ggml's type, such as 'Q8_0'; shape: rows first; row_bytes of the last dimension; offset in the file."""

    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """Metadata and tensors of a GGUF file of version 2 or 3, little-endian.

    metadata: scalars and strings by key, arrays left out. tensors: by llama.cpp's names. Raises LoadError when the file
    is truncated, damaged or of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._read_header(file, os.fstat(file.fileno()).st_size)
        except LoadError:
            raise
        except (struct.error, LookupError, OverflowError, ValueError) as error:
            raise LoadError(f"{str(path)!r} is truncated or damaged; copy or download the file again") from error

    def read(self, name: str) -> Tensor:
        """The bytes of a tensor: uint8 [rows, row_bytes], a copy."""
        tensor = self.tensors[name]
        data = bytearray(tensor.size)
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            if file.readinto(data) != len(data):
                raise LoadError(f"{str(self.path)!r} is truncated; copy or download the file again")
        return torch.frombuffer(data, dtype=torch.uint8).view(-1, tensor.row_bytes)

    def _read_header(self, file: BinaryIO, size: int) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        check_gguf_magic(self.path, file.read(8))
        tensors, keys = struct.unpack("<QQ", file.read(16))
        for _ in range(keys):
            key, (kind,) = _string(file), struct.unpack("<I", file.read(4))
            self.metadata[key] = _value(file, kind)
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name, (dimensions,) = _string(file), struct.unpack("<I", file.read(4))
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise ValueError("dimensions")
            *shape, kind, offset = struct.unpack(f"<{dimensions}QIQ", file.read(8 * dimensions + 12))
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if shape[0] % block:
                raise ValueError("length of a row")
            row_bytes = shape[0] // block * block_bytes
            found[name] = GGMLQuantizationType(kind).name, tuple(reversed(shape)), row_bytes, offset
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError("alignment")
        start = -(-file.tell() // alignment) * alignment
        self.tensors = {n: GgufTensor(kind, shape, row, start + at) for n, (kind, shape, row, at) in found.items()}
        if any(tensor.offset + tensor.size > size for tensor in self.tensors.values()):
            raise ValueError("tensor behind the end")


def check_gguf_magic(path: Path, head: bytes) -> None:
    """LoadError unless the first 8 bytes of ``path`` are those of a GGUF file that can be read."""
    if len(head) < 8 or head[:4] != b"GGUF":
        raise LoadError(f"{str(path)!r} is not a GGUF file; name another file or download it again")
    version = struct.unpack("<I", head[4:])[0]
    if version not in (2, 3):
        raise LoadError(f"{str(path)!r} has GGUF version {version}; convert it to version 2 or 3")


def _string(file: BinaryIO) -> str:
    return file.read(_length(file)).decode()


def _length(file: BinaryIO) -> int:
    """The length of a string, which stands before it."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _MOST:
        raise ValueError("length")
    return int(length)


def _value(file: BinaryIO, kind: int) -> object:
    """A scalar or a string; an array is stepped over and is None."""
    if kind == _STRING:
        return _string(file)
    if kind in _SCALARS:
        code = "<" + _SCALARS[kind]
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]
    if kind != _ARRAY:
        raise ValueError("type of a value")
    item, length = struct.unpack("<IQ", file.read(12))
    if length > _MOST:
        raise ValueError("length")
    if item in _SCALARS:
        file.seek(length * struct.calcsize("<" + _SCALARS[item]), os.SEEK_CUR)
    else:
        for _ in range(length):
            if item == _STRING:
                file.seek(_length(file), os.SEEK_CUR)
            else:
                _value(file, item)
    return None
