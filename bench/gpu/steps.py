"""Latency of a whole decoding step on a GPU, for three shapes with random bfloat16 weights and T query tokens.

  launches     the kernels one after the other, from Python
  graph        the same as one captured CUDA graph
  cooperative  one CUDA launch
  HF eager     transformers' model with SDPA and a static cache, and argmax
  HF graph     the same as one captured CUDA graph

Beside each the least time that its bytes need at the measured copy bandwidth, and the step's time over that of T = 1.
``--dry-run`` lists the cases. ``--selftest`` runs a tiny shape and checks that all ways predict the same: on a GPU, or
without one in Triton's interpreter, in float32. ``--warm N`` first compiles what the cases need, in N processes. With
``--json FILE`` a run that was stopped goes on where it was. Exit code 1 when one of our ways failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu import measure

if TYPE_CHECKING:
    import torch

    from bench.decode_setup import DecodeSetup
    from bench.models import Shape
    from jacobi_kernels import StepWeights

ROWS = (1, 16, 64, 128)
CACHED = 1024
OURS = ("launches", "graph", "cooperative")
PEERS = ("HF eager", "HF graph")
WARM_LAYERS = 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="TEXT", default="", help="only shapes with TEXT in their name")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write each row to FILE; rows that are there stay")
    parser.add_argument("--dry-run", action="store_true", help="list the cases")
    parser.add_argument("--selftest", action="store_true", help="a tiny shape, also without a GPU")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="first compile the kernels, in N processes")
    parser.add_argument("--only-part", nargs=2, type=int, metavar=("I", "N"), help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if not args.dry_run:
        measure.interpret_without_gpu()
    from bench.gpu.op_cases import SHAPES, TINY

    shapes = {"tiny": TINY} if args.selftest else {name: s for name, s in SHAPES.items() if args.k in name}
    rows = (1, 4) if args.selftest else ROWS
    if args.dry_run:
        print("\n".join(key(name, t, way) for name in shapes for t in rows for way in (*OURS, *PEERS)))
        return 0
    try:
        device = measure.pick_device(args.selftest)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if args.only_part:
        return warm_part(shapes, rows, *args.only_part)
    if args.warm:
        warm(args)
    results = measure.Results.open(args.json)
    timer = measure.Timer(device, rounds=3 if args.selftest else measure.ROUNDS)
    results.facts |= measure.gpu_facts(device)
    if "copy_bytes_per_s" not in results.facts:
        results.facts["copy_bytes_per_s"] = timer.copy_bandwidth()
    for name, shape in shapes.items():
        run_shape(name, shape, rows, 12 if args.selftest else CACHED, timer, results)
    print_table(results)
    failed = [k for k, row in results.rows.items() if "error" in row and row["way"] in OURS]
    return 1 if failed else 0


def key(shape: str, rows: int, way: str) -> str:
    return f"{shape} T={rows} {way}"


def warm(args: argparse.Namespace) -> None:
    """Triton keeps what these processes compile."""
    command = [sys.executable, "-m", "bench.gpu.steps", "-k", args.k, *(["--selftest"] if args.selftest else [])]
    parts = [
        subprocess.Popen([*command, "--only-part", str(i), str(args.warm)], stdout=subprocess.DEVNULL)
        for i in range(args.warm)
    ]
    for part in parts:
        part.wait()


def warm_part(shapes: dict[str, Shape], rows: Sequence[int], part: int, parts: int) -> int:
    """One step of every part-th case with few layers."""
    import torch

    from bench.decode_setup import DecodeSetup

    for shape, t in [(shape, t) for shape in shapes.values() for t in rows][part::parts]:
        weights = random_weights(replace(shape, layers=WARM_LAYERS), torch.bfloat16, "cuda")
        DecodeSetup(weights, rows=t, cached=CACHED).step()
        torch.cuda.synchronize()
    return 0


def random_weights(shape: Shape, dtype: torch.dtype, device: str) -> StepWeights:
    from jacobi_kernels import pack_step_weights

    return pack_step_weights(shape.random_tensors(dtype, device), shape.step_config(), dtype)


def run_shape(
    name: str, shape: Shape, rows: Sequence[int], cached: int, timer: measure.Timer, results: measure.Results
) -> None:
    """Every row of one shape that is not there yet; the model is made once."""
    import torch

    from bench.gpu.step_peers import hf_model

    dtype = torch.bfloat16 if timer.on_gpu else torch.float32
    missing = [(t, way) for t in rows for way in OURS if not results.has(key(name, t, way))]
    weights = random_weights(shape, dtype, timer.device) if missing else None
    for t in rows:
        if weights is not None and any(row == t for row, _ in missing):
            for way, row in our_rows(weights, shape, t, cached, timer):
                add(results, key(name, t, way), name, t, way, row)
    del weights
    measure.release()
    models: list[Any] = []
    for t in rows:
        if all(results.has(key(name, t, way)) for way in PEERS):
            continue
        for way, row in peer_rows(lambda: hf_model(shape, dtype, timer.device), models, t, cached, timer):
            add(results, key(name, t, way), name, t, way, row)
    models.clear()
    measure.release()


def add(results: measure.Results, name: str, shape: str, rows: int, way: str, row: dict[str, Any]) -> None:
    results.add(name, {"shape": shape, "rows": rows, "way": way, **row})
    said = f"{row['us']:.0f} us" if "us" in row else row.get("skipped") or row["error"]
    print(f"{name}: {said}", file=sys.stderr, flush=True)


def our_rows(
    weights: StepWeights, shape: Shape, rows: int, cached: int, timer: measure.Timer
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(way, row) of our ways; each must predict what launches predict."""
    import torch

    from bench.decode_setup import DecodeSetup

    state: dict[str, Any] = {}

    def prepared() -> DecodeSetup:
        if "setup" not in state:
            state["setup"] = DecodeSetup(weights, rows=rows, cached=cached)
        setup: DecodeSetup = state["setup"]
        return setup

    def row(time_it: Callable[[DecodeSetup], measure.Sample]) -> dict[str, Any]:
        setup = prepared()
        sample = time_it(setup)
        work = shape.step_work(setup.visible, cached, rows, weights.dtype.itemsize)
        text = setup.state.tokens[:rows].tolist()
        same = text == state.setdefault("tokens", text)
        facts = {"us": sample.median, "low": sample.low, "high": sample.high, "same_tokens": same}
        return facts | {"bytes": work.bytes, "flops": work.flops}

    yield "launches", measure.attempt(lambda: row(lambda s: timer.eager(lambda _: s.step(), prepare=s.restore)))
    if not timer.on_gpu:
        for way in ("graph", "cooperative"):
            yield way, {"skipped": "needs a GPU"}
        return
    yield "graph", measure.attempt(lambda: row(lambda s: timer.graph(lambda _: s.step(), prepare=s.restore)))
    if not torch._C._dispatch_has_kernel_for_dispatch_key("jacobi::_cooperative_step", "CUDA"):
        yield "cooperative", {"skipped": "_C_cuda is not built"}
        return
    yield "cooperative", measure.attempt(lambda: row(lambda s: cooperative(s, timer)))


def cooperative(setup: DecodeSetup, timer: measure.Timer) -> measure.Sample:
    import torch

    from jacobi_kernels.step_weights import aligned_bytes

    sizes = (setup.state.tokens.numel(), 1, setup.state.segments.shape[0])
    least = torch.ops.jacobi._cooperative_workspace_size(setup.weights.descriptor, *sizes)
    if setup.workspace.numel() < least:
        setup.workspace = aligned_bytes(least, setup.workspace.device)
    op = torch.ops.jacobi._cooperative_step.default
    return timer.graph(lambda _: setup.step(op), prepare=setup.restore)


def peer_rows(
    make_model: Callable[[], Any], models: list[Any], rows: int, cached: int, timer: measure.Timer
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(way, row) of transformers' model, which is made when it is first needed and kept in ``models``."""
    from bench.gpu.step_peers import HfStep

    def row(time_it: Callable[[HfStep], measure.Sample]) -> dict[str, Any]:
        if not models:
            models.append(make_model())
        sample = time_it(HfStep(models[0], rows, cached))
        return {"us": sample.median, "low": sample.low, "high": sample.high}

    try:
        import transformers  # noqa: F401
    except ImportError:
        yield from ((way, {"skipped": "transformers is not installed"}) for way in PEERS)
        return
    yield "HF eager", measure.attempt(lambda: row(lambda p: timer.eager(lambda _: p.run(), prepare=p.restore)))
    if not timer.on_gpu:
        yield "HF graph", {"skipped": "needs a GPU"}
        return
    yield "HF graph", measure.attempt(lambda: row(lambda p: timer.graph(lambda _: p.run(), prepare=p.restore)))


def table_rows(results: measure.Results) -> list[list[str]]:
    """Cells of the table."""
    n, copy = measure.number, results.facts["copy_bytes_per_s"]
    cells = []
    for name, row in results.rows.items():
        if "us" not in row:
            cells.append([name, "" if "skipped" in row else "FAILED", *[""] * 6, row.get("skipped") or row["error"]])
            continue
        one = results.rows.get(key(row["shape"], 1, row["way"]), {}).get("us")
        rate = row["bytes"] / row["us"] * 1e6 if "bytes" in row else None
        floor = row["bytes"] / copy * 1e6 if "bytes" in row else None
        cells.append(
            [
                name,
                n(row["us"]),
                f"{n(row['low'])}..{n(row['high'])}",
                n(rate / 1e9) if rate else "",
                f"{rate / copy:.0%}" if rate else "",
                n(floor),
                n(row["us"] / floor) if floor else "",
                n(row["us"] / one) if one else "",
                "other tokens than launches" if row.get("same_tokens") is False else "",
            ]
        )
    return cells


def print_table(results: measure.Results) -> None:
    facts = results.facts
    columns = ("step", "us", "quartiles", "GB/s", "of copy", "floor us", "over floor", "over T=1", "note")
    copy = facts["copy_bytes_per_s"] / 1e9
    title = f"{facts.get('gpu', facts['device'])}, copy {copy:.0f} GB/s, {CACHED} cached tokens"
    measure.print_rows(title, columns, table_rows(results))


if __name__ == "__main__":
    sys.exit(main())
