"""Models and states that cannot be decoded exactly are refused in one line that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.mask_pattern import window_of_mask
from jacobi_decoding.module_engine import ModuleEngine
from jacobi_decoding.row_guard import RowGuard
from tests.decoding.helpers import build, decode, family, prompts

MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "encoder": ("BertModel", "BertConfig", {}, "BertModel: it cannot generate text"),
    "masked": ("BertForMaskedLM", "BertConfig", {}, "BertForMaskedLM: it cannot generate text"),
    "bidirectional": ("BertLMHeadModel", "BertConfig", {}, "head|not causal"),
    "alibi": ("BloomForCausalLM", "BloomConfig", {"n_head": 2}, "takes no position_ids .*ALiBi"),
    "alibi_mpt": ("MptForCausalLM", "MptConfig", {"d_model": 64, "n_heads": 2, "n_layers": 2}, "no position_ids"),
    "sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 32},
        r"attention sinks \(s_aux\)",
    ),
    "encoder_decoder": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1},
        "it is an encoder-decoder model",
    ),
    "experts": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2}, "torch's linear: a matrix product"),
    "old_attention": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {"d_model": 64, "num_layers": 2, "attention_heads": 2, "ffn_dim": 64},
        "does not use transformers' AttentionInterface",
    ),
    "recurrent": ("MambaForCausalLM", "MambaConfig", {}, "its forward takes no"),
    "functional": ("ApertusForCausalLM", "ApertusConfig", {}, "torch's softplus: an activation called as a function"),
}


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    """Models this small only lose time to a second thread; tests of threads set their own numbers."""
    torch_threads(1)


@pytest.mark.parametrize("case", MODELS)
def test_models(case: str) -> None:
    model_class, config_class, config, why = MODELS[case]
    model = build(model_class, config_class, **config)
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        ModuleEngine(model)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_not_a_transformers_model() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Linear: it is not a transformers model; pass the model below"):
        ModuleEngine(nn.Linear(2, 2))


def test_dtype() -> None:
    with pytest.raises(UnsupportedModelError, match=r"float16 is not supported; use model.to\(torch.float32\)"):
        ModuleEngine(family("llama", torch.float16))


def test_autocast() -> None:
    engine = ModuleEngine(family("llama"))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError, match="autocast: it would change"):
        decode(engine, prompts(1), 2)


@pytest.mark.parametrize("config", [{"attention_dropout": 0.1}, {"resid_pdrop": 0.1}])
def test_dropout_in_training_mode(config: dict[str, float]) -> None:
    model = build("Phi3ForCausalLM", "Phi3Config", num_attention_heads=2, **config)
    engine = ModuleEngine(model)
    decode(engine, prompts(1), 2)
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"dropout is active.*call model.eval\(\)"):
        decode(engine, prompts(1), 2)
    model.eval()
    decode(engine, prompts(1), 2)


def test_functional_dropout_in_training_mode() -> None:
    model = build("OPTForCausalLM", "OPTConfig", ffn_dim=96, word_embed_proj_dim=64, num_attention_heads=2, dropout=0.1)
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"call model.eval\(\)"):
        ModuleEngine(model)


def test_what_a_replaced_module_would_skip() -> None:
    model = family("llama")
    layer = model.model.layers[1].mlp.up_proj
    handle = layer.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.up_proj: its forward hooks would be skipped"):
        ModuleEngine(model)
    handle.remove()
    ModuleEngine(model)
    layer.forward = lambda x: x
    with pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.up_proj: its forward is replaced"):
        decode(ModuleEngine(model), prompts(1), 2)
    del layer.forward
    plain = layer.weight

    class Quantised(nn.Parameter):
        pass

    layer.weight = Quantised(plain.detach())
    with pytest.raises(UnsupportedModelError, match=r"its weight is a Quantised \(quantised or sharded\)"):
        decode(ModuleEngine(model), prompts(1), 2)
    layer.weight = plain
    nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(UnsupportedModelError, match="parametrised"):
        decode(ModuleEngine(model), prompts(1), 2)


def test_weights_with_nan() -> None:
    model = family("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[3, 4] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"layers.2.self_attn.k_proj.weight holds NaN"):
        ModuleEngine(model)


def test_logits_that_are_not_reproduced() -> None:
    """A head that does something we do not know is found by the logits."""
    model = family("llama")
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.roll(1, -1))
    with pytest.raises(UnsupportedModelError, match="hooks"):
        ModuleEngine(model)
    model.lm_head._forward_hooks.clear()
    model.register_forward_hook(lambda _, __, out: setattr(out, "logits", out.logits.roll(1, -1)))
    with pytest.raises(UnsupportedModelError, match="its logits differ from ours by"):
        ModuleEngine(model)


def test_rows_that_depend_on_each_other() -> None:
    """A layer that looks at its neighbour is found by evaluating one token at a time."""
    model = family("llama")
    # transformers' own forward does the same, so the logits agree.
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, y: y + 0.01 * y.roll(1, 1))
    with pytest.raises(UnsupportedModelError, match="evaluated one token at a time differ"):
        ModuleEngine(model)


def test_mask_patterns() -> None:
    assert window_of_mask(causal_mask_function, None) == -1
    for window in (1, 2, 8, 4096):
        assert window_of_mask(sliding_window_causal_mask_function(window), window) == window - 1
    chunked = chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64))
    custom = and_masks(causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0)
    for function, window in (
        (bidirectional_mask_function, None),
        (chunked, None),
        (custom, None),
        (sliding_window_causal_mask_function(8), None),
        (sliding_window_causal_mask_function(8), 9),
    ):
        with pytest.raises(UnsupportedModelError, match="the model's pattern is not"):
            window_of_mask(function, window)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.silu(x),
        lambda x: x.sigmoid(),
        lambda x: x @ x.T,
        lambda x: F.linear(x, x),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: F.gelu(x),
        lambda x: torch.rsqrt(x.bfloat16().abs()),
        lambda x: x.expand(3, 40000).mean(-1),
        lambda x: F.dropout(x, 0.5, training=True),
    ],
)
def test_row_guard_refuses(call: Any) -> None:
    with RowGuard(), pytest.raises(UnsupportedModelError):
        call(torch.ones(3, 1) if "expand" in call.__code__.co_names else torch.ones(3, 4))


def test_row_guard_lets_through() -> None:
    with RowGuard():
        x = torch.ones(3, 4)
        F.rms_norm(x, (4,))
        F.layer_norm(x, (4,))
        F.dropout(x, 0.5, training=False)
        torch.ones(2, 4, 1) @ torch.ones(2, 1, 5)
        x.softmax(-1) * x.cos() + torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
