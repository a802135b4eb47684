"""A transformers causal language model whose forward runs on our ops, through public extension points only.

While wrapped, the decoder's attention implementation is ours and its linear layers and activations are replaced; the
model is left as found. What is learned about a model (attention layers, head, packed weights) is kept beside it, held
weakly, so that generating again costs neither a self-check nor packing.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi_decoding import attention_hook
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.head import PackedWeight, head_module, packed_head
from jacobi_decoding.layout_cache import LayoutCache
from jacobi_decoding.module_swap import swapped
from jacobi_decoding.packed_weights import PackedWeights
from jacobi_decoding.position_limit import position_limit
from jacobi_decoding.self_check import run_self_check

_ADAPTERS: weakref.WeakKeyDictionary[nn.Module, ModelAdapter] = weakref.WeakKeyDictionary()
_CACHE_NAMES = ("cache", "past_key_values")  # transformers' names for the cache argument, newest first


def adapt(model: Any) -> ModelAdapter:
    """The adapter of a model, made and checked on first use.

    model: a transformers causal language model, or a peft model with LoRA adapters on one. Raises
    UnsupportedModelError (a ValueError, one line) for what cannot be decoded exactly.
    """
    base = _base_model(model)
    adapter = _ADAPTERS.get(base)
    if adapter is None or adapter.stale():
        adapter = ModelAdapter(base)
        _ADAPTERS[base] = adapter
    return adapter


def _base_model(model: Any) -> PreTrainedModel:
    """The transformers model below peft's wrapper, which only dispatches for adapters that live in the layers."""
    configs = getattr(model, "peft_config", None)
    if configs and hasattr(model, "get_base_model"):
        for name, config in configs.items():
            if getattr(config, "is_prompt_learning", False):
                raise UnsupportedModelError(f"peft adapter {name!r}", "it learns prompt tokens", "use LoRA adapters")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            type(model).__name__, "it is not a transformers model", "pass the model below it (such as model.module)"
        )
    return model


class ModelAdapter:
    """See the module's docstring; made by :func:`adapt`.

    hook: the registry entry of the attention modules. packed: packed weights. limit: longest sequence. head_transform:
    scale and soft cap of the logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        attention_hook.register()
        self._model = weakref.ref(model)
        self._decoder = weakref.ref(_decoder_of(model))
        self._cache_name = _cache_name(self.decoder)
        self._depth = 0
        self._lock = threading.RLock()
        self.hook = attention_hook.AttentionHook(self.decoder)
        self.packed = PackedWeights()
        self.limit = position_limit(self.decoder)
        with torch.no_grad():
            self.head_transform = run_self_check(self)
        self._checked_dtype = _dtype(self.decoder)

    @property
    def model(self) -> PreTrainedModel:
        return _alive(self._model)

    @property
    def decoder(self) -> PreTrainedModel:
        return _alive(self._decoder)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.packed_head().out_features

    def stale(self) -> bool:
        """Whether the model's modules or dtype changed so much that it must be checked again."""
        decoder = self._decoder()
        if decoder is None or decoder is not self.model.get_decoder() or _dtype(decoder) != self._checked_dtype:
            return True
        modules = set(map(id, decoder.modules()))
        return any(id(module) not in modules for module in self.hook.slots)

    def packed_head(self) -> PackedWeight:
        """The head's current packed weight."""
        return packed_head(self.model, self.packed)

    def check_slots(self) -> None:
        """Refuse what one cache tensor for all layers cannot hold."""
        slots = list(self.hook.slots.values())
        name = type(self.model).__name__
        if not slots:
            raise UnsupportedModelError(
                name, "it does not use transformers' AttentionInterface", "decode with model.generate"
            )
        if len({(s.kv_heads, s.head_dim) for s in slots}) > 1:
            raise UnsupportedModelError(
                name, "its layers differ in key/value heads or head size", "decode with model.generate"
            )

    def allocate_cache(self, batch: int, capacity: int) -> LayoutCache:
        """A cache of ``batch`` sequences with ``capacity`` rows each: committed tokens plus the rows of one step."""
        slots = list(self.hook.slots.values())
        return LayoutCache(
            len(slots), batch, capacity, slots[0].kv_heads, slots[0].head_dim, _dtype(self.decoder), "cpu"
        )

    def forward(self, tokens: Tensor, cache: LayoutCache) -> Tensor:
        """Hidden states [T, E] of ``tokens`` [T] int64, the rows of ``cache``'s current layout; only while wrapped."""
        positions = cache.layout.positions(cache.cache_seqlens).long()
        self.limit.check(int(positions.max()) + 1)
        with self.hook.running(cache):
            return self.call_decoder(tokens[None], positions[None], cache)

    def empty_cache(self) -> LayoutCache:
        """What the probe hands the decoder before the shape of a cache is known."""
        return LayoutCache(int(self.decoder.config.num_hidden_layers), 1, 0, 1, 1, torch.float32, "cpu")

    def call_decoder(self, input_ids: Tensor, position_ids: Tensor, cache: LayoutCache) -> Tensor:
        """Run the decoder on [1, T] ids and positions; hidden states [T, E]."""
        arguments: dict[str, Any] = {self._cache_name: cache}
        out = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=True, **arguments)
        return out.last_hidden_state[0].contiguous()

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Run the model on our ops inside; config, attention and modules are as found afterwards.

        May be entered again by the same thread; another thread waits. Gradients are off inside.
        """
        with self._lock:
            if self._depth:
                yield
                return
            _refuse_mode(self.model)
            decoder = self.decoder
            before = _attention_settings(self.model)
            self._depth += 1
            try:
                with swapped(decoder, self.packed):
                    _set_attention(decoder)
                    with torch.no_grad():
                        yield
            finally:
                self._depth -= 1
                for config, implementation in before:
                    config._attn_implementation = implementation


def _alive(reference: weakref.ref[Any]) -> Any:
    model = reference()
    if model is None:
        raise RuntimeError("the model was deleted")
    return model


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    name = type(model).__name__
    remedy = "decode with model.generate"
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(name, "it is an encoder-decoder model", "use a decoder-only model")
    if not model.can_generate():
        raise UnsupportedModelError(
            name, "it cannot generate text (an encoder, or a model without a language-model head)",
            "load a causal model with AutoModelForCausalLM",
        )  # fmt: skip
    head_module(model)
    decoder = model.get_decoder()
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        raise UnsupportedModelError(name, "it has no decoder apart from its head", remedy)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsupportedModelError(
            name, "its forward takes no position_ids (positions by ALiBi or by counting)", remedy
        )
    if _dtype(decoder) not in (torch.float32, torch.bfloat16):
        raise UnsupportedModelError(
            name, f"{str(_dtype(decoder))[6:]} is not supported", "use model.to(torch.float32) or torch.bfloat16"
        )
    if devices := {p.device.type for p in model.parameters()} - {"cpu"}:
        raise UnsupportedModelError(
            name, f"it is on {' and '.join(sorted(devices))}, where these kernels do not run yet", "use model.to('cpu')"
        )
    return decoder


def _dtype(decoder: nn.Module) -> torch.dtype:
    return next(decoder.parameters()).dtype


def _cache_name(decoder: PreTrainedModel) -> str:
    parameters = inspect.signature(decoder.forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return name
    raise UnsupportedModelError(type(decoder).__name__, "its forward takes no cache", "decode with model.generate")


def _attention_settings(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """(config, attention implementation) of every config, parents first: setting a parent's sets its parts' too."""
    found: dict[int, tuple[Any, Any]] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in found:
            return
        found[id(config)] = (config, config._attn_implementation)
        for key in config.sub_configs:
            visit(getattr(config, key, None))

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            visit(module.config)
    return list(found.values())


def _set_attention(decoder: PreTrainedModel) -> None:
    decoder.set_attn_implementation(attention_hook.NAME)
    if decoder.config._attn_implementation != attention_hook.NAME:
        raise UnsupportedModelError(
            type(decoder).__name__, "it does not use transformers' AttentionInterface", "decode with model.generate"
        )


def _refuse_mode(model: PreTrainedModel) -> None:
    """Refuse what makes a forward random or another dtype than the model's."""
    if torch.is_autocast_enabled("cpu"):
        raise UnsupportedModelError("autocast", "it would change dtypes inside the model", "leave torch.autocast first")
    if model.training:
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                raise UnsupportedModelError(name, "dropout is active in training mode", "call model.eval() first")
