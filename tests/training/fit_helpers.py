"""Tiny models, packed samples made by hand, and the losses of a batch by transformers' own attention in float64."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobi_kernels.reference import row_paths
from jacobi_training.batches import Batch
from jacobi_training.losses import Objective
from jacobi_training.packing import KIND
from jacobi_training.shards import ShardWriter
from tests.decoding.helpers import VOCAB, build

Sample = dict[str, Any]


def tiny(seed: int = 0, **config: Any) -> Any:
    """A random Llama of two layers, small enough to train in a blink."""
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        **config,
    }
    return build("LlamaForCausalLM", "LlamaConfig", seed=seed, **settings)


def samples(count: int, seed: int = 0, *, context: str = "window", local: bool = False, size: int = 4) -> list[Sample]:
    """Packed samples of different lengths whose noisy blocks differ from the answer here and there."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(length)]

    def noisy(block: list[int]) -> list[int]:
        return [block[0], *(token if rng.random() < 0.4 else rng.randrange(VOCAB) for token in block[1:])]

    made = []
    for index in range(count):
        answer = ids(rng.randrange(size, 4 * size))
        blocks = [answer[place : place + size] for place in range(0, len(answer), size)]
        made.append(
            {
                "index": index,
                "prompt_ids": ids(rng.randrange(1, 6)),
                "answer_ids": answer,
                "block_size": size,
                "context": context,
                "window": 2,
                "blocks": [
                    {"noisy": noisy(block), "ratio": 0.5, "target": 0.5, "teacher": noisy(block) if local else None}
                    for block in blocks
                ],
            }
        )
    return made


def write_samples(folder: Path, records: Sequence[Sample], shard_size: int = 3) -> Path:
    """A complete folder of packed samples."""
    ShardWriter(folder, KIND, {"made": "by hand"}).write_all(records, shard_size)
    return folder


def save_model(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def visible(batch: Batch, window: int = -1) -> Tensor:
    """[R, R] bool: which row sees which, by the paths of the layout; with a window, its last tokens only."""
    seen = torch.zeros(batch.rows, batch.rows, dtype=torch.bool)
    for paths in row_paths(batch.segments, batch.cu_segments):
        for row, path in paths.items():
            seen[row, path if window < 0 else path[-window - 1 :]] = True
    return seen


def reference_losses(model: Any, batch: Batch, objective: Objective) -> Tensor:
    """[2] float64: what TrainingModel returns, through eager attention, a mask of all pairs and all logits.

    model: in float64, with eager attention.
    """
    text = model.config.get_text_config(decoder=True)
    low = torch.finfo(torch.float64).min

    def mask(window: int) -> Tensor:
        return torch.zeros(1, 1, batch.rows, batch.rows, dtype=torch.float64).masked_fill(~visible(batch, window), low)

    masks: Any = mask(-1)
    if kinds := set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
        assert kinds == {"sliding_attention"}
        masks = {"full_attention": mask(-1), "sliding_attention": mask(text.sliding_window - 1)}
    elif model.config.model_type in ("mistral", "phi3"):  # one window for all layers
        masks = mask(text.sliding_window - 1)
    logits = model(
        input_ids=batch.tokens[None], position_ids=batch.positions[None], attention_mask=masks, use_cache=False
    ).logits[0]
    log_p = logits.log_softmax(-1)
    has_target = batch.targets >= 0
    ar = F.nll_loss(log_p[has_target], batch.targets[has_target], reduction="sum")
    taught = batch.teachers >= 0
    if objective.consistency == "hard":
        consistency = F.nll_loss(log_p[taught], batch.hard_targets[taught], reduction="sum")
    else:
        warm = (logits / objective.temperature).log_softmax(-1)
        consistency = -(warm.detach()[batch.teachers[taught]].exp() * warm[taught]).sum()
    return torch.stack([ar, consistency])


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a saved model."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    """Whether two saved models have the same tensors, bit for bit."""
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
