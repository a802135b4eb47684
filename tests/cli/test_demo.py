"""`jacobi demo`: the results file, and that a failure leaves none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jacobi_decoding.cli import demo
from tests.cli.conftest import Result

pytestmark = pytest.mark.smollm2

ROW = {
    "prompt": str,
    "text_ar": str,
    "text_jacobi": str,
    "identical": bool,
    "forwards": int,
    "tokens": int,
    "tokens_per_forward": float,
    "tokens_per_forward_auto": float,
    "seconds_ar": float,
    "seconds_jacobi": float,
    "seconds_auto": float,
}


def test_demo_writes_its_results(jacobi_here: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = jacobi_here("demo", "--max-new-tokens", "32", "--json", file)
    assert result.code == 0, result.err
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written) == {"model", "tokens_per_forward", "prompts", "trained"}
    assert "SmolLM2" in written["model"]
    assert written["tokens_per_forward"] > 1
    assert [row["prompt"] for row in written["prompts"]] == [prompt for _, prompt in demo.PROMPTS]
    trained = written["trained"]
    assert set(trained) == {"model", "tokens_per_forward", "prompts"}
    assert trained["model"] == "jacobi-6m"
    assert trained["tokens_per_forward"] > 3  # it is what the model was trained for
    assert [row["prompt"] for row in trained["prompts"]] == [prompt for _, prompt in demo.trained_prompts()]
    for row in written["prompts"] + trained["prompts"]:
        assert {name: type(value) for name, value in row.items()} == ROW
        assert row["identical"] is True
        assert row["text_ar"] == row["text_jacobi"] != ""
        assert 0 < row["forwards"] <= row["tokens"] <= 32
        assert row["tokens_per_forward"] >= 1
        assert row["seconds_ar"] > 0
        assert row["seconds_jacobi"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]
    # People see the answers and the tables, the trained model's first.
    shown = " ".join(result.out.split())
    assert 0 < shown.index("token by token against blocks of 32") < shown.index("token by token against blocks of 16")
    assert f"prompt 1 of {len(demo.PROMPTS)}" in result.err


def test_prompts_are_of_every_kind() -> None:
    assert {kind for kind, _ in demo.PROMPTS} == {"code", "maths", "chat"}
    assert 6 <= len(demo.PROMPTS) <= 8
    assert {kind for kind, _ in demo.trained_prompts()} == {"arithmetic", "sql"}


def test_one_model_only(jacobi_here: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = jacobi_here("demo", "--model", "jacobi-6m", "--limit", "1", "--block-size", "8", "--json", file)
    assert result.code == 0, result.err
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written) == {"model", "tokens_per_forward", "prompts"}
    assert written["model"] == "jacobi-6m"
    assert "token by token against blocks of 8" in " ".join(result.out.split())


def test_failure_leaves_no_file(
    jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_print_table", interrupted)
    result = jacobi_here("demo", "--limit", "1", "--max-new-tokens", "4", "--json", tmp_path / "demo.json")
    assert result.code == 130
    assert list(tmp_path.iterdir()) == []


def test_different_tokens_fail(
    jacobi_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decode, calls = demo._decode, []

    def last_token_changed(*args: Any) -> tuple[list[int], dict[str, Any]]:
        ids, stats = decode(*args)
        calls.append(args)
        return [*ids[:-1], ids[-1] + (len(calls) == 5)], stats

    monkeypatch.setattr(demo, "_decode", last_token_changed)
    arguments = ("--model", "jacobi-6m", "--limit", "1", "--max-new-tokens", "4")
    result = jacobi_here("demo", *arguments, "--json", tmp_path / "demo.json")
    assert result.code == 1
    assert json.loads((tmp_path / "demo.json").read_text())["prompts"][0]["identical"] is False
    assert "NO" in result.out
