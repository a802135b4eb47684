"""JacobiDecoder and generate: batches, stops, limits, sampling, streaming, interruption, statistics."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_decoding import JacobiDecoder, generate
from jacobi_decoding.batching import unpadded_prompts
from jacobi_decoding.errors import UnsupportedModelError
from tests.decoding.helpers import FAMILIES, VOCAB, build

STEP_FAMILIES = ("llama", "smollm3", "qwen2", "qwen3", "mistral")
AR = {"block_size": 1, "blocks": 1, "candidates": 0}


def family(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model_class, config_class, config = FAMILIES[name]
    return build(model_class, config_class, dtype, **config)


@pytest.fixture(scope="module")
def llama() -> Any:
    return family("llama")


@pytest.fixture(scope="module")
def decoder(llama: Any) -> JacobiDecoder:
    return JacobiDecoder(llama)


def prompt(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded random prompts with their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for b, length in enumerate(lengths):
        ids[b, width - length :] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[b, width - length :] = 1
    return ids, mask


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_step_path_is_chosen_and_equals_transformers(name: str) -> None:
    model = family(name)
    decoder = JacobiDecoder(model)
    assert decoder.path == "multi_block_step", decoder.path_reason
    ids, _ = prompt(21)
    wanted = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=40), wanted)
    assert torch.equal(JacobiDecoder(model, path="modules").generate(ids, max_new_tokens=40), wanted)


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_step_path_is_exact_in_bfloat16(name: str) -> None:
    decoder = JacobiDecoder(family(name, torch.bfloat16))
    ids, mask = prompt(30, 3)
    one_by_one = decoder.generate(ids, mask, max_new_tokens=40, **AR)
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=40, block_size=7, blocks=3, candidates=2), one_by_one)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    block_size=st.integers(1, 20),
    blocks=st.integers(1, 3),
    candidates=st.integers(0, 4),
    from_prompt=st.booleans(),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    limit=st.integers(1, 30),
    stop=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_setting_gives_the_tokens_of_one_by_one(
    decoder: JacobiDecoder,
    lengths: list[int],
    block_size: int,
    blocks: int,
    candidates: int,
    from_prompt: bool,
    temperature: float,
    top_k: int,
    limit: int,
    stop: bool,
    seed: int,
) -> None:
    ids, mask = prompt(*lengths, seed=seed)
    options: dict[str, Any] = {
        "max_new_tokens": limit,
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "pad_token_id": 0,
        "eos_token_id": list(range(0, VOCAB, 9)) if stop else None,
    }
    one_by_one = decoder.generate(ids, mask, **options, **AR)
    blocked = decoder.generate(
        ids,
        mask,
        **options,
        block_size=block_size,
        blocks=blocks,
        candidates=candidates,
        pool_from_prompt=from_prompt,
    )
    assert torch.equal(blocked, one_by_one)


def test_batch_equals_single_with_settings_per_row(decoder: JacobiDecoder) -> None:
    ids, mask = prompt(5, 17, 9)
    stops = [[7, 9, 13, 30], [], list(range(0, VOCAB, 5))]
    per_row: list[dict[str, Any]] = [
        {"max_new_tokens": 12, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 5},
        {"max_new_tokens": 25, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "seed": 6},
        {"max_new_tokens": 20, "temperature": 1.2, "top_k": 7, "top_p": 1.0, "seed": 7},
    ]
    together = {key: [row[key] for row in per_row] for key in per_row[0]}
    batch = decoder.generate(ids, mask, do_sample=True, eos_token_id=stops, pad_token_id=0, **together)
    for b, row in enumerate(per_row):
        own = ids[b : b + 1, mask[b].bool()]
        options = {**row, "seed": [row["seed"]]}
        alone = decoder.generate(own, do_sample=True, eos_token_id=[stops[b]], pad_token_id=0, **options)
        new = alone.shape[1] - own.shape[1]
        assert torch.equal(batch[b, ids.shape[1] :][:new], alone[0, own.shape[1] :])
        assert (batch[b, ids.shape[1] + new :] == 0).all()


def test_batch_equals_transformers(llama: Any, decoder: JacobiDecoder) -> None:
    ids, mask = prompt(5, 17, 9)
    eos = [11, 52, 200, 31]
    wanted = llama.generate(
        ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=30, eos_token_id=eos, pad_token_id=0), wanted)


def test_padding_on_either_side_is_left_out() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
    assert unpadded_prompts(ids, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]), None) == [[5, 6], [7, 8, 9]]
    assert unpadded_prompts(ids, None, 0) == [[5, 6], [7, 8, 9, 0]]
    assert unpadded_prompts(ids, None, None) == ids.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": [3, 4]}, "max_new_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"blocks": 0}, "blocks"),
        ({"candidates": -1}, "candidates"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"do_sample": True, "top_p": 0.0}, "top_p"),
        ({"do_sample": True, "top_k": -2}, "top_k"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask"),
        ({"attention_mask": torch.zeros(1, 3)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask"),
        ({"eos_token_id": [[1], [2]]}, "stop_tokens"),
        ({"spawn_ratio": 2.0}, "spawn_ratio"),
        *(({"max_new_tokens": v}, "max_new_tokens") for v in (2.5, None, "3", torch.tensor(3), 2**31, 2**40, [2.5])),
        *(({"block_size": v}, "block_size .* or 'auto'") for v in (2.0, "3", None, True)),
        *(({"blocks": v}, "blocks") for v in (2.0, "3", None)),
        *(({"candidates": v}, "candidates") for v in (2.0, "3", None)),
        ({"block_size": 4, "candidates": 1.5}, "candidates"),
        *(({"eos_token_id": v}, "eos_token_id") for v in (1.5, "a", -1, [[1], 2], [1.5], ["a"])),
        *(({"seed": v}, "seed") for v in (1.5, "x", [1, 2])),
        ({"do_sample": True, "temperature": 1e39}, "temperature .* float32"),
        ({"pad_token_id": "a"}, "pad_token_id"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask"),
        ({"streamer": print}, "streamer must have the methods put and end, got builtin_function_or_method"),
    ],
)
def test_errors_name_the_argument(decoder: JacobiDecoder, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder.generate(torch.tensor([[5, 6, 7]]), **options)


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.ones(3),
        torch.ones(1, 3, dtype=torch.int64, device="meta"),
    ],
)
def test_input_ids_are_checked(decoder: JacobiDecoder, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        decoder.generate(ids)


def test_a_seed_tensor_holds_one_per_row(decoder: JacobiDecoder) -> None:
    ids, mask = prompt(4, 4)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True}
    wanted = decoder.generate(ids, mask, seed=[3, 4], **options)
    assert torch.equal(decoder.generate(ids, mask, seed=torch.tensor([3, 4]), **options), wanted)


@pytest.mark.parametrize("block_size", [4, "auto"])
def test_text_beyond_the_positions_is_warned_of(block_size: Any) -> None:
    model_class, config_class, config = FAMILIES["llama"]
    decoder = JacobiDecoder(build(model_class, config_class, **{**config, "max_position_embeddings": 16}))
    ids, _ = prompt(8)
    with pytest.warns(UserWarning, match="17 tokens, more than the model's max_position_embeddings 16") as caught:
        decoder.generate(ids, max_new_tokens=9, block_size=block_size)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.generate(ids, max_new_tokens=8, block_size=block_size)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_tokens_are_checked(decoder: JacobiDecoder, token: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.|token"):
        decoder.generate(torch.tensor([[5, token]]))


def test_eos_comes_from_the_generation_config(llama: Any) -> None:
    model = copy.deepcopy(llama)
    ids, _ = prompt(12)
    free = generate(model, ids, max_new_tokens=20)
    eos = int(free[0, 17])
    model.generation_config.eos_token_id = eos
    cut = generate(model, ids, max_new_tokens=20)
    assert torch.equal(cut, model.generate(ids, max_new_tokens=20, do_sample=False))
    assert cut.shape[1] < free.shape[1]
    assert torch.equal(generate(model, ids, max_new_tokens=20, eos_token_id=None), free)


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids, _ = prompt(30, seed=9)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_follows_an_optimiser_step(name: str) -> None:
    model = family(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    ids, _ = prompt(12)
    answers = []
    for _ in range(3):
        answers.append(generate(model, ids, max_new_tokens=24))
        assert torch.equal(answers[-1], model.generate(ids, max_new_tokens=24, do_sample=False))
        train_step(model, optimizer)
    assert not torch.equal(answers[0], answers[-1])


def test_seed(decoder: JacobiDecoder) -> None:
    ids, _ = prompt(8)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True}
    first = decoder.generate(ids, seed=7, **options)
    assert torch.equal(first, decoder.generate(ids, seed=7, **options))
    assert not torch.equal(first, decoder.generate(ids, seed=8, **options))
    torch.manual_seed(3)
    drawn = decoder.generate(ids, **options)
    again = decoder.generate(ids, **options)
    torch.manual_seed(3)
    assert torch.equal(drawn, decoder.generate(ids, **options))
    assert not torch.equal(drawn, again)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.ended = 0

    @property
    def tokens(self) -> list[int]:
        return [token for call in self.calls for token in call]

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streaming(decoder: JacobiDecoder) -> None:
    ids, _ = prompt(8)
    recorder = Recorder()
    answer = decoder.generate(ids, max_new_tokens=30, streamer=recorder)
    assert recorder.calls[0] == ids[0].tolist()
    assert recorder.tokens == answer[0].tolist()
    assert recorder.ended == 1
    with pytest.raises(ValueError, match="streamer"):
        decoder.generate(*prompt(3, 4), streamer=Recorder())


@pytest.mark.parametrize("path", ["step", "modules"])
def test_interruption_leaves_a_usable_state(llama: Any, path: Any) -> None:
    decoder = JacobiDecoder(llama, path=path)
    ids, _ = prompt(8)
    wanted = decoder.generate(ids, max_new_tokens=20)

    class Interrupted(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.calls) == 4:
                raise KeyboardInterrupt

    streamer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(ids, max_new_tokens=20, streamer=streamer)
    assert streamer.ended == 1
    assert streamer.tokens == wanted[0, : len(streamer.tokens)].tolist()
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), wanted)
    assert torch.equal(llama.generate(ids, max_new_tokens=20, do_sample=False), wanted)


def test_statistics_add_up(decoder: JacobiDecoder) -> None:
    ids, mask = prompt(20, 6)
    answer, stats = decoder.generate(ids, mask, max_new_tokens=40, pad_token_id=0, return_stats=True)
    facts = stats.to_dict()
    assert facts["backend"] == "cpu"
    assert facts["path"] == "multi_block_step"
    assert facts["tokens"] == 80 == answer.numel() - ids.numel()
    assert facts["decode_tokens"] == 78
    assert facts["forwards"] == facts["prefill_forwards"] + facts["decode_forwards"]
    steps = [row.decode_steps for row in stats.rows]
    assert facts["tokens_per_forward"] == pytest.approx(78 / sum(steps))
    assert max(steps) == facts["decode_forwards"]
    assert sum(facts["accepted_histogram"].values()) == sum(steps)
    assert facts["fast_forwarded_tokens"] == 78 - sum(steps)
    assert facts["positions"] >= 26 + sum(steps)
    assert len(stats.step_seconds) == facts["decode_forwards"]
    assert facts["seconds"] > 0


def test_one_by_one_is_one_token_per_forward(decoder: JacobiDecoder) -> None:
    ids, _ = prompt(20)
    _, stats = decoder.generate(ids, max_new_tokens=15, return_stats=True, **AR)
    assert stats.tokens_per_forward == 1.0
    assert (stats.forwards, stats.prefill_forwards, stats.positions) == (15, 1, 20 + 14)
    assert stats.to_dict()["iterations_per_block"] == 1.0
    assert stats.to_dict()["stationary_tokens"] == 0


@pytest.mark.parametrize("path", ["step", "modules"])
def test_share_of_the_time_in_each_op(llama: Any, path: Any) -> None:
    ids, _ = prompt(20)
    _, stats = JacobiDecoder(llama, path=path).generate(ids, max_new_tokens=8, return_stats=True, profile=True)
    share = stats.to_dict()["op_share"]
    assert sum(share.values()) == pytest.approx(1.0)
    wanted = (
        {"multi_block_step.linear", "multi_block_step.attention"} if path == "step" else {"packed_linear", "commit"}
    )
    assert wanted <= set(share)
    assert all(value >= -1e-6 for value in share.values())


def test_a_decoder_is_left_out_of_copies(llama: Any) -> None:
    model = copy.deepcopy(llama)
    ids, _ = prompt(8)
    generate(model, ids, max_new_tokens=4)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone.model.norm.weight.mul_(-1.0)
    assert torch.equal(generate(clone, ids, max_new_tokens=12), clone.generate(ids, max_new_tokens=12, do_sample=False))
    assert len(pickle.dumps(model.__dict__["_jacobi_decoder"])) < 200


def test_a_hook_moves_the_model_to_the_module_path(llama: Any) -> None:
    decoder = JacobiDecoder(llama)
    ids, _ = prompt(8)
    assert decoder.path == "multi_block_step"
    handle = llama.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output)
    try:
        with pytest.raises(UnsupportedModelError, match="hook"):
            JacobiDecoder(llama, path="step")
        wanted = llama.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(decoder.generate(ids, max_new_tokens=12), wanted)
        assert decoder.path == "modules"
    finally:
        handle.remove()


def test_paths_are_named(llama: Any) -> None:
    with pytest.raises(ValueError, match="path"):
        JacobiDecoder(llama, path="fast")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="multi_block_step runs"):
        JacobiDecoder(family("gemma2"), path="step")


def test_text_streamer_of_transformers(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids = smollm2.tokenizer("Count: one, two, three,", return_tensors="pt")["input_ids"]
    streamer = transformers.TextStreamer(smollm2.tokenizer, skip_prompt=True)
    answer = generate(smollm2.model, ids, max_new_tokens=12, streamer=streamer)
    assert capsys.readouterr().out.strip() == smollm2.tokenizer.decode(answer[0, ids.shape[1] :]).strip()


@pytest.fixture(autouse=True)
def _no_stray_settings() -> Iterator[None]:
    """Decoding changes no global setting of torch."""
    before = (torch.get_num_threads(), torch.is_grad_enabled())
    yield
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
        lambda model: [setattr(m, "variance_epsilon", 0.5) for m in model.modules() if hasattr(m, "variance_epsilon")],
        lambda model: [setattr(layer.mlp, "act_fn", torch.nn.GELU()) for layer in model.model.layers],
        lambda model: setattr(model.model, "layers", model.model.layers[:2]),
    ],
    ids=["frequencies", "epsilon", "activation", "fewer layers"],
)
def test_a_change_beside_the_weights_is_followed(change: Any) -> None:
    model = family("llama")
    decoder = JacobiDecoder(model)
    ids, _ = prompt(12)
    before = decoder.generate(ids, max_new_tokens=24)
    change(model)
    model.config.num_hidden_layers = len(model.model.layers)
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert not torch.equal(wanted, before)
    assert torch.equal(decoder.generate(ids, max_new_tokens=24), wanted)


def test_another_thread_may_not_call_a_wrapped_model() -> None:
    model = family("llama")
    decoder = JacobiDecoder(model, path="modules")
    ids, _ = prompt(12)
    wanted = decoder.generate(ids, max_new_tokens=12)
    errors: list[str] = []

    def call(state: Any) -> None:
        def forward() -> None:
            try:
                with torch.no_grad():
                    model(ids[:, :1], use_cache=False)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    assert torch.equal(decoder.generate(ids, max_new_tokens=12, step_callback=call), wanted)
    assert len(errors) >= 2
    assert all("wrapped for Jacobi decoding" in error for error in errors)
