"""`jacobi generate`, `info` and `pack` with packed weights, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_decoding.loading import load_model
from jacobi_kernels.step_weights import load_step_weights
from tests.cli.conftest import ROOT, Result, tiny_config

PROMPT = "Write a Python function that adds two numbers."
FORMATS = ["float32", "bfloat16", "int8", "int4"]
SINGLE = ("--block-size", "1", "--blocks", "1", "--candidates", "0")


@pytest.mark.smollm2
@pytest.mark.parametrize("format", FORMATS)
def test_auto_equals_token_by_token(jacobi_here: Callable[..., Result], format: str) -> None:
    answers = []
    for options in (("--block-size", "auto"), SINGLE):
        tokens = ("--max-new-tokens", "32", "--stats", "--json")
        result = jacobi_here("generate", "--prompt", PROMPT, "--dtype", format, *options, *tokens)
        assert result.code == 0, result.err
        answers.append(json.loads(result.out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["settings"]["dtype"] == format
    assert answers[0]["stats"]["path"] == "multi_block_step"


@pytest.mark.smollm2
def test_int4_gives_the_tokens_of_float32(jacobi_here: Callable[..., Result]) -> None:
    """The default file holds Q4_1 and Q8_0, whose values both formats keep."""
    answers = [
        json.loads(jacobi_here("generate", "--prompt", PROMPT, "--dtype", format, "--json").out)["token_ids"]
        for format in ("float32", "int4")
    ]
    assert answers[0] == answers[1]


@pytest.mark.smollm2
def test_info_tells_format_and_size(jacobi_here: Callable[..., Result]) -> None:
    facts = json.loads(jacobi_here("info", "--model", "--dtype", "int4", "--json").out)["model"]
    assert facts["path"] == "multi_block_step"
    assert facts["path_reason"] == "Llama models run as one op per step"
    assert facts["dtype"] == "int4"
    assert 90 < facts["packed_mb"] < 100
    assert "int4, 97 MB packed" in jacobi_here("info", "--model", "--dtype", "int4").out


def test_models_without_a_step_run_by_their_modules(jacobi_here: Callable[..., Result], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny_config("gemma2")).save_pretrained(tmp_path)
    result = jacobi_here("info", "--model", tmp_path, "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)["model"]
    assert (facts["path"], facts["packed_mb"]) == ("modules", None)
    assert facts["parameters"] > 0
    for command in (("generate", "--prompt", "x"), ("info",)):
        result = jacobi_here(*command, "--model", tmp_path, "--dtype", "int8")
        assert result.code == 2
        assert result.err.count("\n") == 1
        assert "--dtype int8: Gemma2ForCausalLM" in result.err
        assert "use --dtype float32 or bfloat16" in result.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--path", "modules"), ("int4", "leave out --path modules")),
        (("--prefill", "flash-attn"), ("int4", "leave out --prefill flash-attn")),
        (("--device", "cuda"), ("int4", "not on cuda")),
    ],
)
def test_int4_is_refused(
    jacobi_here: Callable[..., Result], tiny_folder: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = jacobi_here("generate", "--prompt", "x", "--model", tiny_folder, "--dtype", "int4", *options)
    assert result.code == 2
    assert result.err.count("\n") == 1
    for word in words:
        assert word in result.err


def test_int4_is_refused_in_the_interpreter(
    jacobi_here: Callable[..., Result], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACOBI_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = jacobi_here("info", "--model", tiny_folder, "--dtype", "int4")
    assert result.code == 2
    assert "unset JACOBI_BACKEND" in result.err


@pytest.mark.parametrize("format", FORMATS)
def test_pack_writes_packed_weights(
    jacobi_here: Callable[..., Result], tiny_folder: Path, tmp_path: Path, format: str
) -> None:
    file = tmp_path / "packed.safetensors"
    result = jacobi_here("pack", "--model", tiny_folder, "--dtype", format, "--out", file)
    assert result.code == 0, result.err
    packed, expected = load_step_weights(file), load_model(tiny_folder, format, packed=True).model.weights
    assert packed.format == format
    assert torch.equal(packed.blob, expected.blob)
    assert torch.equal(packed.descriptor, expected.descriptor)


MEASURE = """
import sys, torch
def peak():
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
before, packed = peak(), 0
if sys.argv[1] != "torch":
    from jacobi_decoding import JacobiDecoder, load_model
    loaded = load_model(None, sys.argv[1], packed=True)
    decoder = JacobiDecoder(loaded.model, loaded.tokenizer)
    decoder.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, block_size=4)
    packed = loaded.model.weights.blob.numel()
    assert not any("modeling_llama" in name or name.startswith("triton.") for name in sys.modules)
print(peak(), packed)
"""


def measured(what: str) -> tuple[int, int]:
    """Peak bytes of a process, and bytes of the weights that it packed."""
    command = [sys.executable, "-c", MEASURE, what]
    peak, packed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    return int(peak), int(packed)


@pytest.fixture(scope="module")
def only_torch() -> int:
    return measured("torch")[0]


@pytest.mark.smollm2
@pytest.mark.parametrize("format", FORMATS)
def test_memory_is_the_packed_weights_and_little_else(
    smollm2: Any, only_torch: int, format: str, record_property: Any
) -> None:
    """Beside the weights: transformers' config code (some 90 MB), the tokenizer (60 MB), one tensor at a time."""
    peak, packed = measured(format)
    beside = (peak - only_torch - packed) / 1e6
    print(f"{format}: {packed / 1e6:.0f} MB packed, peak {beside:.0f} MB above torch and weights")
    record_property("megabytes_beside_torch_and_weights", beside)
    assert beside < 180
