"""A step of transformers' own model beside ours: forward over T tokens behind a static cache, argmax of every logit."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from bench.models import Shape


def hf_model(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """transformers' Llama of that shape with random weights; ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


class HfStep:
    """``run()`` is one step over ``rows`` tokens behind ``cached``, ``restore()`` puts the cache's length back."""

    def __init__(self, model: Any, rows: int, cached: int) -> None:
        from transformers import StaticCache

        self.model, config, device = model, model.config, model.device
        self.rows, self.cached = rows, cached
        self.cache = StaticCache(config=config, max_cache_len=cached + rows)
        self.tokens = torch.randint(config.vocab_size, (1, rows), device=device)
        self.positions = torch.arange(cached, cached + rows, device=device)
        names = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.options: dict[str, Any] = {"position_ids": self.positions[None]}
        if "cache_position" in inspect.signature(self.model.model.forward).parameters:
            self.options["cache_position"] = self.positions
        if cached:  # fills the cache, which allocates it
            text = torch.randint(config.vocab_size, (1, cached), device=device)
            positions = torch.arange(cached, device=device)
            options = {name: positions if name == "cache_position" else positions[None] for name in self.options}
            self.model(text, **{self.cache_name: self.cache}, logits_to_keep=1, **options)

    @torch.no_grad()
    def run(self) -> Tensor:
        logits = self.model(self.tokens, **{self.cache_name: self.cache}, **self.options).logits
        predictions: Tensor = logits.argmax(dim=-1)
        return predictions

    def restore(self) -> None:
        for layer in self.cache.layers:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, Tensor):
                length.fill_(self.cached)
