"""The language-model head in the terms of ``argmax_verify``: weight, bias, logit scale and soft cap.

transformers has no common name for what a model does to its logits, and one name can mean a factor or a divisor. So the
config only suggests candidates; the one that reproduces the model's own logits is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.packed_weights import PackedWeight, PackedWeights, is_linear, is_lora_linear

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "logit_softcap", "output_logit_soft_cap")

# Largest root-mean-square difference from the model's own logits, as a share of their root mean square.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class HeadTransform:
    """logit = softcap(scale * (hidden . weight + bias)); softcap 0 is none."""

    scale: float = 1.0
    softcap: float = 0.0

    def apply(self, product: Tensor) -> Tensor:
        logits = product * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap > 0 else logits


def head_module(model: Any) -> nn.Module:
    """The model's output layer; raises UnsupportedModelError when it has none or not a linear one."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            type(model).__name__, "it has no language-model head", "load it with AutoModelForCausalLM"
        )
    if not (is_linear(head) or is_lora_linear(head)):
        raise UnsupportedModelError(
            type(model).__name__,
            f"its head is a {type(head).__name__}, not a linear layer",
            "decode with model.generate",
        )
    return head


def packed_head(model: Any, packed: PackedWeights) -> PackedWeight:
    """The head's current packed weight."""
    return packed.get(head_module(model), "the language-model head")


def fit_head(model: Any, packed: PackedWeights, hidden: Tensor, own_logits: Tensor) -> HeadTransform:
    """Find what the model does to its logits.

    hidden [T, E]: hidden states of our forward. own_logits [T, V]: the model's own, before wrapping. Raises
    UnsupportedModelError when no candidate reproduces them within the dtype's tolerance.
    """
    head = packed_head(model, packed)
    if own_logits.shape[-1] != head.out_features:
        raise UnsupportedModelError(
            type(model).__name__,
            f"its logits have {own_logits.shape[-1]} columns, its head {head.out_features}",
            "decode with model.generate",
        )
    product = torch.ops.jacobi.packed_linear.default(hidden.float(), head.weight, head.bias, head.out_features)
    return match_transform(model, product, own_logits, TOLERANCE[hidden.dtype])


def match_transform(model: Any, product: Tensor, own_logits: Tensor, tolerance: float) -> HeadTransform:
    """Which candidate turns ``product`` [T, V], the head's linear layer, into the model's own logits [T, V].

    Raises UnsupportedModelError when none is closer than ``tolerance``, a share of the logits' root mean square.
    """
    own = own_logits.float()
    size = own.square().mean().sqrt().clamp(min=1e-30)
    errors = {}
    for candidate in _candidates(model.config):
        error = float((candidate.apply(product) - own).square().mean().sqrt() / size)
        if error <= tolerance:
            return candidate
        errors[candidate] = error
    raise UnsupportedModelError(
        type(model).__name__,
        f"its logits differ from ours by {min(errors.values()):.1e} of their size (at most "
        f"{tolerance:.0e} expected), so it computes something we do not know",
        "decode with model.generate",
    )


def _candidates(config: Any) -> list[HeadTransform]:
    """What the config may mean, named values first."""
    text = config.get_text_config(decoder=True)
    scales = [s for name in _SCALES if (v := _positive(text, name)) for s in (v, 1.0 / v)]
    softcaps = [v for name in _SOFTCAPS if (v := _positive(text, name))]
    return [HeadTransform(s, c) for c in (*softcaps, 0.0) for s in (*scales, 1.0)]


def _positive(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
