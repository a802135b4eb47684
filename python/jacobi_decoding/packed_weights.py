"""Packed copies of a model's weights that follow the model.

A copy is made when a module is first wrapped and made again when its parameters changed since: an optimiser step or
``load_state_dict`` raises a parameter's version counter, a moved or converted model has other storage or dtypes. Writes
through ``parameter.data`` raise no counter, so a sample of the elements is compared too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_kernels.packing import pack_weight

_SAMPLE = 32  # elements of a parameter that are compared


@dataclass(frozen=True)
class PackedWeight:
    """weight [ceil(out/16), in, 16]; bias [out] or None; sizes in elements."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a plain linear layer, stored either way around."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def is_lora_linear(module: nn.Module) -> bool:
    """Whether ``module`` is peft's LoRA layer over a plain linear layer."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.tuners.lora.Linear):
        return False
    return type(module).forward is peft.tuners.lora.Linear.forward and is_linear(module.base_layer)


class PackedWeights:
    """Packed weights by module, held weakly so that they die with the model."""

    def __init__(self) -> None:
        self._packed: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, PackedWeight]] = weakref.WeakKeyDictionary()

    def get(self, module: nn.Module, name: str) -> PackedWeight:
        """The current packed weight of a linear or LoRA layer; ``name`` is its path, for error messages.

        Raises UnsupportedModelError for dtypes other than float32 and bfloat16, NaN weights, and LoRA variants.
        """
        _refuse_side_effects(module, name)
        key = _lora_key(module, name) if is_lora_linear(module) else _linear_key(module)
        known = self._packed.get(module)
        if known is not None and known[0] == key:
            return known[1]
        try:
            packed = _pack_lora(module, name) if is_lora_linear(module) else _pack_linear(module, name)
        except ValueError as error:
            if isinstance(error, UnsupportedModelError):
                raise
            raise UnsupportedModelError(name, str(error), "convert the model to float32 or bfloat16") from error
        self._packed[module] = (key, packed)
        return packed


def _refuse_side_effects(module: nn.Module, name: str) -> None:
    """What a replaced module would silently skip."""
    layers = [module, *module.modules()]
    if any(m._forward_hooks or m._forward_pre_hooks for m in layers):
        raise UnsupportedModelError(name, "its forward hooks would be skipped", "remove the hooks")
    if any("forward" in m.__dict__ for m in layers):
        raise UnsupportedModelError(
            name, "its forward is replaced (offloading or quantisation)", "load the model without device_map"
        )
    if any(hasattr(m, "parametrizations") for m in layers):
        raise UnsupportedModelError(name, "its weight is parametrised", "remove the parametrisation")
    for parameter in module.parameters():
        if type(parameter) not in (nn.Parameter, Tensor):
            why = f"its weight is a {type(parameter).__name__} (quantised or sharded)"
            raise UnsupportedModelError(name, why, "load the model in float32 or bfloat16")


def _linear_key(module: Any) -> Hashable:
    return _fingerprint(module.weight), _fingerprint(module.bias)


def _fingerprint(parameter: Tensor | None) -> Hashable:
    if parameter is None:
        return None
    # Inference tensors count no versions: a key that equals nothing makes the copy anew each time.
    version = object() if parameter.is_inference() else parameter._version
    with torch.no_grad():
        whole = parameter.is_contiguous() or parameter.dim() < 2
        flat = parameter.detach().reshape(-1) if whole else parameter.detach()[0]
        sample = tuple(flat[:: max(1, flat.shape[0] // _SAMPLE)].tolist())
    return parameter.data_ptr(), version, parameter.dtype, parameter.shape, parameter.device, sample


def _weight(module: Any) -> Tensor:
    """[out, in] of a linear layer or a Conv1D, which stores [in, out]."""
    return module.weight.detach().t() if isinstance(module, Conv1D) else module.weight.detach()


def _pack_linear(module: Any, name: str) -> PackedWeight:
    weight = _weight(module)
    return _packed(weight, module.bias, name)


def _packed(weight: Tensor, bias: Tensor | None, name: str) -> PackedWeight:
    bias = None if bias is None else bias.detach().contiguous()
    return PackedWeight(pack_weight(weight, f"{name}.weight"), bias, weight.shape[1], weight.shape[0])


def _lora_adapters(module: Any) -> list[str]:
    """The adapters that take part in the layer's forward besides what is merged into its weight."""
    if module.disable_adapters or module.merged:
        return []
    return [a for a in module.active_adapters if a in module.lora_A]


def _lora_key(module: Any, name: str) -> Hashable:
    if module.disable_adapters and module.merged:
        raise UnsupportedModelError(name, "its adapters are merged but disabled", "unmerge them first")
    parts = [
        (a, module.scaling[a], _fingerprint(module.lora_A[a].weight), _fingerprint(module.lora_B[a].weight))
        for a in _lora_adapters(module)
    ]
    return _linear_key(module.base_layer), tuple(parts)


def _pack_lora(module: Any, name: str) -> PackedWeight:
    """Base weight plus scaling * B @ A of the active adapters, summed in float32.

    The packed copy stays float32 (the op takes it beside bfloat16 rows), or small updates would round away.
    """
    adapters = _lora_adapters(module)
    base = module.base_layer
    if not adapters:
        return _pack_linear(base, name)
    weight = _weight(base).float()
    for adapter in adapters:
        if adapter in module.lora_variant:
            variant = type(module.lora_variant[adapter]).__name__
            raise UnsupportedModelError(name, f"LoRA variant {variant} is not supported", "call merge_and_unload()")
        if module.lora_bias.get(adapter):
            raise UnsupportedModelError(name, "LoRA with a bias is not supported", "call merge_and_unload()")
        a, b = module.lora_A[adapter].weight.detach().float(), module.lora_B[adapter].weight.detach().float()
        weight = weight + module.scaling[adapter] * (b @ a)
    return _packed(weight, base.bias, name)
