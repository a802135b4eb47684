"""Timing on a GPU by CUDA events, the copy bandwidth that figures are compared with, and results that survive a stop.

What runs inside a step is timed in a captured graph of several calls, each with its own copy of the inputs, so that
none is found in the L2 cache and no call waits for the host; ``eager`` beside it is one call after the other from
Python. On the CPU (a self-test in Triton's interpreter) one call is run and its time means nothing.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROTATED_L2 = 4  # copies of an input together are so many L2 caches
COPIES = (4, 64)
ROUNDS = 30
COPY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Sample:
    """Microseconds: median, and first and third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Sample:
        low, median, high = statistics.quantiles(microseconds, n=4) if len(microseconds) > 1 else [microseconds[0]] * 3
        return cls(median, low, high)


class Timer:
    """Times functions on one device."""

    def __init__(self, device: str, rounds: int = ROUNDS) -> None:
        self.device, self.rounds = device, rounds

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def copies(self, bytes_each: float) -> int:
        """How many copies of an input must take turns."""
        if not self.on_gpu:
            return 1
        together = ROTATED_L2 * torch.cuda.get_device_properties(0).L2_cache_size
        return max(COPIES[0], min(COPIES[1], -(-together // max(int(bytes_each), 1))))

    def eager(
        self, run: Callable[[int], Any], copies: int = 1, prepare: Callable[[], Any] | None = None, rounds: int = 0
    ) -> Sample:
        """``run(i)``, i going round ``copies``; ``prepare`` before each is not timed."""
        if not self.on_gpu:
            if prepare is not None:
                prepare()
            start = time.perf_counter()
            run(0)
            return Sample.of([1e6 * (time.perf_counter() - start)])
        for i in range(3):
            if prepare is not None:
                prepare()
            run(i % copies)
        pairs = []
        for i in range(rounds or self.rounds):
            if prepare is not None:
                prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(i % copies)
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return Sample.of([1e3 * begin.elapsed_time(end) for begin, end in pairs])

    def graph(self, run: Callable[[int], Any], copies: int = 1, prepare: Callable[[], Any] | None = None) -> Sample:
        """One call of ``run`` inside a captured graph of ``copies`` of them."""
        if not self.on_gpu:
            return self.eager(run, copies, prepare)
        replay = capture(lambda: [run(i) for i in range(copies)], prepare)
        whole = self.eager(lambda _: replay(), prepare=prepare)
        return Sample(whole.median / copies, whole.low / copies, whole.high / copies)

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written, of a device-to-device copy; a nominal figure on the CPU."""
        if not self.on_gpu:
            return 1e10
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        sample = self.eager(lambda _: target.copy_(source), rounds=10)
        return 2 * COPY_BYTES / (1e-6 * sample.median)


def capture(run: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> Callable[[], None]:
    """Replay of ``run`` as a CUDA graph, after a run outside it that compiles what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            if prepare is not None:
                prepare()
            run()
    torch.cuda.current_stream().wait_stream(stream)
    if prepare is not None:
        prepare()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            kept = run()  # outputs live as long as the graph
    except Exception:
        torch.cuda.set_stream(before)  # torch stays on the stream whose capture failed
        raise

    def replay(kept: Any = kept) -> None:
        graph.replay()

    return replay


@dataclass
class Results:
    """Rows by key, written after each one: a run that was stopped goes on where it was."""

    path: Path | None = None
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None) -> Results:
        """What ``path`` holds so far, if anything."""
        if path is None or not path.exists():
            return cls(path)
        whole = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, whole["rows"], whole["facts"])

    def has(self, key: str) -> bool:
        """Whether the row is there and did not fail."""
        return key in self.rows and "error" not in self.rows[key]

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.rows[key] = row
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text(json.dumps({"facts": self.facts, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its row, or a row that says why there is none: one broken case does not cost the others."""
    try:
        return run()
    except Exception as error:
        cause: BaseException = error
        while cause.__context__ is not None:  # the end of a capture that failed raises an error of its own
            cause = cause.__context__
        lines = str(cause).strip().splitlines() or [""]
        return {"error": f"{type(cause).__name__}: {lines[0]}"[:300]}


def release() -> None:
    """Give back memory that nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # torch gives none back after a capture that failed
            torch.cuda.empty_cache()


def gpu_facts(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import triton

    facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "l2_bytes": properties.L2_cache_size,
        }
    return facts


def pick_device(selftest: bool) -> str:
    """'cuda', or 'cpu' for a self-test on a machine without a GPU (in Triton's interpreter).

    Raises:
        RuntimeError: there is no GPU, and this is no self-test.
    """
    if torch.cuda.is_available():
        return "cuda"
    if not selftest:
        raise RuntimeError("there is no CUDA GPU: --dry-run lists the cases, --selftest runs them tiny on the CPU")
    return "cpu"


def interpret_without_gpu() -> None:
    """Before the ops are imported: on a machine without a GPU they run in Triton's interpreter."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("JACOBI_BACKEND", "triton")


def print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, the first column to the left."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=i < len(columns) - 1)
    for row in rows:
        table.add_row(*row)
    console = Console(width=max(Console().width, 180), highlight=False)
    console.print()
    console.print(table)


def number(value: float | None) -> str:
    """Three significant digits; '' for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
