"""What the user can put right: exit code 2, one line on standard error that names the remedy, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jacobi_decoding.loading import default_model_path
from tests.cli.conftest import Result, tiny_config


def check(result: Result, *words: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("jacobi: error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", "x", "--model", "/nonexistent"], ["/nonexistent", "does not exist"]),
        (["--prompt", "x", "--model", "missing.gguf"], ["missing.gguf", "does not exist"]),
        (["--prompt", "x", "--model", "nobody/no-such-model"], ["no-such-model", "hf download"]),
        (["--prompt", "x", "--model", __file__], ["not a .gguf"]),
        (["--prompt", "x", "--block-size", "0"], ["--block-size", "at least 1"]),
        (["--prompt", "x", "--block-size", "many"], ["--block-size", "integer"]),
        (["--prompt", "x", "--blocks", "0"], ["--blocks", "at least 1"]),
        (["--prompt", "x", "--candidates", "-1"], ["--candidates", "at least 0"]),
        (["--prompt", "x", "--max-new-tokens", "0"], ["--max-new-tokens", "at least 1"]),
        (["--prompt", "x", "--temperature", "-1"], ["--temperature", "at least 0"]),
        (["--prompt", "x", "--temperature", "nan"], ["--temperature", "at least 0"]),
        (["--prompt", "x", "--top-p", "0", "--temperature", "1"], ["--top-p", "above 0"]),
        (["--prompt", "x", "--top-p", "1.5", "--temperature", "1"], ["--top-p", "at most 1"]),
        (["--prompt", "x", "--top-k", "-3", "--temperature", "1"], ["--top-k", "at least 0"]),
        (["--prompt", "x", "--top-k", "5"], ["--temperature"]),
        (["--prompt", "x", "--seed", str(2**63)], ["--seed", "at most"]),
        (["--prompt", "x", "--dtype", "float16"], ["--dtype", "float32", "bfloat16"]),
        (["--prompt", "x", "--device", "abacus"], ["--device", "cpu"]),
        (["--prompt", "x", "--json", "--stream"], ["--json", "--stream"]),
        (["--chat", "--raw"], ["--chat", "--raw"]),
        (["--prompt-file", "/nonexistent.txt"], ["/nonexistent.txt", "--prompt-file"]),
        ([], ["--prompt", "--prompt-file", "--chat"]),
        (["--prompt", "x", "--no-such-option"], ["--no-such-option", "--help"]),
    ],
)
def test_generate_refuses(jacobi_here: Callable[..., Result], args: list[str], words: list[str]) -> None:
    check(jacobi_here("generate", *args), *words)


@pytest.mark.parametrize(
    "args",
    [["--model", "/nonexistent"], ["--block-size", "0"], ["--temperature", "-1"]],
    ids=lambda args: args[0],
)
def test_process_exits_with_one_line(jacobi: Callable[..., Result], args: list[str]) -> None:
    check(jacobi("generate", "--prompt", "x", *args), args[1])


@pytest.mark.parametrize("size", [3, 20, 5_000, 6_000_000])
def test_truncated_gguf(jacobi_here: Callable[..., Result], tmp_path: Path, size: int) -> None:
    file = tmp_path / "short.gguf"
    with default_model_path().open("rb") as whole:
        file.write_bytes(whole.read(size))
    result = jacobi_here("generate", "--prompt", "x", "--model", file)
    lines = result.err.strip().splitlines()
    # A file that starts like a GGUF takes seconds to read, which is announced first.
    assert all(line.startswith("jacobi: reading") for line in lines[:-1])
    check(result._replace(err=lines[-1]), "short.gguf", "download")


def test_folder_without_config(jacobi_here: Callable[..., Result], tmp_path: Path) -> None:
    check(jacobi_here("generate", "--prompt", "x", "--model", tmp_path), "config.json")


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-type"}', "{}", "[1]"])
def test_broken_config(jacobi_here: Callable[..., Result], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    check(jacobi_here("generate", "--prompt", "x", "--model", tmp_path), "config.json")


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_encoder_only(jacobi_here: Callable[..., Result], tmp_path: Path, kind: str) -> None:
    tiny_config(kind, num_key_value_heads=None).save_pretrained(tmp_path)
    check(jacobi_here("generate", "--prompt", "x", "--model", tmp_path), "encoder-only", kind)


@pytest.mark.parametrize(("kind", "words"), [("t5", "encoder-decoder"), ("vit", "not a causal language model")])
def test_not_a_language_decoder(jacobi_here: Callable[..., Result], tmp_path: Path, kind: str, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    check(jacobi_here("generate", "--prompt", "x", "--model", tmp_path), words)


def test_weights_missing_or_broken(jacobi_here: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    check(jacobi_here("generate", "--prompt", "x", "--model", folder), "weights", "again")
    weights.unlink()
    check(jacobi_here("generate", "--prompt", "x", "--model", folder), "weights")


def test_weights_of_another_model(jacobi_here: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    tiny_config(num_hidden_layers=3).save_pretrained(folder)
    check(jacobi_here("generate", "--prompt", "x", "--model", folder), "lack", "model.layers.2")


def test_quantised_folder(jacobi_here: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    check(jacobi_here("generate", "--prompt", "x", "--model", folder), "quantised")


def test_folder_without_tokenizer(jacobi_here: Callable[..., Result], tiny_folder: Path) -> None:
    check(jacobi_here("generate", "--prompt", "x", "--model", tiny_folder), "no tokenizer files")


def test_demo_checks_its_file_first(jacobi_here: Callable[..., Result]) -> None:
    check(jacobi_here("demo", "--json", "/nonexistent/demo.json"), "/nonexistent")


def test_unknown_command(jacobi_here: Callable[..., Result]) -> None:
    check(jacobi_here("conjure"), "conjure")
