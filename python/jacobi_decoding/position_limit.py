"""How far a model's positions reach before its rotary frequencies change or its position table ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from jacobi_decoding.errors import UnsupportedModelError


@dataclass(frozen=True)
class PositionLimit:
    """tokens: most tokens a sequence may have (None: any number); reason: what changes beyond."""

    tokens: int | None = None
    reason: str = ""

    def check(self, length: int) -> None:
        """Raise UnsupportedModelError when a sequence of ``length`` tokens goes beyond the limit."""
        if self.tokens is not None and length > self.tokens:
            raise UnsupportedModelError(
                f"a sequence of {length} tokens", self.reason, f"keep prompt and new tokens within {self.tokens}"
            )


def position_limit(decoder: Any) -> PositionLimit:
    """The limit of ``decoder`` (a transformers base model).

    Dynamic NTK and longrope choose their frequencies by the longest position of a whole forward. Keys cached before a
    change keep the old ones, so beyond it the result depends on how the tokens were grouped into forwards.
    """
    config = decoder.config
    longest = getattr(config, "max_position_embeddings", None)
    limits = [PositionLimit()]
    for module in decoder.modules():
        for rope_type, parameters in _ropes(module):
            if "dynamic" in rope_type and longest is not None:
                # At exactly max_position_embeddings a module that saw longer text does not go back to its frequencies.
                limits.append(PositionLimit(longest - 1, f"rotary frequencies ({rope_type}) change with the length"))
            elif rope_type == "longrope":
                original = parameters.get("original_max_position_embeddings") or getattr(
                    config, "original_max_position_embeddings", longest
                )
                limits.append(PositionLimit(original, "rotary frequencies (longrope) change with the length"))
    if longest is not None and _learned_positions(decoder, longest):
        limits.append(PositionLimit(longest, "the model has a learned embedding for each position"))
    return min(limits, key=lambda limit: float("inf") if limit.tokens is None else limit.tokens)


def _ropes(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """(type, parameters) of a rotary module; models with several kinds of layers have one per kind."""
    rope_type = getattr(module, "rope_type", None)
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope_type, dict):
        for layer_type, kind in rope_type.items():
            yield kind, parameters.get(layer_type) or {}
    elif isinstance(rope_type, str):
        yield rope_type, parameters


def _learned_positions(decoder: Any, longest: int) -> bool:
    """An embedding besides the tokens' own with about a row per position (OPT has two rows more)."""
    tokens = decoder.get_input_embeddings()
    return any(
        isinstance(m, nn.Embedding) and m is not tokens and longest <= m.num_embeddings <= longest + 8
        for m in decoder.modules()
    )
