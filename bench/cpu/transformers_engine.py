"""transformers in float32 with sdpa attention, as a peer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from jacobi_decoding.loading import load_model


class Forward:
    """One forward pass over tokens behind a filled cache; logits behind every token, their maxima not taken."""

    def __init__(self, model: Any, context: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens + context)
        c = model.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.model, self.context = model, context
        self.ids = torch.randint(c.vocab_size, (1, tokens), generator=generator)
        self.cache = DynamicCache(config=c)
        for layer in range(c.num_hidden_layers if context else 0):
            shape = (1, c.num_key_value_heads, context, head_dim)
            self.cache.update(*(torch.randn(shape, generator=generator) for _ in range(2)), layer)

    def restore(self) -> None:
        added = self.cache.get_seq_length() - self.context
        if added:
            self.cache.crop(-added)

    @torch.no_grad()
    def step(self) -> None:
        self.model(self.ids, past_key_values=self.cache, use_cache=True)


class TransformersEngine:
    def __init__(self, model: str | None, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = load_model(model, "float32").model
        self.model.set_attn_implementation("sdpa")

    def facts(self) -> dict[str, Any]:
        parameters = {p.data_ptr(): p.numel() * p.itemsize for p in self.model.parameters()}
        return {"weight_bytes": sum(parameters.values()), "cache_itemsize": 4}

    def stepper(self, context: int, tokens: int, flash_attn: bool | None) -> Forward:
        return Forward(self.model, context, tokens)

    def generate(self, ids: list[int], max_new_tokens: int, method: str) -> dict[str, Any]:
        x = torch.tensor([ids])
        output = self.model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=max_new_tokens, do_sample=False
        )
        new = output[0, len(ids) :].tolist()
        return {"ids": new, "tokens": len(new) - 1, "forwards": len(new) - 1}
