"""Pack trajectories into training samples: noise schedule, context, order of training.

Every block of a sample takes one state of its trajectory, by a noise schedule over the blocks of a window and over the
run. The table shows, per noise ratio, how many blocks wanted it and how many got it; the manifest in --out keeps it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_decoding.cli import CommandError, note
from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli.output import cannot_write, check_writable, write_json_atomically
from jacobi_training.noise import CEILINGS, SCHEDULES
from jacobi_training.pack_config import CONTEXTS, MODES, PackConfig

if TYPE_CHECKING:
    from jacobi_training.packing import Histogram, PackReport

SECONDS_BETWEEN_LINES = 15.0
RATIO = shared.number(0, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trajectories",
        required=True,
        nargs="+",
        metavar="DIR",
        help="folders of trajectories; several block sizes are trained one after another, the smallest first",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the packed samples")
    parser.add_argument("--json", metavar="FILE", help="write the counts and the histogram to FILE as well")
    parser.add_argument("--plot", metavar="FILE", help="draw the histogram into FILE, a .png (needs matplotlib)")
    add_pack_arguments(parser)


def add_pack_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """The settings of packing, for this stage and for a run of all stages; :func:`config_from_args` reads them.

    without: fields of PackConfig that the parser has already, or that are to keep their default.
    """
    defaults = asdict(PackConfig())
    group = parser.add_argument_group("packing")

    def add(name: str, text: str, **options: Any) -> None:
        if name in without:
            return
        shown = "" if defaults[name] is None else " (default: %(default)s)"
        group.add_argument("--" + name.replace("_", "-"), default=defaults[name], help=text + shown, **options)

    add("mode", "who teaches a noisy block, as in Jacobi Forcing (progressive) or CLLM (global, local)", choices=MODES)
    add(
        "schedule",
        "noise ratio over the blocks of a window (default: linear; any state in the modes global and local)",
        choices=SCHEDULES,
    )
    add("context", "what a noisy block continues: noisy blocks of its window, all, or clean ones", choices=CONTEXTS)
    add("window", "blocks of a window", type=shared.integer(1), metavar="W")
    add("min_ratio", "least noise ratio", type=RATIO, metavar="R")
    add("max_ratio", "greatest noise ratio", type=RATIO, metavar="R")
    add("ceiling", "how the greatest noise ratio moves over the run", choices=CEILINGS)
    add("ceiling_low", "the ceiling where a rising one starts and a falling one ends", type=RATIO, metavar="R")
    add("ceiling_share", "share of the run over which it moves", type=shared.number(0, 1, above=True), metavar="S")
    add("epochs", "times that every sample is packed", type=shared.integer(1), metavar="N")
    add("max_length", "most rows of a sample; longer answers are cut", type=shared.integer(1), metavar="N")
    add("seed", "of the order and of random states", type=shared.integer(0), metavar="N")


def config_from_args(args: argparse.Namespace) -> PackConfig:
    """The settings that the options name; a field without an option keeps its default."""
    given = vars(args)
    return PackConfig(**{f.name: given[f.name] for f in fields(PackConfig) if f.name in given})


def run(args: argparse.Namespace) -> None:
    config = config_from_args(args)
    if args.plot:
        if Path(args.plot).suffix != ".png":
            raise CommandError(f"--plot must end in .png, got {args.plot!r}")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise CommandError("--plot needs matplotlib; run `pip install matplotlib` or leave out --plot") from None
    for option in ("json", "plot"):
        if getattr(args, option):
            check_writable(Path(getattr(args, option)), f"--{option}")
    from jacobi_training.packing import write_packed

    with progress_bar() as progress:
        report = write_packed(args.trajectories, args.out, config, progress=progress)
    print_report(report)
    if args.json:
        write_json_atomically(Path(args.json), asdict(report))
    if args.plot:
        plot_histogram(report.histogram, Path(args.plot))
    note(f"packed samples are in {args.out}")


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A callback (records behind, all records): a bar on a terminal, otherwise a line now and then."""
    from rich.console import Console
    from rich.progress import Progress

    shown = time.monotonic()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("packing")

        def progress(behind: int, total: int) -> None:
            nonlocal shown
            bar.update(task, completed=behind, total=total)
            if bar.disable and time.monotonic() - shown > SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                note(f"packing: {behind} of {total} samples")

        yield progress


def print_report(report: PackReport) -> None:
    """The histogram as a table on stdout, and what was packed and left out as lines on stderr."""
    from rich.console import Console
    from rich.table import Table

    histogram = report.histogram
    table = Table(title="Blocks per noise ratio")
    for name in ("ratio", "wanted", "reached"):
        table.add_column(name, justify="right")
    table.add_column("")
    most = max(histogram.reached)
    for label, wanted, reached in zip(bin_labels(), histogram.wanted, histogram.reached, strict=True):
        table.add_row(label, str(wanted), str(reached), "█" * round(30 * reached / max(most, 1)))
    Console().print(table)
    note(
        f"{report.samples} samples, {report.blocks} blocks, {report.rows} rows: {report.ar_rows} with an AR term, "
        f"{report.consistency_rows} with a consistency term"
    )
    for count, what in (
        (report.cut, "answers were cut to fit --max-length"),
        (report.too_long, "samples were left out: not one block fits --max-length"),
        (report.empty, "samples were left out: their answer is empty"),
    ):
        if count:
            note(f"{count} {what}")


def bin_labels() -> list[str]:
    """Labels of the histogram's bins: "0.0-0.1" (its end left out), ..., "1.0"."""
    return [*(f"{i / 10:.1f}-{(i + 1) / 10:.1f}" for i in range(10)), "1.0"]


def plot_histogram(histogram: Histogram, path: Path) -> None:
    """Draw wanted and reached ratios side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="noise ratio", ylabel="blocks")
    places = range(len(histogram.reached))
    axes.bar([x - 0.2 for x in places], histogram.wanted, width=0.4, label="wanted")
    axes.bar([x + 0.2 for x in places], histogram.reached, width=0.4, label="reached")
    axes.set_xticks(list(places), bin_labels(), rotation=30)
    axes.legend()
    temporary = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error, "--plot") from None
    finally:
        temporary.unlink(missing_ok=True)
