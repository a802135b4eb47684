"""Latency of every op on a GPU: in a captured graph and from Python, GB/s, share of the copy bandwidth, peers.

``--dry-run`` lists the cases. ``--selftest`` runs one tiny case of every op and checks it against the reference: on a
GPU, or without one in Triton's interpreter, in float32. ``--warm N`` first compiles what the cases need, in N
processes. With ``--json FILE`` a run that was stopped goes on where it was. Exit code 1 when a case failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu import measure

if TYPE_CHECKING:
    from bench.gpu.op_cases import Case


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="TEXT", default="", help="only cases with TEXT in their name")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write each row to FILE; rows that are there stay")
    parser.add_argument("--dry-run", action="store_true", help="list the cases")
    parser.add_argument("--selftest", action="store_true", help="one tiny case of every op, also without a GPU")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="first run every case once, in N processes")
    parser.add_argument("--only-part", nargs=2, type=int, metavar=("I", "N"), help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if not args.dry_run:
        measure.interpret_without_gpu()
    from bench.gpu import op_cases

    cases = [c for c in (op_cases.tiny_cases() if args.selftest else op_cases.cases()) if args.k in c.key]
    if args.dry_run:
        print("\n".join(case.key for case in cases))
        return 0
    try:
        device = measure.pick_device(args.selftest)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if args.only_part:
        i, n = args.only_part
        return run(cases[i::n], device, measure.Results(), rounds=1, quiet=True)
    if args.warm:
        warm(args)
    results = measure.Results.open(args.json)
    status = run(cases, device, results, rounds=3 if args.selftest else measure.ROUNDS)
    print_table(results)
    return status


def warm(args: argparse.Namespace) -> None:
    """Triton keeps what these processes compile."""
    command = [sys.executable, "-m", "bench.gpu.ops", "-k", args.k, *(["--selftest"] if args.selftest else [])]
    parts = [
        subprocess.Popen([*command, "--only-part", str(i), str(args.warm)], stdout=subprocess.DEVNULL)
        for i in range(args.warm)
    ]
    for part in parts:
        part.wait()


def run(cases: Sequence[Case], device: str, results: measure.Results, rounds: int, quiet: bool = False) -> int:
    """Run the cases that have no row yet; 1 when one failed."""
    import torch

    from bench.gpu.op_cases import OPS, Bench

    timer = measure.Timer(device, rounds)
    bench = Bench(timer, torch.bfloat16 if device == "cuda" else torch.float32)
    results.facts |= measure.gpu_facts(device)
    if not quiet and "copy_bytes_per_s" not in results.facts:
        results.facts["copy_bytes_per_s"] = timer.copy_bandwidth()
    failed = 0
    for case in cases:
        if results.has(case.key):
            continue
        if not quiet:
            print(case.key, file=sys.stderr, flush=True)
        torch.manual_seed(0)
        row = measure.attempt(lambda case=case: OPS[case.op](bench, case))
        results.add(case.key, row)
        if "error" in row:
            failed = 1
            print(f"{case.key}: {row['error']}", file=sys.stderr)
        measure.release()
    return failed


def table_rows(results: measure.Results) -> list[list[str]]:
    """Cells of the table."""
    n, copy = measure.number, results.facts.get("copy_bytes_per_s", 0.0)
    rows = []
    for key, row in results.rows.items():
        if "error" in row:
            rows.append([key, "FAILED", *[""] * 6, row["error"]])
            continue
        rate = row["bytes"] / row["us"] * 1e6 if row.get("bytes") else None
        share = f"{rate / copy:.0%}" if rate and copy else ""
        floor = n(row["bytes"] / copy * 1e6) if row.get("bytes") and copy else ""
        tflops = n(row["flops"] / row["us"] / 1e6) if row.get("flops") else ""
        peers = ", ".join(f"{name} {n(p) if isinstance(p, float) else p}" for name, p in row["peers"].items())
        cells = [n(row["us"]), f"{n(row['low'])}..{n(row['high'])}", n(row["eager_us"])]
        rows.append([key, *cells, n(rate / 1e9) if rate else "", share, floor, tflops, peers])
    return rows


def print_table(results: measure.Results) -> None:
    facts: dict[str, Any] = results.facts
    columns = ("op", "us", "quartiles", "from Python", "GB/s", "of copy", "floor us", "TFLOP/s", "peers, us")
    copy = facts.get("copy_bytes_per_s", 0.0) / 1e9
    measure.print_rows(f"{facts.get('gpu', facts['device'])}, copy {copy:.0f} GB/s", columns, table_rows(results))


if __name__ == "__main__":
    sys.exit(main())
