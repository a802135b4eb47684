"""Wrapped models of many families against transformers' own generate, and against themselves token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jacobi_decoding.adapter import adapt
from jacobi_decoding.module_engine import ModuleEngine
from jacobi_decoding.sampling import SamplingParams
from jacobi_kernels.state import DecodeState
from tests.decoding.helpers import FAMILIES, VOCAB, agree, build, decode, family, prompts, reference

NEW = 20
SETTINGS = [(4, 2, 2), (7, 1, 0), (16, 2, 4), (3, 3, 1)]  # block_size, blocks, candidates
DTYPES = [torch.float32, torch.bfloat16]

# Families beyond the named ones: Conv1D and learned positions, biases, partial rotary embeddings, parallel blocks.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {"sliding_window": 5}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {"head_dim": 32}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {"num_attention_heads": 2, "sliding_window": 6}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", {"num_attention_heads": 2, "sliding_window": 6}),
}


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    """Models this small only lose time to a second thread; tests of threads set their own numbers."""
    torch_threads(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(name: str, record_property: Any) -> None:
    model = family(name)
    engine = ModuleEngine(model)
    ids = prompts(2)
    theirs = [reference(model, row, NEW) for row in ids]
    assert len({token for row in theirs for token in row}) > 12, "the model's output does not vary"
    runs = [decode(engine, ids, NEW)[0], *(decode(engine, ids, NEW, *setting)[0] for setting in SETTINGS[:3])]
    same = [agree(model, row, ours, own) for run in runs for row, ours, own in zip(ids, run, theirs, strict=True)]
    record_property("ties", same.count(False))
    assert same.count(False) <= len(same) // 4, "too many ties to mean anything"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_batches_and_threads_change_no_token(name: str, dtype: torch.dtype, torch_threads: Any) -> None:
    model = family(name, dtype, seed=1)
    engine = ModuleEngine(model)
    ids = prompts(2, seed=1)
    torch_threads(1)
    single = [decode(engine, [row], NEW, chain_capacity=1)[0][0] for row in ids]
    for threads, setting in zip((1, 2, 3, 5), SETTINGS, strict=True):
        torch_threads(threads)
        assert decode(engine, ids, NEW, *setting)[0] == single, f"{setting} with {threads} threads"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["smollm3", "gemma3", "cohere"])
def test_keys_and_values_agree_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Keys and values come out of every layer's hidden states: equal bits in them mean equal bits there."""
    engine = ModuleEngine(family(name, dtype))
    ids = prompts(2, seed=6)
    kept = []
    for chain_capacity, (n, k, c) in ((1, (1, 1, 0)), (None, (5, 2, 3))):
        state = DecodeState.allocate(
            ids, max_new_tokens=NEW, block_size=n, blocks=k, candidates=c, chain_capacity=chain_capacity
        )
        cache = engine.allocate_cache(2, state.cache_capacity)
        while state.running:
            engine.step(state, cache, SamplingParams())
        kept.append((state.cache_seqlens.tolist(), cache))
    (lengths, one), (other_lengths, other) = kept
    for b, length in enumerate(map(min, zip(lengths, other_lengths, strict=True))):
        assert length >= len(ids[b]) + NEW - 1 - 10
        assert torch.equal(one.k_cache[:, b, :length], other.k_cache[:, b, :length])
        assert torch.equal(one.v_cache[:, b, :length], other.v_cache[:, b, :length])


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_sampling_is_that_of_one_token_at_a_time(name: str) -> None:
    engine = ModuleEngine(family(name))
    ids = prompts(2, seed=2)

    def run(rows: list[list[int]], seeds: list[int], *setting: int) -> list[list[int]]:
        sampling = SamplingParams.create(len(rows), VOCAB, temperature=0.9, top_k=40, top_p=0.95, seed=seeds)
        return decode(engine, rows, NEW, *setting, sampling=sampling)[0]

    single = [run([row], [seed])[0] for row, seed in zip(ids, (5, 6), strict=True)]
    assert single[0] != decode(engine, ids[:1], NEW)[0][0]
    for setting in SETTINGS:
        assert run(ids, [5, 6], *setting) == single
    assert run(ids, [8, 9]) != single


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    model_class, config_class, config = OTHERS[name]
    model = build(model_class, config_class, **{"num_attention_heads": 2, "num_key_value_heads": 2, **config})
    engine = ModuleEngine(model)
    ids = prompts(2, seed=3)
    single, steps = decode(engine, ids, NEW)
    blocks, fewer = decode(engine, ids, NEW, 6, 2, 3)
    assert blocks == single
    assert fewer <= steps
    for row, ours in zip(ids, single, strict=True):
        agree(model, row, ours, reference(model, row, NEW))


def test_blocks_take_fewer_steps_than_tokens() -> None:
    """A text that repeats itself: candidates from the prompt win."""
    engine = ModuleEngine(family("olmo2"))
    period = prompts(1, seed=4, length=5)[0]
    tokens, steps = decode(engine, [period * 6], 40, 8, 2, 3)
    assert tokens == decode(engine, [period * 6], 40)[0]
    assert steps < 40


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("qwen2", [-1, 6, 6]),
        ("mistral", [8, 8, 8]),
        ("gemma2", [7, -1, 7]),
        ("gemma3", [5, -1, 5]),
        ("llama", [-1] * 3),
    ],
)
def test_windows_are_read_from_the_masks(name: str, windows: list[int]) -> None:
    model = family(name)
    slots = adapt(model).hook.slots.values()
    assert [slot.window_size for slot in sorted(slots, key=lambda slot: slot.index)] == windows


@pytest.mark.parametrize(
    ("name", "scale", "softcap"), [("gemma2", 1.0, 3.0), ("granite", 1 / 3, 0.0), ("cohere", 0.25, 0.0)]
)
def test_heads_are_fitted(name: str, scale: float, softcap: float) -> None:
    for dtype in DTYPES:
        model = family(name, dtype)
        transform = adapt(model).head_transform
        assert (transform.scale, transform.softcap) == (scale, softcap)


@pytest.mark.parametrize("width", [1365, 70])
def test_odd_widths(width: int, torch_threads: Any) -> None:
    model = build("LlamaForCausalLM", "LlamaConfig", intermediate_size=width, hidden_size=72, head_dim=40)
    engine = ModuleEngine(model)
    ids = prompts(2, seed=5)
    single = decode(engine, ids, NEW, chain_capacity=1)[0]
    for threads in (1, 2, 3, 5):
        torch_threads(threads)
        assert decode(engine, ids, NEW, 5, 2, 3)[0] == single
    for row, ours in zip(ids, single, strict=True):
        agree(model, row, ours, reference(model, row, NEW))
