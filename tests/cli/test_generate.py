"""`jacobi generate` on the real model: blocks change the number of forwards, never the tokens."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Result

pytestmark = pytest.mark.smollm2

PROMPT = "Write a Python function that returns the n-th Fibonacci number."
BLOCKS = ["--block-size", "16", "--blocks", "2", "--candidates", "4"]
SINGLE = ["--block-size", "1", "--blocks", "1", "--candidates", "0"]
DTYPES = ["float32", "bfloat16"]
STATS = {"backend", "path", "forwards", "positions", "tokens", "tokens_per_forward", "seconds"}


def answer(run: Callable[..., Result], *args: str, prompt: str = PROMPT, tokens: int = 96) -> dict[str, Any]:
    result = run("generate", "--prompt", prompt, "--max-new-tokens", str(tokens), "--json", *args)
    assert result.code == 0, result.err
    assert result.out.count("\n") == 1
    return json.loads(result.out)


@pytest.fixture(scope="module")
def kept() -> dict[Any, Any]:
    """Answers by their arguments: several tests compare with the same one."""
    return {}


@pytest.fixture
def ask(kept: dict[Any, Any], jacobi_here: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    def run(*args: str) -> dict[str, Any]:
        if args not in kept:
            kept[args] = answer(jacobi_here, *args)
        return kept[args]

    return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_equals_token_by_token(ask: Callable[..., dict[str, Any]], dtype: str) -> None:
    blocks, single = ask("--dtype", dtype, *BLOCKS), ask("--dtype", dtype, *SINGLE)
    assert blocks["token_ids"] == single["token_ids"]
    assert blocks["text"] == single["text"]
    assert 0 < len(blocks["token_ids"]) <= 96
    assert blocks["stats"].keys() >= STATS
    assert blocks["stats"]["tokens"] == len(blocks["token_ids"])
    assert blocks["stats"]["forwards"] < len(blocks["token_ids"])
    assert blocks["stats"]["tokens_per_forward"] > 1
    assert single["stats"]["tokens_per_forward"] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_equals_token_by_token(ask: Callable[..., dict[str, Any]], dtype: str) -> None:
    sampled = ["--dtype", dtype, "--temperature", "0.8", "--seed"]
    blocks = ask(*sampled, "7", *BLOCKS)
    assert blocks["token_ids"] == ask(*sampled, "7", *SINGLE)["token_ids"]
    assert blocks["token_ids"] != ask("--dtype", dtype, *BLOCKS)["token_ids"]
    assert blocks["token_ids"] != ask(*sampled, "8", *BLOCKS)["token_ids"]


def test_top_k_and_top_p(jacobi_here: Callable[..., Result]) -> None:
    sampled = ["--temperature", "1.2", "--top-k", "40", "--top-p", "0.9", "--seed", "3"]
    blocks, single = (answer(jacobi_here, *sampled, *way, tokens=32) for way in (BLOCKS, SINGLE))
    assert blocks["token_ids"] == single["token_ids"]


def test_process_prints_the_same(jacobi: Callable[..., Result], ask: Callable[..., dict[str, Any]]) -> None:
    alone, here = answer(jacobi, *BLOCKS), ask("--dtype", "float32", *BLOCKS)
    assert {name: alone[name] for name in ("text", "token_ids", "prompt_ids", "model", "settings")} == {
        name: here[name] for name in ("text", "token_ids", "prompt_ids", "model", "settings")
    }


def test_paths_agree(ask: Callable[..., dict[str, Any]], jacobi_here: Callable[..., Result]) -> None:
    step, modules = (answer(jacobi_here, "--path", path, *BLOCKS, tokens=24) for path in ("step", "modules"))
    assert step["stats"]["path"] == "multi_block_step"
    assert modules["stats"]["path"] == "modules"
    whole = ask("--dtype", "float32", *BLOCKS)["token_ids"]
    assert step["token_ids"] == whole[: len(step["token_ids"])]
    assert modules["token_ids"] == whole[: len(modules["token_ids"])]


def test_auto_is_the_default_and_exact(ask: Callable[..., dict[str, Any]]) -> None:
    auto, single = ask("--dtype", "float32"), ask("--dtype", "float32", *SINGLE)
    assert auto["token_ids"] == single["token_ids"]
    assert auto["settings"]["block_size"] == "auto"
    assert auto["stats"]["adaptive"] is True
    assert auto["stats"]["tokens_per_forward"] >= 1  # how much more depends on the step times measured here


def test_settings_and_prompt_ids(ask: Callable[..., dict[str, Any]], smollm2: Any) -> None:
    result = ask("--dtype", "float32", *BLOCKS)
    settings = {"block_size": 16, "blocks": 2, "candidates": 4, "dtype": "float32", "temperature": 0.0, "seed": 0}
    assert settings.items() <= result["settings"].items()
    chat = [{"role": "user", "content": PROMPT}]
    expected = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert result["prompt_ids"] == expected["input_ids"]
    assert result["text"] == smollm2.tokenizer.decode(result["token_ids"], skip_special_tokens=True)


def test_raw_prompt(jacobi_here: Callable[..., Result], smollm2: Any) -> None:
    result = answer(jacobi_here, "--raw", prompt="def add(a, b):", tokens=8)
    assert result["prompt_ids"] == smollm2.tokenizer("def add(a, b):")["input_ids"]


def test_ignore_eos_goes_on(jacobi_here: Callable[..., Result], smollm2: Any) -> None:
    prompt = "Answer with the word yes and nothing else."
    eos = smollm2.tokenizer.eos_token_id
    stopped = answer(jacobi_here, prompt=prompt, tokens=64)
    assert stopped["token_ids"][-1] == eos
    assert eos not in stopped["token_ids"][:-1]
    going = answer(jacobi_here, "--ignore-eos", prompt=prompt, tokens=64)
    assert len(going["token_ids"]) == 64
    assert going["token_ids"][: len(stopped["token_ids"])] == stopped["token_ids"]


def test_stream_prints_the_same_text(jacobi_here: Callable[..., Result]) -> None:
    args = ["generate", "--prompt", PROMPT, "--max-new-tokens", "32", *BLOCKS]
    whole = jacobi_here(*args)
    streamed = jacobi_here(*args, "--stream", "--stats")
    assert streamed.out.strip() == whole.out.strip() != ""
    assert whole.err == ""
    assert "tokens per forward" in streamed.err


def test_prompt_file(
    jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smollm2: Any
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Say hello in Español.", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hello in Español."))
    for source in (file, "-"):
        result = jacobi_here("generate", "--prompt-file", source, "--max-new-tokens", "4", "--json")
        assert result.code == 0, result.err
        assert "Say hello in Español." in smollm2.tokenizer.decode(json.loads(result.out)["prompt_ids"])


def test_prompt_file_must_be_text(jacobi_here: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    result = jacobi_here("generate", "--prompt-file", file)
    assert result.code == 2
    assert "UTF-8" in result.err


def test_chat_keeps_the_conversation(
    jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, smollm2: Any
) -> None:
    from jacobi_decoding.cli import arguments

    conversations = []
    chat_ids = arguments.chat_ids

    def spy(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
        conversations.append([dict(message) for message in messages])
        return chat_ids(tokenizer, messages)

    monkeypatch.setattr(arguments, "chat_ids", spy)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n\nWhat did I just say?\n"))
    result = jacobi_here("generate", "--chat", "--max-new-tokens", "12")
    assert result.code == 0
    first, second = conversations
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0] == first[0] == {"role": "user", "content": "Hello!"}
    assert second[1]["content"].strip() in result.out


def test_non_english_text_is_not_escaped(jacobi_here: Callable[..., Result]) -> None:
    result = answer(jacobi_here, prompt="Repeat: ¡Olé! Привет", tokens=12)
    assert result["text"].isprintable() or "\n" in result["text"]
