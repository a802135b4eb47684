"""What wrapping does to a model: nothing that lasts, and never with stale weights."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from jacobi_decoding import self_check
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.module_engine import ModuleEngine
from jacobi_decoding.sampling import SamplingParams
from jacobi_kernels.state import DecodeState
from tests.decoding.helpers import VOCAB, agree, build, decode, family, prompts, reference

IDS = prompts(1, seed=9)
NEW = 12


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    """Models this small only lose time to a second thread; tests of threads set their own numbers."""
    torch_threads(1)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that wrapping touches, and what it must not touch."""
    return {
        "modules": [(name, id(m)) for name, m in model.named_modules(remove_duplicate=False)],
        "parameters": [(name, id(p), p._version, p.requires_grad) for name, p in model.named_parameters()],
        "buffers": [(name, b.clone()) for name, b in model.named_buffers()],
        "state_dict": list(model.state_dict()),
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "hooks": [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()],
        "attributes": [(name, sorted(m.__dict__)) for name, m in model.named_modules()],
        "training": [m.training for m in model.modules()],
        "grad": torch.is_grad_enabled(),
    }


def assert_as_found(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    buffers = zip(before.pop("buffers"), after.pop("buffers"), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in buffers)
    assert after == before


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere"])
def test_left_as_found(name: str, attention: str) -> None:
    model = family(name)
    model.set_attn_implementation(attention)
    before = snapshot(model)
    engine = ModuleEngine(model)
    assert_as_found(model, dict(before))
    ours = decode(engine, IDS, NEW, 4, 2, 2)[0][0]
    assert_as_found(model, before)
    agree(model, IDS[0], ours, reference(model, IDS[0], NEW))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_left_as_found_after_an_exception(error: type[BaseException]) -> None:
    model = family("llama")
    engine = ModuleEngine(model)
    before = snapshot(model)

    def interrupt(*_: Any) -> None:
        raise error

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        decode(engine, IDS, NEW)
    handle.remove()
    assert_as_found(model, before)
    assert decode(engine, IDS, NEW)[0][0] == reference(model, IDS[0], NEW)


def test_left_as_found_when_refused() -> None:
    model = build("MixtralForCausalLM", "MixtralConfig", num_local_experts=2)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match="matrix product"):
        ModuleEngine(model)
    assert_as_found(model, before)


def test_running_may_be_nested_and_the_model_says_that_it_is_wrapped() -> None:
    model = family("llama")
    engine = ModuleEngine(model)
    with engine.running():
        once = decode(engine, IDS, NEW)[0]
        with pytest.raises(RuntimeError, match="wrapped for Jacobi decoding"):
            model(input_ids=torch.tensor(IDS))
    assert once[0] == reference(model, IDS[0], NEW)


def test_a_step_alone_wraps_by_itself() -> None:
    model = family("llama")
    engine = ModuleEngine(model)
    state = DecodeState.allocate(IDS, max_new_tokens=NEW, block_size=4, blocks=1, candidates=1)
    cache = engine.allocate_cache(1, state.cache_capacity)
    while state.running:
        engine.step(state, cache, SamplingParams())
        assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear
    assert state.generated(0) == reference(model, IDS[0], NEW)


def test_checked_once_and_freed_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    original = self_check._check_tokens
    monkeypatch.setattr(self_check, "_check_tokens", lambda model: checks.append(1) or original(model))
    model = family("llama")
    for _ in range(3):
        decode(ModuleEngine(model), IDS, 4)
    assert len(checks) == 1
    model.to(torch.bfloat16)
    decode(ModuleEngine(model), IDS, 4)
    assert len(checks) == 2
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def _sgd(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def _adamw_foreach(model: Any) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True).step()


def _data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.5 * parameter.grad


def _load(model: Any) -> None:
    model.load_state_dict({name: value * 0.7 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("update", [_sgd, _adamw_foreach, _data, _load])
def test_packed_weights_follow_the_model(update: Callable[[Any], None]) -> None:
    """Generate, train one step, generate: with transformers each time."""
    model = build("Qwen2ForCausalLM", "Qwen2Config")
    model.train()  # no dropout in this family
    engine = ModuleEngine(model)
    before = decode(engine, IDS, NEW, 4, 2, 2)[0][0]
    agree(model, IDS[0], before, reference(model, IDS[0], NEW))
    batch = torch.tensor(IDS)
    model(input_ids=batch, labels=batch).loss.backward()
    update(model)
    after = decode(engine, IDS, NEW, 4, 2, 2)[0][0]
    agree(model, IDS[0], after, reference(model, IDS[0], NEW))
    assert after != before


def test_gradient_checkpointing_is_no_obstacle() -> None:
    model = family("llama")
    model.gradient_checkpointing_enable()
    model.train()
    ours = decode(ModuleEngine(model), IDS, NEW, 4, 1, 1)[0][0]
    model.eval()
    agree(model, IDS[0], ours, reference(model, IDS[0], NEW))


def test_a_model_may_be_converted_and_replaced_in_part() -> None:
    model = family("llama")
    engine = ModuleEngine(model)
    single = decode(engine, IDS, NEW)[0]
    model.to(torch.bfloat16)
    assert decode(engine, IDS, NEW, 4, 2, 2)[0] == decode(engine, IDS, NEW)[0]
    model.to(torch.float32)
    model.model.layers[1] = LlamaDecoderLayer(model.config, 1).eval()
    model.lm_head = nn.Linear(64, VOCAB)
    ours = decode(engine, IDS, NEW, 4, 2, 2)[0]
    assert ours != single
    agree(model, IDS[0], ours[0], reference(model, IDS[0], NEW))


def test_threads_take_turns_on_a_model() -> None:
    model = family("llama")
    expected = reference(model, IDS[0], NEW)
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(lambda: decode(ModuleEngine(model), IDS, NEW, 4, 2, 2)[0][0]) for _ in range(6)]
        assert [run.result() for run in runs] == [expected] * 6


def test_two_models_may_be_wrapped_at_once() -> None:
    a, b = family("llama"), family("llama", seed=3)
    engine_a, engine_b = ModuleEngine(a), ModuleEngine(b)
    with engine_a.running(), engine_b.running():
        ours = decode(engine_a, IDS, NEW)[0][0], decode(engine_b, IDS, NEW)[0][0]
    assert ours == (reference(a, IDS[0], NEW), reference(b, IDS[0], NEW))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 39),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.5] * 8,
                "long_factor": [9.0] * 8,
                "original_max_position_embeddings": 40,
                "factor": 2.0,
            },
            40,
        ),
    ],
)
def test_frequencies_that_depend_on_the_length(rope: dict[str, Any], limit: int) -> None:
    model = build("LlamaForCausalLM", "LlamaConfig", head_dim=16, max_position_embeddings=40, rope_parameters=rope)
    engine = ModuleEngine(model)
    assert engine.max_length == limit
    new = limit - len(IDS[0])
    ours = decode(engine, IDS, new, 4, 2, 2)[0][0]
    agree(model, IDS[0], ours, reference(model, IDS[0], new))
    engine.check_length(limit)
    with pytest.raises(UnsupportedModelError, match=f"a sequence of {limit + 1} tokens.*change.*within {limit}"):
        engine.check_length(limit + 1)
    with pytest.raises(UnsupportedModelError, match="change with the length"):
        decode(engine, IDS, new + 8)


def test_learned_positions_end() -> None:
    model = build("GPT2LMHeadModel", "GPT2Config", max_position_embeddings=64)
    engine = ModuleEngine(model)
    assert engine.max_length == 64
    assert ModuleEngine(family("llama")).max_length is None
