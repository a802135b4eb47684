"""A model as the step op takes it and nothing else: packed weights with the configs of the model that they are of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from jacobi_decoding.devices import DeviceError
from jacobi_decoding.step_config import step_shapes
from jacobi_kernels.step_weights import StepConfig, StepWeights


@dataclass(frozen=True, eq=False)
class PackedModel:
    """What ``load_model(..., packed=True)`` makes; decodes on the CPU, by ``multi_block_step``.

    config, generation_config: transformers'. weights: of any format. step_config: sizes and constants of ``config``.
    """

    config: Any
    generation_config: Any
    weights: StepWeights
    step_config: StepConfig

    @property
    def device(self) -> torch.device:
        return self.weights.blob.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the caches."""
        return self.weights.dtype

    @property
    def format(self) -> str:
        """Of the weights: float32, bfloat16, int8 or int4."""
        return self.weights.format

    def num_parameters(self) -> int:
        """Elements of all tensors; a tied head counts once."""
        shapes = step_shapes(self.config)
        if self.config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        return sum(map(prod, shapes.values()))

    def to(self, device: torch.device | str) -> PackedModel:
        """Itself: packed weights stay on the CPU; DeviceError for a GPU."""
        if torch.device(device).type != "cpu":
            raise DeviceError(f"packed weights run on the CPU, not on {device}; load the model with packed=False")
        return self
