"""Running the command line: as a process of its own, or in this one with the model loaded once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
JACOBI = Path(sys.executable).with_name("jacobi")


class Result(NamedTuple):
    code: int
    out: str
    err: str


def run_process(
    *command: str | Path, env: dict[str, str] | None = None, stdin: str = "", timeout: float = 300
) -> Result:
    done = subprocess.run(
        [str(part) for part in command],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def jacobi() -> Callable[..., Result]:
    """Runs the installed command in a process of its own."""

    def run(*args: str | Path, **options: Any) -> Result:
        return run_process(JACOBI, *args, **options)

    return run


@pytest.fixture(scope="session")
def loaded_models() -> Iterator[None]:
    """While it is in use, commands run in this process load each default model once."""
    from jacobi_decoding.cli import arguments

    load, cache = arguments.load, {}

    def load_once(args: Any, **options: Any) -> Any:
        names = ("model", "dtype", "device", "path", "prefill")
        key = (options.get("packed"), *(getattr(args, name, None) for name in names))
        if key not in cache:
            cache[key] = load(args, **options)
        return cache[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "load", load_once)
        yield


@pytest.fixture
def jacobi_here(loaded_models: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command in this process."""
    from jacobi_decoding.cli import main

    def run(*args: str | Path) -> Result:
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


def tiny_config(kind: str = "llama", **changes: Any) -> Any:
    """Config of a model small enough to make in a test."""
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return AutoConfig.for_model(kind, **{**sizes, **changes})


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that save_pretrained() wrote: a random Llama of 20,000 parameters, without a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(folder)
    return folder
