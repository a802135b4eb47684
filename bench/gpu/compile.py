"""Compile every GPU kernel for sm_80, sm_90a and sm_100a, without a GPU, and show what each takes.

Triton kernels are compiled for every specialisation that their ``compile_cases()`` name, csrc/cuda by nvcc, and the
binding of csrc/ops_cuda is linked and loaded. The exit code is 1 when something does not compile, spills registers
where it may not, lacks the matrix instructions it is meant to have, or needs more shared memory than the target has.
Triton keeps what it compiled, so that a second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu import compile_cuda, compile_triton
from bench.gpu.resources import ARCHITECTURE, Compiled

Task = tuple[str, str, int, int]  # kind, module or file, case, target

NO_TRITON = "triton is not installed: pip install -e '.[gpu]' (Linux on x86-64)"
NO_NVCC = (
    "nvcc is not found: install the CUDA toolkit 13.0, or set CUDA_HOME; --triton-only leaves csrc/cuda and "
    "csrc/ops_cuda out"
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="TEXT", default="", help="only what has TEXT in its file's or case's name")
    parser.add_argument(
        "--target",
        type=int,
        action="append",
        choices=sorted(ARCHITECTURE),
        help="80, 90 or 100; may be given again (default: all three)",
    )
    parser.add_argument("--triton-only", action="store_true", help="leave csrc/cuda and csrc/ops_cuda out")
    parser.add_argument("-j", "--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.json and (
        args.json.is_dir() or not os.access(args.json if args.json.exists() else args.json.parent, os.W_OK)
    ):
        parser.error(f"--json: cannot write {args.json}")  # now, not minutes later
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported, here and in the workers
    for missing in missing_tools(args.triton_only):
        print(missing, file=sys.stderr)
        return 1
    start = time.perf_counter()
    tasks, faults = collect(args.k, args.target or sorted(ARCHITECTURE), args.triton_only)
    if not tasks and not faults:
        print(f"nothing has {args.k!r} in its name", file=sys.stderr)
        return 1
    results = run(tasks, max(1, args.jobs))
    faults += [fault for result in results for fault in result.faults()]
    if results:
        print_table(results)
    summary = f"{len(results)} compiled in {time.perf_counter() - start:.0f} s, {len(faults)} faults"
    if args.json:
        whole = {"results": [asdict(r) for r in results], "faults": faults}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"\n{summary}")
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    return 1 if faults else 0


def missing_tools(triton_only: bool) -> list[str]:
    """What is not installed, with the remedy."""
    missing = []
    try:
        import triton  # noqa: F401
    except ImportError:
        missing.append(NO_TRITON)
    if not triton_only and compile_cuda.find_nvcc() is None:
        missing.append(NO_NVCC)
    return missing


def collect(text: str, targets: Sequence[int], triton_only: bool) -> tuple[list[Task], list[str]]:
    """What to compile, the slow ones first, and the modules that cannot say."""
    tasks: list[Task] = []
    faults = []
    if not triton_only:
        tasks += [("cuda", name, 0, t) for name in compile_cuda.kernel_files() for t in targets if text in name]
        if any(compile_cuda.BINDING.glob("*.cpp")) and text in f"csrc/ops_cuda {compile_cuda.LINK}":
            tasks.append(("link", "", 0, compile_cuda.LINK_TARGET))
    importable = []
    for module in compile_triton.module_names():
        try:
            cases = compile_triton.cases_of(module)
        except RuntimeError as error:
            if text in module:
                faults.append(str(error))
            continue
        importable.append(module)
        for index, case in enumerate(cases):
            tasks += [("triton", module, index, t) for t in targets if text in f"{module} {case.name}"]
    if not text:
        faults += compile_triton.kernels_without_case(importable)
    return tasks, faults


def work(task: Task) -> list[Compiled]:
    kind, name, index, target = task
    if kind == "cuda":
        return compile_cuda.compile_kernels(name, target)
    if kind == "link":
        return [compile_cuda.link_and_load()]
    return [compile_triton.compile_case(name, index, target)]


def run(tasks: Sequence[Task], jobs: int) -> list[Compiled]:
    """Results in the order of the tasks, with progress on standard error."""
    results: dict[int, list[Compiled]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(work, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            last = results[futures[future]][-1]
            progress(f"{len(results)}/{len(tasks)} {last.group}: {last.name}")
    progress("")
    return [result for i in range(len(tasks)) for result in results[i]]


def progress(text: str) -> None:
    """One line that the next one replaces, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="" if text else "\r", file=sys.stderr, flush=True)


def print_table(results: Sequence[Compiled]) -> None:
    """One row per kernel and case; figures of the targets side by side."""
    from rich.console import Console
    from rich.table import Table

    targets = sorted({r.target for r in results})
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    of = " / ".join(ARCHITECTURE[t].removeprefix("sm_") for t in targets)
    for name in ("registers", "shared KB", "spilled bytes", "matrix instructions"):
        table.add_column(f"{name}\n{of}", no_wrap=True, justify="right")
    rows: dict[tuple[str, str], dict[int, Compiled]] = {}
    for r in results:
        rows.setdefault((r.group, r.name), {})[r.target] = r
    group = ""
    for (file, name), by_target in rows.items():
        if group and file != group:
            table.add_section()
        group = file
        cells = [_cell(by_target, targets, field) for field in ("registers", "shared", "spills", "mma")]
        table.add_row(file, name, *cells)
    console = Console(width=max(Console().width, 150), highlight=False)
    console.print(table)


def _cell(by_target: dict[int, Compiled], targets: Sequence[int], field: str) -> str:
    """One figure for every target, only once when all are the same."""
    values = []
    for target in targets:
        result = by_target.get(target)
        if result is None or result.usage is None:
            values.append("FAILED" if result is not None and result.error else "-")
            continue
        values.append(_figure(getattr(result.usage, field), field))
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def _figure(value: Any, field: str) -> str:
    if field == "shared":
        return f"{value / 1024:.3g}"
    return value or "-" if field == "mma" else str(value)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
