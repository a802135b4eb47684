"""Exact Jacobi decoding for Hugging Face causal language models.

Names are imported on first use: the command line answers ``--help`` without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jacobi_decoding.custom_generate import jacobi_generate
    from jacobi_decoding.decoder import JacobiDecoder, generate
    from jacobi_decoding.loading import LoadedModel, LoadError, load_model
    from jacobi_decoding.packed_model import PackedModel
    from jacobi_decoding.stats import DecodeStats

__all__ = [
    "DecodeStats",
    "JacobiDecoder",
    "LoadError",
    "LoadedModel",
    "PackedModel",
    "generate",
    "jacobi_generate",
    "load_model",
]

_MODULES = {
    "JacobiDecoder": "decoder",
    "generate": "decoder",
    "jacobi_generate": "custom_generate",
    "LoadError": "loading",
    "LoadedModel": "loading",
    "load_model": "loading",
    "PackedModel": "packed_model",
    "DecodeStats": "stats",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
