"""What is refused by looking at a model, before anything runs."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import PreTrainedModel

from jacobi_decoding.devices import model_device
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.head import head_module

_CACHE_NAMES = ("cache", "past_key_values")  # transformers' names for the cache argument, newest first
_REMEDY = "decode with model.generate"


def cache_name(decoder: nn.Module) -> str:
    """What ``decoder``'s forward calls its cache argument, which changes between transformers' releases."""
    parameters = inspect.signature(decoder.forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return name
    raise UnsupportedModelError(type(decoder).__name__, "its forward takes no cache", _REMEDY)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError unless ``model`` has the outward form of a decoder-only causal model on the CPU."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(name, "it is an encoder-decoder model", "use a decoder-only model")
    if not model.can_generate():
        why = "it cannot generate text (an encoder, or a model without a language-model head)"
        raise UnsupportedModelError(name, why, "load a causal model with AutoModelForCausalLM")
    head_module(model)
    decoder = model.get_decoder()
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        raise UnsupportedModelError(name, "it has no decoder apart from its head", _REMEDY)
    cache_name(decoder)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        why = "its forward takes no position_ids (positions by ALiBi or by counting)"
        raise UnsupportedModelError(name, why, _REMEDY)
    dtype = next(decoder.parameters()).dtype
    if dtype not in (torch.float32, torch.bfloat16):
        remedy = "use model.to(torch.float32) or model.to(torch.bfloat16)"
        raise UnsupportedModelError(name, f"{str(dtype)[6:]} is not supported", remedy)
    model_device(model)


def refuse_mode(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for what makes a forward random, or computes in other dtypes than the model's."""
    if torch.is_autocast_enabled(model.device.type):
        raise UnsupportedModelError("autocast", "it would change dtypes inside the model", "leave torch.autocast first")
    if model.training:
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                raise UnsupportedModelError(name, "dropout is active in training mode", "call model.eval() first")
