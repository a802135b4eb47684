"""The GPU tools where there is no GPU: rules of the compile report, dry runs, limits and restarts of device_check."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import measure, report
from bench.gpu.resources import Compiled, Usage, mma_in_ptx, mma_in_sass, parse_ptxas
from tests.conftest import ROOT

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onePf' for 'sm_90a'
ptxas info    : Function properties for _Z3onePf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 40960 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_what_ptxas_says() -> None:
    assert parse_ptxas(PTXAS) == {"_Z3onePf": Usage(255, 40960, 20, ""), "two": Usage(32, 0, 0, "")}


def test_matrix_instructions() -> None:
    assert mma_in_ptx("  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}") == "mma"
    assert mma_in_ptx("wgmma.mma_async.sync.aligned\n tcgen05.mma.cta_group::1") == "tcgen05+wgmma"
    assert mma_in_ptx("fma.rn.f32 // summa.sync") == ""
    assert mma_in_sass("/*0100*/ HMMA.16816.F32.BF16 R4, R8 ;") == "HMMA"


@pytest.mark.parametrize("place", ["", "missing/out.json"])
def test_results_that_cannot_be_written_are_refused_first(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.gpu import compile as tool

    monkeypatch.setattr(tool, "run", lambda *args: pytest.fail("compiled"))
    with pytest.raises(SystemExit) as stop:
        tool.main(["--json", str(tmp_path / place)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: --json: cannot write {tmp_path / place}")


@pytest.mark.parametrize(
    ("compiled", "fault"),
    [
        (Compiled("f", "k", 90, Usage(64, 1024, 0, "mma"), uses_mma=True), ""),
        (Compiled("f", "k", 90, Usage(64, 1024, 20, ""), may_spill=True), ""),
        (Compiled("f", "host code", 90), ""),
        (Compiled("f", "k", 90, Usage(255, 1024, 20, "")), "f: k for sm_90a: spills 20 bytes of registers per thread"),
        (Compiled("f", "k", 80, Usage(64, 1024, 0, ""), uses_mma=True), "f: k for sm_80: has no matrix instruction"),
        (Compiled("f", "k", 80, Usage(64, 200_000, 0, "")), "f: k for sm_80: needs 195.3 KB of shared memory, the lim"),
        (Compiled("f", "k", 100, error="ValueError: no"), "f: k for sm_100a: ValueError: no"),
    ],
)
def test_rules_of_a_kernel(compiled: Compiled, fault: str) -> None:
    faults = compiled.faults()
    assert len(faults) == bool(fault)
    assert not fault or faults[0].startswith(fault)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_compiling_one_kernel(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "out.json"
    command = (
        sys.executable,
        "-m",
        "bench.gpu.compile",
        "--triton-only",
        "--target",
        "90",
        "-j",
        "1",
        "-k",
        "activation",
    )
    # Elsewhere in this process kernels are interpreted; the command compiles all the same.
    done = run(*command, "--json", out, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["faults"] == []
    assert all(r["target"] == 90 and r["usage"]["registers"] > 0 for r in result["results"])
    nothing = run(*command[:-1], "no such kernel")
    assert nothing.returncode == 1
    assert "no such kernel" in nothing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["ops", "steps"])
def test_selftests(tool: str, tmp_path: Path) -> None:
    """Tiny cases of every op, and whole steps, in Triton's interpreter."""
    pytest.importorskip("triton")
    out = tmp_path / "out.json"
    done = run(sys.executable, "-m", f"bench.gpu.{tool}", "--selftest", "--json", out, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert rows
    assert not [key for key, row in rows.items() if "error" in row]
    again = run(sys.executable, "-m", f"bench.gpu.{tool}", "--selftest", "--json", out)
    assert again.returncode == 0, again.stderr
    assert json.loads(out.read_text())["rows"] == rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("tool", ["ops", "steps"])
def test_no_gpu(tool: str) -> None:
    done = run(sys.executable, "-m", f"bench.gpu.{tool}")
    assert done.returncode == 1
    assert "there is no CUDA GPU" in done.stderr.splitlines()[-1]


# device_check with a Python that claims to have a GPU and plays the parts ---------------------------------------------

PLAYED = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
  *"torch.cuda.is_available"*) exit 0 ;;
  *get_device_capability*) echo 9.0a ;;
  "-c "*) exit 0 ;;
  *bench.gpu.report*) exec "$REAL" "$@" ;;
  "-m pytest "*) [ -e "$FAIL" ] && { echo "2 failed, 40 passed"; exit 1; }; exit 0 ;;
  *bench.gpu.steps*) sleep "${STEPS_TAKE:-0}" ;;
esac
"""


@pytest.fixture
def played(tmp_path: Path) -> dict[str, str]:
    python = tmp_path / "python"
    python.write_text(PLAYED)
    python.chmod(0o755)
    (tmp_path / "nvcc").touch(mode=0o755)
    paths = {"CALLS": str(tmp_path / "calls"), "FAIL": str(tmp_path / "fail"), "PYTHON": str(python)}
    return {**paths, "REAL": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def parts_of(out: Path) -> dict[str, str]:
    parts = json.loads((out / "device_check.json").read_text())["parts"]
    return {name: part["status"] for name, part in parts.items()}


def test_device_check_repeats_what_did_not_pass(played: dict[str, str], tmp_path: Path) -> None:
    out, fail = tmp_path / "out", Path(played["FAIL"])
    fail.touch()
    command = ("bash", "bench/device_check.sh", "--only", "build,build-cuda,tests,ops,steps", "--out", out)
    first = run(*command, **played)
    assert first.returncode == 1, first.stderr
    fine = dict.fromkeys(("build", "build-cuda", "tests", "ops", "steps"), "passed")
    assert parts_of(out) == {**fine, "tests": "failed"}
    assert "2 failed, 40 passed" in first.stdout
    fail.unlink()
    Path(played["CALLS"]).unlink()
    second = run(*command, **played)
    assert second.returncode == 0, second.stderr
    assert parts_of(out) == fine
    calls = Path(played["CALLS"]).read_text()
    assert "-m pytest tests/triton tests/gpu" in calls
    assert "setup.py" not in calls


def test_device_check_ends_within_its_limit(played: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("bash", "bench/device_check.sh", "--only", "steps,ops", "--out", out, "--limit")
    done = run(*command, "24", **played, STEPS_TAKE="100")
    assert done.returncode == 1, done.stderr
    assert parts_of(out) == {"steps": "cut off", "ops": "not run"}


@pytest.mark.parametrize("option", [["--limit", "0"], ["--only", "everything"], ["--fast"]])
def test_device_check_refuses(option: list[str]) -> None:
    done = run("bash", "bench/device_check.sh", *option)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_device_check_dry_run(tmp_path: Path) -> None:
    done = run("bash", "bench/device_check.sh", "--dry-run", "--out", tmp_path / "out", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()
    for part in ("build:", "build-cuda:", "tests:", "ops:", "steps:", "sanitizer:", "tests/gpu/test_step.py"):
        assert part in done.stdout


def test_report_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "tests").write_text("failed\t12\tone failed\n")
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0">'
        '<testcase classname="a" name="b"><failure message="bits differ&#10;more"/></testcase>'
        '<testcase classname="a" name="c"/></testsuite></testsuites>'
    )
    (tmp_path / "ops.json").write_text('{"facts": {')  # cut off
    assert report.main([str(tmp_path)]) == 1
    assert "bits differ" in capsys.readouterr().out
    whole = json.loads((tmp_path / "device_check.json").read_text())
    assert whole["tests"] == {"tests": 2, "failures": 1, "errors": 0, "skipped": 0}
    assert whole["failed_tests"] == [{"name": "a.b", "message": "bits differ"}]
    assert whole["ops"] is None


def test_rows_that_failed_are_run_again(tmp_path: Path) -> None:
    results = measure.Results.open(tmp_path / "rows.json")
    results.add("a", {"us": 1.0})
    results.add("b", measure.attempt(lambda: 1 // 0))  # type: ignore[arg-type]
    again = measure.Results.open(tmp_path / "rows.json")
    assert again.has("a")
    assert not again.has("b")
    assert "ZeroDivisionError" in again.rows["b"]["error"]


def test_a_failed_capture_names_its_cause_and_leaves_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[str] = ["own"]

    @contextmanager
    def graph(_: object) -> Iterator[None]:
        streams.append("capture's")
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    for name, stand_in in {
        "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda _: nullcontext(),
        "current_stream": lambda: SimpleNamespace(name=streams[-1], wait_stream=lambda other: None),
        "set_stream": lambda stream: streams.append(stream.name),
        "CUDAGraph": object,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    calls = iter((None, None, ValueError("not in a capture")))

    def run_it() -> None:
        if (error := next(calls)) is not None:
            raise error

    assert measure.attempt(lambda: {"us": measure.capture(run_it)}) == {"error": "ValueError: not in a capture"}
    assert streams == ["own", "capture's", "own"]


def test_the_toolkit_of_a_wrapped_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes the folder above nvcc's; what setup.py does about it, without its setup()."""
    (tool := tmp_path / "bin" / "nvcc").parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho '#$ TOP={tmp_path}/toolkit/bin/..' >&2\n")
    tool.chmod(0o755)
    code = ast.parse((ROOT / "setup.py").read_text())
    code.body = [node for node in code.body if isinstance(node, ast.FunctionDef) and node.name == "find_toolkit"]
    names = {"os": os, "re": re, "shutil": shutil, "subprocess": subprocess, "Path": Path}
    exec(compile(code, "setup.py", "exec"), names)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_PATH", "/chosen")
    names["find_toolkit"]()  # type: ignore[operator]
    assert "CUDA_HOME" not in os.environ
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("CUDA_HOME", "")  # so that it is put back
    names["find_toolkit"]()  # type: ignore[operator]
    assert os.environ["CUDA_HOME"] == f"{tmp_path}/toolkit"
