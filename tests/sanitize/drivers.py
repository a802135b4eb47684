"""Programs without torch that run the CPU kernels, compiled with the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.helpers import available_isas

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"

# Tables and their flags, as in setup.py.
TABLES = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-Wno-maybe-uninitialized"],
}
AVAILABLE = [name for name in TABLES if name in available_isas()]

FLAGS = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi", "-pthread"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-fsanitize=thread"]
CALLS = ["--param", "asan-instrumentation-with-call-threshold=0"]  # GCC: half the time to compile
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:detect_leaks=0",  # the leak checker needs ptrace
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def _compiler() -> list[str]:
    command = os.environ.get("CXX", "c++").split()
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs a C++ compiler ({command[0]} is not found): install g++ or set CXX")
    return command


def usable(folder: Path, sanitizer: Sequence[str], runtimes: str) -> list[str]:
    """The sanitizer's flags; skips where its runtime is not installed or does not start."""
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n")
    for flags in ([*sanitizer, *CALLS], [*sanitizer]):
        made = subprocess.run([*_compiler(), *flags, str(source), "-o", str(program)], capture_output=True)
        if made.returncode == 0 and subprocess.run([str(program)], capture_output=True).returncode == 0:
            return flags
    pytest.skip(f"needs the compiler's {runtimes}: install g++'s sanitizer runtimes")


def build(folder: Path, flags: Sequence[str], names: Sequence[str], tables: Sequence[str]) -> None:
    """Programs ``folder/name`` of ``name.cpp``, linked with the kernel tables; files are compiled side by side."""
    command = [*_compiler(), *FLAGS, f"-I{CSRC}", *flags]
    jobs = {f"table_{t}": ["step_table.cpp", f"-DJACOBI_ISA=jacobi_{t}", *TABLES[t]] for t in tables[::-1]}
    jobs |= {name: [f"{name}.cpp", *(f"-DHAVE_{t}" for t in tables)] for name in names}

    def compile_one(name: str) -> str:
        source, *options = jobs[name]
        target = str(folder / f"{name}.o")
        subprocess.run([*command, *options, "-c", str(HERE / source), "-o", target], check=True, timeout=600)
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        objects = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
        linked = [objects[f"table_{t}"] for t in tables]

        def link(name: str) -> None:
            subprocess.run([*command, objects[name], *linked, "-o", str(folder / name)], check=True, timeout=300)

        list(pool.map(link, names))


def drive(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | ENVIRONMENT,
    )
