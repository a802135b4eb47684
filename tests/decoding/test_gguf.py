"""Tensors of GGUF files: the values that transformers reads, raw blocks kept, damaged files refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from jacobi_decoding import JacobiDecoder, LoadError, load_model
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.gguf_file import GgufFile
from jacobi_decoding.lazy_weights import GgufTensors
from jacobi_decoding.loading import default_model_path
from jacobi_decoding.packed_loading import load_packed
from jacobi_decoding.step_config import step_shapes
from jacobi_kernels.grouped import GroupedMatrix

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, LAYERS = 64, 96, 70, 4, 2, 2
KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.F16, Kind.BF16, Kind.F32, Kind.Q5_1)  # matrices take turns


def write(path: Path, architecture: str, kinds: tuple[Kind, ...] = KINDS, scale: float = 1.0) -> Path:
    """A random model of two layers."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)])
    writer.add_array("some.numbers", [1, 2, 3])
    count = 0

    def matrix(name: str, rows: int, columns: int) -> None:
        nonlocal count
        kind = kinds[count % len(kinds)]
        count += 1
        values = (scale * generator.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        writer.add_tensor(name + ".weight", gguf.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, generator.standard_normal(size).astype(np.float32))

    kv = KV_HEADS * HIDDEN // HEADS
    matrix("token_embd", VOCAB, HIDDEN)
    for i in range(LAYERS):
        at = f"blk.{i}."
        for part, rows in (("q", HIDDEN), ("k", kv), ("v", kv)):
            matrix(at + f"attn_{part}", rows, HIDDEN)
            if architecture == "qwen2":
                vector(at + f"attn_{part}.bias", rows)
        matrix(at + "attn_output", HIDDEN, HIDDEN)
        matrix(at + "ffn_gate", FFN, HIDDEN)
        matrix(at + "ffn_up", FFN, HIDDEN)
        matrix(at + "ffn_down", HIDDEN, FFN)
        vector(at + "attn_norm.weight", HIDDEN)
        vector(at + "ffn_norm.weight", HIDDEN)
    vector("output_norm.weight", HIDDEN)
    if architecture == "qwen2":
        matrix("output", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)


def floats(value: Any) -> torch.Tensor:
    return value.dequantize() if isinstance(value, GroupedMatrix) else value.float()


def check_values(tensors: GgufTensors, model: Any) -> set[str]:
    """Every tensor of ``model`` is what the file gives; the kinds that were met."""
    state, kinds = model.state_dict(), set()
    for name in step_shapes(model.config):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            assert name not in tensors
            continue
        value = tensors.read(name)
        kinds.add(tensors.kind(name))
        assert tensors.kind(name) == (value.format if isinstance(value, GroupedMatrix) else "float")
        assert torch.equal(floats(value), state[name]), name
    return kinds


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_values_of_all_kinds(tmp_path: Path, architecture: str) -> None:
    model = by_transformers(write(tmp_path / "some.gguf", architecture))
    tensors = GgufTensors(GgufFile(tmp_path / "some.gguf"), model.config)
    assert check_values(tensors, model) == {"float", "int8", "int4"}
    packed = load_packed(model.config, model.generation_config, tensors, "float32", "some.gguf")
    ids = torch.arange(3, 12)[None]
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None}
    wanted = JacobiDecoder(model, path="step").generate(ids, **options)
    assert torch.equal(JacobiDecoder(packed).generate(ids, **options), wanted)


def test_scales_that_float16_cannot_hold_eightfold(tmp_path: Path) -> None:
    """Q4_0 with scales beyond 8188 is no int4 of ours: it is quantised from its values."""
    path = write(tmp_path / "large.gguf", "llama", (Kind.Q4_0,), scale=6e5)
    model = by_transformers(path)
    tensors = GgufTensors(GgufFile(path), model.config)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(floats(tensors.read(name)), model.state_dict()[name])
    assert not isinstance(tensors.read(name), GroupedMatrix)


def test_header(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "some.gguf", "llama"))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.attention.head_count_kv"] == KV_HEADS
    assert file.metadata["tokenizer.ggml.tokens"] is None
    for tensor in gguf.GGUFReader(file.path).tensors:
        ours = file.tensors[tensor.name]
        assert (ours.kind, ours.offset, ours.size) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert list(ours.shape) == tensor.shape.tolist()[::-1]


def test_damaged_files(tmp_path: Path) -> None:
    content = write(tmp_path / "some.gguf", "llama").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for size in (0, 7, 8, 23, 24, 100, 300, 1000, len(content) // 2, len(content) - 40):
        damaged.write_bytes(content[:size])
        with pytest.raises(LoadError, match="download") as found:
            GgufFile(damaged)
        assert "\n" not in str(found.value)
    for place in range(8, 1500, 7):  # whatever the header says, an error is one of ours
        damaged.write_bytes(content[:place] + b"\xff" * 8 + content[place + 8 :])
        with suppress(LoadError):
            GgufFile(damaged)
    damaged.write_bytes(content.replace(b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0llama",
                                        b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0zzzzz"))  # fmt: skip
    config = by_transformers(tmp_path / "some.gguf").config
    with pytest.raises(UnsupportedModelError, match="zzzzz"):
        GgufTensors(GgufFile(damaged), config)


@pytest.mark.smollm2
def test_values_of_the_default_model(smollm2: Any) -> None:
    tensors = GgufTensors(GgufFile(default_model_path()), smollm2.model.config)
    assert check_values(tensors, smollm2.model) == {"float", "int8", "int4"}


@pytest.mark.smollm2
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "int4"])
def test_default_model_packed(smollm2: Any, prompts: list[dict[str, Any]], format: str) -> None:
    loaded = load_model(None, format, packed=True)
    assert loaded.name == smollm2.name
    assert loaded.tokenizer is not None
    packed = JacobiDecoder(loaded.model)
    whole = None
    if format == "bfloat16":
        whole = JacobiDecoder(load_model(None, format).model, path="step")
    elif format != "int8":  # int4 keeps the values of this file, which has no others
        whole = JacobiDecoder(smollm2.model, path="step")
    for entry in prompts[::10]:
        chat = [{"role": "user", "content": entry["prompt"]}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        ids = loaded.tokenizer.apply_chat_template(chat, **options)["input_ids"]
        assert torch.equal(ids, smollm2.tokenizer.apply_chat_template(chat, **options)["input_ids"])
        single = packed.generate(ids, max_new_tokens=24, block_size=1, blocks=1, candidates=0)
        assert torch.equal(packed.generate(ids, max_new_tokens=24), single)
        if whole is not None:
            assert torch.equal(whole.generate(ids, max_new_tokens=24), single)


@pytest.mark.smollm2
def test_without_a_copy(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache off, config and tokenizer come from the GGUF file through transformers."""
    monkeypatch.setenv("JACOBI_CACHE_DIR", "off")
    direct = load_model(None, "int4")
    monkeypatch.undo()
    copied = load_model(None, "int4")
    assert torch.equal(direct.model.weights.blob, copied.model.weights.blob)
    assert torch.equal(direct.model.weights.descriptor, copied.model.weights.descriptor)
    text = "def f(x):\n    return x + 12"
    assert direct.tokenizer is not None
    assert direct.tokenizer(text)["input_ids"] == smollm2.tokenizer(text)["input_ids"]
    for name in ("eos_token_id", "pad_token_id"):
        assert getattr(direct.model.generation_config, name) == getattr(copied.model.generation_config, name)


def test_architectures_without_kv_heads(tmp_path: Path) -> None:
    """Their files can be opened; that the step cannot run them is for the configuration to say."""
    from transformers import GPT2Config

    from jacobi_decoding.packed_loading import load_packed

    content = write(tmp_path / "some.gguf", "llama").read_bytes()
    renamed = tmp_path / "renamed.gguf"
    key = b"general.architecture\x08\0\0\0%c\0\0\0\0\0\0\0%s"
    renamed.write_bytes(content.replace(key % (5, b"llama"), key % (5, b"bloom")))
    config = GPT2Config()
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel on the step path"):
        load_packed(config, None, GgufTensors(GgufFile(renamed), config), "float32", "renamed")
