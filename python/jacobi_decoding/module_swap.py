"""Linear layers and activations of a decoder replaced by ours for as long as it is wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.packed_weights import PackedWeight, PackedWeights, is_linear, is_lora_linear

_KINDS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.AccurateGELUActivation: "gelu_tanh",
    activations.QuickGELUActivation: "quick_gelu",
    nn.ReLU: "relu",
    activations.ReLUSquaredActivation: "relu2",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}


class _Stand(nn.Module):
    """Stands in for a module: attributes it lacks are the original's, which it keeps out of the module tree."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original
        self.training = original.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)


class PackedLinear(_Stand):
    """``packed_linear`` in place of ``nn.Linear``, ``Conv1D`` or a LoRA layer."""

    def __init__(self, original: nn.Module, packed: PackedWeight) -> None:
        super().__init__(original)
        self.__dict__["packed"] = packed

    def forward(self, x: Tensor) -> Tensor:
        packed: PackedWeight = self.__dict__["packed"]
        return torch.ops.jacobi.packed_linear.default(x, packed.weight, packed.bias, packed.out_features)


class OwnActivation(_Stand):
    """``activation`` in place of an activation module."""

    def __init__(self, original: nn.Module, kind: str) -> None:
        super().__init__(original)
        self.__dict__["kind"] = kind

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.jacobi.activation.default(x, self.__dict__["kind"])


def activation_kind(module: nn.Module) -> str | None:
    """The op's name for an activation module, None for any other module."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _KINDS.get(type(module))


def _replacement(module: nn.Module, name: str, packed: PackedWeights) -> nn.Module | None:
    if is_linear(module) or is_lora_linear(module):
        return PackedLinear(module, packed.get(module, name))
    if type(module).__module__.partition(".")[0] == "peft":
        raise UnsupportedModelError(
            name, f"peft's {type(module).__name__} is not supported", "call merge_and_unload() first"
        )
    kind = activation_kind(module)
    return None if kind is None else OwnActivation(module, kind)


@contextmanager
def swapped(decoder: nn.Module, packed: PackedWeights) -> Iterator[None]:
    """Replace the linear layers and activations below ``decoder``; all are back afterwards, whatever happens.

    A module used in several places is replaced by one module. Raises UnsupportedModelError before anything is replaced.
    """
    plan: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
    replacements: dict[int, nn.Module | None] = {}
    below = ""  # layers inside a replaced LoRA layer go with it
    for path, module in decoder.named_modules(remove_duplicate=False):
        if not path or (below and path.startswith(below)):
            continue
        if id(module) not in replacements:
            replacements[id(module)] = _replacement(module, path, packed)
        new = replacements[id(module)]
        if new is not None:
            below = f"{path}."
            parent, _, name = path.rpartition(".")
            plan.append((decoder.get_submodule(parent), name, module, new))
    try:
        for parent_module, name, _, new in plan:
            setattr(parent_module, name, new)
        yield
    finally:
        for parent_module, name, module, _ in plan:
            setattr(parent_module, name, module)
