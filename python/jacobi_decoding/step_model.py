"""Which transformers models ``multi_block_step`` can run, and their sizes and constants in its terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from jacobi_decoding.devices import model_device
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_kernels.step_weights import StepConfig, StepWeights, pack_step_weights

STEP_CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # inverse frequencies that no length changes
_REMEDY = "the module path (path='auto' or 'modules') may still run it"


@dataclass(frozen=True)
class StepModel:
    """A model that the step op can run: where its weights are and what its sizes are."""

    model: Any
    config: StepConfig
    dtype: torch.dtype

    def same_as(self, other: StepModel) -> bool:
        """Whether sizes, constants and dtype are the same; weights may differ."""
        if self.dtype != other.dtype or not torch.equal(self.config.inv_freq, other.config.inv_freq):
            return False
        return replace(self.config, inv_freq=other.config.inv_freq) == other.config

    def pack(self) -> StepWeights:
        """Pack the current weights; ValueError when one holds NaN or infinity."""
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()}
        return pack_step_weights(tensors, self.config, self.dtype)


def describe_step_model(model: Any) -> StepModel:
    """Sizes and constants of ``model`` for the step op; UnsupportedModelError, with the reason, if it cannot run it."""
    name = type(model).__name__
    if name not in STEP_CLASSES:
        raise step_refusal(name)
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise step_refusal(name, "all weights must be float32, or all bfloat16")
    model_device(model)
    _check_modules(name, model)
    c = model.config
    layers = model.model.layers
    for layer in layers:
        if type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise step_refusal(name, f"its activation is {type(layer.mlp.act_fn).__name__}, not SiLU")
    epsilons = {m.variance_epsilon for m in model.modules() if hasattr(m, "variance_epsilon")}
    if len(epsilons) != 1:
        raise step_refusal(name, f"its norms must share one epsilon, found {sorted(epsilons)}")
    rope = getattr(model.model, "rotary_emb", None)
    kind = getattr(rope, "rope_type", "default")
    if rope is None or kind not in FIXED_ROPE:
        raise step_refusal(name, f"its rotary frequencies ({kind}) may change with the length")
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    config = StepConfig(
        num_layers=len(layers),
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=c.intermediate_size,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        inv_freq=rope.inv_freq.detach().to("cpu", torch.float32, copy=True),
        norm_eps=epsilons.pop(),
        rope_scale=float(getattr(rope, "attention_scaling", 1.0)),
        windows=[_window(layer, c, i) for i, layer in enumerate(layers)],
        use_rope=[bool(getattr(layer.self_attn, "use_rope", True)) for layer in layers],
    )
    return StepModel(model, config, dtypes.pop())


def _window(layer: Any, config: Any, index: int) -> int:
    """Earlier keys that a layer's queries see: transformers' window counts the query itself; -1 is all."""
    kinds = getattr(config, "layer_types", None)
    if type(layer.self_attn).__name__.startswith("Mistral"):
        window = config.sliding_window  # of every layer, whatever layer_types says
    elif kinds is not None and kinds[index] != "sliding_attention":
        window = None
    else:
        window = getattr(layer.self_attn, "sliding_window", None)
    return -1 if window is None else int(window) - 1


def _check_modules(name: str, model: Any) -> None:
    """Refuse what the packed weights would not show: adapters, quantised layers, hooks."""
    plain = (nn.Linear, nn.Embedding)
    for path, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if any(hooks):
            raise step_refusal(name, f"module {path or 'itself'} has forward hooks, which the op would not call")
        if isinstance(module, plain) and type(module) not in plain:
            raise step_refusal(name, f"{path} is a {type(module).__name__}, not a plain layer")
        if path.endswith("_proj") and type(module) is not nn.Linear:
            raise step_refusal(name, f"{path} is a {type(module).__name__}, not a plain linear layer")


def step_refusal(name: str, why: str = "") -> UnsupportedModelError:
    """That the step op cannot run a model of class ``name``; ``why``: by default, that it is of another kind."""
    kinds = ", ".join(c.removesuffix("ForCausalLM") for c in STEP_CLASSES)
    return UnsupportedModelError(f"{name} on the step path", why or f"multi_block_step runs {kinds}", _REMEDY)
