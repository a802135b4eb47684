"""`make bench-cpu` on a tiny model: what its JSON and its report hold, how ratios pair rounds, bad arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.cpu.plan import FULL, comparisons
from bench.cpu.ratios import quartiles, ratios
from tests.conftest import ROOT

MACHINE = {"read_gb_s", "fp32_gflop_s", "int8_gop_s", "threads", "cpu"}
STEP = {"engine", "format", "context", "tokens", "ms_median", "ms_min", "ms_max", "floor_ms"}
ANSWER = {"engine", "format", "method", "tokens_per_second", "tokens_per_forward", "identical"}


def bench_cpu(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(
        [sys.executable, "-m", "bench.cpu", *args],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_results_without_llama_cpp(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('as if it were not installed')\n")
    out = tmp_path / "cpu.json"
    options = ["--quick", "--formats", "int8", "float32", "--threads", "1", "--out", str(out)]
    done = bench_cpu(*options, "--model", str(folder), "--prompts", str(folder / "code.jsonl"), path=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["complete"]
    assert result["machine"].keys() >= MACHINE
    assert result["machine"]["threads"] == 1
    assert all(row.keys() >= STEP for row in result["steps"])
    assert all(row.keys() >= ANSWER for row in result["end_to_end"])
    peer = [row for row in result["steps"] if row["engine"] == "llama.cpp"]
    assert {(row["ms_median"], row["note"]) for row in peer} == {(None, "not installed")}
    for row in result["steps"]:
        if row not in peer:
            assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"], row
            assert row["floor_ms"] > 0, row
    measured = {(r["engine"], r["format"], r["context"], r["tokens"]) for r in result["steps"]}
    assert measured >= {(e, "float32", 512, m) for e in ("jacobi", "transformers", "llama.cpp") for m in (1, 16, 64)}
    assert measured >= {("jacobi", "int8", context, m) for context in (0, 512) for m in (1, 8)}
    ours = [way for way in result["end_to_end"] if way["engine"] == "jacobi"]
    ways = {(form, method) for form in ("int8", "float32") for method in ("ar", "jacobi")}
    assert {(way["format"], way["method"]) for way in ours} == ways
    assert all(way["identical"] for way in ours)
    assert "not installed" in done.stdout
    assert "Targets" in done.stdout


def step(engine: str, rounds: list[float], **more: Any) -> dict[str, Any]:
    row = {"engine": engine, "format": "float32", "context": 512, "tokens": 16, "rounds_ms": rounds}
    return row | {"ms_median": sorted(rounds)[len(rounds) // 2]} | more


def test_ratios_pair_the_rounds_with_the_faster_of_llama_cpp_s_two() -> None:
    found = ratios(
        [
            step("jacobi", [2.0, 3.0, 10.0]),
            step("llama.cpp", [9.0, 9.0, 90.0], flash_attn=True),
            step("llama.cpp", [4.0, 4.0, 40.0], flash_attn=False),
        ]
    )
    (same,) = (r for r in found if r["peer"] == "llama.cpp" and r["peer_tokens"] == 16)
    assert same["flash_attn"] is False
    assert (same["least"], same["median"], same["most"], same["rounds"]) == (0.25, 0.5, 0.75, 3)


def test_quartiles_of_one_round_are_that_round() -> None:
    assert set(quartiles([1.5]).values()) == {1.5}


def test_every_target_has_at_least_nine_rounds() -> None:
    assert FULL.rounds.start >= 9
    assert all(c.tokens in FULL.tokens and c.peer_tokens in FULL.tokens for c in comparisons())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "/nonexistent.jsonl"], "/nonexistent.jsonl"),
        (["--threads", "0"], "--threads"),
        (["--formats", "float16"], "float16"),
        (["--out", "/nonexistent/cpu.json"], "/nonexistent"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    done = bench_cpu(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
