"""The machine as a worker of its own: its limits, and the facts that go with every figure."""

from __future__ import annotations

from typing import Any

import torch

from bench.environment import environment
from bench.floor import measure_limits


class Machine:
    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def facts(self) -> dict[str, Any]:
        return environment()

    def limits(self, repeats: int) -> dict[str, float | str]:
        """Under the names of the results file."""
        found = measure_limits(repeats)
        return {
            "read_gb_s": found.read / 1e9,
            "fp32_gflop_s": found.fma / 1e9,
            "int8_gop_s": found.int8 / 1e9,
            "source": found.source,
        }
