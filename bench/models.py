"""Shapes that the benchmarks run: SmolLM2-135M's, with random weights or the real ones, and larger ones for GPUs."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bench.decode_setup import DecodeSetup
from bench.floor import Work
from jacobi_kernels import StepConfig, StepWeights, pack_step_weights, reference
from jacobi_kernels.packing import pack_weight

CHECK_ROWS = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model; ``tied``: the head is the embedding."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of the packed matrices of one layer, and of the head."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "attention_out": (self.hidden, q),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "lm_head": (self.vocab, self.hidden),
        }

    @property
    def matrix_elements(self) -> int:
        """Weights that a forward pass multiplies with."""
        sizes = {name: n * k for name, (n, k) in self.linears.items()}
        head = sizes.pop("lm_head")
        return self.layers * sum(sizes.values()) + head

    def attention_work(self, visible: int, cached: int, rows: int, itemsize: int) -> Work:
        """One layer: ``visible`` keys over all rows; cached keys and values are read, those of the rows written."""
        row_bytes = 2 * self.kv_heads * self.head_dim * itemsize
        return Work((cached + rows) * row_bytes, 4 * self.heads * self.head_dim * visible)

    def step_work(self, visible: int, cached: int, rows: int, itemsize: int) -> Work:
        """A whole forward pass: every matrix is read once."""
        attention = self.attention_work(visible, cached, rows, itemsize)
        return Work(
            self.matrix_elements * itemsize + self.layers * attention.bytes,
            2 * rows * self.matrix_elements + self.layers * attention.flops,
        )

    def step_config(self) -> StepConfig:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return StepConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            inv_freq=1.0 / 100_000.0**exponents,
        )

    def random_tensors(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """Weights under transformers' names, scaled so that activations keep their size."""
        generator = torch.Generator(device).manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator, device=device) / columns**0.5).to(dtype)

        def ones() -> Tensor:
            return torch.ones(self.hidden, device=device)

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors = {
            "model.embed_tokens.weight": matrix(self.vocab, self.hidden),
            "model.norm.weight": ones(),
        }
        if not self.tied:
            tensors["lm_head.weight"] = matrix(self.vocab, self.hidden)
        for i in range(self.layers):
            layer = {
                "self_attn.q_proj": (q, self.hidden),
                "self_attn.k_proj": (kv, self.hidden),
                "self_attn.v_proj": (kv, self.hidden),
                "self_attn.o_proj": (self.hidden, q),
                "mlp.gate_proj": (self.ffn, self.hidden),
                "mlp.up_proj": (self.ffn, self.hidden),
                "mlp.down_proj": (self.hidden, self.ffn),
            }
            tensors |= {f"model.layers.{i}.{name}.weight": matrix(*size) for name, size in layer.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{i}.{norm}.weight"] = ones()
        return tensors


SMOLLM2 = Shape(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152)
# Qwen2.5's without the biases of q, k and v.
QWEN_1_5B = Shape(layers=28, hidden=1536, ffn=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936)
QWEN_7B = Shape(layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064, tied=False)


@dataclass(frozen=True)
class StepModel:
    """Packed weights for ``multi_block_step`` and their shape."""

    shape: Shape
    weights: StepWeights


@lru_cache(maxsize=1)  # half a gigabyte each
def random_model(dtype: torch.dtype) -> StepModel:
    """SmolLM2's shape with random weights; checked against the reference."""
    gc.collect()
    tensors, config = SMOLLM2.random_tensors(dtype), SMOLLM2.step_config()
    weights = pack_step_weights(tensors, config, dtype)
    check_against_reference(weights, tensors, config)
    return StepModel(SMOLLM2, weights)


@lru_cache(maxsize=1)
def default_model(dtype: torch.dtype) -> StepModel:
    """The default model of the command line; LoadError when it is not installed."""
    from jacobi_decoding.loading import load_model
    from jacobi_decoding.step_model import describe_step_model

    random_model.cache_clear()
    gc.collect()
    step_model = describe_step_model(load_model(None, dtype).model)
    weights, c = step_model.pack(), step_model.config
    check_against_reference(weights, step_model.model.state_dict(), c)
    shape = Shape(
        c.num_layers, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size
    )
    return StepModel(shape, weights)


def check_against_reference(weights: StepWeights, tensors: Mapping[str, Tensor], config: StepConfig) -> None:
    """One step over CHECK_ROWS guesses and no cache: what it predicts is within rounding of the reference's best."""
    setup = DecodeSetup(weights, rows=CHECK_ROWS, cached=0)
    tokens = setup.state.tokens.clone()
    setup.step()
    accepted = int(setup.state.state[0, setup.column.ACCEPTED])
    behind = CHECK_ROWS - accepted + 1  # predictions that the new chain still shows
    predicted = setup.state.tokens[:behind].long()
    hidden = reference.hidden_states(tensors, config, tokens, *setup.one_chain, dtype=torch.float32)
    head = pack_weight(tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).to(weights.dtype))
    logits = reference.token_logits(hidden, head, None, config.vocab_size)[CHECK_ROWS - behind :]
    best = logits.max(dim=1).values
    tolerance = (1e-3 if weights.dtype == torch.float32 else 6e-2) * (best - logits.mean(dim=1))
    missed = best - logits.gather(1, predicted[:, None])[:, 0] - tolerance
    assert float(missed.max()) <= 0, f"multi_block_step's predictions are {float(missed.max()):.3g} beyond rounding"


def random_linear(out_features: int, in_features: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A packed weight whose products with normal rows are of size 1."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    return pack_weight(weight.to(dtype))
