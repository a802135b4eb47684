"""`jacobi info`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from tests.cli.conftest import Result


def test_facts_as_json(jacobi_here: Callable[..., Result]) -> None:
    result = jacobi_here("info", "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["cpu"]["kernels"] in ("scalar", "avx2", "avx512", "simde")
    assert all(isinstance(there, bool) for there in facts["cpu"]["features"].values())
    assert facts["default_model"].endswith(".gguf")
    names = {
        "packed_linear",
        "activation",
        "multi_block_attention",
        "multi_block_attention_with_kvcache",
        "argmax_verify",
        "commit",
        "redraft",
        "multi_block_step",
    }
    assert names <= facts["ops"].keys()
    for name in names:
        op = facts["ops"][name]
        assert "cpu" in op["devices"]
        assert op["schema"] == str(getattr(torch.ops.jacobi, name).default._schema)


def test_facts_for_people(jacobi_here: Callable[..., Result]) -> None:
    result = jacobi_here("info")
    assert result.code == 0
    for words in ("versions", "CPU features", "kernels", "multi_block_step(Tensor weights, Tensor descriptor"):
        assert words in result.out


def test_kernels_can_be_forced(jacobi: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACOBI_CPU_ISA", "scalar")
    cpu = json.loads(jacobi("info", "--json").out)["cpu"]
    assert cpu["kernels"] == cpu["kernels_override"] == "scalar"


@pytest.mark.smollm2
def test_path_of_the_default_model(jacobi_here: Callable[..., Result]) -> None:
    result = jacobi_here("info", "--json", "--model")
    assert result.code == 0, result.err
    model = json.loads(result.out)["model"]
    assert model["path"] == "multi_block_step"
    assert model["path_reason"]
    assert 130e6 < model["parameters"] < 140e6
    assert model["chat_template"] is True


def test_unknown_model(jacobi_here: Callable[..., Result]) -> None:
    result = jacobi_here("info", "--model", "/nonexistent")
    assert result.code == 2
    assert "/nonexistent" in result.err
