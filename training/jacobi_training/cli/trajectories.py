"""Write a model's own block trajectories: greedy answers with every Jacobi state on the way.

Interrupted, the same command goes on where it stopped and leaves the same files as if it had run through. Under
torchrun each process makes every world-size-th shard; the files do not depend on how many there are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli import note
from jacobi_decoding.cli.output import check_writable, write_json_atomically
from jacobi_training.trajectory_config import INITS, MOST, TrajectoryConfig

if TYPE_CHECKING:
    from jacobi_training.trajectories import Progress, Summary

SECONDS_BETWEEN_LINES = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the shards, new or begun")
    parser.add_argument("--json", metavar="FILE", help="write the summary to FILE as well (rank 0: of its shards)")
    shared.add_model_arguments(parser)
    shared.add_device_argument(parser)
    add_prompt_arguments(parser)
    add_trajectory_arguments(parser)
    group = parser.add_argument_group("ranks")
    for option, variable, least, text in (
        ("--rank", "RANK", 0, "this process among all, from 0"),
        ("--world-size", "WORLD_SIZE", 1, "number of processes"),
    ):
        group.add_argument(
            option,
            type=shared.integer(least),
            default=os.environ.get(variable, str(least)),  # argparse checks a default that is text
            metavar="N",
            help=f"{text} (default: {variable} as torchrun sets it, else {least})",
        )


def add_prompt_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """What names the prompts, for this stage and for a run of all stages."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        required=required,
        metavar="FILE",
        help="a .jsonl file whose records have prompt, question, messages or prompt_ids, or a data set folder that "
        "save_to_disk() wrote",
    )
    group.add_argument(
        "--chat-template", action="store_true", help="make text the user's message in the tokenizer's chat template"
    )


def add_trajectory_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """The settings of trajectories, for this stage and for a run of all stages; :func:`config_from_args` reads them.

    without: fields of TrajectoryConfig that the parser has already, or that are to keep their default.
    """
    defaults = asdict(TrajectoryConfig())
    group = parser.add_argument_group("trajectories")

    def add(name: str, text: str, **options: Any) -> None:
        if name in without:
            return
        shown = "" if defaults[name] is None else " (default: %(default)s)"
        group.add_argument("--" + name.replace("_", "-"), default=defaults[name], help=text + shown, **options)

    add("block_size", "tokens of a block", type=shared.integer(2, MOST), metavar="N")
    add("max_new_tokens", "longest answer", type=shared.integer(1, MOST), metavar="N")
    add(
        "init",
        "first guesses of a block: random tokens of the vocabulary or of the prompt, the last final token repeated, or "
        "one of these for each block",
        choices=INITS,
    )
    add("limit", "take the first N distinct prompts", type=shared.integer(1), metavar="N")
    add("repeats", "end an answer where 10 tokens stand in it for the N-th time; 0: never", type=_repeats, metavar="N")
    add(
        "stop_tokens",
        "end answers at these token ids, not the model's",
        type=shared.integer(0),
        nargs="+",
        metavar="ID",
    )
    add("seed", "of the guesses", type=shared.integer(-(2**63)), metavar="N")
    add("shard_size", "prompts of a shard", type=shared.integer(1), metavar="N")
    add("batch_size", "answers side by side; changes speed, not the files", type=shared.integer(1), metavar="N")


def _repeats(text: str) -> int:
    value = shared.integer(0)(text)
    if value == 1:
        raise argparse.ArgumentTypeError("must be 0 (never) or at least 2, got 1")
    return value


def config_from_args(args: argparse.Namespace) -> TrajectoryConfig:
    """The settings that the options name; a field without an option keeps its default."""
    values: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(TrajectoryConfig)}
    if values["stop_tokens"] is not None:
        values["stop_tokens"] = tuple(values["stop_tokens"])
    return TrajectoryConfig(**values)


def run(args: argparse.Namespace) -> None:
    config = config_from_args(args)
    if args.json:
        check_writable(Path(args.json), "--json")
    shared.set_threads(args)
    from jacobi_training.distributed import own_device

    loaded = shared.load(argparse.Namespace(**vars(args) | {"device": own_device(args.device)}), need_tokenizer=False)
    from jacobi_training.prompts import read_prompts
    from jacobi_training.trajectories import write_trajectories

    prompts = read_prompts(args.prompts, loaded.tokenizer, chat_template=args.chat_template)
    with progress_bar("trajectories") as progress:
        summary = write_trajectories(
            loaded.model,
            prompts,
            args.out,
            config,
            tokenizer=loaded.tokenizer,
            rank=args.rank,
            world_size=args.world_size,
            progress=progress,
        )
    print_summary(summary)
    note(f"trajectories are in {args.out}")
    if args.json and args.rank == 0:
        write_json_atomically(Path(args.json), asdict(summary))


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A callback for :func:`write_trajectories`: a bar on a terminal, otherwise a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    started = shown = time.monotonic()
    with Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(title, total=None, speed="")

        def progress(finished: int, tokens: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            speed = f"{tokens / max(now - started, 1e-9):.0f} tokens/s"
            bar.update(task, completed=finished, total=total, speed=speed)
            if bar.disable and now - shown > SECONDS_BETWEEN_LINES:
                shown = now
                note(f"{title}: {finished} of {total} prompts, {speed}")

        yield progress


def print_summary(summary: Summary) -> None:
    """What was made, as lines on stderr."""
    note(
        f"{summary.prompts} prompts, {summary.tokens} tokens, {summary.tpf:.2f} tokens per forward, "
        f"{summary.iterations_per_block:.1f} iterations per block, {summary.states} states"
    )
    ends = ", ".join(f"{count} by {how}" for how, count in summary.stops.items() if count)
    kept = f"; {summary.shards_kept} shards were there already" if summary.shards_kept else ""
    note(f"answers ended: {ends or 'none'}; {summary.tokens_per_second:.0f} tokens/s{kept}")
    if summary.duplicates:
        note(f"{summary.duplicates} prompts were left out: they occurred before")
