"""Benchmarks: options, the cases they run over, the session's machine limits and the table at the end.

``pytest bench --benchmark-only`` (or ``--benchmark``) measures a cross of the cases: every block size with 512 cached
tokens, every cache length with 16 rows. ``--full`` measures all combinations, and longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROWS = (1, 4, 8, 16, 32, 64, 128)
CACHED = (0, 512, 2048)
LIMITS = pytest.StashKey[Any]()
CROSS = (16, 512)  # rows where cache lengths vary, cached tokens where rows vary


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmark")
    group.addoption("--benchmark", action="store_true", dest="bench_only", help="Same as --benchmark-only.")
    group.addoption("--full", action="store_true", help="All combinations of the benchmarks' cases, measured longer.")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.bench_only:
        config.option.benchmark_only = True
    if not config.option.benchmark_verbose:
        config.option.benchmark_quiet = True  # the table below says more in less space


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Arguments named dtype, rows and cached run over the cases."""
    import torch

    names = set(metafunc.fixturenames)
    if "dtype" in names:
        metafunc.parametrize("dtype", (torch.float32, torch.bfloat16), ids=lambda dtype: str(dtype)[6:])
    if {"rows", "cached"} <= names:
        full = metafunc.config.option.full
        cases = [(m, n) for m in ROWS for n in CACHED if full or m == CROSS[0] or n == CROSS[1]]
        metafunc.parametrize(("rows", "cached"), cases)
    elif "rows" in names:
        metafunc.parametrize("rows", ROWS)


@pytest.fixture(scope="session")
def limits_before(request: pytest.FixtureRequest) -> Any:
    """The machine's limits before anything else is measured; None when nothing is."""
    if request.config.option.benchmark_disable:
        return None
    from bench.floor import measure_limits

    request.config.stash[LIMITS] = limits = measure_limits()
    return limits


@pytest.fixture
def measure(benchmark: Any, limits_before: Any, request: pytest.FixtureRequest) -> Any:
    """:class:`bench.measure.Measure` of this item."""
    from bench.measure import Measure

    return Measure(benchmark, seconds=1.0 if request.config.option.full else 0.3)


def pytest_report_header() -> str:
    from bench.environment import environment_line

    return f"benchmarks: {environment_line()}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Floors, before pytest-benchmark writes its JSON: the limits are measured once more and the better ones count."""
    config = session.config
    if LIMITS in config.stash and _measured(config):
        from bench.floor import measure_limits
        from bench.measure import add_floors

        config.stash[LIMITS] = config.stash[LIMITS].or_better(measure_limits())
        add_floors(_measured(config), config.stash[LIMITS])
    yield


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    from bench.environment import environment

    machine_info["environment"] = environment()
    if LIMITS in config.stash:
        limits = config.stash[LIMITS]
        machine_info["limits"] = {"read": limits.read, "fma": limits.fma, "int8": limits.int8, "source": limits.source}


def pytest_terminal_summary(config: pytest.Config) -> None:
    if LIMITS in config.stash and _measured(config):
        from bench.measure import print_table

        print_table(_measured(config), config.stash[LIMITS])


def _measured(config: Any) -> list[Any]:
    """pytest-benchmark's items that ran to their end."""
    return [bench for bench in config._benchmarksession.benchmarks if "median_ms" in bench.extra_info]
