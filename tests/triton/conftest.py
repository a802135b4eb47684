"""Triton kernels on a GPU where there is one, else in Triton's interpreter on the CPU (float32 only)."""

import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """What the kernels can be run in here."""
    return (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
