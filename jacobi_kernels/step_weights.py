"""Weights of ``multi_block_step``: one packed blob, and a descriptor tensor that says what lies where.

The op runs decoder-only transformers of the Llama kind: RMS norm, rotary embedding (rotate-half), grouped-query
attention, gated SiLU feed-forward, residual connections before each norm; optionally biases, RMS norms of q and k per
head (Qwen3), layers without rotation (SmolLM3), a sliding window per layer, a tied or separate head.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from jacobi_kernels.grouped import FORMATS
from jacobi_kernels.step_blob import FLOAT_TYPES, BlobPlan, Weights, aligned_bytes

STEP_MAGIC = 0x4A41434F42490002  # "JACOBI", format 2
EMBEDDING = "model.embed_tokens.weight"


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
    def format(self) -> str:
        """What was asked for: float32, bfloat16, int8 or int4."""
        return FORMATS[self[DescriptorField.WEIGHT_TYPE]]

    @property
    def dtype(self) -> torch.dtype:
        """Of the caches: float32, or bfloat16 beside bfloat16 weights."""
        return FLOAT_TYPES.get(self.format, torch.float32)

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


def pack_step_weights(tensors: Weights, config: StepConfig, format: str | torch.dtype) -> StepWeights:
    """Pack a model's weights for ``torch.ops.jacobi.multi_block_step``.

    int8 and int4 are of weights only: products sum in float32, norms, biases and the caches are float32. Matrices that
    come as int8 or int4 keep their values (but int4 ones where int8 is asked for), others are quantised; where int4 is
    asked for, an embedding or head of floats becomes int8. Stacked matrices (q, k, v; gate, up) of several formats
    become float32.

    Memory: the blob and one tensor at a time, each read once, so that ``tensors`` may read lazily. Such a mapping has a
    method ``kind(name)`` that tells "float", "int8" or "int4" without reading, and lacks ``lm_head.weight`` when the
    head is tied.

    Args:
        tensors: weights, any float dtype or GroupedMatrix, under the names of Hugging Face's Llama family:
            ``model.embed_tokens.weight``, ``model.layers.N.self_attn.{q,k,v,o}_proj.weight`` (and ``.bias``),
            ``...self_attn.{q,k}_norm.weight``, ``...mlp.{gate,up,down}_proj.weight``,
            ``...{input,post_attention}_layernorm.weight``, ``model.norm.weight`` and, unless the head is tied,
            ``lm_head.weight``.
        config: sizes and constants.
        format: ``float32``, ``bfloat16``, ``int8`` or ``int4``, or the torch dtype of the first two.

    Returns:
        StepWeights: blob, on the device of ``model.norm.weight``, and descriptor.

    Raises:
        ValueError: another format; a tensor is missing, has another shape than the config says, or holds NaN, infinity
            or what the format cannot.
    """
    name = str(format).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(f"pack_step_weights: format must be one of {', '.join(FORMATS)}, got {name}")
    plan, c, f = BlobPlan(tensors, name), config, DescriptorField
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tied = _is_tied(tensors)
    floats = "int8" if name == "int4" else name
    head = EMBEDDING if tied else "lm_head.weight"
    head_format, embedding_format = plan.format_of([head], floats), plan.format_of([EMBEDDING], floats)
    header = {
        f.MAGIC: STEP_MAGIC,
        f.WEIGHT_TYPE: FORMATS.index(name),
        f.LAYERS: c.num_layers,
        f.HIDDEN: c.hidden_size,
        f.HEADS: c.num_heads,
        f.KV_HEADS: c.num_kv_heads,
        f.HEAD_DIM: c.head_dim,
        f.FFN: c.intermediate_size,
        f.VOCAB: c.vocab_size,
        f.NORM_EPS: float_bits(c.norm_eps),
        f.SOFTMAX_SCALE: float_bits(c.softmax_scale if c.softmax_scale is not None else 1.0 / math.sqrt(c.head_dim)),
        f.ROPE_DIM: 2 * c.inv_freq.numel(),
        f.ROPE_SCALE: float_bits(c.rope_scale),
        f.LOGIT_SCALE: float_bits(c.logit_scale),
        f.LOGIT_SOFTCAP: float_bits(c.logit_softcap),
        f.INV_FREQ: plan.constant(c.inv_freq),
        f.EMBEDDING: -1,
        f.FINAL_NORM: plan.vectors(["model.norm.weight"], [c.hidden_size], required=True),
        f.LM_HEAD: plan.matrix([head], [c.vocab_size], c.hidden_size, head_format),
        f.LM_HEAD_BIAS: plan.vectors(["lm_head.bias"], [c.vocab_size]),
        f.LM_HEAD_TYPE: FORMATS.index(head_format),
        f.EMBEDDING_TYPE: FORMATS.index(embedding_format),
    }
    if not tied and embedding_format in FLOAT_TYPES:
        header[f.EMBEDDING] = plan.plain(EMBEDDING, c.vocab_size, c.hidden_size, embedding_format)
    elif not tied:
        header[f.EMBEDDING] = plan.matrix([EMBEDDING], [c.vocab_size], c.hidden_size, embedding_format)
    layers: list[int] = []
    for i in range(c.num_layers):
        at, l = f"model.layers.{i}.", LayerField
        words = {
            l.ATTENTION_NORM: plan.vectors([at + "input_layernorm.weight"], [c.hidden_size], required=True),
            l.Q_NORM: plan.vectors([at + "self_attn.q_norm.weight"], [c.head_dim]),
            l.K_NORM: plan.vectors([at + "self_attn.k_norm.weight"], [c.head_dim]),
            l.FFN_NORM: plan.vectors([at + "post_attention_layernorm.weight"], [c.hidden_size], required=True),
            l.WINDOW: int(c.windows[i]) if c.windows else -1,
            l.USE_ROPE: int(c.use_rope[i]) if c.use_rope else 1,
        }
        products = (
            (
                l.QKV,
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                (q_size, kv_size, kv_size),
                c.hidden_size,
            ),
            (l.ATTENTION_OUT, ("self_attn.o_proj",), (c.hidden_size,), q_size),
            (l.GATE_UP, ("mlp.gate_proj", "mlp.up_proj"), (c.intermediate_size,) * 2, c.hidden_size),
            (l.DOWN, ("mlp.down_proj",), (c.hidden_size,), c.intermediate_size),
        )
        for matrix, modules, rows_of, columns in products:
            weights = [at + module + ".weight" for module in modules]
            packed_as = plan.format_of(weights)
            words[matrix] = plan.matrix(weights, rows_of, columns, packed_as)
            words[l[matrix.name + "_BIAS"]] = plan.vectors([at + module + ".bias" for module in modules], rows_of)
            words[l[matrix.name + "_TYPE"]] = FORMATS.index(packed_as)
        layers += [words[field] for field in LayerField]
    header[f.BLOB_BYTES] = plan.size
    descriptor = torch.tensor([header[field] for field in DescriptorField] + layers, dtype=torch.int64)
    return StepWeights(plan.fill(tensors["model.norm.weight"].device), descriptor)


def _is_tied(tensors: Weights) -> bool:
    """Whether the head is the embedding: it is missing, or, unless read lazily, the same tensor."""
    if "lm_head.weight" not in tensors:
        return True
    if hasattr(tensors, "kind") or EMBEDDING not in tensors:
        return False
    head, embedding = tensors["lm_head.weight"], tensors[EMBEDDING]
    if isinstance(head, Tensor) and isinstance(embedding, Tensor):
        return head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape
    return head is embedding


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
