"""States of a decoding, as arrays that step_driver.cpp reads."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobi_kernels import StepWeights, pack_step_weights
from jacobi_kernels.step_weights import DescriptorField, LayerField
from tests.cuda.grid import Case, Run, random_model
from tests.kernels.helpers import int32, random_grouped
from tests.kernels.test_multi_block_step import model_with_every_option

# No size is a multiple of 16 or, where it is summed over, of 32; the second layer has a window.
CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 40,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 24,
    "intermediate_size": 53,
    "vocab_size": 333,
    "inv_freq": 1.0 / 10000 ** (torch.arange(0, 24, 2) / 24),
    "windows": (-1, 7),
}
# Gate and up have panels of their own; more of them than a thread takes at a time.
WIDE = CONFIG | {"hidden_size": 24, "num_heads": 4, "num_kv_heads": 1, "intermediate_size": 144}


def step_weights(name: str, format: str) -> StepWeights:
    """A random model: "separate" has all options, "tied" has none, "mixed" has matrices of all grouped formats."""
    if name == "separate":
        return random_model(CONFIG, format, biases=True, head_norms=True)  # type: ignore[arg-type]
    if name == "tied":
        return random_model(WIDE, format, tied=True)  # type: ignore[arg-type]
    return _mixed()


def _mixed() -> StepWeights:
    """Layer 0: int8 and int4, 1: float32 where q, k and v differ, 2: int4; the head is int8, the embedding int4."""
    model = model_with_every_option()
    tensors: dict[str, Any] = dict(model.tensors)
    int8 = ("layers.0.mlp.down", "layers.0.self_attn.o", "layers.1.self_attn.k", "lm_head")
    for seed, (name, tensor) in enumerate(model.tensors.items()):
        if tensor.dim() == 2:
            tensors[name] = random_grouped(seed, *tensor.shape, "int8" if any(n in name for n in int8) else "int4")
    weights = pack_step_weights(tensors, model.config, "int4")
    layers = weights.descriptor[len(DescriptorField) :].view(3, -1)[:, LayerField.QKV_TYPE :]
    assert layers.tolist() == [[3, 2, 3, 2], [0, 3, 3, 3], [3, 3, 3, 3]]
    assert (weights[DescriptorField.LM_HEAD_TYPE], weights[DescriptorField.EMBEDDING_TYPE]) == (2, 3)
    return weights


@dataclass(frozen=True)
class Decoding:
    """What is decoded and how. Tokens are taken modulo the vocabulary."""

    model: str
    prompts: list[list[int]]
    case: Case
    asked: int = 1  # threads
    granted: int | None = None
    filters: bool = False  # top-k and top-p
    most_steps: int = 100


def start(weights: StepWeights, decoding: Decoding) -> Run:
    vocab = weights.vocab_size
    run = Run.start(weights, [[t % vocab for t in prompt] for prompt in decoding.prompts], decoding.case)
    if decoding.filters:
        batch = run.state.batch
        run.sampling |= {"top_k": int32(*[40] * batch), "top_p": torch.full((batch,), 0.9)}
        run.sampling["logits_scratch"] = torch.full((4, vocab), float("nan"))
    return run


def arrays(weights: StepWeights, run: Run, most_steps: int) -> dict[str, Tensor]:
    """All that step_driver.cpp reads, by name."""
    s = run.state
    named: dict[str, Tensor] = {"weights": weights.blob, "descriptor": weights.descriptor}
    named |= {"k_cache": run.k, "v_cache": run.v, **run.sampling}
    for name in ("cache_seqlens", "tokens", "segments", "cu_seqlens_q", "cu_segments"):
        named[name] = getattr(s, name)
    named |= {"text": s.text, "pool": s.pool, "state": s.state, "stop_tokens": s.stop_tokens}
    if run.page_table is not None:
        named["page_table"] = run.page_table
    numbers = {
        "cache_is_float32": int(run.k.dtype == torch.float32),
        "slabs": run.k.shape[1],
        "page_size": run.k.shape[2],
        "pool_width": s.pool.shape[2] - 1,
        "block_size": s.block_size,
        "blocks": s.blocks,
        "candidates": s.candidates,
        "most_steps": most_steps,
    }
    named |= {name: torch.tensor([value]) for name, value in numbers.items()}
    named["spawn_ratio"] = torch.tensor([s.spawn_ratio], dtype=torch.float64)
    return named


def dump(path: Path, named: dict[str, Tensor]) -> Path:
    with path.open("wb") as file:
        for name, tensor in named.items():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            file.write(struct.pack("<32sq", name.encode(), len(data)) + data)
    return path


def decode(weights: StepWeights, run: Run, most_steps: int) -> tuple[int, list[list[int]]]:
    """Steps and texts of the op."""
    steps = 0
    while steps < most_steps and run.state.running:
        run.step(weights)
        steps += 1
    return steps, [run.state.text[b, : int(run.state.state[b, 0])].tolist() for b in range(run.state.batch)]
