"""The least time that a step can take on this machine, with limits that are measured again and again during the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.models import Shape

RATES = ("read_gb_s", "fp32_gflop_s", "int8_gop_s")
INTEGER_FORMATS = ("q8_0", "q4_1")  # llama.cpp multiplies them in 8-bit integers; everyone else all in float32
Limits = dict[str, Any]


class Ceiling:
    """What the machine can do: ``measure(repeats)`` gives RATES as they are now; the best of the run is kept."""

    def __init__(self, measure: Callable[[int], Limits]) -> None:
        self._measure = measure
        self.best: Limits = {}

    def now(self, repeats: int = 2) -> Limits:
        """The rates of this moment, each the best of ``repeats`` runs."""
        limits = self._measure(repeats)
        self.best = limits | {name: max(limits[name], self.best.get(name, 0.0)) for name in RATES}
        return limits


def step_work(shape: Shape, context: int, tokens: int, weight_bytes: int, cache_itemsize: int) -> dict[str, float]:
    """bytes that a step must read or write, operations that it must do."""
    visible = tokens * context + tokens * (tokens + 1) // 2
    attention = shape.attention_work(visible, context, tokens, cache_itemsize)
    operations = shape.step_work(visible, context, tokens, cache_itemsize).flops
    return {"bytes": weight_bytes + shape.layers * attention.bytes, "operations": operations}


def floor_ms(row: dict[str, Any], limits: Limits) -> float | None:
    """Memory or arithmetic, whichever takes longer; None for a row whose work is not known."""
    if row.get("bytes") is None:
        return None
    peak = limits["int8_gop_s"] if row["format"] in INTEGER_FORMATS else limits["fp32_gflop_s"]
    return float(1e-6 * max(row["bytes"] / limits["read_gb_s"], row["operations"] / peak))


def add_floors(rows: list[dict[str, Any]], best: Limits) -> None:
    """floor_ms of every row, by the best limits of the run."""
    for row in rows:
        row["floor_ms"] = floor_ms(row, best)
