"""The weights of a .gguf file, written in other formats for llama.cpp, once per file and format."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

TYPES = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
WRITTEN_ANEW = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")


def converted(source: Path, weight_format: str, folder: Path) -> Path:
    """``source`` with every matrix in ``weight_format`` (q4_1: as it is), in ``folder``; made where it is missing."""
    if weight_format == "q4_1":
        return source
    state = source.stat()
    version = hashlib.sha256(f"{source.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    target = folder / f"{source.name.split('.')[0]}.{version}.{weight_format}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        try:
            _write(source, temporary, *TYPES[weight_format])
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


def _write(source: Path, target: Path, matrix_type: GGMLQuantizationType, file_type: LlamaFileType) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(file_type)
    for name, field in reader.fields.items():
        if name not in WRITTEN_ANEW:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    pending = []
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        wanted = matrix_type if len(shape) > 1 else GGMLQuantizationType.F32
        sample = quantize(np.zeros((1, shape[-1]), np.float32), wanted)
        rows = int(np.prod(shape[:-1]))
        writer.add_tensor_info(
            tensor.name, (*shape[:-1], sample.shape[-1]), sample.dtype, rows * sample.nbytes, raw_dtype=wanted
        )
        pending.append((tensor, wanted))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, wanted in pending:  # one at a time: the file is larger than all that this needs
        same = tensor.tensor_type == wanted
        writer.write_tensor_data(tensor.data if same else quantize(dequantize(tensor.data, tensor.tensor_type), wanted))
    writer.close()
