"""A model as the step on a device sees it: the descriptor read into views of the blob, scratch cut from a workspace.

The descriptor is a CPU tensor: reading it costs no synchronisation, and what is launched follows from it and from the
shapes of the arguments alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from jacobi_kernels._ops import LANES
from jacobi_kernels.grouped import FORMATS
from jacobi_kernels.step_blob import ALIGNMENT, FLOAT_TYPES
from jacobi_kernels.step_weights import DescriptorField, LayerField
from jacobi_kernels.triton.argmax_verify import Head, Verdict, verdict_shapes
from jacobi_kernels.triton.packed_linear import Tiling, tiling

F, L = DescriptorField, LayerField
HEADER, LAYER = len(DescriptorField), len(LayerField)


@dataclass(frozen=True)
class Matrix:
    """A packed weight ``[ceil(n / 16), k, 16]`` with its float32 bias."""

    weight: Tensor
    bias: Tensor | None
    n: int

    @property
    def cut(self) -> Tiling:
        return tiling(self.n, self.weight.shape[1], self.weight.dtype)


class StepModel:
    """Sizes, constants and weights that a descriptor names; ``blob`` may be on any device, or meta for sizes only."""

    def __init__(self, blob: Tensor, descriptor: Tensor) -> None:
        words = self._words = descriptor.tolist()
        form = FORMATS[words[F.WEIGHT_TYPE]]
        if form not in FLOAT_TYPES:
            raise RuntimeError(
                f"multi_block_step: the weights are packed in {form}, which runs on CPUs only: "
                "pack them in float32 or bfloat16"
            )
        self._blob, self.dtype = blob, FLOAT_TYPES[form]
        self.layers, self.hidden, self.vocab = words[F.LAYERS], words[F.HIDDEN], words[F.VOCAB]
        self.heads, self.kv_heads, self.head_dim = words[F.HEADS], words[F.KV_HEADS], words[F.HEAD_DIM]
        self.ffn, self.rotated = words[F.FFN], words[F.ROPE_DIM]
        self.eps, self.softmax_scale = self._number(F.NORM_EPS), self._number(F.SOFTMAX_SCALE)
        self.rope_scale = self._number(F.ROPE_SCALE)
        self.q_size = self.heads * self.head_dim
        self.qkv_size = self.q_size + 2 * self.kv_heads * self.head_dim

    def _number(self, field: DescriptorField) -> float:
        return float(struct.unpack("<f", struct.pack("<I", self._words[field] & 0xFFFFFFFF))[0])

    def _view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._blob[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _vector(self, offset: int, size: int) -> Tensor | None:
        return None if offset < 0 else self._view(offset, (size,), torch.float32)

    def _packed(self, offset: int, n: int, k: int) -> Tensor:
        return self._view(offset, (-(-n // LANES), k, LANES), self.dtype)

    def norm(self, offset: int) -> Tensor:
        return self._view(offset, (self.hidden,), torch.float32)

    @property
    def inv_freq(self) -> Tensor:
        return self._view(self._words[F.INV_FREQ], (self.rotated // 2,), torch.float32)

    @property
    def final_norm(self) -> Tensor:
        return self.norm(self._words[F.FINAL_NORM])

    @property
    def embedding(self) -> Tensor | None:
        """``[V, E]``, or None where it is the head."""
        offset = self._words[F.EMBEDDING]
        return None if offset < 0 else self._view(offset, (self.vocab, self.hidden), self.dtype)

    @property
    def head(self) -> Head:
        weight = self._packed(self._words[F.LM_HEAD], self.vocab, self.hidden)
        bias = self._vector(self._words[F.LM_HEAD_BIAS], self.vocab)
        return Head(weight, bias, self.vocab, self._number(F.LOGIT_SCALE), self._number(F.LOGIT_SOFTCAP))

    def layer(self, index: int) -> StepLayer:
        words = self._words[HEADER + index * LAYER : HEADER + (index + 1) * LAYER]

        def matrix(weight: LayerField, bias: LayerField, n: int, k: int) -> Matrix:
            return Matrix(self._packed(words[weight], n, k), self._vector(words[bias], n), n)

        return StepLayer(
            self.norm(words[L.ATTENTION_NORM]),
            matrix(L.QKV, L.QKV_BIAS, self.qkv_size, self.hidden),
            (self._vector(words[L.Q_NORM], self.head_dim), self._vector(words[L.K_NORM], self.head_dim)),
            matrix(L.ATTENTION_OUT, L.ATTENTION_OUT_BIAS, self.hidden, self.q_size),
            self.norm(words[L.FFN_NORM]),
            matrix(L.GATE_UP, L.GATE_UP_BIAS, 2 * self.ffn, self.hidden),
            matrix(L.DOWN, L.DOWN_BIAS, self.hidden, self.ffn),
            words[L.WINDOW],
            bool(words[L.USE_ROPE]) and self.rotated > 0,
        )


@dataclass(frozen=True)
class StepLayer:
    """One layer; ``head_norms`` of q and k."""

    attention_norm: Tensor
    qkv: Matrix
    head_norms: tuple[Tensor | None, Tensor | None]
    attention_out: Matrix
    ffn_norm: Tensor
    gate_up: Matrix
    down: Matrix
    window: int
    use_rope: bool


class Scratch:
    """Tensors of a step, cut from ``workspace`` one behind the other; without one only ``used`` is counted."""

    def __init__(self, workspace: Tensor | None = None) -> None:
        self.used = 0
        self._workspace = workspace
        if workspace is not None:
            shift = -workspace.data_ptr() % ALIGNMENT
            self._workspace = workspace[shift:]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, size = self.used, prod(shape) * dtype.itemsize
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        if self._workspace is None or self.used > self._workspace.numel():
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._workspace[begin : begin + size].view(dtype).view(shape)


class StepBuffers:
    """Scratch of one step over T rows. ``parts``: memory that every product's parts share in turn."""

    def __init__(self, model: StepModel, rows: int, batch: int, segments: int, scratch: Scratch) -> None:
        integer, real, dtype = torch.int32, torch.float32, model.dtype
        self.segments = scratch.take((segments, 4), integer)
        self.live, self.count = scratch.take((rows,), integer), scratch.take((1,), integer)
        self.table = scratch.take((2, rows, model.rotated // 2), real)
        self.x = scratch.take((rows, model.hidden), real)
        self.normed = scratch.take((rows, model.hidden), dtype)
        self.product = scratch.take((rows, model.ffn), dtype)
        self.attended = scratch.take((rows, model.heads, model.head_dim), dtype)
        widest = (rows, model.qkv_size)
        self._qkv = scratch.take(widest, real)  # in the cache's type, which may be wider than the weights'
        layer = model.layer(0)
        matrices = (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        self._parts = scratch.take((max(m.cut.parts * m.n for m in matrices) * rows,), real)
        shapes = verdict_shapes(model.head, rows, batch)
        self.verdict = Verdict(**{name: scratch.take(shape, kind) for name, (shape, kind) in shapes.items()})

    def parts(self, matrix: Matrix) -> Tensor:
        """``[parts, T, n]`` float32."""
        rows, parts = self.x.shape[0], matrix.cut.parts
        return self._parts[: parts * rows * matrix.n].view(parts, rows, matrix.n)

    def heads(self, model: StepModel, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[T, H, D]``, k and v ``[T, KVH, D]`` of ``dtype``."""
        rows, d = self.x.shape[0], model.head_dim
        sizes = (rows * model.q_size, rows * model.kv_heads * d, rows * model.kv_heads * d)
        q, k, v = self._qkv.view(-1).view(dtype)[: sum(sizes)].split(sizes)
        return q.view(rows, -1, d), k.view(rows, -1, d), v.view(rows, -1, d)


def step_workspace_size(descriptor: Tensor, rows: int, batch: int, num_segments: int) -> int:
    """Bytes that the step needs on a device, see :func:`jacobi_kernels.ops.step_workspace_size`."""
    checked_size(descriptor)
    blob = torch.empty((int(descriptor[F.BLOB_BYTES]),), dtype=torch.uint8, device="meta")
    scratch = Scratch()
    StepBuffers(StepModel(blob, descriptor), rows, batch, num_segments, scratch)
    return scratch.used + ALIGNMENT


def checked_size(descriptor: Tensor) -> None:
    """Let the CPU kernel read the descriptor: RuntimeError when it is unsound or points outside its blob."""
    torch.ops.jacobi.step_workspace_size.default(descriptor, 1, 1, 1)
