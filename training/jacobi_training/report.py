"""An evaluation's result for people: tables on the terminal, a plot, and progress while it runs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jacobi_decoding.cli import CommandError, note
from jacobi_decoding.cli.output import cannot_write
from jacobi_training.decode_runs import Interval

Result = Mapping[str, Any]  # what jacobi_training.evaluate.evaluate returns


@contextmanager
def show_part(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress on stderr: a bar on a terminal, else a line at the end of the part. Yields what counts units done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if sys.stderr.isatty():
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)
        return
    start = time.perf_counter()
    yield lambda count: None
    note(f"{name}: {total} in {time.perf_counter() - start:.1f} s")


@dataclass(frozen=True)
class Row:
    """One way to decode: tokens per forward of base and model with their intervals; key of the model's run, if ours."""

    name: str
    base: float | None
    base_interval: Interval | None
    model: float | None
    model_interval: Interval | None
    key: str | None = None


def rows_of(result: Result) -> list[Row]:
    """The ways to decode, in the order of tables and plots."""
    intervals, s = result["intervals"], result["settings"]
    rows = []
    for key, value in result["tpf"].items():
        base, base_interval = (values["base_tpf"].get(key) for values in (result, intervals))
        rows.append(Row(f"blocks of {key}", base, base_interval, value, intervals["tpf"][key], key))
    multi_block = "{blocks} blocks of {block_size}, {candidates} candidates".format(**s["multi_block"])
    lookup = f"prompt lookup, k = {s['prompt_lookup_tokens']}"
    for name, of_base, of_model, run in (
        (multi_block, "base_tpf_multi_block", "tpf_multi_block", "multi_block"),
        (lookup, "prompt_lookup_tpf", "model_prompt_lookup_tpf", None),
    ):
        base, base_interval = (values[of_base] if result["base"] else None for values in (result, intervals))
        rows.append(Row(name, base, base_interval, result[of_model], intervals[of_model], run))
    return rows


def print_report(result: Result) -> None:
    """Tables of tokens per forward and of the rest, then latency and seconds, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=max(Console().width, 100))
    prompts, names = result["prompts"], (result["base"] or "(no base)", result["model"])
    table = Table(title=f"Tokens per forward, {prompts} prompts of {result['prompts_file']}, greedy", box=None)
    table.title_justify = "left"
    table.add_column("", no_wrap=True)
    for name in (names[0], "95%", names[1], "95%", "chars/forward", "same as one by one"):
        table.add_column(name, justify="right")
    for row in rows_of(result):
        same = f"{result['identical']['model'][row.key]} of {prompts}" if row.key else ""
        per_forward = _number(result["characters_per_forward"][row.key]) if row.key else ""
        base = _number(row.base), _range(row.base_interval)
        table.add_row(row.name, *base, _number(row.model), _range(row.model_interval), per_forward, same)
    console.print(table)
    console.print()

    table = Table(box=None)
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for fact in _facts(result):
        table.add_row(*fact)
    console.print(table)
    console.print()
    _print_times(console, result)


def _print_times(console: Any, result: Result) -> None:
    for key, timing in result["latency"].items():
        label = {"1": "one by one", "multi_block": "multi-block"}.get(key, f"blocks of {key}")
        if timing["milliseconds"] is not None:
            console.print(
                f"{label}: a forward over {timing['positions']:.1f} tokens takes {timing['milliseconds']:.2f} ms "
                f"(median, one prompt at a time), {timing['tokens_per_second']:.0f} tokens/s"
            )
    s, e, seconds = result["settings"], result["environment"], result["seconds"]
    console.print(
        f"every output as one by one: {'yes' if result['ar_identical'] else 'NO'}; {s['dtype']}, up to "
        f"{s['max_new_tokens']} tokens; {e['threads']} threads, kernels {e['kernels']}",
        soft_wrap=True,
    )
    longest = sorted(((value, part) for part, value in seconds.items() if part != "all"), reverse=True)
    parts = ", ".join(f"{part} {value:.1f}" for value, part in longest)
    console.print(f"{seconds['all']:.0f} s in all: {parts}", soft_wrap=True)


def _facts(result: Result) -> Iterator[tuple[str, str, str]]:
    """Rows of the second table: name, base, model."""
    intervals = result["intervals"]
    if result["accuracy"] is not None:
        yield (
            f"accuracy, {result['settings']['task']}",
            _share(result["base_accuracy"], intervals["base_accuracy"]),
            _share(result["accuracy"], intervals["accuracy"]),
        )
    if result["perplexity"] is not None:
        yield "perplexity of the reference answers", _number(result["base_perplexity"]), _number(result["perplexity"])
    yield "characters per token of the answers", "", _number(result["characters_per_token"])
    blocks = result["fixed_blocks"]
    n = blocks["model"]["block_size"]
    for key, name in (
        ("iterations", "iterations to the fixed point"),
        ("fast_forwarded_tokens", "fast-forwarded tokens"),
        ("stationary_tokens", "stationary tokens"),
    ):
        base = blocks["base"][key] if blocks["base"] else None
        yield f"{name} per block of {n}", _number(base), _number(blocks["model"][key])


def check_plot(path: Path) -> None:
    """Raise CommandError, before the work starts, when a plot cannot be drawn to ``path``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError("--plot needs matplotlib; run `pip install matplotlib` or leave --plot out") from None
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:] not in formats:
        raise CommandError(f"{str(path)!r} names no format of plots; end it in .png or .svg (or {', '.join(formats)})")


def write_plot(path: Path, result: Result) -> None:
    """Tokens per forward of every way to decode, base beside model, with 95% intervals; the suffix says the format."""
    from matplotlib.figure import Figure

    rows = rows_of(result)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    groups = (
        (result["base"], -0.2, [(row.base, row.base_interval) for row in rows]),
        (result["model"], 0.2, [(row.model, row.model_interval) for row in rows]),
    )
    for name, shift, points in groups:
        bars = [(i + shift, value, span) for i, (value, span) in enumerate(points) if value and span]
        if not bars:
            continue
        values = [value for _, value, _ in bars]
        spread = [[max(0, v - low) for _, v, (low, _) in bars], [max(0, high - v) for _, v, (_, high) in bars]]
        drawn = axes.bar([at for at, _, _ in bars], values, 0.38, yerr=spread, capsize=3, label=name)
        axes.bar_label(drawn, fmt="%.2f", padding=2)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")  # one by one
    axes.set_xticks(range(len(rows)), [row.name.replace(", ", ",\n") for row in rows])
    axes.set_ylabel("tokens per forward")
    axes.set_title(f"{result['prompts']} prompts of {result['prompts_file']}, greedy")
    axes.margins(y=0.12)
    figure.legend(loc="outside right upper")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=".jacobi-", delete=False) as file:
            temporary = Path(file.name)
            figure.savefig(file, format=path.suffix[1:], dpi=150)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error, "--plot") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def _share(value: float | None, interval: Interval | None) -> str:
    return "-" if value is None or interval is None else f"{value:.1%} ({interval[0]:.1%}-{interval[1]:.1%})"
