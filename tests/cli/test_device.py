"""--device, and the Triton backend under the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_decoding.loading import SHIPPED
from tests.cli.conftest import Result, tiny_config

COMMANDS: dict[str, list[str]] = {
    "generate": ["--prompt", "x"],
    "demo": [],
    "info": ["--model"],
    "train": ["--model", "jacobi-6m", "--prompts", "p.jsonl", "--out", "OUT"],
    "train trajectories": ["--model", "jacobi-6m", "--prompts", "p.jsonl", "--out", "OUT"],
    "train fit": ["--model", "jacobi-6m", "--packed", "p", "--out", "OUT"],
    "train evaluate": [],
}


def run_on(jacobi_here: Callable[..., Result], command: str, device: str, folder: Path) -> Result:
    arguments = [str(folder / "out") if word == "OUT" else word for word in COMMANDS[command]]
    return jacobi_here(*command.split(), *arguments, "--device", device)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_gpu(jacobi_here: Callable[..., Result], no_gpu: None, command: str, tmp_path: Path) -> None:
    result = run_on(jacobi_here, command, "cuda", tmp_path)
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last == "jacobi: error: device 'cuda': no GPU or no driver for CUDA 13.0; see what nvidia-smi says"
    assert not (tmp_path / "out").exists()


def test_a_cpu_build_of_torch(jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    result = jacobi_here("generate", "--prompt", "x", "--device", "cuda:1")
    assert result.code == 2
    assert f"device 'cuda:1': torch {torch.__version__} is a CPU build; install a CUDA build" in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_no_such_device(jacobi_here: Callable[..., Result], command: str, tmp_path: Path) -> None:
    result = run_on(jacobi_here, command, "abacus", tmp_path)
    assert result.code == 2
    assert "argument --device: must be cpu, cuda or cuda:N, got 'abacus'" in result.err


def test_info_names_devices(jacobi_here: Callable[..., Result], no_gpu: None) -> None:
    devices = json.loads(jacobi_here("info", "--json").out)["devices"]
    assert (devices["cpu"], devices["cuda"], devices["gpus"]) == ("cpu", None, [])
    assert "no GPU or no driver" in devices["cuda_problem"]
    assert "cpu: cpu; cuda: none" in jacobi_here("info").out


def test_prefill_by_flash_attn_needs_a_gpu(jacobi_here: Callable[..., Result]) -> None:
    result = jacobi_here("generate", "--prompt", "x", "--model", "jacobi-6m", "--prefill", "flash-attn")
    assert result.code == 2
    assert "prefill by flash-attn needs a GPU; use --device cuda, or leave it out" in result.err


def test_no_room_on_a_gpu_is_one_line(jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any, **options: Any) -> None:
        raise torch.cuda.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr("jacobi_decoding.cli.arguments.load", no_room)
    result = jacobi_here("generate", "--prompt", "x")
    assert result.code == 2
    assert "out of GPU memory (tried to allocate 3 GiB); take --dtype bfloat16" in result.err


def test_triton_backend(jacobi: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens from Triton's kernels, in their interpreter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "base")
    torch.manual_seed(0)
    config = tiny_config(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    command = ("generate", "--model", tmp_path, "--prompt", "x", "--max-new-tokens", "4", "--json")
    wanted = json.loads(jacobi(*command).out)
    monkeypatch.setenv("JACOBI_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = jacobi(*command)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["token_ids"] == wanted["token_ids"]
    assert (wanted["stats"]["backend"], found["stats"]["backend"]) == ("cpu", "triton")
    launches = found["stats"]["launches"]
    assert launches["multi_block_step"] > 0
    assert min(launches.values()) > 0
    result = jacobi(*command, "--dtype", "bfloat16")
    assert result.code == 2
    wanted_line = (
        "jacobi: error: JACOBI_BACKEND=triton: the interpreter computes float32 only; load the model in float32"
    )
    assert result.err.splitlines() == [wanted_line]
