"""What the user can put right: exit code 2, one line on standard error that names the remedy, no traceback."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from jacobi_decoding.cli import CommandError
from jacobi_decoding.cli.output import warnings_as_notes, write_json_atomically
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
    check(result, "short.gguf", "download")


def test_prompt_that_is_not_utf8(
    jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    check(jacobi_here("generate", "--prompt-file", tmp_path / "latin.txt"), "latin.txt", "not UTF-8", "convert")
    check(jacobi_here("generate", "--prompt", "caf\udce9"), "--prompt is not UTF-8", "convert")
    for errors in ("strict", "surrogateescape"):  # as Python opens it, and as it does in the C locale
        stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", stdin)
        check(jacobi_here("generate", "--prompt-file", "-"), "standard input is not UTF-8", "convert")


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


@pytest.mark.parametrize("command", [("demo", "--json"), ("pack", "--out")])
def test_targets_are_checked_first(
    jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, str]
) -> None:
    monkeypatch.setattr("jacobi_decoding.cli.arguments.load", lambda *args, **options: pytest.fail("loaded"))
    name, option = command
    folder = tmp_path / "x.safetensors"
    folder.mkdir()
    check(jacobi_here(name, option, folder), str(folder), "is a folder", option)
    # root may write anywhere but here
    check(jacobi_here(name, option, "/proc/x.safetensors"), "cannot write '/proc/x.safetensors'", option)
    check(jacobi_here(name, option, tmp_path / f"{'x' * 300}.safetensors"), "too long", option)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_failing_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "x.json").write_text("old")
    for place in ("json.dump", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            with pytest.raises(CommandError, match=r"x\.json': No space left on device"):
                write_json_atomically(tmp_path / "x.json", {})
    with pytest.raises(TypeError):
        write_json_atomically(tmp_path / "x.json", {"a": object()})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    write_json_atomically(tmp_path / "x.json", {"a": "é"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": "é"}


def test_a_special_file_is_no_target(jacobi_here: Callable[..., Result]) -> None:
    check(jacobi_here("demo", "--json", "/dev/null"), "/dev/null", "not a regular file")


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_as_notes():
        warnings.warn("first\nsecond", stacklevel=1)
    assert capsys.readouterr().err == "jacobi: note: first second\n"


def test_unknown_command(jacobi_here: Callable[..., Result]) -> None:
    check(jacobi_here("conjure"), "conjure")
