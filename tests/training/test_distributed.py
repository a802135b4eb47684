"""Two ranks over gloo against one: the same losses and weights within float32 rounding."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_training.fit import fit
from jacobi_training.fit_config import FitConfig
from tests.conftest import ROOT
from tests.training.fit_helpers import lines, samples, save_model, tiny, weights, write_samples

pytestmark = pytest.mark.slow

# Five samples in steps of three: the ranks have unequal shares, and in the last step one of them has nothing.
BASE = FitConfig(epochs=2, batch_size=3, max_rows=60, lr=1e-3, checkpoint_every=2)
STEPS = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distributed")
    return save_model(tiny(), folder / "model"), write_samples(folder / "packed", samples(5))


def launch(inputs: tuple[Path, Path], out: Path, *options: str, stop_after: int = 0) -> str:
    """`jacobi train fit` in two processes with the environment that torchrun and accelerate set; rank 0's messages.

    stop_after: both end without a word after the checkpoint of that step.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"""
import argparse, os
from jacobi_training import checkpoints
from jacobi_training.cli import fit as command
save = checkpoints.save
def dying(folder, step, *rest):
    save(folder, step, *rest)
    if step == {stop_after}:
        os._exit(9)
checkpoints.save = dying
parser = argparse.ArgumentParser()
command.add_arguments(parser)
command.run(parser.parse_args())
"""
    arguments = ["--model", inputs[0], "--packed", inputs[1], "--out", out, "--threads", 1, "--epochs", 2]
    arguments += ["--batch-size", 3, "--max-rows", 60, "--lr", 1e-3, "--checkpoint-every", 2, *options]
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), str(ROOT / "training")])
    shared = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == (9 if stop_after else 0), error
    return errors[0]


def one_rank(inputs: tuple[Path, Path], out: Path, torch_threads: Any, **options: Any) -> Path:
    torch_threads(1)
    return fit(*inputs, out, replace(BASE, **options), quiet=True).out


def check_equal(two: Path, one: Path, tolerance: float = 2e-5) -> None:
    found, expected = lines(two / "metrics.jsonl"), lines(one / "metrics.jsonl")
    assert len(found) == len(expected) == STEPS
    for a, b in zip(found, expected, strict=True):
        assert (a["rows"], a["ar_rows"], a["consistency_rows"]) == (b["rows"], b["ar_rows"], b["consistency_rows"])
        for name in ("ar_loss", "consistency_loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_ranks_equal_one(parallel: str, inputs: tuple[Path, Path], tmp_path: Path, torch_threads: Any) -> None:
    messages = launch(inputs, tmp_path / "two", "--parallel", parallel)
    assert messages.splitlines()[-1].endswith(f"the model is in {str(tmp_path / 'two')!r}")
    check_equal(tmp_path / "two", one_rank(inputs, tmp_path / "one", torch_threads))


def test_fsdp2_with_checkpointing_lora_and_bfloat16(
    inputs: tuple[Path, Path], tmp_path: Path, torch_threads: Any
) -> None:
    options = ["--lora-rank", "2", "--gradient-checkpointing", "--precision", "bfloat16"]
    launch(inputs, tmp_path / "two", "--parallel", "fsdp2", *options)
    one = one_rank(
        inputs, tmp_path / "one", torch_threads, lora_rank=2, gradient_checkpointing=True, precision="bfloat16"
    )
    found, expected = lines(tmp_path / "two" / "metrics.jsonl"), lines(one / "metrics.jsonl")
    assert [m["ar_loss"] for m in found] == pytest.approx([m["ar_loss"] for m in expected], rel=1e-2)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_run_goes_on_with_another_number_of_ranks(
    parallel: str, inputs: tuple[Path, Path], tmp_path: Path, torch_threads: Any
) -> None:
    launch(inputs, tmp_path / "out", "--parallel", parallel, stop_after=2)
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000002"]
    out = one_rank(inputs, tmp_path / "out", torch_threads)
    check_equal(out, one_rank(inputs, tmp_path / "one", torch_threads))
