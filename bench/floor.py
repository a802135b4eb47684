"""What the machine can do at most, and the least time that an operation can take there.

Read bandwidth, float32 FMA peak and the rate of 8-bit products are measured with as many threads as torch uses by the
loops of machine_limits.c, which the C compiler builds for this machine. Where there is no compiler, torch.sum over a
large tensor and a large torch.mm stand in (8-bit products count like float32 ones); both are slower than the limit, so
shares come out too high there. The best run counts, before and after the benchmarks: other programs can only make a run
slower.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

READ_BYTES = 512 * 2**20
FMA_STEPS = 10_000_000
REPEATS = 7
SOURCE = Path(__file__).resolve().parent / "machine_limits.c"


@dataclass(frozen=True)
class Work:
    """What an operation must at least do: bytes that it reads from or writes to memory, floating-point operations."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Limits:
    """read: bytes per second from memory; fma: float32 operations per second; int8: operations per second on bytes with
    32-bit sums, by vector instructions (matrix units such as AMX do more); source: how they were measured."""

    read: float
    fma: float
    int8: float
    source: str

    def floor(self, work: Work) -> float:
        """Least seconds: memory and arithmetic may overlap, so the longer of the two."""
        return max(work.bytes / self.read, work.flops / self.fma)

    def bound(self, work: Work) -> str:
        """'memory' or 'arithmetic', whichever sets the floor."""
        return "memory" if work.bytes / self.read >= work.flops / self.fma else "arithmetic"

    def or_better(self, other: Limits) -> Limits:
        """The higher of both, each for itself."""
        return Limits(max(self.read, other.read), max(self.fma, other.fma), max(self.int8, other.int8), self.source)

    def __str__(self) -> str:
        return (
            f"read {self.read / 1e9:.1f} GB/s, float32 FMA {self.fma / 1e9:.0f} GFLOP/s, "
            f"int8 {self.int8 / 1e9:.0f} GOP/s ({self.source})"
        )


def measure_limits(repeats: int = REPEATS) -> Limits:
    """The best of ``repeats`` runs of each loop; a second or two with the default."""
    library = _compiled()
    return _torch_limits(repeats) if library is None else _native_limits(library, repeats)


def _native_limits(library: ctypes.CDLL, repeats: int) -> Limits:
    threads = torch.get_num_threads()
    data = torch.ones(READ_BYTES // 4)
    library.read_window_floats.restype = ctypes.c_long
    window = library.read_window_floats()
    part = data.numel() // threads // window * window
    library.read_floats.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.fma_loop.argtypes = [ctypes.c_long]
    library.int8_loop.argtypes = [ctypes.c_long]
    for count in (library.fma_operations_per_step, library.int8_operations_per_step):
        count.restype = ctypes.c_long
    operations = threads * FMA_STEPS
    with ThreadPoolExecutor(threads) as pool:

        def everywhere(work: Callable[[int], object]) -> Callable[[], object]:
            return lambda: list(pool.map(work, range(threads)))  # ctypes gives the interpreter's lock back

        read = _best(everywhere(lambda i: library.read_floats(data.data_ptr() + 4 * part * i, part)), repeats)
        fma = _best(everywhere(lambda _: library.fma_loop(FMA_STEPS)), repeats)
        int8 = _best(everywhere(lambda _: library.int8_loop(FMA_STEPS)), repeats)
    return Limits(
        4 * part * threads / read,
        operations * library.fma_operations_per_step() / fma,
        operations * library.int8_operations_per_step() / int8,
        "machine_limits.c",
    )


def _torch_limits(repeats: int) -> Limits:
    data, size = torch.ones(READ_BYTES // 4), 2048
    a = torch.ones(size, size)
    fma = 2 * size**3 / _best(lambda: torch.mm(a, a), repeats)
    return Limits(READ_BYTES / _best(data.sum, repeats), fma, fma, "torch, no C compiler")


def _best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` runs, behind one that is not counted."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@cache
def _compiled() -> ctypes.CDLL | None:
    """machine_limits.c as a library, or None where it cannot be built."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "machine_limits.so"
        command = [*compiler.split(), "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        try:
            subprocess.run([*command, "-o", str(target), str(SOURCE)], capture_output=True, check=True)
            return ctypes.CDLL(str(target))
        except (OSError, subprocess.CalledProcessError):
            return None
