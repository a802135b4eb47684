"""The results as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cpu.plan import MAIN_CONTEXT
from bench.environment import environment_line

Row = dict[str, Any]


def print_report(result: Row) -> None:
    console = Console(highlight=False, width=max(Console().width, 120))
    m = result["machine"]
    console.print(f"{result['model']}; {environment_line(m)}", soft_wrap=True)
    console.print(
        f"read {m['read_gb_s']:.1f} GB/s, float32 FMA {m['fp32_gflop_s']:.0f} GFLOP/s, "
        f"int8 {m['int8_gop_s']:.0f} GOP/s ({m['source']}; the best of the run)\n",
        soft_wrap=True,
    )
    main = [row for row in result["steps"] if row["context"] == MAIN_CONTEXT and row.get("part") != "curve"]
    _table(
        console,
        f"Steps behind {MAIN_CONTEXT} tokens, predictions behind every one",
        ("engine", "format", "flash-attn", "tokens", "median ms", "least", "most", "floor ms", "rounds"),
        (_step_cells(row) for row in main),
    )
    _table(
        console,
        "Our steps over the engine's, paired round by round",
        ("format", "tokens", "over", "its tokens", "median", "quartiles", "least", "most", "rounds"),
        (
            (r["format"], r["tokens"], f"{r['peer']} {r['peer_format']}", r["peer_tokens"], *_spread(r), r["rounds"])
            for r in result["ratios"]
        ),
    )
    _table(
        console,
        "Share of the floor: the longer of memory and arithmetic, by the machine's limits in the same round",
        ("format", "tokens", "share", "quartiles", "least", "most", "by the run's best limits"),
        ((s["format"], s["tokens"], *_spread(s), f"{s['of_best_limits']:.3f}") for s in result["floor_shares"]),
    )
    _print_curve(console, [row for row in result["steps"] if row.get("part") == "curve"])
    _table(
        console,
        f"Whole answers, up to {result['settings']['max_new_tokens']} tokens, greedy",
        ("engine", "format", "method", "tokens/s", "tokens/forward", "same as ours, one by one", "speed against it"),
        (_answer_cells(row) for row in result["end_to_end"]),
    )
    _table(
        console,
        "Memory, MB",
        ("format", "packed weights", "peak", "over torch's"),
        ((r["format"], *(f"{r[n]:.0f}" for n in ("weights_mb", "peak_mb", "over_torch_mb"))) for r in result["memory"]),
    )
    _table(
        console,
        "Targets",
        ("", "wanted", "figure", "quartiles", "rounds", "met"),
        (
            (
                t["what"],
                t["target"],
                f"{t['figure']:.4g}",
                "" if t["first_quartile"] is None else f"{t['first_quartile']:.3f}..{t['third_quartile']:.3f}",
                t["rounds"] or "",
                "yes" if t["met"] else "NO",
            )
            for t in result["targets"]
        ),
    )
    for note in result["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{result['seconds']:.0f} s; complete: {'yes' if result['complete'] else 'NO'}")


def _table(console: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    table = Table(title=title, box=None)
    table.title_justify = "left"
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    if table.row_count:
        console.print(table)
        console.print()


def _step_cells(row: Row) -> list[Any]:
    flash = {True: "on", False: "off", None: ""}[row.get("flash_attn")]
    cells = [row["engine"], row["format"], flash, row["tokens"]]
    if row["ms_median"] is None:
        return [*cells, row["note"].split(": ", 1)[-1][:40]]
    floor = "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}"
    return [*cells, *(f"{row[n]:.2f}" for n in ("ms_median", "ms_min", "ms_max")), floor, len(row["rounds_ms"])]


def _spread(row: Row) -> list[str]:
    quartiles = f"{row['first_quartile']:.3f}..{row['third_quartile']:.3f}"
    return [f"{row['median']:.3f}", quartiles, f"{row['least']:.3f}", f"{row['most']:.3f}"]


def _answer_cells(row: Row) -> list[Any]:
    cells = [row["engine"], row["format"], row["method"]]
    if row["tokens_per_second"] is None:
        return [*cells, row["note"].split(": ", 1)[-1][:40]]
    speed = row.get("speed_against_ar")
    against = f"{speed['median']:.2f} ({speed['first_quartile']:.2f}..{speed['third_quartile']:.2f})" if speed else ""
    same = f"{row['agreeing']} of {row['prompts']}"
    return [*cells, f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_forward']:.2f}", same, against]


def _print_curve(console: Console, rows: list[Row]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    lines: dict[tuple[str, int], dict[int, str]] = {}
    for row in rows:
        cell = "-" if row["ms_median"] is None else f"{row['ms_median']:.2f}"
        lines.setdefault((row["format"], row["context"]), {})[row["tokens"]] = cell
    _table(
        console,
        "Our steps by the number of tokens, median ms",
        ("format", "behind", *map(str, tokens)),
        ((*key, *(cells.get(t, "") for t in tokens)) for key, cells in lines.items()),
    )
