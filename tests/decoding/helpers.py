"""Small random models of many families, and the shortest possible decoding loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from jacobi_decoding.module_engine import ModuleEngine
from jacobi_decoding.sampling import SamplingParams
from jacobi_kernels.state import DecodeState

VOCAB = 307  # not a multiple of 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# Family: (causal model class, config class, what differs from _COMMON).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layers": [1, 0, 1], "head_dim": 32}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_attention_heads": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 9, "head_dim": 32}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "sliding_window": 8,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "sliding_window": 6,
            "head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {"sliding_window": 11, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {"num_attention_heads": 2}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "num_attention_heads": 2,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
        },
    ),
    "cohere": (
        "CohereForCausalLM",
        "CohereConfig",
        {"num_attention_heads": 2, "logit_scale": 0.25, "use_qk_norm": True},
    ),
}  # fmt: skip


def build(
    model_class: str, config_class: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any
) -> transformers.PreTrainedModel:
    """A model with weights scaled up so that its output varies, in evaluation mode, with its own eager attention."""
    torch.manual_seed(seed)
    known = getattr(transformers, config_class)(**{**_COMMON, **config})
    known._attn_implementation = "eager"
    model = getattr(transformers, model_class)(known).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "norm" not in name:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:  # norms: gains around 1, or around 0 where the family adds 1
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def family(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> transformers.PreTrainedModel:
    model_class, config_class, config = FAMILIES[name]
    return build(model_class, config_class, dtype, seed, **config)


def prompts(count: int, seed: int = 0, length: int = 23) -> list[list[int]]:
    """Prompts of different lengths; every second one repeats itself, so that candidates win now and then."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        ids = torch.randint(2, VOCAB, (length - 3 * i,), generator=generator).tolist()
        made.append(ids + ids[: len(ids) // 2] if i % 2 else ids)
    return made


def decode(
    engine: ModuleEngine,
    ids: Sequence[Sequence[int]],
    new_tokens: int,
    block_size: int = 1,
    blocks: int = 1,
    candidates: int = 0,
    sampling: SamplingParams | None = None,
    **state_args: Any,
) -> tuple[list[list[int]], int]:
    """(New tokens of every prompt, number of steps)."""
    state = DecodeState.allocate(
        ids, max_new_tokens=new_tokens, block_size=block_size, blocks=blocks, candidates=candidates, **state_args
    )
    cache = engine.allocate_cache(state.batch, state.cache_capacity)
    steps = 0
    with engine.running():
        while state.running:
            engine.step(state, cache, sampling or SamplingParams())
            steps += 1
    return [state.generated(b) for b in range(state.batch)], steps


def reference(model: Any, ids: Sequence[int], new_tokens: int) -> list[int]:
    """New tokens of transformers' own greedy ``generate``."""
    inputs = torch.tensor([list(ids)])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(ids) :].tolist()


@torch.no_grad()
def gaps(model: Any, ids: Sequence[int], new: Sequence[int]) -> Tensor:
    """Difference between the two best logits at each of the ``new`` tokens, by the model's own forward: [len(new)]."""
    logits = model(input_ids=torch.tensor([[*ids, *new]]), use_cache=False).logits[0].float()
    best = logits[len(ids) - 1 : -1].topk(2).values
    return best[:, 0] - best[:, 1]


def agree(model: Any, ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int], tie: float = 1e-4) -> bool:
    """True when equal, False when they part at a tie of the two best logits; anything else fails."""
    if list(ours) == list(theirs):
        return True
    first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    gap = float(gaps(model, ids, theirs)[first])
    assert gap < tie, f"token {first}: {ours[first]} instead of {theirs[first]}, whose logit leads by {gap:.2e}"
    return False
