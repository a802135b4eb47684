"""A transformers causal language model whose forward runs on our ops, through public extension points only.

While wrapped, the decoder's attention implementation is ours and its linear layers and activations are replaced; the
model is left as found. What is learned about a model (attention layers, head, packed weights) is kept beside it, held
weakly, so that generating again costs neither a self-check nor packing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi_decoding import attention_hook
from jacobi_decoding.devices import on_device
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.head import HeadTransform, packed_head
from jacobi_decoding.layout_cache import LayoutCache
from jacobi_decoding.module_swap import swapped
from jacobi_decoding.packed_weights import PackedWeight, PackedWeights
from jacobi_decoding.position_limit import PositionLimit, position_limit
from jacobi_decoding.refusals import cache_name, refuse_mode, refuse_unsupported
from jacobi_decoding.self_check import run_self_check

_ADAPTERS: weakref.WeakKeyDictionary[nn.Module, ModelAdapter] = weakref.WeakKeyDictionary()
_ADAPTERS_LOCK = threading.Lock()


def adapt(model: Any) -> ModelAdapter:
    """The adapter of a model, made and checked on first use.

    model: a transformers causal language model, or a peft model with LoRA adapters on one. Raises
    UnsupportedModelError (a ValueError, one line) for what cannot be decoded exactly.
    """
    base = base_model(model)
    with _ADAPTERS_LOCK:
        adapter = _ADAPTERS.get(base)
        if adapter is None:
            adapter = _ADAPTERS[base] = ModelAdapter(base)
    adapter.ensure_checked()
    return adapter


def base_model(model: Any) -> PreTrainedModel:
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

    head_transform: HeadTransform
    limit: PositionLimit

    def __init__(self, model: PreTrainedModel) -> None:
        attention_hook.register()
        self._model = weakref.ref(model)
        self._checked: Any = None
        self._depth = 0
        self._lock = threading.RLock()
        self.hook = attention_hook.AttentionHook()
        self.packed = PackedWeights()

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise RuntimeError("the model was deleted")
        return model

    @property
    def decoder(self) -> PreTrainedModel:
        return self.model.get_decoder()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.packed_head().out_features

    def ensure_checked(self) -> None:
        """Run the self-check, unless the model has its modules, dtype and mode since the last one.

        Weights may change freely. Raises UnsupportedModelError.
        """
        with self._lock:
            decoder = self.model.get_decoder()
            modules = set(map(id, decoder.modules()))
            state = (id(decoder), next(decoder.parameters()).dtype, self.model.training)
            if state == self._checked and all(id(module) in modules for module in self.hook.slots):
                return
            self._checked = None
            refuse_unsupported(self.model)
            self.hook.own(decoder)
            self.limit = position_limit(decoder)
            with torch.no_grad():
                self.head_transform = run_self_check(self)
            self._checked = state

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
        if len({(s.kv_heads, s.head_dim, s.dtype) for s in slots}) > 1:
            raise UnsupportedModelError(
                name, "its layers differ in key/value heads, head size or dtype", "decode with model.generate"
            )

    def allocate_cache(self, batch: int, capacity: int) -> LayoutCache:
        """A cache of ``batch`` sequences with ``capacity`` rows each: committed tokens plus the rows of one step."""
        if self._depth == 0:
            self.ensure_checked()
        return self.cache_for_slots(batch, capacity)

    def cache_for_slots(self, batch: int, capacity: int) -> LayoutCache:
        """:meth:`allocate_cache` for the attention modules that are known, without a check."""
        slots = list(self.hook.slots.values())
        return LayoutCache(
            len(slots), batch, capacity, slots[0].kv_heads, slots[0].head_dim, slots[0].dtype, self.device
        )

    def forward(self, tokens: Tensor, cache: LayoutCache) -> Tensor:
        """Hidden states [T, E] of ``tokens`` [T] int64, the rows of ``cache``'s current layout; only while wrapped."""
        self.limit.check(cache.most + 1)
        rows = tokens.shape[0]
        tokens = torch.nn.functional.pad(tokens, (0, cache.positions.shape[0] - rows))
        with self.hook.running(cache):
            return self.call_decoder(tokens[None], cache.positions.long()[None], cache)[:rows]

    def empty_cache(self) -> LayoutCache:
        """What the probe hands the decoder before the shape of a cache is known."""
        return LayoutCache(int(self.decoder.config.num_hidden_layers), 1, 0, 1, 1, torch.float32, self.device)

    def call_decoder(self, input_ids: Tensor, position_ids: Tensor, cache: LayoutCache) -> Tensor:
        """Run the decoder on [1, T] ids and positions; hidden states [T, E]."""
        decoder = self.decoder
        arguments: dict[str, Any] = {cache_name(decoder): cache, "use_cache": True, "return_dict": True}
        out = decoder(input_ids=input_ids, position_ids=position_ids, **arguments)
        return out.last_hidden_state[0].contiguous()

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Run the model on our ops inside; config, attention and modules are as found afterwards.

        Checks the model again first if it changed. May be entered again by the same thread; another thread waits.
        Gradients are off inside.
        """
        with self._lock:
            if self._depth == 0:
                self.ensure_checked()
            with self.wrapped_unchecked():
                yield

    @contextmanager
    def wrapped_unchecked(self) -> Iterator[None]:
        """:meth:`wrapped` without the check, for the check itself."""
        if self._depth:
            yield
            return
        refuse_mode(self.model)
        self._depth += 1
        try:
            with (
                on_device(self.device),
                attention_of(self.model, attention_hook.NAME),
                swapped(self.decoder, self.packed),
                torch.no_grad(),
            ):
                yield
        finally:
            self._depth -= 1


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Let ``model`` attend by what transformers knows as ``name``; its own settings come back afterwards."""
    base = base_model(model)
    before = _attention_settings(base)
    try:
        set_attention(base.get_decoder(), name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


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


def set_attention(decoder: PreTrainedModel, name: str, remedy: str = "decode with model.generate") -> None:
    """Make ``decoder`` call the attention function registered as ``name``; UnsupportedModelError when it would not."""
    decoder.set_attn_implementation(name)
    if decoder.config._attn_implementation != name:
        raise UnsupportedModelError(type(decoder).__name__, "it does not use transformers' AttentionInterface", remedy)
