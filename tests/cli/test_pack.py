"""`jacobi pack` and the loop that decodes from its file without the decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jacobi_kernels.step_weights import load_step_weights
from tests.cli.conftest import Result, tiny_config


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
