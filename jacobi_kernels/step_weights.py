"""Weights of ``multi_block_step``: one packed blob, and a descriptor tensor that says what lies where.

The op runs decoder-only transformers of the Llama kind: RMS norm, rotary embedding (rotate-half), grouped-query
attention, gated SiLU feed-forward, residual connections before each norm; optionally biases, RMS norms of q and k per
head (Qwen3), layers without rotation (SmolLM3), a sliding window per layer, a tied or separate head.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from .packing import pack_weight

STEP_MAGIC = 0x4A41434F42490002  # "JACOBI", format 2
ALIGNMENT = 64
DTYPES = (torch.float32, torch.bfloat16)


class DescriptorField(IntEnum):
    """Header words of the descriptor (``csrc/common/step_descriptor.h`` explains each)."""

    MAGIC = 0
    WEIGHT_TYPE = 1
    LAYERS = 2
    HIDDEN = 3
    HEADS = 4
    KV_HEADS = 5
    HEAD_DIM = 6
    FFN = 7
    VOCAB = 8
    NORM_EPS = 9
    SOFTMAX_SCALE = 10
    ROPE_DIM = 11
    ROPE_SCALE = 12
    LOGIT_SCALE = 13
    LOGIT_SOFTCAP = 14
    INV_FREQ = 15
    EMBEDDING = 16
    FINAL_NORM = 17
    LM_HEAD = 18
    LM_HEAD_BIAS = 19
    BLOB_BYTES = 20
    LM_HEAD_TYPE = 21
    EMBEDDING_TYPE = 22


class LayerField(IntEnum):
    """Words of one layer, behind the header."""

    ATTENTION_NORM = 0
    QKV = 1
    QKV_BIAS = 2
    Q_NORM = 3
    K_NORM = 4
    ATTENTION_OUT = 5
    ATTENTION_OUT_BIAS = 6
    FFN_NORM = 7
    GATE_UP = 8
    GATE_UP_BIAS = 9
    DOWN = 10
    DOWN_BIAS = 11
    WINDOW = 12
    USE_ROPE = 13
    QKV_TYPE = 14
    ATTENTION_OUT_TYPE = 15
    GATE_UP_TYPE = 16
    DOWN_TYPE = 17


@dataclass(frozen=True)
class StepConfig:
    """Sizes and constants of a model that ``multi_block_step`` can run.

    Attributes:
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: sizes.
        inv_freq: float32 [rotated dimensions / 2], inverse frequencies of the rotary embedding, scaling applied.
        norm_eps: epsilon of every RMS norm.
        softmax_scale: factor on q.k; None means 1 / sqrt(head_dim).
        rope_scale: factor on cos and sin (the rotary embedding's attention scaling).
        logit_scale: positive factor on the logits.
        logit_softcap: cap * tanh(logit / cap); 0 is off.
        windows: per layer, how many earlier keys a query sees; -1 is all.
        use_rope: per layer, whether q and k are rotated.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    inv_freq: Tensor
    norm_eps: float = 1e-5
    softmax_scale: float | None = None
    rope_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    windows: Sequence[int] = field(default_factory=tuple)
    use_rope: Sequence[bool] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"StepConfig: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"StepConfig: num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim > 256 or 2 * self.inv_freq.numel() > self.head_dim:
            raise ValueError(
                f"StepConfig: head_dim must be at most 256 and at least twice the {self.inv_freq.numel()} inverse "
                f"frequencies, got {self.head_dim}"
            )
        for name in ("windows", "use_rope"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ValueError(f"StepConfig: {name} must have one entry per layer ({self.num_layers}) or none")


@dataclass(frozen=True)
class StepWeights:
    """What ``multi_block_step`` takes as its first two arguments.

    Attributes:
        blob: uint8 [bytes], 64-byte aligned parts, on the device that runs the step.
        descriptor: int64 [header + layers * layer fields], always on the CPU: the host reads sizes from it.
    """

    blob: Tensor
    descriptor: Tensor

    def __getitem__(self, name: DescriptorField) -> int:
        return int(self.descriptor[name])

    @property
    def num_layers(self) -> int:
        return self[DescriptorField.LAYERS]

    @property
    def vocab_size(self) -> int:
        return self[DescriptorField.VOCAB]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self[DescriptorField.WEIGHT_TYPE]]

    def to(self, device: torch.device | str) -> StepWeights:
        """The same weights with the blob on ``device``."""
        return replace(self, blob=self.blob.to(device))

    def allocate_cache(self, batch: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Key and value caches beside the blob, each [layers, batch, capacity, kv_heads, head_dim] of its dtype."""
        f = DescriptorField
        shape = (self.num_layers, batch, capacity, self[f.KV_HEADS], self[f.HEAD_DIM])
        k_cache, v_cache = (torch.zeros(shape, dtype=self.dtype, device=self.blob.device) for _ in range(2))
        return k_cache, v_cache


def float_bits(value: float) -> int:
    """Bits of `value` as a float32, the way the descriptor stores floats."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class _Blob:
    """Parts appended at aligned offsets, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Tensor] = []
        self.size = 0

    def add(self, part: Tensor | None) -> int:
        """Offset of `part` in the blob, or -1 for None."""
        if part is None:
            return -1
        data = part.to(self.device).contiguous().view(-1).view(torch.uint8)
        offset = self.size
        self.parts.append(data)
        padding = -data.numel() % ALIGNMENT
        if padding:
            self.parts.append(torch.zeros(padding, dtype=torch.uint8, device=self.device))
        self.size += data.numel() + padding
        return offset

    def tensor(self) -> Tensor:
        blob = aligned_bytes(self.size, self.device)
        torch.cat(self.parts, out=blob)
        return blob


def aligned_bytes(size: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [size], zeroed, starting at a multiple of 64 bytes."""
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]


class _Source:
    """Named tensors of a model, with one clear error for a missing or misshapen one."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype = tensors, dtype

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"pack_step_weights: tensor {name} is missing")
        tensor = self.tensors[name].detach()
        if tuple(tensor.shape) != shape:
            raise ValueError(f"pack_step_weights: {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        return tensor

    def vector(self, name: str, size: int) -> Tensor:
        return self.get(name, (size,)).float()

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.get(name, (rows, columns)).to(self.dtype)

    def stacked(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        matrices = [self.matrix(n + ".weight", r, columns) for n, r in zip(names, rows, strict=True)]
        return pack_weight(torch.cat(matrices), name=" and ".join(names))

    def stacked_bias(self, names: Sequence[str], rows: Sequence[int]) -> Tensor | None:
        """Biases of stacked matrices, zeros where one lacks its own; None when all do."""
        if not any(n + ".bias" in self.tensors for n in names):
            return None
        pairs = zip(names, rows, strict=True)
        device = next(iter(self.tensors.values())).device
        return torch.cat([self.optional(n + ".bias", r, torch.zeros(r, device=device)) for n, r in pairs])  # type: ignore[misc]

    def optional(self, name: str, size: int, default: Tensor | None = None) -> Tensor | None:
        return self.vector(name, size) if name in self.tensors else default


def pack_step_weights(tensors: Mapping[str, Tensor], config: StepConfig, dtype: torch.dtype) -> StepWeights:
    """Pack a model's weights for ``torch.ops.jacobi.multi_block_step``.

    Args:
        tensors: weights under the names of Hugging Face's Llama family: ``model.embed_tokens.weight``,
            ``model.layers.N.self_attn.{q,k,v,o}_proj.weight`` (and ``.bias``), ``...self_attn.{q,k}_norm.weight``,
            ``...mlp.{gate,up,down}_proj.weight``, ``...{input,post_attention}_layernorm.weight``,
            ``model.norm.weight`` and, unless the head is tied, ``lm_head.weight``.
        config: sizes and constants.
        dtype: float32 or bfloat16, of the packed matrices and of the caches that go with them.

    Returns:
        StepWeights: blob, on the tensors' device, and descriptor.

    Raises:
        ValueError: a tensor is missing, has another shape than the config says, or holds NaN or infinity.
    """
    if dtype not in DTYPES:
        raise ValueError(f"pack_step_weights: dtype must be float32 or bfloat16, got {dtype}")
    source, c = _Source(tensors, dtype), config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    embedding = source.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    blob = _Blob(embedding.device)
    tied = "lm_head.weight" not in tensors or _same(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    head = embedding if tied else source.matrix("lm_head.weight", c.vocab_size, c.hidden_size)
    header = [
        STEP_MAGIC,
        DTYPES.index(dtype),
        c.num_layers,
        c.hidden_size,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        c.intermediate_size,
        c.vocab_size,
        float_bits(c.norm_eps),
        float_bits(c.softmax_scale if c.softmax_scale is not None else 1.0 / math.sqrt(c.head_dim)),
        2 * c.inv_freq.numel(),
        float_bits(c.rope_scale),
        float_bits(c.logit_scale),
        float_bits(c.logit_softcap),
        blob.add(c.inv_freq.float()),
        blob.add(None if tied else embedding),
        blob.add(source.vector("model.norm.weight", c.hidden_size)),
        blob.add(pack_weight(head, name="lm_head.weight")),
        blob.add(source.optional("lm_head.bias", c.vocab_size)),
        -1,
        DTYPES.index(dtype),
        DTYPES.index(dtype),
    ]
    layers: list[int] = []
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        qkv = [at + f"self_attn.{p}_proj" for p in "qkv"]
        gate_up = [at + f"mlp.{p}_proj" for p in ("gate", "up")]
        out, down = [at + "self_attn.o_proj"], [at + "mlp.down_proj"]
        qkv_rows, ffn_rows = (q_size, kv_size, kv_size), (c.intermediate_size,) * 2
        layers += [
            blob.add(source.vector(at + "input_layernorm.weight", c.hidden_size)),
            blob.add(source.stacked(qkv, qkv_rows, c.hidden_size)),
            blob.add(source.stacked_bias(qkv, qkv_rows)),
            blob.add(source.optional(at + "self_attn.q_norm.weight", c.head_dim)),
            blob.add(source.optional(at + "self_attn.k_norm.weight", c.head_dim)),
            blob.add(source.stacked(out, (c.hidden_size,), q_size)),
            blob.add(source.stacked_bias(out, (c.hidden_size,))),
            blob.add(source.vector(at + "post_attention_layernorm.weight", c.hidden_size)),
            blob.add(source.stacked(gate_up, ffn_rows, c.hidden_size)),
            blob.add(source.stacked_bias(gate_up, ffn_rows)),
            blob.add(source.stacked(down, (c.hidden_size,), c.intermediate_size)),
            blob.add(source.stacked_bias(down, (c.hidden_size,))),
            int(c.windows[i]) if c.windows else -1,
            int(c.use_rope[i]) if c.use_rope else 1,
            *[DTYPES.index(dtype)] * 4,
        ]
    header[DescriptorField.BLOB_BYTES] = blob.size
    return StepWeights(blob.tensor(), torch.tensor(header + layers, dtype=torch.int64))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


def save_step_weights(weights: StepWeights, path: str | Path) -> None:
    """Write blob and descriptor to a safetensors file; an existing file is replaced only by a complete one."""
    from safetensors.torch import save_file

    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file({"blob": weights.blob, "descriptor": weights.descriptor}, str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_step_weights(path: str | Path) -> StepWeights:
    """Read a file of :func:`save_step_weights`.

    Raises:
        ValueError: no such file, or not a file of packed step weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(path))
        blob = aligned_bytes(tensors["blob"].numel())
        blob.copy_(tensors["blob"])
        weights = StepWeights(blob, tensors["descriptor"])
        if weights[DescriptorField.MAGIC] != STEP_MAGIC:
            raise ValueError("another format")
        return weights
    except (OSError, SafetensorError, KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path} is not a file of packed step weights ({error}): make one with `jacobi pack`"
        ) from error
