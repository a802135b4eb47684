"""Models loaded as packed weights alone: the tokens of the model that transformers builds, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import jacobi_decoding
from jacobi_decoding import JacobiDecoder, LoadError, load_model
from jacobi_decoding.devices import DeviceError
from jacobi_decoding.engine import check_packed_engine
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.packed_model import PackedModel
from jacobi_decoding.step_engine import StepEngine
from tests.decoding.helpers import FAMILIES, build

FAMILY_NAMES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
AR = {"block_size": 1, "blocks": 1, "candidates": 0}
PROMPTS = torch.tensor([[5, 9, 200, 31, 5, 9, 200, 31, 5, 9], [7, 7, 8, 250, 7, 7, 8, 250, 7, 7]])
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def saved(
    folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, shard: str = "1GB", **config: Any
) -> Any:
    """A random model of a family, saved in ``folder``."""
    model_class, config_class, known = FAMILIES[name]
    model = build(model_class, config_class, dtype, **{**known, **config})
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors, or leave them out; dots of names are written __."""
    file = folder / "model.safetensors"
    found = load_file(file)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file, metadata={"format": "pt"})


def tokens(model: Any, **options: Any) -> list[list[int]]:
    out = JacobiDecoder(model, path="step").generate(PROMPTS, max_new_tokens=32, pad_token_id=0, **options)
    return out.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_tokens_are_those_of_the_modules(tmp_path: Path, name: str, dtype: str, tied: bool) -> None:
    saved(tmp_path, name, shard="60KB", tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    packed, whole = load_model(tmp_path, dtype, packed=True), load_model(tmp_path, dtype)
    assert isinstance(packed.model, PackedModel)
    assert packed.dtype == packed.model.dtype == whole.dtype
    assert packed.model.num_parameters() == whole.model.num_parameters()
    wanted = StepEngine(whole.model).weights()
    assert torch.equal(packed.model.weights.descriptor, wanted.descriptor)
    assert torch.equal(packed.model.weights.blob, wanted.blob)
    assert tokens(packed.model) == tokens(whole.model)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_of_other_dtypes(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    saved(tmp_path, "qwen2", stored)
    packed, whole = load_model(tmp_path, dtype, packed=True), load_model(tmp_path, dtype)
    assert torch.equal(packed.model.weights.blob, StepEngine(whole.model).weights().blob)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_quantised_blocks_equal_token_by_token(tmp_path: Path, name: str, format: str, tied: bool) -> None:
    saved(tmp_path, name, tie_word_embeddings=tied)
    loaded = load_model(tmp_path, format)
    assert isinstance(loaded.model, PackedModel)
    assert loaded.model.format == format
    assert loaded.dtype == torch.float32
    single = tokens(loaded.model, **AR)
    assert len({token for row in single for token in row}) > 12, "the model's output does not vary"
    assert tokens(loaded.model) == single
    assert tokens(loaded.model, block_size=6, blocks=2, candidates=3) == single


def test_int8_is_close_to_float32(tmp_path: Path) -> None:
    model = saved(tmp_path)
    packed = load_model(tmp_path, "int8").model
    ids = PROMPTS[:1]
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    token = JacobiDecoder(packed).generate(ids, max_new_tokens=1)[0, -1]
    assert logits.max() - logits[token] < 0.1 * logits.std()


def test_checkpoint_without_its_head(tmp_path: Path) -> None:
    """Saved from the model below the head: names lack 'model.'."""
    model = saved(tmp_path / "whole", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "base")
    packed = load_model(tmp_path / "base", packed=True)
    assert tokens(packed.model) == tokens(model)


@pytest.mark.parametrize("what", ["head only", "both", "both, different"])
def test_tied_heads(tmp_path: Path, what: str) -> None:
    model = saved(tmp_path, tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach()
    head = embedding.flip(0) if what == "both, different" else embedding.clone()
    change(tmp_path, **{HEAD.replace(".", "__"): head})
    if what == "head only":
        change(tmp_path, **{EMBEDDING.replace(".", "__"): None})
    packed, whole = load_model(tmp_path, packed=True), load_model(tmp_path)
    assert tokens(packed.model) == tokens(whole.model)
    assert (tokens(packed.model) == tokens(model)) == (what != "both, different")


def test_generate_of_the_package(tmp_path: Path) -> None:
    saved(tmp_path)
    model = load_model(tmp_path, packed=True).model
    first = jacobi_decoding.generate(model, PROMPTS, max_new_tokens=9, pad_token_id=0)
    assert torch.equal(first, jacobi_decoding.generate(model, PROMPTS, max_new_tokens=9, pad_token_id=0))
    assert JacobiDecoder(tmp_path, dtype="int4").path == "multi_block_step"
    assert JacobiDecoder(model).path_reason == "Llama models run as one op per step"
    assert JacobiDecoder(model, device="cpu").model is model


def test_generation_config_is_that_of_the_files(tmp_path: Path) -> None:
    model = saved(tmp_path)
    model.generation_config.eos_token_id = [3, 4]
    model.generation_config.save_pretrained(tmp_path)
    assert load_model(tmp_path, packed=True).model.generation_config.eos_token_id == [3, 4]
    (tmp_path / "generation_config.json").unlink()
    packed, whole = load_model(tmp_path, packed=True), load_model(tmp_path)
    for token in ("eos_token_id", "pad_token_id", "bos_token_id"):
        assert getattr(packed.model.generation_config, token) == getattr(whole.model.generation_config, token)


def test_other_ways_to_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    model = load_model(tmp_path, packed=True).model
    with pytest.raises(UnsupportedModelError, match="no modules to run"):
        JacobiDecoder(model, path="modules")
    with pytest.raises(DeviceError, match="cuda"):
        JacobiDecoder(model, device="cuda")
    with pytest.raises(DeviceError, match="packed=False"):
        model.to("cuda:0")
    with pytest.raises(DeviceError, match="needs a GPU"):
        JacobiDecoder(model).generate(PROMPTS, max_new_tokens=2, prefill="flash-attn")
    for format in ("float32", "int8"):
        with pytest.raises(DeviceError, match=f"packed {format} weights run on the CPU, not on cuda:1"):
            load_model(tmp_path, format, packed=True, device="cuda:1")
    monkeypatch.setenv("JACOBI_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for load in (lambda: JacobiDecoder(model), lambda: load_model(tmp_path, packed=True)):
        with pytest.raises(DeviceError, match="unset JACOBI_BACKEND"):
            load()


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gemma2")
    for options in ({"packed": True}, {"dtype": "int8"}):
        with pytest.raises(UnsupportedModelError, match=r"Gemma2.*multi_block_step runs.*packed=False"):
            load_model(tmp_path, **options)


class Careless(StepEngine):
    """Steps over one token leave other values in the cache than steps over several."""

    def step(self, state: Any, cache: Any, sampling: Any) -> None:
        super().step(state, cache, sampling)
        if state.tokens.shape[0] == 1:
            cache.v_cache.mul_(1 + 1e-6)


def test_self_check_finds_a_step_that_depends_on_its_rows(tmp_path: Path) -> None:
    saved(tmp_path)
    model = load_model(tmp_path, packed=True).model
    check_packed_engine(StepEngine(model))
    with pytest.raises(UnsupportedModelError, match="one by one"):
        check_packed_engine(Careless(model))


NORM, DOWN = "model__norm__weight", "model__layers__1__mlp__down_proj__weight"


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({DOWN: None}, r"lack 1 tensors, model\.layers\.1\.mlp\.down_proj\.weight among them"),
        ({DOWN: torch.zeros(64, 99)}, r"down_proj\.weight must have shape \[64, 100\]"),
        ({NORM: torch.ones(65)}, r"norm\.weight must have shape \[64\]"),
        ({DOWN: torch.full((64, 100), torch.nan)}, "down_proj.weight holds NaN"),
        ({NORM: torch.full((64,), torch.inf)}, "norm.weight holds NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, format: str, changes: dict[str, Any], words: str) -> None:
    saved(tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(LoadError, match=words) as found:
        load_model(tmp_path, format, packed=True)
    assert "\n" not in str(found.value)


def test_damaged_files(tmp_path: Path) -> None:
    saved(tmp_path, shard="60KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / sorted(set(json.loads(index.read_text())["weight_map"].values()))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(LoadError, match=r"cannot load the weights of .* again"):
        load_model(tmp_path, packed=True)
    shard.unlink()
    with pytest.raises(LoadError, match=r"cannot load the weights of .* again"):
        load_model(tmp_path, packed=True)
    shard.write_bytes(content)
    load_model(tmp_path, packed=True)
    index.write_text("[]")
    with pytest.raises(LoadError, match="is damaged"):
        load_model(tmp_path, packed=True)
    index.unlink()
    with pytest.raises(UnsupportedModelError, match=r"not in .*safetensors files"):
        load_model(tmp_path, packed=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"intermediate_size": 10**9}, r"must have shape \[1000000000, 64\]"),  # found before memory is taken for it
        ({"num_key_value_heads": 3}, "configuration of .* is damaged"),
        ({"num_hidden_layers": 0}, "configuration of .* is damaged|num_layers"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    saved(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(LoadError, match=words) as found:
        load_model(tmp_path, packed=True)
    assert "\n" not in str(found.value)


def test_damaged_generation_config(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    assert load_model(tmp_path, packed=True).model.generation_config is not None
