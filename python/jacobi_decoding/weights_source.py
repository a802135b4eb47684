"""Where the step path's weights come from: a transformers model that may change, or packed ones that stay."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from jacobi_decoding.devices import model_device
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.packed_model import PackedModel
from jacobi_decoding.step_model import StepModel, describe_step_model
from jacobi_kernels.step_weights import StepConfig, StepWeights


class WeightsSource(Protocol):
    """Weights on one device, and the sizes that they had when the source was made."""

    @property
    def device(self) -> torch.device: ...
    @property
    def config(self) -> StepConfig: ...

    def fits(self) -> bool:
        """Whether the model still is what ``config`` says, weights apart."""
        ...

    def weights(self) -> StepWeights:
        """The weights as they are now."""
        ...


class ModelWeights:
    """Weights of a transformers model: packed at first use, and again after a parameter has changed.

    UnsupportedModelError, with the reason, when the step op cannot run the model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model_device(model)
        self._described: StepModel = describe_step_model(model)
        self._weights: StepWeights | None = None
        self._packed_from: tuple[tuple[int, int], ...] = ()

    @property
    def config(self) -> StepConfig:
        return self._described.config

    def fits(self) -> bool:
        """Whether the model is what was described: layers, constants, frequencies, dtype, device."""
        try:
            same = describe_step_model(self.model).same_as(self._described)
            return same and model_device(self.model) == self.device
        except UnsupportedModelError:
            return False

    def weights(self) -> StepWeights:
        """The packed weights of the model as it is now."""
        found = tuple((p.data_ptr(), p._version) for p in self.model.parameters())
        if self._weights is None or found != self._packed_from:
            self._weights = None  # free the old blob first
            self._weights = self._described.pack()
            self._packed_from = found
        return self._weights


class FixedWeights:
    """Weights of a PackedModel."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def config(self) -> StepConfig:
        return self._model.step_config

    def fits(self) -> bool:
        """They stay as they are."""
        return True

    def weights(self) -> StepWeights:
        return self._model.weights


def weights_source(model: Any) -> WeightsSource:
    """The source for ``model``, a PackedModel or a transformers causal language model."""
    return FixedWeights(model) if isinstance(model, PackedModel) else ModelWeights(model)
