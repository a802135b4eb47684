"""What ``multi_block_step`` needs to know of a model, from its transformers config alone.

The classes of ``step_model.STEP_CLASSES`` build their modules from few settings. Importing their code takes a second
and 80 MB, which loading packed weights does without; tests compare with what ``describe_step_model`` finds in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jacobi_decoding.step_model import FIXED_ROPE, STEP_CLASSES, step_refusal
from jacobi_kernels.step_weights import StepConfig

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def step_config(config: Any) -> StepConfig:
    """Sizes and constants of the causal model of ``config``, a transformers config.

    Raises UnsupportedModelError, with the reason, when the step op cannot run it.
    """
    name, c = step_class(config), config
    if c.hidden_act not in ("silu", "swish"):
        raise step_refusal(name, f"its activation is {c.hidden_act}, not SiLU")
    if _head_dim(c) > 256:
        raise step_refusal(name, f"its heads have {_head_dim(c)} dimensions, more than 256")
    inv_freq, rope_scale = _rotary(name, c)
    return StepConfig(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=_head_dim(c),
        intermediate_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        inv_freq=inv_freq,
        norm_eps=c.rms_norm_eps,
        rope_scale=rope_scale,
        windows=[_window(name, c, i) for i in range(c.num_hidden_layers)],
        use_rope=[name != "SmolLM3ForCausalLM" or bool(c.no_rope_layers[i]) for i in range(c.num_hidden_layers)],
    )


def step_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the model of ``config`` has, ``lm_head.weight`` also where it is tied."""
    name, c = step_class(config), config
    q, kv = c.num_attention_heads * _head_dim(c), c.num_key_value_heads * _head_dim(c)
    hidden, ffn = c.hidden_size, c.intermediate_size
    matrices = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    biased = _biased(name, c)
    for module, shape in matrices.items():
        layer[module + ".weight"] = shape
        if module.partition(".")[2] in biased:
            layer[module + ".bias"] = shape[:1]
    if name == "Qwen3ForCausalLM":
        layer |= {f"self_attn.{norm}.weight": (_head_dim(c),) for norm in ("q_norm", "k_norm")}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    for i in range(c.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (c.vocab_size, hidden)}


def step_class(config: Any) -> str:
    """The class that AutoModelForCausalLM makes of ``config``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))
    if name not in STEP_CLASSES:
        raise step_refusal(name)
    return name


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _biased(name: str, config: Any) -> tuple[str, ...]:
    """The linear layers that have a bias."""
    if name == "MistralForCausalLM":
        return ()
    if name == "Qwen2ForCausalLM":
        return _ATTENTION[:3]
    mlp = name != "Qwen3ForCausalLM" and config.mlp_bias
    return (_ATTENTION if config.attention_bias else ()) + (_MLP if mlp else ())


def _window(name: str, config: Any, index: int) -> int:
    """Earlier keys that a layer's queries see: transformers' window counts the query itself; -1 is all."""
    if name == "LlamaForCausalLM" or config.sliding_window is None:
        return -1
    slides = name == "MistralForCausalLM" or (
        config.use_sliding_window and config.layer_types[index] == "sliding_attention"
    )
    return int(config.sliding_window) - 1 if slides else -1


def _rotary(name: str, config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin: what the rotary module has."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, size = config.rope_parameters or {}, _head_dim(config)
    kind = parameters.get("rope_type")
    if kind not in FIXED_ROPE:
        raise step_refusal(name, f"its rotary frequencies ({kind}) may change with the length")
    if kind == "default":
        inv_freq = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
        return inv_freq, 1.0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config)
    if 2 * inv_freq.numel() != size:
        raise step_refusal(name, f"its rotary embedding covers {2 * inv_freq.numel()} of {size} dimensions of a head")
    return inv_freq, float(scale)
