"""What a config alone says of a model, against what its modules say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.step_config import step_config, step_shapes
from jacobi_decoding.step_model import describe_step_model

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EVERYTHING: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "rms_norm_eps": 1e-3}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {**EVERYTHING, **WINDOWS, "tie_word_embeddings": True}),
    ("Llama", {"num_key_value_heads": None, "rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": YARN, "hidden_act": "swish"}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0}}),
    ("Mistral", {"head_dim": 12}),
    ("Mistral", {"sliding_window": None, **EVERYTHING}),
    ("Mistral", {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}),
    ("Qwen2", {"rope_parameters": YARN}),
    ("Qwen2", {**WINDOWS, "max_window_layers": 2, **EVERYTHING}),
    ("Qwen2", {"sliding_window": 9, "tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 16}),
    ("Qwen3", {**WINDOWS, "max_window_layers": 1, **EVERYTHING}),
    ("SmolLM3", {}),
    ("SmolLM3", {**WINDOWS, **EVERYTHING, "no_rope_layers": [1, 0, 0, 1, 1]}),
    ("SmolLM3", {"sliding_window": 5, "tie_word_embeddings": False, "rope_parameters": LLAMA3}),
]


def made(kind: str, changes: dict[str, Any]) -> Any:
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **special, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_config_says_what_the_modules_say(kind: str, changes: dict[str, Any]) -> None:
    model = made(kind, changes)
    ours, theirs = step_config(model.config), describe_step_model(model).config
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert replace(ours, inv_freq=theirs.inv_freq) == theirs
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert step_shapes(model.config) == shapes


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("Llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("Qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("Gemma2", {"head_dim": 8}, "multi_block_step runs Llama"),
    ],
)
def test_refused_for_the_reason_that_the_modules_give(kind: str, changes: dict[str, Any], words: str) -> None:
    model = made(kind, changes)
    with pytest.raises(UnsupportedModelError, match=words):
        step_config(model.config)
    with pytest.raises(UnsupportedModelError):
        describe_step_model(model)


def test_a_part_of_the_head_rotated_is_refused() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="covers 4 of 8 dimensions"):
        step_config(config)
