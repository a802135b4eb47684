"""Measuring one case: rounds with rotated inputs, a peer in turn, the floor beside it; and the table of all cases."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.environment import cache_bytes, environment_line
from bench.floor import Limits, Work

ROUNDS = (5, 200)
ROTATED_CACHES = (
    8  # copies of an input together are so many last-level caches: at 3 or 4 some of it is still found there
)
MOST_ROTATED = 2**30  # bytes


class Measure:
    """Runs one benchmark item.

    benchmark: pytest-benchmark's fixture. seconds: about how long to measure (at least 5, at most 200 rounds).
    """

    def __init__(self, benchmark: Any, seconds: float) -> None:
        self.benchmark, self.seconds = benchmark, seconds

    def copies(self, bytes_each: float) -> int:
        """How many copies of an input must take turns so that none is found in the cache."""
        if not self.benchmark.enabled:
            return 1
        together = min(ROTATED_CACHES * cache_bytes(), MOST_ROTATED)
        return max(1, -(-together // max(int(bytes_each), 1)))

    def __call__(
        self,
        run: Callable[[int], Any],
        work: Work | None,
        *,
        copies: int = 1,
        prepare: Callable[[], Any] | None = None,
        peer: Callable[[int], Any] | None = None,
        peer_name: str = "",
        **facts: Any,
    ) -> None:
        """Measure ``run(i)``, i going round ``copies``.

        work: what it must at least do; None where memory and arithmetic set no useful floor.
        prepare: called before every round, not timed: puts back what the last one changed.
        peer: another implementation of the same, timed before every round, so that both meet the same noise; it gets
        an index far from ours, as it would warm the cache for us.
        facts: further columns of the JSON.
        """
        turn, peer_seconds = -1, []
        rounds = self._rounds(run, prepare) if self.benchmark.enabled else 1

        def setup() -> tuple[tuple[int], dict[str, Any]]:
            nonlocal turn
            turn = (turn + 1) % copies
            if peer is not None:
                start = time.perf_counter()
                peer((turn + copies // 2) % copies)
                peer_seconds.append(time.perf_counter() - start)
            if prepare is not None:
                prepare()
            return (turn,), {}

        self.benchmark.pedantic(run, setup=setup, rounds=rounds, warmup_rounds=1)
        if self.benchmark.enabled:
            self._record(work, peer_name, peer_seconds[1:], facts)

    def _rounds(self, run: Callable[[int], Any], prepare: Callable[[], Any] | None) -> int:
        seconds = []
        for _ in range(2):
            if prepare is not None:
                prepare()
            start = time.perf_counter()
            run(0)
            seconds.append(time.perf_counter() - start)
        return max(ROUNDS[0], min(ROUNDS[1], int(self.seconds / min(seconds))))

    def _record(self, work: Work | None, peer_name: str, peer_seconds: list[float], facts: dict[str, Any]) -> None:
        """What this item did; :func:`add_floors` says at the end of the session how near to the floor that is."""
        median = self.benchmark.stats.stats.median
        info: dict[str, Any] = {"median_ms": 1e3 * median, "iqr_ms": 1e3 * self.benchmark.stats.stats.iqr, **facts}
        if work is not None:
            info |= {
                "bytes": work.bytes,
                "flops": work.flops,
                "gb_per_s": work.bytes / median / 1e9,
                "gflop_per_s": work.flops / median / 1e9,
            }
        if peer_seconds:
            peer = statistics.median(peer_seconds)
            info |= {"peer": peer_name, "peer_ms": 1e3 * peer, "peer_over_ours": peer / median}
        self.benchmark.extra_info |= info


def add_floors(benchmarks: list[Any], limits: Limits) -> None:
    """Add floor_ms, bound and share_of_floor to the items whose work is known."""
    for bench in benchmarks:
        info = bench.extra_info
        if "bytes" in info:
            work = Work(info["bytes"], info["flops"])
            floor_ms = 1e3 * limits.floor(work)
            info |= {"floor_ms": floor_ms, "bound": limits.bound(work), "share_of_floor": floor_ms / info["median_ms"]}


def assert_close(actual: Tensor, exact: Tensor, what: str) -> None:
    """The reference check of a benchmark: a gross error, not the last bit (the tests are strict)."""
    tolerance = {4: 1e-4, 2: 2e-2}[actual.element_size()] * float(exact.abs().max())
    error = float((actual.double() - exact.double()).abs().max())
    assert error <= tolerance, f"{what} is {error:.3g} from the reference, allowed {tolerance:.3g}"


def print_table(benchmarks: list[Any], limits: Limits) -> None:
    """All measured items: time and spread, rates, floor and share of it, the peer's time."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("benchmark", no_wrap=True)
    columns = ("median ms", "iqr", "GB/s", "GFLOP/s", "floor ms", "share", "bound by", "peer ms", "peer/ours")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for bench in benchmarks:
        item, e = bench.name.removeprefix("test_"), bench.extra_info
        if last and item.split("[")[0] != last:
            table.add_section()
        last = item.split("[")[0]
        table.add_row(
            item.replace("[", " ").rstrip("]"),
            _number(e["median_ms"]),
            _number(e["iqr_ms"]),
            _number(e.get("gb_per_s")),
            _number(e.get("gflop_per_s") or None),
            _number(e.get("floor_ms")),
            f"{e['share_of_floor']:.0%}" if "share_of_floor" in e else "",
            e.get("bound", ""),
            _number(e.get("peer_ms")),
            _number(e.get("peer_over_ours")),
        )
    console = Console(width=max(Console().width, 140), highlight=False)
    console.print()
    console.print(table)
    console.print(f"\n{environment_line()}\nlimits: {limits}", soft_wrap=True)


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
