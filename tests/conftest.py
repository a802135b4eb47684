"""What every test shares: the hypothesis profile, the prompts of tests/data and the real model, loaded once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from jacobi_decoding.loading import LoadedModel

# Nothing is fetched at run time; without this a mistyped model name would try the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Waiting threads sleep instead of spinning (read when torch loads OpenMP): on a busy machine small parallel regions are
# up to fifty times faster so.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

# Read when a kernel is decorated, Triton's own included: before anything imports Triton, as transformers' models do.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "jacobi", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("jacobi")

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"


@pytest.fixture(scope="session")
def prompts() -> list[dict[str, Any]]:
    """The prompts of tests/data/prompts.jsonl: dicts with id, kind and prompt."""
    with (DATA / "prompts.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 with its tokenizer; shared, so leave its weights and config as found."""
    from jacobi_decoding.loading import load_model

    return load_model(None, "float32")


@pytest.fixture
def torch_threads() -> Any:
    """torch.set_num_threads, put back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# What stands in for a GPU, by folder: the terminal summary counts it.
WITHOUT_GPU = {"tests/triton": "Triton's interpreter, or on a GPU", "tests/cuda": "the CUDA step's host interpreter"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per interpreter: how many of its tests passed."""
    for folder, name in WITHOUT_GPU.items():
        reports = [r for r in terminalreporter.stats.get("passed", []) if r.nodeid.startswith(folder)]
        if reports:
            terminalreporter.write_line(f"{len(reports)} tests passed in {name} ({folder})")
