"""pack_step_weights: which format every matrix gets, memory while packing, and refusals."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jacobi_kernels import pack_step_weights
from jacobi_kernels.grouped import GroupedMatrix, quantize
from jacobi_kernels.step_weights import DescriptorField, LayerField
from tests.kernels.helpers import assert_equal
from tests.kernels.test_multi_block_step import (
    FORMATS,
    PROMPTS,
    RUNS,
    Model,
    decode,
    dequantized,
    grouped,
    make_model,
    model_with_every_option,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: make_model(name) for name in ("llama", "qwen3")} | {"every option": model_with_every_option()}


# Formats --------------------------------------------------------------------------------------------------------------


def mixed(model: Model) -> dict[str, Tensor | GroupedMatrix]:
    """Layer 0: q, k and v of different kinds, layer 1: one matrix of a kind of its own; a head of int4."""
    tensors = grouped(model, "int4")
    for name, form in (("layers.0.self_attn.k_proj", "int8"), ("layers.1.mlp.down_proj", "int8")):
        name = f"model.{name}.weight"
        tensors[name] = quantize(model.tensors[name], form)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = quantize(model.tensors.get(name, model.tensors["model.embed_tokens.weight"]), "int4")
    return tensors


def test_matrices_keep_their_kinds(models: dict[str, Model]) -> None:
    """Where int4 is asked for; stacked ones of several kinds become float32, and no value changes."""
    model = models["qwen3"]
    tensors = mixed(model)
    weights = pack_step_weights(tensors, model.config, "int4")
    header = len(DescriptorField)
    layers = weights.descriptor[header:].view(2, len(LayerField))
    kinds = [LayerField.QKV_TYPE, LayerField.ATTENTION_OUT_TYPE, LayerField.GATE_UP_TYPE, LayerField.DOWN_TYPE]
    assert layers[:, kinds].tolist() == [[0, 3, 3, 3], [3, 3, 3, 2]]
    assert weights[DescriptorField.LM_HEAD_TYPE] == weights[DescriptorField.EMBEDDING_TYPE] == 3
    assert weights[DescriptorField.EMBEDDING] >= 0
    values = pack_step_weights(dequantized(tensors), model.config, "float32")
    state, caches, _ = decode(weights, PROMPTS, 20, RUNS[2])
    expected, expected_caches, _ = decode(values, PROMPTS, 20, RUNS[2])
    assert_equal((state.text, *caches), (expected.text, *expected_caches))


def test_floats_asked_of_a_quantised_model(models: dict[str, Model]) -> None:
    model = models["qwen3"]
    tensors = mixed(model)
    for form in ("float32", "bfloat16"):
        ours = pack_step_weights(tensors, model.config, form)
        expected = pack_step_weights(dequantized(tensors), model.config, form)
        assert_equal((ours.blob, ours.descriptor), (expected.blob, expected.descriptor), form)
    eight = pack_step_weights(tensors, model.config, "int8")
    assert_equal(eight.blob, pack_step_weights(requantized(tensors), model.config, "int8").blob)


def requantized(tensors: Mapping[str, Tensor | GroupedMatrix]) -> dict[str, Tensor | GroupedMatrix]:
    """int8 matrices as they are, int4 ones as floats."""
    return {
        name: t.dequantize() if isinstance(t, GroupedMatrix) and t.format == "int4" else t
        for name, t in tensors.items()
    }


# Packing reads one tensor at a time -----------------------------------------------------------------------------------


class LazyTensors(Mapping[str, Any]):
    """Makes a tensor when it is asked for, and none while one that it gave is alive."""

    def __init__(self, tensors: Mapping[str, Tensor | GroupedMatrix]) -> None:
        self.tensors, self.reads, self.given = tensors, Counter[str](), list[weakref.ref[Any]]()

    def kind(self, name: str) -> str:
        value = self.tensors[name]
        return value.format if isinstance(value, GroupedMatrix) else "float"

    def __getitem__(self, name: str) -> Tensor | GroupedMatrix:
        assert not any(array() is not None for array in self.given), f"{name} is read while another tensor is alive"
        self.reads[name] += 1
        value = self.tensors[name]
        array = (value.q if isinstance(value, GroupedMatrix) else value).numpy().copy()
        self.given.append(weakref.ref(array))  # dies with the memory, which views keep
        tensor = torch.from_numpy(array)
        return replace(value, q=tensor) if isinstance(value, GroupedMatrix) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "every option", "mixed"])
def test_packing_reads_one_tensor_at_a_time(models: dict[str, Model], name: str, form: str) -> None:
    model = models["qwen3" if name == "mixed" else name]
    tensors: dict[str, Any] = mixed(model) if name == "mixed" else dict(model.tensors)
    if name == "llama":
        del tensors["lm_head.weight"]
    expected = pack_step_weights(tensors, model.config, form)
    lazy = LazyTensors(tensors)
    ours = pack_step_weights(lazy, model.config, form)
    assert_equal((ours.blob, ours.descriptor), (expected.blob, expected.descriptor))
    assert set(lazy.reads) == set(tensors)
    del lazy.reads["model.norm.weight"]  # asked for its device as well
    assert set(lazy.reads.values()) == {1}


PEAK = """
import torch
from jacobi_kernels import StepConfig, pack_step_weights

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

c = StepConfig(num_layers=2, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=12000,
               vocab_size=48000, inv_freq=torch.ones(32))
at, linears = "model.layers.%d.", {"self_attn.q_proj": (512, 512), "self_attn.k_proj": (512, 512)}
linears |= {"self_attn.v_proj": (512, 512), "self_attn.o_proj": (512, 512), "mlp.down_proj": (512, 12000)}
linears |= {"mlp.gate_proj": (12000, 512), "mlp.up_proj": (12000, 512)}
linears |= {"input_layernorm": (512,), "post_attention_layernorm": (512,)}
shapes = {at % i + n + ".weight": s for i in range(2) for n, s in linears.items()}
shapes |= {"model.embed_tokens.weight": (48000, 512), "model.norm.weight": (512,)}

class Lazy(dict):
    kind = lambda self, name: "float"
    def __getitem__(self, name):
        return torch.full(shapes[name], 0.5)

torch.set_num_threads(1)
tiny = StepConfig(num_layers=1, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=12000,
                  vocab_size=16, inv_freq=torch.ones(32))
shapes["model.embed_tokens.weight"] = (16, 512)
pack_step_weights(Lazy(shapes), tiny, FORM)  # what the first call sets up does not count
shapes["model.embed_tokens.weight"] = (48000, 512)
open("/proc/self/clear_refs", "w").write("5")  # the peak is that from now on
before = memory("VmRSS")
weights = pack_step_weights(Lazy(shapes), c, FORM)
print(memory("VmHWM") - before, weights.blob.numel() / 2**20)
"""


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_packing_needs_the_blob_and_the_largest_tensor(form: str) -> None:
    """A vocabulary of 94 MB in float32, 155 MB of other matrices."""
    code = f"FORM = {form!r}\n{PEAK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stderr == ""
    peak, blob = map(float, done.stdout.split())
    assert peak < blob + 94 + 40
    assert peak > blob + 40, "else it was not measured"


# Refusals -------------------------------------------------------------------------------------------------------------


def test_packing_refuses_other_formats(models: dict[str, Model]) -> None:
    model = models["llama"]
    for form in ("int3", torch.float16):
        with pytest.raises(ValueError, match=r"one of float32, bfloat16, int8, int4, got (int3|float16)"):
            pack_step_weights(model.tensors, model.config, form)
    name = "model.layers.1.mlp.down_proj.weight"
    for form in FORMATS:
        with pytest.raises(ValueError, match=rf"{name} holds NaN or infinity"):
            pack_step_weights(model.tensors | {name: torch.full((40, 52), float("nan"))}, model.config, form)
        wrong = quantize(torch.ones(40, 51), form)
        with pytest.raises(ValueError, match=rf"{name} must have shape \[40, 52\], got \[40, 51\]"):
            pack_step_weights(model.tensors | {name: wrong}, model.config, form)


def test_packing_names_the_tensor(models: dict[str, Model]) -> None:
    model = models["llama"]
    name = "model.layers.1.mlp.down_proj.weight"
    missing = {n: t for n, t in model.tensors.items() if n != name}
    with pytest.raises(ValueError, match=f"{name} is missing"):
        pack_step_weights(missing, model.config, torch.float32)
    with pytest.raises(ValueError, match=rf"{name} must have shape \[40, 52\], got \[40, 51\]"):
        pack_step_weights(model.tensors | {name: torch.zeros(40, 51)}, model.config, torch.float32)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds NaN"):
        pack_step_weights(model.tensors | {name: torch.full((40, 52), float("nan"))}, model.config, torch.float32)
