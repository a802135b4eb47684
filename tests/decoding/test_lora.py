"""LoRA adapters are merged in the packed copy; what cannot be merged is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.module_engine import ModuleEngine
from tests.decoding.helpers import agree, build, decode, prompts, reference

peft = pytest.importorskip("peft")

IDS = prompts(1, seed=9)
NEW = 12


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    """Models this small only lose time to a second thread; tests of threads set their own numbers."""
    torch_threads(1)


def lora(dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A peft model whose adapter changes the output."""
    model = build("LlamaForCausalLM", "LlamaConfig", dtype)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    return adapted


def ours(engine: ModuleEngine) -> list[int]:
    blocks = decode(engine, IDS, NEW, 4, 2, 2)[0][0]
    assert blocks == decode(engine, IDS, NEW)[0][0]
    return blocks


def test_adapters_are_merged_in_the_packed_copy() -> None:
    model = lora()
    engine = ModuleEngine(model)
    adapted = ours(engine)
    agree(model, IDS[0], adapted, reference(model, IDS[0], NEW))
    with model.disable_adapter():
        plain = ours(engine)
        agree(model, IDS[0], plain, reference(model, IDS[0], NEW))
    assert plain != adapted
    assert ours(engine) == adapted


def test_a_training_step_and_a_merge_are_followed() -> None:
    model = lora()
    engine = ModuleEngine(model)
    before = ours(engine)
    batch = torch.tensor(IDS)
    model(input_ids=batch, labels=batch).loss.backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    after = ours(engine)
    agree(model, IDS[0], after, reference(model, IDS[0], NEW))
    assert after != before
    model.merge_adapter()
    agree(model, IDS[0], ours(engine), reference(model, IDS[0], NEW))
    model.unmerge_adapter()
    agree(model, IDS[0], ours(engine), reference(model, IDS[0], NEW))
    merged = model.merge_and_unload()
    agree(merged, IDS[0], ours(ModuleEngine(merged)), reference(merged, IDS[0], NEW))


def test_the_head_may_be_adapted_too() -> None:
    model = lora(target_modules=["lm_head", "o_proj"])
    agree(model, IDS[0], ours(ModuleEngine(model)), reference(model, IDS[0], NEW))


def test_bfloat16() -> None:
    ours(ModuleEngine(lora(torch.bfloat16)))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "DoraLinearVariant is not supported.*merge_and_unload"),
        ({"lora_bias": True}, "LoRA with a bias"),
        ({"modules_to_save": ["lm_head"]}, "not a linear layer|no linear layer"),
        ({"target_modules": ["embed_tokens"]}, "peft's Embedding is not supported"),
    ],
)
def test_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        ModuleEngine(lora(**config))


def test_prompt_tuning_is_refused() -> None:
    model = build("LlamaForCausalLM", "LlamaConfig")
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match="learns prompt tokens"):
        ModuleEngine(tuned)
