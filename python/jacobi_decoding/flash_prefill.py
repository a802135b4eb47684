"""Prompts taken in by the model's own forward with flash-attn: long prompts sooner, exactness given up.

The cached keys and values then come from other kernels, which round otherwise: what is decoded after them need not
equal token-by-token decoding bit for bit. So it is never used unless it is asked for by name.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from jacobi_decoding.devices import DeviceError
from jacobi_decoding.step_engine import StepCache
from jacobi_kernels.state import DecodeState, StateColumn

PREFILLS = ("exact", "flash-attn")
NOTICE = "prefill by flash-attn: that the output equals token-by-token decoding is not promised bit for bit"


def check_flash_attn(model: Any, path: str) -> None:
    """Raise DeviceError, one line, where prefill by flash-attn cannot run."""
    if model.device.type != "cuda":
        raise DeviceError("prefill by flash-attn needs a GPU; use --device cuda, or leave it out")
    if model.dtype != torch.bfloat16:
        raise DeviceError("prefill by flash-attn needs bfloat16; use --dtype bfloat16, or leave it out")
    if path != "multi_block_step":
        raise DeviceError(f"prefill by flash-attn needs the step path, this model runs by {path}; leave it out")
    if importlib.util.find_spec("flash_attn") is None:
        raise DeviceError(
            "prefill by flash-attn needs the package: run `pip install 'jacobi-kernels[flash-attn]'`, or leave it out"
        )


@torch.no_grad()
def take_in_prompts(model: Any, state: DecodeState, cache: StepCache, attention: str = "flash_attention_2") -> None:
    """Fill the cache with all prompt tokens but the last, which the first step then evaluates; row by row.

    state: before its first step, beside the model, as is the cache. attention: transformers' name of what attends.
    """
    from transformers import DynamicCache

    from jacobi_decoding.adapter import attention_of, base_model
    from jacobi_decoding.refusals import cache_name

    lengths = state.state[:, StateColumn.PROMPT_LEN].tolist()
    decoder = base_model(model).get_decoder()
    with attention_of(model, attention):
        for b, length in enumerate(lengths):
            if length < 2:
                continue
            ids = state.text[b : b + 1, : length - 1].long()
            known = DynamicCache()
            decoder(input_ids=ids, use_cache=True, **{cache_name(decoder): known})
            for i, layer in enumerate(known.layers):
                cache.k_cache[i, b, : length - 1] = layer.keys[0].transpose(0, 1)
                cache.v_cache[i, b, : length - 1] = layer.values[0].transpose(0, 1)
            state.cache_seqlens[b] = length - 1
    state.lay_out()
