"""A model's tensors, each read from its file when it is asked for, and dropped by whoever asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from jacobi_decoding.errors import LoadError, UnsupportedModelError
from jacobi_decoding.gguf_file import GgufFile
from jacobi_kernels.grouped import GroupedMatrix, from_gguf

_GROUPED = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS = 4096  # dequantised at a time


class TensorFiles(Protocol):
    """Tensors by transformers' names."""

    def __contains__(self, name: object) -> bool: ...

    def kind(self, name: str) -> str:
        """'float', 'int8' or 'int4': what ``read`` gives."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor | GroupedMatrix: ...


class SafetensorsFiles:
    """The .safetensors files of a folder, one or several with an index.

    Raises UnsupportedModelError when there are none, LoadError or what safetensors raises for damaged ones.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if single.is_file():
            with safe_open(single, "pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        elif index.is_file():
            try:
                entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
                self._files = {name: folder / file for name, file in entries}
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise LoadError(f"{str(index)!r} is damaged; copy or download it again") from error
        else:
            why = "its weights are not in .safetensors files"
            raise UnsupportedModelError(str(folder), why, "save the model again with save_pretrained()")

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def kind(self, name: str) -> str:
        return "float"

    def shape(self, name: str) -> tuple[int, ...]:
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        # Opened anew for each tensor: pages of the mapped file count as ours until it is closed.
        with safe_open(self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


class GgufTensors:
    """The tensors of a GGUF file: Q8_0, Q4_0 and Q4_1 as they are, other kinds dequantised to float32.

    config: the model's transformers config. Raises UnsupportedModelError for an architecture that gguf does not know.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self._file = file
        architecture = file.metadata.get("general.architecture")
        found = [arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture]
        if not found:
            why = f"gguf does not know the architecture {architecture!r}"
            raise UnsupportedModelError(str(file.path), why, "convert the model to a safetensors folder")
        self._names = get_tensor_name_map(found[0], config.num_hidden_layers)
        # llama.cpp interleaves the halves that rotate-half rotates, in this architecture only.
        self._heads: dict[str, int] = {}
        if architecture == "llama":
            self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def __contains__(self, name: object) -> bool:
        return self._gguf_name(str(name)) in self._file.tensors

    def kind(self, name: str) -> str:
        return _GROUPED.get(self._file.tensors[self._gguf_name(name)].kind, "float")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_name(name)].shape

    def read(self, name: str) -> Tensor | GroupedMatrix:
        name = self._gguf_name(name)
        tensor = self._file.tensors[name]
        rows = self._file.read(name).view(tensor.shape[0], -1)
        for part, heads in self._heads.items():
            if f".{part}." in name:
                rows = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return _values(rows, tensor.kind, tensor.shape)

    def _gguf_name(self, name: str) -> str:
        module, _, suffix = name.rpartition(".")
        return f"{self._names.get_name(module)}.{suffix}"


def _values(rows: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor | GroupedMatrix:
    """Values of ``shape`` from ``rows``, uint8 [shape[0], bytes], of ggml's type ``kind``."""
    if kind in _FLOATS:
        return rows.view(_FLOATS[kind]).view(shape)
    if kind in _GROUPED and len(shape) == 2:
        try:
            return from_gguf(rows, kind, shape[1])
        except ValueError:  # a Q4_0 scale whose eightfold float16 does not hold
            pass
    from gguf import GGMLQuantizationType, dequantize

    values = torch.empty(shape)
    for begin in range(0, shape[0], _ROWS):
        some = dequantize(rows[begin : begin + _ROWS].numpy(), GGMLQuantizationType[kind])
        values[begin : begin + _ROWS] = torch.from_numpy(some)
    return values


class LazyWeights(Mapping[str, "Tensor | GroupedMatrix"]):
    """What ``pack_step_weights`` reads: some of the tensors of ``files``, under names of their own.

    names: the name in ``files`` by the name here. dtype: what a transformers model would have; vectors are rounded to
    it, matrices when they are packed.
    """

    def __init__(self, files: TensorFiles, names: Mapping[str, str], dtype: torch.dtype) -> None:
        self._files, self._names, self._dtype = files, names, dtype

    def __getitem__(self, name: str) -> Tensor | GroupedMatrix:
        value = self._files.read(self._names[name])
        return value.to(self._dtype) if isinstance(value, Tensor) and value.dim() == 1 else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading, as Mapping's own would

    def kind(self, name: str) -> str:
        """'float', 'int8' or 'int4', as the file holds it."""
        return self._files.kind(self._names[name])
