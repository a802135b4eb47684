"""`jacobi pack` and the loop that decodes from its file without the decoder."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_kernels.step_weights import load_step_weights
from tests.cli.conftest import ROOT, Result, run_process, tiny_config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_file_holds_the_packed_weights(
    jacobi_here: Callable[..., Result], tiny_folder: Path, tmp_path: Path, dtype: str
) -> None:
    from jacobi_decoding.loading import load_model
    from jacobi_decoding.step_model import describe_step_model

    file = tmp_path / "packed.safetensors"
    result = jacobi_here("pack", "--model", tiny_folder, "--dtype", dtype, "--out", file)
    assert result.code == 0, result.err
    assert result.out == ""
    assert str(file) in result.err
    packed, expected = load_step_weights(file), describe_step_model(load_model(tiny_folder, dtype).model).pack()
    assert torch.equal(packed.blob, expected.blob)
    assert torch.equal(packed.descriptor, expected.descriptor)
    assert [path.name for path in tmp_path.iterdir()] == ["packed.safetensors"]


@pytest.mark.parametrize(("out", "words"), [("packed.bin", ".safetensors"), ("nowhere/packed.safetensors", "nowhere")])
def test_refuses_the_target(
    jacobi_here: Callable[..., Result], tiny_folder: Path, tmp_path: Path, out: str, words: str
) -> None:
    result = jacobi_here("pack", "--model", tiny_folder, "--out", tmp_path / out)
    assert result.code == 2
    assert words in result.err
    assert list(tmp_path.iterdir()) == []


def test_refuses_other_models(jacobi_here: Callable[..., Result], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny_config("gemma2")).save_pretrained(tmp_path / "gemma2")
    result = jacobi_here("pack", "--model", tmp_path / "gemma2", "--out", tmp_path / "packed.safetensors")
    assert result.code == 2
    assert "Gemma2" in result.err
    assert result.err.count("\n") == 1


STEP_LOOP = ROOT / "examples" / "step_loop.py"


@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_loop_prints_what_generate_prints(
    jacobi_here: Callable[..., Result], tmp_path: Path, smollm2: Any, dtype: str
) -> None:
    weights, tokens = tmp_path / "weights.safetensors", ("--max-new-tokens", "24")
    prompt = "Write a Python function that returns the n-th Fibonacci number."
    assert jacobi_here("pack", "--dtype", dtype, "--out", weights).code == 0
    answer = json.loads(jacobi_here("generate", "--prompt", prompt, "--dtype", dtype, *tokens, "--json").out)
    prompt_ids = ",".join(map(str, answer["prompt_ids"]))
    stop = str(smollm2.tokenizer.eos_token_id)
    loop = run_process(
        sys.executable, STEP_LOOP, "--weights", weights, "--prompt-ids", prompt_ids, "--stop", stop, *tokens
    )
    assert loop.code == 0, loop.err
    assert json.loads(loop.out) == answer["token_ids"]


def test_step_loop_imports_the_kernels_only() -> None:
    imported = set()
    for node in ast.walk(ast.parse(STEP_LOOP.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "jacobi_kernels"}
