"""Our own decoder: steps of multi_block_step, answers and prefill through JacobiDecoder."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch

from bench.cpu.plan import MAIN_TOKENS
from bench.decode_setup import DecodeSetup
from bench.models import Shape
from bench.tokens_per_forward import AR
from jacobi_decoding import JacobiDecoder
from jacobi_decoding.cli.arguments import prompt_ids
from jacobi_decoding.loading import load_model
from jacobi_kernels.step_weights import DescriptorField

METHODS: dict[str, dict[str, Any]] = {"ar": AR, "jacobi": {"block_size": "auto"}}


class JacobiEngine:
    def __init__(self, model: str | None, weight_format: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.loaded = load_model(model, weight_format, packed=True)
        self.decoder = JacobiDecoder(self.loaded.model, self.loaded.tokenizer, path="step")
        self.weights = self.loaded.model.weights
        self._setup = lru_cache(maxsize=len(MAIN_TOKENS))(self._make_setup)  # they take turns

    def facts(self) -> dict[str, Any]:
        f, w = DescriptorField, self.weights
        sizes = (f.LAYERS, f.HIDDEN, f.FFN, f.HEADS, f.KV_HEADS, f.HEAD_DIM, f.VOCAB)
        return {
            "weight_bytes": w.blob.numel(),
            "cache_itemsize": w.dtype.itemsize,
            "shape": asdict(Shape(*(w[size] for size in sizes))),
        }

    def tokenize(self, prompt: str) -> list[int]:
        return prompt_ids(self.loaded.tokenizer, prompt, raw=False)

    def stepper(self, context: int, tokens: int, flash_attn: bool | None) -> DecodeSetup:
        return self._setup(context, tokens)

    def generate(self, ids: list[int], max_new_tokens: int, method: str) -> dict[str, Any]:
        sequences, stats = self.decoder.generate(
            torch.tensor([ids]), max_new_tokens=max_new_tokens, return_stats=True, **METHODS[method]
        )
        new = sequences[0, len(ids) :].tolist()
        return {"ids": new, "tokens": stats.decode_tokens, "forwards": stats.decode_forwards}

    def _make_setup(self, context: int, tokens: int) -> DecodeSetup:
        return DecodeSetup(self.weights, rows=tokens, cached=context)
