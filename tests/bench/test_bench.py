"""The benchmark programs run: tokens per forward on a tiny model, a case of every op's suite, the JSON they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import tokens_per_forward as tpf
from bench.decode_setup import DecodeSetup
from bench.models import Shape, check_against_reference
from jacobi_kernels import pack_step_weights
from tests.conftest import ROOT

WORDS = 64
METHODS = {"ar", "vanilla", "ours", "prompt_lookup"}
OPTIONS = ["--max-new-tokens", "24", "--block-size", "4", "--blocks", "2", "--candidates", "2", "--pool-from-prompt"]
CASES = (
    "bench_activation.py::test_activation[bfloat16-4]",
    "bench_argmax_verify.py::test_argmax_verify[float32-4]",
    "bench_attention.py::test_attention[bfloat16-16-0]",
    "bench_commit.py::test_commit[float32-4]",
    "bench_consistency_loss.py::test_consistency_loss[float32-2048x256x4096-forward]",
    "bench_packed_linear.py::test_packed_linear[bfloat16-4-attention_out]",
    "bench_redraft.py::test_redraft[16-0]",
)


def run_here(folder: Path, *arguments: str) -> int:
    return tpf.main(["--model", str(folder), *OPTIONS, *arguments])


def test_tokens_per_forward(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    files = [str(folder / name) for name in ("code.jsonl", "maths.jsonl")]
    command = [sys.executable, "bench/tokens_per_forward.py", "--model", str(folder), "--prompts", *files, *OPTIONS]
    done = subprocess.run(
        [*command, "--limit", "2", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "prompt_lookup" in done.stdout
    result = json.loads(out.read_text())
    assert result["complete"]
    assert result["settings"]["block_size"] == 4
    assert [len(file["prompts"]) for file in result["files"]] == [2, 1]
    prompts = [prompt for file in result["files"] for prompt in file["prompts"]]
    for prompt in prompts:
        assert prompt["prompt_tokens"] == 2
        assert len(prompt["token_ids"]) == 24
        assert set(prompt["methods"]) == METHODS
        for name, outcome in prompt["methods"].items():
            assert outcome["identical"] or (name == "prompt_lookup" and outcome["near_tie"])
            assert outcome["decode_tokens"] == outcome["tokens"] - 1 == 23
            assert outcome["tokens_per_forward"] == 23 / outcome["decode_forwards"]
        assert prompt["methods"]["ar"]["tokens_per_forward"] == 1
        assert prompt["methods"]["ar"]["decode_positions"] == 23
    for name, totals in result["totals"].items():
        forwards = sum(prompt["methods"][name]["decode_forwards"] for prompt in prompts)
        assert totals["decode_forwards"] == forwards <= 3 * 23
        assert totals["tokens_per_forward"] == 3 * 23 / forwards
        assert totals["lowest"] <= totals["tokens_per_forward"] <= totals["highest"]


def test_a_different_output_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decode = tpf.Runner.jacobi

    def wrong(self: tpf.Runner, ids: list[int], options: dict[str, Any], most: int) -> tuple[list[int], tpf.Outcome]:
        tokens, outcome = decode(self, ids, options, most)
        if options["block_size"] == 4 and options["candidates"] == 2 and len(tokens) > 5:
            tokens[5] = (tokens[5] + 1) % WORDS
        return tokens, outcome

    monkeypatch.setattr(tpf.Runner, "jacobi", wrong)
    out = tmp_path / "out.json"
    assert run_here(folder, "--prompts", str(folder / "maths.jsonl"), "--json", str(out)) == 1
    methods = json.loads(out.read_text())["files"][0]["prompts"][0]["methods"]
    assert methods["vanilla"]["identical"]
    assert not methods["ours"]["identical"]
    assert methods["ours"]["first_difference"] == 5


def test_an_interrupt_keeps_what_is_done(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compare = tpf.Runner.compare

    def interrupted(self: tpf.Runner, prompt: str) -> dict[str, Any]:
        if prompt == "w7 w1":
            raise KeyboardInterrupt
        return compare(self, prompt)

    monkeypatch.setattr(tpf.Runner, "compare", interrupted)
    out = tmp_path / "out.json"
    assert run_here(folder, "--prompts", str(folder / "code.jsonl"), "--json", str(out)) == 130
    result = json.loads(out.read_text())
    assert not result["complete"]
    assert [prompt["prompt"] for prompt in result["files"][0]["prompts"]] == ["w5 w9"]
    assert result["totals"]["ours"]["prompts"] == 1
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("w1 w2\n", "is not a JSON object"),
        ("[1]\n", "is not a JSON object"),
        ('{"prompt": 3}\n', "has neither prompt nor question"),
        ('{"text": "w1"}\n', "has neither prompt nor question"),
        (None, "No such file"),
    ],
)
def test_prompt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    assert tpf.main(["--prompts", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_drawn_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(20)))
    assert tpf.read_prompts(path, 3, None) == ["w0", "w1", "w2"]
    drawn = tpf.read_prompts(path, 3, 1)
    assert drawn == tpf.read_prompts(path, 3, 1) != tpf.read_prompts(path, 3, 2)
    assert len(set(drawn)) == 3


def run_pytest(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_op_has_a_case() -> None:
    out = run_pytest(*(f"bench/{case}" for case in CASES), "--benchmark-disable")
    assert f"{len(CASES)} passed" in out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_setup(dtype: torch.dtype) -> None:
    """What the benchmark of whole steps does, for a small shape: checked weights, a state that comes back."""
    shape = Shape(layers=2, hidden=48, ffn=64, heads=3, kv_heads=1, head_dim=16, vocab=80)
    tensors, config = shape.random_tensors(dtype), shape.step_config()
    weights = pack_step_weights(tensors, config, dtype)
    check_against_reference(weights, tensors, config)
    setup = DecodeSetup(weights, rows=4, cached=7, blocks=2, candidates=2)
    assert setup.rows == 2 * 4 + 2 * 3
    assert setup.visible == sum(range(8, 16)) + 2 * sum(range(9, 12))
    texts = []
    for _ in range(2):
        setup.restore()
        setup.step()
        texts.append(setup.state.text.tolist())
        assert setup.state.emitted(0)
    assert texts[0] == texts[1]


def test_measured_item(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    case = "bench/bench_activation.py::test_activation[float32-16]"
    out = run_pytest(case, "--benchmark", f"--benchmark-json={path}")
    assert "activation float32-16" in out
    assert "limits: read" in out
    result = json.loads(path.read_text())
    info = result["benchmarks"][0]["extra_info"]
    assert info["bytes"] == 16 * 1536 * 4
    assert info["floor_ms"] / info["median_ms"] == pytest.approx(info["share_of_floor"])
    assert info["peer_ms"] > 0
    assert result["machine_info"]["limits"]["read"] > 0
    assert result["machine_info"]["environment"]["torch"]


@pytest.mark.parametrize(("option", "cases"), [("--benchmark-only", 9), ("--full", 21)])
def test_cases_of_attention(option: str, cases: int) -> None:
    out = run_pytest("bench/bench_attention.py", option, "--collect-only", "-q")
    assert out.count("test_attention[float32-") == out.count("test_attention[bfloat16-") == cases
