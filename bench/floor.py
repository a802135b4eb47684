"""What the machine can do at most, and the least time that an operation can take there.

Read bandwidth and float32 FMA peak are measured with as many threads as torch uses by the loops of machine_limits.c,
which the C compiler builds for this machine. Where there is no compiler, torch.sum over a large tensor and a large
torch.mm stand in; both are slower than the limit, so shares come out too high there. The best run counts, before and
after the benchmarks: other programs can only make a run slower.
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
    """read: bytes per second from memory; fma: float32 operations per second; source: how they were measured."""

    read: float
    fma: float
    source: str

    def floor(self, work: Work) -> float:
        """Least seconds: memory and arithmetic may overlap, so the longer of the two."""
        return max(work.bytes / self.read, work.flops / self.fma)

    def bound(self, work: Work) -> str:
        """'memory' or 'arithmetic', whichever sets the floor."""
        return "memory" if work.bytes / self.read >= work.flops / self.fma else "arithmetic"

    def or_better(self, other: Limits) -> Limits:
        """The higher of both, each for itself."""
        return Limits(max(self.read, other.read), max(self.fma, other.fma), self.source)

    def __str__(self) -> str:
        return f"read {self.read / 1e9:.1f} GB/s, float32 FMA {self.fma / 1e9:.0f} GFLOP/s ({self.source})"


def measure_limits() -> Limits:
    """Takes a second or two."""
    library = _compiled()
    return _torch_limits() if library is None else _native_limits(library)


def _native_limits(library: ctypes.CDLL) -> Limits:
    threads = torch.get_num_threads()
    data = torch.ones(READ_BYTES // 4)
    library.read_window_floats.restype = ctypes.c_long
    window = library.read_window_floats()
    part = data.numel() // threads // window * window
    library.read_floats.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.fma_loop.argtypes = [ctypes.c_long]
    library.fma_operations_per_step.restype = ctypes.c_long
    steps = library.fma_operations_per_step()
    with ThreadPoolExecutor(threads) as pool:

        def everywhere(work: Callable[[int], object]) -> Callable[[], object]:
            return lambda: list(pool.map(work, range(threads)))  # ctypes gives the interpreter's lock back

        read = _best(everywhere(lambda i: library.read_floats(data.data_ptr() + 4 * part * i, part)))
        fma = _best(everywhere(lambda _: library.fma_loop(FMA_STEPS)))
    return Limits(4 * part * threads / read, threads * FMA_STEPS * steps / fma, "machine_limits.c")


def _torch_limits() -> Limits:
    data, size = torch.ones(READ_BYTES // 4), 2048
    a = torch.ones(size, size)
    return Limits(READ_BYTES / _best(data.sum), 2 * size**3 / _best(lambda: torch.mm(a, a)), "torch, no C compiler")


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of REPEATS runs."""
    run()
    seconds = []
    for _ in range(REPEATS):
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
