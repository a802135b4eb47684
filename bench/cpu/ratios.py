"""Ratios of our step times to a peer's, round by round, and how near our steps come to the floor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.cpu.plan import FLOOR_TARGETS, MAIN_CONTEXT, Comparison, comparisons

Row = dict[str, Any]


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """median, first_quartile, third_quartile, least, most."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {
        "median": middle,
        "first_quartile": low,
        "third_quartile": high,
        "least": min(values),
        "most": max(values),
    }


def ratios(steps: list[Row]) -> list[Row]:
    """One row per comparison of the plan whose both sides were measured at MAIN_CONTEXT."""
    found = []
    for c in comparisons():
        ours = fastest(steps, "jacobi", c.format, c.tokens)
        peer = fastest(steps, c.peer, c.peer_format, c.peer_tokens)
        if ours is not None and peer is not None:
            found.append(compare(c, ours, peer))
    return found


def fastest(steps: list[Row], engine: str, weight_format: str, tokens: int) -> Row | None:
    """The row of that case; of llama.cpp's two the one with the lower median."""
    wanted = {"engine": engine, "format": weight_format, "context": MAIN_CONTEXT, "tokens": tokens}
    rows = [row for row in steps if wanted.items() <= row.items() and row["ms_median"] is not None]
    return min(rows, key=lambda row: row["ms_median"], default=None)


def compare(c: Comparison, ours: Row, peer: Row) -> Row:
    paired = [a / b for a, b in zip(ours["rounds_ms"], peer["rounds_ms"], strict=True)]
    found: Row = {"format": c.format, "tokens": c.tokens, "peer": c.peer, "peer_format": c.peer_format}
    found |= {"peer_tokens": c.peer_tokens, "rounds": len(paired), **quartiles(paired), "target": c.target}
    if "flash_attn" in peer:
        found["flash_attn"] = peer["flash_attn"]
    return found


def floor_shares(steps: list[Row]) -> list[Row]:
    """Of our steps at MAIN_CONTEXT: each round's floor, by the limits of that round, over its time."""
    found = []
    for row in steps:
        if row["engine"] == "jacobi" and row["context"] == MAIN_CONTEXT and row.get("rounds_floor_ms"):
            paired = [floor / ms for floor, ms in zip(row["rounds_floor_ms"], row["rounds_ms"], strict=True)]
            share: Row = {"format": row["format"], "tokens": row["tokens"], "rounds": len(paired), **quartiles(paired)}
            share["of_best_limits"] = row["floor_ms"] / row["ms_median"]
            share["target"] = FLOOR_TARGETS.get((row["format"], row["tokens"]))
            found.append(share)
    return found
