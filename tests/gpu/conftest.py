"""What only a GPU can show. Each check also runs on the CPU kernels where it can, so that its own logic is tested."""

from __future__ import annotations

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and a GPU where there is one."""
    return str(request.param)


@pytest.fixture
def gpu() -> str:
    """A GPU; the test is skipped without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return "cuda"
