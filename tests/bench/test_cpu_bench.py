"""`make bench-cpu` on a tiny model: what its JSON and its report hold, how ratios pair rounds, bad arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from bench.cpu.answers import Way, answered
from bench.cpu.budget import Budget
from bench.cpu.floors import RATES, Ceiling, floor_ms
from bench.cpu.gguf_files import TYPES, converted
from bench.cpu.plan import FULL, comparisons
from bench.cpu.ratios import quartiles, ratios
from bench.cpu.targets import targets
from bench.decode_setup import DecodeSetup
from bench.step_phases import phases
from jacobi_decoding import load_model
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


def test_time_that_a_part_leaves_over_goes_to_the_later_ones() -> None:
    now = [0.0]
    budget = Budget(1.0, {"a": 1.0, "b": 1.0, "c": 2.0}, clock=lambda: now[0])
    assert budget.deadline("a") == 15.0
    now[0] = 6.0
    deadline = budget.deadline("b")
    assert deadline == 6.0 + 54.0 / 3
    assert not budget.over(deadline)
    now[0] = 90.0
    assert budget.deadline("c") == 90.0
    assert budget.over(90.0)


def test_floors_know_which_format_multiplies_integers() -> None:
    limits = {"read_gb_s": 10.0, "fp32_gflop_s": 100.0, "int8_gop_s": 400.0}
    row = {"format": "int8", "bytes": 2e8, "operations": 4e9}
    assert floor_ms(row, limits) == pytest.approx(40.0)
    assert floor_ms(row | {"format": "q8_0"}, limits) == pytest.approx(20.0)
    assert floor_ms({"format": "int8"}, limits) is None


def test_the_best_limits_of_a_run_are_kept_each_for_itself() -> None:
    seen = iter([(9.0, 90.0, 300.0), (8.0, 95.0, 200.0)])
    ceiling = Ceiling(lambda repeats: dict(zip(RATES, next(seen), strict=True)))
    assert ceiling.now()["read_gb_s"] == 9.0
    assert ceiling.now()["read_gb_s"] == 8.0
    assert ceiling.best == dict(zip(RATES, (9.0, 95.0, 300.0), strict=True))


def test_an_answer_that_differs_shows() -> None:
    single = {i: {"ids": [1, i], "tokens": 2, "forwards": 2, "seconds": 3.0} for i in range(2)}
    other = {0: single[0] | {"forwards": 1, "seconds": 1.5}, 1: single[1] | {"ids": [1, 7], "seconds": 1.0}}
    row = answered(Way("jacobi", "float32", method="jacobi"), other, single)
    assert (row["identical"], row["agreeing"], row["prompts"]) == (False, 1, 2)
    assert row["speed_against_ar"]["median"] == 2.5
    assert row["tokens_per_forward"] == pytest.approx(4 / 3)
    assert answered(Way("jacobi", "float32"), single, single)["identical"]


def test_targets_are_met_on_their_side_of_the_limit() -> None:
    ratio = {"format": "int8", "tokens": 16, "peer": "llama.cpp", "peer_format": "q8_0", "peer_tokens": 16}
    share = {"format": "float32", "tokens": 1, "target": 0.85}
    result = {
        "ratios": [ratio | {"target": 0.6, "median": 0.7}, ratio | {"target": None, "median": 0.1}],
        "floor_shares": [share | {"median": 0.9}],
        "end_to_end": [],
        "prefill": None,
        "memory": [{"format": "int4", "target_mb": 240.0, "over_torch_mb": 240.0}],
    }
    assert [(t["target"], t["met"]) for t in targets(result)] == [
        ("<= 0.6", False),
        (">= 0.85", True),
        ("<= 240", True),
    ]


@pytest.mark.parametrize("form", ["float32", "bfloat16", "q8_0"])
def test_weights_for_llama_cpp_keep_their_values(tmp_path: Path, form: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    source = tmp_path / "tiny.Q4_1.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    packed = quantize(values, GGMLQuantizationType.Q4_1)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = converted(source, form, tmp_path / "made")
    reader = GGUFReader(target)
    matrix, norm = reader.tensors
    expected = dequantize(packed, GGMLQuantizationType.Q4_1)
    assert matrix.tensor_type == TYPES[form][0]
    largest = np.abs(expected).max()
    error = np.abs(dequantize(matrix.data, matrix.tensor_type) - expected).max()
    assert error <= {"float32": 0.0, "bfloat16": largest / 256, "q8_0": largest / 250}[form]
    assert np.array_equal(norm.data, values[0])
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert converted(source, form, tmp_path / "made") == target
    assert list((tmp_path / "made").iterdir()) == [target]
    assert converted(source, "q4_1", tmp_path / "made") == source


def test_step_phases_add_up_to_the_step(folder: Path) -> None:
    weights = load_model(folder, packed=True).model.weights
    found = phases(DecodeSetup(weights, rows=3, cached=20), steps=2)
    assert found.keys() == {"linear", "norm_rope", "attention", "verify", "commit", "redraft"}
    assert min(found.values()) >= 0
    assert found["linear"] > 0
