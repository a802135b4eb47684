"""Decode built-in prompts token by token and by blocks, with the same kernels, and compare.

Two models: a small one that was trained for parallel decoding (jacobi-6m, on problems that it never saw) and an
ordinary one. For each prompt: the answer, whether all ways gave the same tokens, forwards, tokens per forward and
seconds. Blocks of a fixed size save the most forwards; auto verifies, step by step, only as many guesses as pay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli import note
from jacobi_decoding.cli.output import check_writable, warnings_as_notes, write_json_atomically

if TYPE_CHECKING:
    from jacobi_decoding.loading import LoadedModel

_AREA = "def area(width, height):\n    return width * height"
PROMPTS = (
    ("code", "Write a Python function that returns the n-th Fibonacci number."),
    ("code", f"Add a docstring to this function and show the whole function:\n\n{_AREA}"),
    ("code", "Write a Python class Stack with the methods push, pop and is_empty."),
    ("maths", "A shop sells pens at $2 each. Tom buys 7 pens and pays with a $20 bill. How much change does he get?"),
    ("maths", "List the multiples of 6 from 6 to 60, one per line."),
    ("chat", "Explain in three sentences why the sky is blue."),
    ("chat", "Give me five tips for learning a new language."),
)
TOKEN_BY_TOKEN = {"block_size": 1, "blocks": 1, "candidates": 0, "pool_from_prompt": False}
TRAINED = "jacobi-6m"
TRAINED_BLOCK_SIZE = 32  # what its training ended with

Prompts = tuple[tuple[str, str], ...]  # kind, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model_arguments(parser, default=f"{TRAINED}, then SmolLM2-135M-Instruct")
    shared.add_device_argument(parser)
    shared.add_block_arguments(parser)
    parser.set_defaults(block_size=None)
    parser.add_argument(
        "--max-new-tokens", type=shared.integer(1), default=96, metavar="N", help="per prompt (default: %(default)s)"
    )
    parser.add_argument("--limit", type=shared.integer(1), metavar="N", help="take the first N prompts only")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE as well")


def run(args: argparse.Namespace) -> int:
    target = None if args.json is None else Path(args.json)
    if target:
        check_writable(target, "--json")
    shared.set_threads(args)
    results = []
    for model, prompts, block_size in _models(args):
        note("loading the model")
        loaded = shared.load(argparse.Namespace(model=model, dtype=args.dtype, device=args.device))
        results.append(_compare(loaded, prompts[: args.limit], block_size, args))
    if target:
        trained = {"trained": results[0]} if len(results) > 1 else {}
        write_json_atomically(target, results[-1] | trained)
        note(f"results are in {target}")
    return 0 if all(row["identical"] for result in results for row in result["prompts"]) else 1


def _models(args: argparse.Namespace) -> list[tuple[str | None, Prompts, int]]:
    """Each model with its prompts and its block size."""
    named = (args.model, PROMPTS, args.block_size or 16)
    if args.model is not None and args.model != TRAINED:
        return [named]
    trained = (TRAINED, trained_prompts(), args.block_size or TRAINED_BLOCK_SIZE)
    return [trained] if args.model == TRAINED else [trained, named]


def trained_prompts(count: int = 6) -> Prompts:
    """The first problems that the shipped model is evaluated on."""
    from jacobi_decoding.loading import SHIPPED

    with (SHIPPED / "test.jsonl").open(encoding="utf-8") as file:
        problems = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
    return tuple((problem["task"], problem["prompt"]) for problem in problems)


def _compare(loaded: LoadedModel, prompts: Prompts, block_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts in every way and print answers and table."""
    from jacobi_decoding import JacobiDecoder

    decoder = JacobiDecoder(loaded.model, loaded.tokenizer)
    blocks = {name: getattr(args, name) for name in TOKEN_BY_TOKEN} | {"block_size": block_size}
    ways = {
        "ar": TOKEN_BY_TOKEN,
        "jacobi": blocks,
        "auto": {"block_size": "auto", "pool_from_prompt": args.pool_from_prompt},
    }
    for options in ways.values():  # first use of code and weights, not timed
        _decode(decoder, loaded.tokenizer, prompts[0][1], 4, options)

    rows: list[dict[str, Any]] = []
    totals = [0, 0]  # tokens and forwards of the decode steps
    for index, (kind, prompt) in enumerate(prompts):
        note(f"prompt {index + 1} of {len(prompts)} ({kind})")
        answers = {
            way: _decode(decoder, loaded.tokenizer, prompt, args.max_new_tokens, options)
            for way, options in ways.items()
        }
        row = _row(loaded.tokenizer, prompt, answers)
        rows.append(row)
        totals[0] += answers["jacobi"][1]["decode_tokens"]
        totals[1] += answers["jacobi"][1]["decode_forwards"]
        _print_answer(kind, row)
    result = {"model": loaded.name, "tokens_per_forward": totals[0] / max(totals[1], 1), "prompts": rows}
    _print_table(prompts, result, blocks, args.dtype)
    return result


def _decode(
    decoder: Any, tokenizer: Any, prompt: str, max_new_tokens: int, blocks: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    import torch

    ids = shared.prompt_ids(tokenizer, prompt, raw=False)
    with warnings_as_notes():
        sequences, stats = decoder.generate(
            torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False, return_stats=True, **blocks
        )
    return sequences[0, len(ids) :].tolist(), stats.to_dict()


def _row(tokenizer: Any, prompt: str, answers: dict[str, tuple[list[int], dict[str, Any]]]) -> dict[str, Any]:
    ids_ar, stats_ar = answers["ar"]
    ids, stats = answers["jacobi"]
    ids_auto, stats_auto = answers["auto"]
    return {
        "prompt": prompt,
        "text_ar": tokenizer.decode(ids_ar, skip_special_tokens=True),
        "text_jacobi": tokenizer.decode(ids, skip_special_tokens=True),
        "identical": ids_ar == ids == ids_auto,
        "forwards": stats["forwards"],
        "tokens": stats["tokens"],
        "tokens_per_forward": stats["tokens_per_forward"],
        "tokens_per_forward_auto": stats_auto["tokens_per_forward"],
        "seconds_ar": stats_ar["seconds"],
        "seconds_jacobi": stats["seconds"],
        "seconds_auto": stats_auto["seconds"],
    }


def _print_answer(kind: str, row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel

    title = f"{kind}: {escape(row['prompt'].splitlines()[0])}"
    Console().print(Panel(escape(row["text_jacobi"].strip()), title=title, title_align="left"))


def _print_table(prompts: Prompts, result: dict[str, Any], blocks: dict[str, Any], dtype: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result['model']}, {dtype}: token by token against blocks of {blocks['block_size']}, "
        f"up to {blocks['blocks']} open, {blocks['candidates']} candidates; and auto"
    )
    counts = ("same\ntokens", "tokens", "fwds", "tokens/\nfwd", "tokens/\nfwd, auto")
    for name in ("", *counts, "s, one\nby one", "s,\nblocks", "s,\nauto"):
        table.add_column(name, justify="right" if name else "left")
    for (kind, _), row in zip(prompts, result["prompts"], strict=True):
        table.add_row(
            kind,
            "yes" if row["identical"] else "NO",
            str(row["tokens"]),
            str(row["forwards"]),
            f"{row['tokens_per_forward']:.2f}",
            f"{row['tokens_per_forward_auto']:.2f}",
            f"{row['seconds_ar']:.2f}",
            f"{row['seconds_jacobi']:.2f}",
            f"{row['seconds_auto']:.2f}",
        )
    table.add_section()
    rows = result["prompts"]
    table.add_row(
        "all",
        f"{sum(row['identical'] for row in rows)} of {len(rows)}",
        str(sum(row["tokens"] for row in rows)),
        str(sum(row["forwards"] for row in rows)),
        f"{result['tokens_per_forward']:.2f}",
        "",
        f"{sum(row['seconds_ar'] for row in rows):.2f}",
        f"{sum(row['seconds_jacobi'] for row in rows):.2f}",
        f"{sum(row['seconds_auto'] for row in rows):.2f}",
    )
    Console().print(table)
