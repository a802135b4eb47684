"""multi_block_step: a whole transformer, against transformers and, bit for bit, against one token a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels import DecodeState, StateColumn, StepConfig, StepWeights, ops, pack_step_weights, reference
from jacobi_kernels.grouped import GroupedMatrix, quantize
from jacobi_kernels.packing import pack_weight
from jacobi_kernels.sampling import row_seeds
from tests.kernels.helpers import (
    Layout,
    assert_equal,
    assert_same_everywhere,
    chains,
    random_layout,
    random_tensor,
)

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 9}),
}


class Model(NamedTuple):
    hf: Any
    tensors: dict[str, Tensor]
    config: StepConfig


def make_model(name: str) -> Model:
    """A tiny random model of transformers and what multi_block_step takes of it."""
    kind, options = ARCHITECTURES[name]
    torch.manual_seed(5)
    c = getattr(transformers, kind + "Config")(**SIZES, **options)
    hf = getattr(transformers, kind + "ForCausalLM")(c).eval().requires_grad_(False)
    for parameter_name, parameter in hf.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:  # not the ones and zeros of a new model
            parameter.add_(0.2 * torch.randn_like(parameter))
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    config = StepConfig(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=c.intermediate_size,
        vocab_size=VOCAB,
        inv_freq=hf.model.rotary_emb.inv_freq,
        norm_eps=c.rms_norm_eps,
        windows=[options["sliding_window"] - 1] * c.num_hidden_layers if "sliding_window" in options else (),
    )
    return Model(hf, dict(hf.state_dict()), config)


def model_with_every_option() -> Model:
    """No published model: biases everywhere, a partial and scaled rotation, layers without it, soft cap, odd sizes."""
    config = StepConfig(
        num_layers=3,
        hidden_size=33,
        num_heads=6,
        num_kv_heads=3,
        head_dim=10,
        intermediate_size=35,
        vocab_size=VOCAB,
        inv_freq=torch.tensor([1.0, 0.3, 0.05]),
        norm_eps=1e-3,
        softmax_scale=0.4,
        rope_scale=1.2,
        logit_scale=0.7,
        logit_softcap=6.0,
        windows=(-1, 0, 11),
        use_rope=(True, False, True),
    )
    shapes = {"model.embed_tokens": (VOCAB, 33), "lm_head": (VOCAB, 33), "model.norm": (33,)}
    for i in range(3):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm": (33,), at + "post_attention_layernorm": (33,)}
        shapes |= {at + f"self_attn.{p}_norm": (10,) for p in "qk"}
        shapes |= {at + f"self_attn.{p}_proj": (heads * 10, 33) for p, heads in (("q", 6), ("k", 3), ("v", 3))}
        shapes |= {at + "self_attn.o_proj": (33, 60), at + "mlp.down_proj": (33, 35)}
        shapes |= {at + f"mlp.{p}_proj": (35, 33) for p in ("gate", "up")}
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        tensors[name + ".weight"] = 0.3 * random_tensor(seed, *shape) + (1.0 if len(shape) == 1 else 0.0)
        if name.endswith("_proj") or name == "lm_head":
            tensors[name + ".bias"] = 0.3 * random_tensor(100 + seed, shape[0])
    return Model(None, tensors, config)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: make_model(name) for name in ARCHITECTURES} | {"every option": model_with_every_option()}


def logits_of(model: Model, tokens: Tensor, layout: Layout) -> Tensor:
    hidden = reference.hidden_states(model.tensors, model.config, tokens, *layout)
    head = pack_weight(model.tensors.get("lm_head.weight", model.tensors["model.embed_tokens.weight"]))
    bias, c = model.tensors.get("lm_head.bias"), model.config
    return reference.token_logits(hidden, head, bias, VOCAB, logit_scale=c.logit_scale, softcap=c.logit_softcap)


class Run(NamedTuple):
    """How to decode."""

    block_size: int = 1
    blocks: int = 1
    candidates: int = 0
    chain_capacity: int | None = None
    page_size: int | None = None
    sampler: tuple[float, int, float] = (0.0, 0, 1.0)
    seeds: tuple[int, ...] | int = 0


def decode(
    weights: StepWeights, prompts: list[list[int]], new_tokens: int, run: Run, **options: Any
) -> tuple[DecodeState, list[Tensor], int]:
    """The finished state, per sequence the committed keys and values, and the number of decode steps."""
    state = DecodeState.allocate(
        prompts,
        max_new_tokens=new_tokens,
        block_size=run.block_size,
        blocks=run.blocks,
        candidates=run.candidates,
        chain_capacity=run.chain_capacity,
        **options,
    )
    batch, capacity = state.batch, state.cache_capacity
    k, v = (torch.full_like(t, float("nan")) for t in weights.allocate_cache(batch, capacity))
    table = None
    if run.page_size is not None:
        pages = -(-capacity // run.page_size)
        table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)).int().view(batch, pages)
        shape = (weights.num_layers, batch * pages, run.page_size, *k.shape[3:])
        k, v = k.new_full(shape, float("nan")), v.new_full(shape, float("nan"))
    temperature, top_k, top_p = run.sampler
    sampling: dict[str, Any] = {}
    if temperature > 0:
        sampling = {
            "temperature": torch.full((batch,), temperature),
            "top_k": torch.full((batch,), top_k, dtype=torch.int32),
            "top_p": torch.full((batch,), top_p),
            "seeds": row_seeds(run.seeds if isinstance(run.seeds, int) else list(run.seeds), batch),
            "logits_scratch": torch.empty(4, VOCAB),
        }
    size = ops.step_workspace_size(weights.descriptor, state.tokens.numel(), batch, state.segments.shape[0])
    workspace = torch.full((size,), 255, dtype=torch.uint8)
    steps = 0
    while state.running:
        ops.multi_block_step(
            weights.blob,
            weights.descriptor,
            k,
            v,
            state.cache_seqlens,
            state.tokens,
            state.segments,
            state.cu_seqlens_q,
            state.cu_segments,
            state.text,
            state.pool,
            state.state,
            state.stop_tokens,
            workspace,
            block_size=state.block_size,
            blocks=state.blocks,
            candidates=state.candidates,
            page_table=table,
            **sampling,
        )
        steps += 1
        assert steps < 1000, "decoding does not end"
    caches = []
    for b in range(batch):
        slots = reference.cache_slots(list(range(int(state.cache_seqlens[b]))), b, k.shape[2], table)
        caches.append(torch.stack([torch.stack([layer[slots] for layer in cache]) for cache in (k, v)]))
    return state, caches, steps


def generated(state: DecodeState) -> list[list[int]]:
    return [state.generated(b) for b in range(state.batch)]


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [2], [7, 8, 7, 8, 7, 8, 7]]
RUNS = [
    Run(4),
    Run(5, 2),
    Run(8, 3, 2),
    Run(3, 1, 4),
    Run(16, 2, 1, chain_capacity=32),
    Run(4, 2, 3, chain_capacity=9, page_size=5),
    Run(2, 1, 1, page_size=64),
]


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reference_is_the_model(models: dict[str, Model], name: str) -> None:
    model = models[name]
    tokens = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(1))
    expected = model.hf.double()(tokens[None]).logits[0]
    model.hf.float()
    torch.testing.assert_close(logits_of(model, tokens.int(), chains(30)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reference_sees_paths(models: dict[str, Model], name: str) -> None:
    """Every row of a tree is the last row of its path run alone."""
    model, layout = models[name], random_layout(21, 2)
    tokens = torch.randint(0, VOCAB, (layout.rows,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    logits = logits_of(model, tokens, layout)
    for seen in reference.row_paths(layout.segments, layout.cu_segments):
        for row, path in seen.items():
            alone = logits_of(model, tokens[path], chains(len(path)))
            torch.testing.assert_close(logits[row], alone[-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "every option"])
def test_text_is_the_reference_s_greedy_text(models: dict[str, Model], name: str, dtype: torch.dtype) -> None:
    """Each emitted token has the reference's largest logit, or one that is closer to it than rounding reaches."""
    model = models[name]
    rounded = {n: t.to(dtype) if t.dim() == 2 else t for n, t in model.tensors.items()}
    state, _, _ = decode(pack_step_weights(rounded, model.config, dtype), PROMPTS, 24, RUNS[2])
    ties = 0
    for b, prompt in enumerate(PROMPTS):
        text = state.text[b, : int(state.state[b, StateColumn.TEXT_LEN])]
        logits = logits_of(Model(None, rounded, model.config), text, chains(len(text)))[len(prompt) - 1 : -1]
        emitted = text[len(prompt) :].long()
        lost = logits.max(1).values - logits.gather(1, emitted[:, None])[:, 0]
        ties += int((lost > 0).sum())
        reach = 1e-4 if dtype == torch.float32 else 0.03  # a bfloat16 cache rounds keys and values
        assert float(lost.max()) <= reach * float(logits.abs().max())
    assert ties <= (0 if dtype == torch.float32 else 5)


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "every option"])
def test_any_blocks_give_the_bits_of_one_token_a_step(models: dict[str, Model], name: str, dtype: torch.dtype) -> None:
    weights = pack_step_weights(models[name].tensors, models[name].config, dtype)
    slow, slow_caches, slow_steps = decode(weights, PROMPTS, 40, Run())
    for run in RUNS:
        fast, caches, steps = decode(weights, PROMPTS, 40, run)
        assert generated(fast) == generated(slow), run
        assert steps <= slow_steps or run.chain_capacity is not None
        for b, (ours, expected) in enumerate(zip(caches, slow_caches, strict=True)):
            shared = min(ours.shape[2], expected.shape[2])
            assert shared >= len(PROMPTS[b]) + 38
            assert_equal(ours[:, :, :shared], expected[:, :, :shared], f"{run}, sequence {b}")


@pytest.mark.parametrize("sampler", [(0.8, 0, 1.0), (1.2, 8, 1.0), (1.0, 20, 0.9)], ids=str)
def test_seeded_sampling_gives_the_same_text(models: dict[str, Model], sampler: tuple[float, int, float]) -> None:
    weights = pack_step_weights(models["llama"].tensors, models["llama"].config, torch.float32)
    texts = [generated(decode(weights, PROMPTS, 30, Run(sampler=sampler, seeds=s))[0]) for s in (1, 2)]
    assert texts[0] != texts[1]
    for run in RUNS:
        assert generated(decode(weights, PROMPTS, 30, run._replace(sampler=sampler, seeds=1))[0]) == texts[0], run


@pytest.mark.parametrize("sampler", [(0.0, 0, 1.0), (1.0, 0, 1.0)], ids=str)
def test_batch_gives_the_texts_of_its_sequences_alone(
    models: dict[str, Model], sampler: tuple[float, int, float]
) -> None:
    weights = pack_step_weights(models["qwen3"].tensors, models["qwen3"].config, torch.float32)
    seeds = (5, -6, 7)
    together, caches, _ = decode(weights, PROMPTS, 30, Run(6, 2, 2, sampler=sampler, seeds=seeds))
    for b, prompt in enumerate(PROMPTS):
        alone, cache, _ = decode(weights, [prompt], 30, Run(6, 2, 2, sampler=sampler, seeds=(seeds[b],)))
        assert generated(alone) == [together.generated(b)]
        shared = min(cache[0].shape[2], caches[b].shape[2])
        assert_equal(cache[0][:, :, :shared], caches[b][:, :, :shared])


@pytest.mark.parametrize("name", ["qwen2", "mistral", "every option"])
def test_same_bits_for_threads_and_instruction_sets(models: dict[str, Model], name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weights = pack_step_weights(models[name].tensors, models[name].config, dtype)

        def run(weights: StepWeights = weights) -> tuple[Tensor, ...]:
            state, caches, _ = decode(weights, PROMPTS, 16, Run(4, 2, 2, sampler=(0.7, 9, 0.95)))
            return state.text, *caches

        assert_same_everywhere(run)


@settings(max_examples=25)
@given(
    block_size=st.integers(1, 12),
    blocks=st.integers(1, 3),
    candidates=st.integers(0, 3),
    extra=st.integers(0, 20),
    page_size=st.sampled_from([None, 1, 3, 16]),
    pool_rows=st.integers(0, 8),
    pool_from_prompt=st.booleans(),
    new_tokens=st.integers(1, 30),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    stop=st.integers(0, VOCAB - 1),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_any_settings(
    models: dict[str, Model],
    block_size: int,
    blocks: int,
    candidates: int,
    extra: int,
    page_size: int | None,
    pool_rows: int,
    pool_from_prompt: bool,
    new_tokens: int,
    prompt: list[int],
    stop: int,
    temperature: float,
) -> None:
    weights = pack_step_weights(models["llama"].tensors, models["llama"].config, torch.float32)
    sampler = (temperature, 0, 1.0)
    run = Run(block_size, blocks, candidates, blocks * block_size + extra, page_size, sampler)
    slow, _, _ = decode(weights, [prompt], new_tokens, Run(sampler=sampler), stop_tokens=[stop])
    fast, _, _ = decode(
        weights, [prompt], new_tokens, run, stop_tokens=[stop], pool_rows=pool_rows, pool_from_prompt=pool_from_prompt
    )
    assert generated(fast) == generated(slow)
    assert fast.done == slow.done


def test_a_predictable_text_needs_few_steps(models: dict[str, Model]) -> None:
    """Greedy text of a random model soon repeats itself; guesses from the pool then come true."""
    weights = pack_step_weights(models["llama"].tensors, models["llama"].config, torch.float32)
    _, _, steps = decode(weights, PROMPTS[:1], 200, Run(8, 2, 2))
    assert steps < 150


def test_a_limit_set_to_the_length_ends_a_sequence(models: dict[str, Model]) -> None:
    """MAX_LEN = TEXT_LEN on a running row: the next step emits nothing and writes nothing behind the text."""
    weights = pack_step_weights(models["llama"].tensors, models["llama"].config, torch.float32)
    state = DecodeState.allocate([[3, 1, 4, 1, 5]], max_new_tokens=8, block_size=8, blocks=1, candidates=0)
    k, v = weights.allocate_cache(1, state.cache_capacity)
    size = ops.step_workspace_size(weights.descriptor, state.tokens.numel(), 1, state.segments.shape[0])

    def step() -> None:
        values = (k, v, state.cache_seqlens, state.tokens, state.segments, state.cu_seqlens_q, state.cu_segments)
        values += (state.text, state.pool, state.state, state.stop_tokens, torch.empty(size, dtype=torch.uint8))
        ops.multi_block_step(weights.blob, weights.descriptor, *values, block_size=8, blocks=1, candidates=0)

    step()
    length = int(state.state[0, StateColumn.TEXT_LEN])
    assert state.running
    assert length == 6
    state.state[0, StateColumn.MAX_LEN] = length
    memory = torch.cat([state.text[0, :length], torch.full((64,), -7, dtype=torch.int32)])
    state.text = memory[:length].view(1, length)
    expected = memory.clone()
    step()
    assert torch.equal(memory, expected)
    assert state.done == [2]
    assert state.emitted(0) == []
    assert int(state.cache_seqlens[0]) <= length


# int8 and int4 --------------------------------------------------------------------------------------------------------

FORMATS = ["int8", "int4"]


def grouped(model: Model, form: str) -> dict[str, Tensor | GroupedMatrix]:
    """The model as pack_step_weights quantises it."""
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    return {
        name: tensor if tensor.dim() == 1 else quantize(tensor, "int8" if name in tables else form)
        for name, tensor in model.tensors.items()
    }


def dequantized(tensors: Mapping[str, Tensor | GroupedMatrix]) -> dict[str, Tensor]:
    return {name: t.dequantize() if isinstance(t, GroupedMatrix) else t for name, t in tensors.items()}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "every option"])
def test_int8_and_int4_are_the_float32_step_over_their_values(models: dict[str, Model], name: str, form: str) -> None:
    model = models[name]
    weights = pack_step_weights(model.tensors, model.config, form)
    assert (weights.format, weights.dtype) == (form, torch.float32)
    tensors = grouped(model, form)
    if "lm_head.weight" in tensors and model.hf is not None and model.hf.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    values = pack_step_weights(dequantized(tensors), model.config, "float32")
    assert weights.blob.numel() < 0.5 * values.blob.numel()
    for run in (Run(), RUNS[2], RUNS[5]):
        state, caches, _ = decode(weights, PROMPTS, 24, run)
        expected, expected_caches, _ = decode(values, PROMPTS, 24, run)
        assert_equal((state.text, *caches), (expected.text, *expected_caches), f"{run}")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama", "every option"])
def test_any_blocks_of_int8_and_int4_give_the_bits_of_one_token_a_step(
    models: dict[str, Model], name: str, form: str
) -> None:
    weights = pack_step_weights(models[name].tensors, models[name].config, form)
    slow, slow_caches, _ = decode(weights, PROMPTS, 40, Run())
    for run in RUNS:
        fast, caches, _ = decode(weights, PROMPTS, 40, run)
        assert generated(fast) == generated(slow), run
        for ours, expected in zip(caches, slow_caches, strict=True):
            shared = min(ours.shape[2], expected.shape[2])
            assert_equal(ours[:, :, :shared], expected[:, :, :shared], f"{run}")


@pytest.mark.parametrize("form", FORMATS)
def test_int8_and_int4_steps_are_the_same_everywhere(models: dict[str, Model], form: str) -> None:
    weights = pack_step_weights(models["every option"].tensors, models["every option"].config, form)

    def run() -> tuple[Tensor, ...]:
        state, caches, _ = decode(weights, PROMPTS, 16, Run(4, 2, 2))
        return state.text, *caches

    assert_same_everywhere(run)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [-2, 2**31, 2**63 - 1])
def test_a_descriptor_with_a_window_out_of_range_is_refused(models: dict[str, Model], window: int) -> None:
    model = models["mistral"]
    weights = pack_step_weights(model.tensors, model.config, torch.float32)
    ops.step_workspace_size(weights.descriptor, 8, 1, 1)
    words = weights.descriptor.clone()
    at = (words == ARCHITECTURES["mistral"][1]["sliding_window"] - 1).nonzero()[-1]
    words[at] = window
    with pytest.raises(RuntimeError, match=r"step_workspace_size: descriptor of shape .* has a window out of range"):
        ops.step_workspace_size(words, 8, 1, 1)
