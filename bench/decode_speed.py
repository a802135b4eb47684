"""Seconds per answer of several ways to decode the same prompts, in one run, taken in turns prompt by prompt.

  ar            token by token, our kernels
  auto          block_size='auto': as many guesses verified as pay
  blocks        a fixed block size, with --block-size, --blocks, --candidates
  transformers  model.generate, its own kernels and attention

Every figure is a ratio against ar on the same prompt, whole calls, prefill included: median over the prompts, with the
first and third quartile. Outputs of auto and blocks must equal ar's: otherwise the exit code is 1. Leave the machine
alone while it runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this file is run as a script

from bench.tokens_per_forward import AR, progress, read_prompts
from jacobi_decoding.cli import CommandError, Parser, fail, note
from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli.output import check_writable, write_json_atomically

METHODS = ("ar", "auto", "blocks", "transformers")


def make_parser() -> Parser:
    parser = Parser(prog=Path(__file__).name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="one or more .jsonl files")
    parser.add_argument(
        "--limit", type=shared.integer(1), default=10, metavar="N", help="prompts of each file (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=shared.integer(2), default=128, metavar="N", help="per prompt (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    shared.add_model_arguments(parser)
    shared.add_device_argument(parser)
    shared.add_block_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except (CommandError, ValueError, OSError) as error:
        fail(str(error))
        return 2


def run(args: argparse.Namespace) -> int:
    prompts = [prompt for name in args.prompts for prompt in read_prompts(Path(name), args.limit, None)]
    target = Path(args.json) if args.json else None
    if target:
        check_writable(target, "--json")
    shared.set_threads(args)
    note("loading the model")
    loaded = shared.load(args)
    from bench.environment import environment, environment_line
    from jacobi_decoding import JacobiDecoder

    decoder = JacobiDecoder(loaded.model, loaded.tokenizer)
    ways: dict[str, dict[str, Any]] = {
        "ar": AR,
        "auto": {"block_size": "auto", "pool_from_prompt": args.pool_from_prompt},
        "blocks": {name: getattr(args, name) for name in ("block_size", "blocks", "candidates", "pool_from_prompt")},
    }
    rows: list[dict[str, Any]] = []
    with progress(len(prompts)) as advance:
        for index, prompt in enumerate([prompts[0], *prompts]):
            ids = shared.prompt_ids(loaded.tokenizer, prompt, raw=False)
            row = {method: decode(decoder, ids, args.max_new_tokens, ways[method]) for method in ways}
            row["transformers"] = decode_by_transformers(loaded.model, ids, args.max_new_tokens)
            if index > 0:  # the first is a warm-up
                rows.append(row)
                advance()
    print(environment_line())
    result = {"model": loaded.name, "dtype": args.dtype, "environment": environment(), "methods": summary(rows)}
    print_table(result, len(rows))
    if target:
        write_json_atomically(target, result)
        note(f"results are in {target}")
    wrong = sum(row[m]["ids"] != row["ar"]["ids"] for row in rows for m in ("auto", "blocks"))
    if wrong:
        fail(f"{wrong} outputs of auto or blocks differ from ar's: report it as a defect")
    return 1 if wrong else 0


def decode(decoder: Any, ids: list[int], max_new_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    import torch

    start = time.perf_counter()
    sequences, stats = decoder.generate(
        torch.tensor([ids]), max_new_tokens=max_new_tokens, return_stats=True, **options
    )
    seconds = time.perf_counter() - start
    new = sequences[0, len(ids) :].tolist()
    counts = {"tokens": stats.decode_tokens, "forwards": stats.decode_forwards, "rows": stats.positions - len(ids)}
    return {"ids": new, "seconds": seconds, **counts}


def decode_by_transformers(model: Any, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    import torch

    x = torch.tensor([ids])
    start = time.perf_counter()
    output = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=max_new_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    new = output[0, len(ids) :].tolist()
    steps = len(new) - 1
    return {"ids": new, "seconds": seconds, "tokens": steps, "forwards": steps, "rows": steps}


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per method: tokens per second and per forward over all prompts; speed against ar, quartiles over the prompts."""
    table = {}
    for method in METHODS:
        speeds = [row["ar"]["seconds"] / row[method]["seconds"] for row in rows]
        low, middle, high = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
        seconds = sum(row[method]["seconds"] for row in rows)
        table[method] = {
            "tokens_per_second": sum(len(row[method]["ids"]) for row in rows) / seconds,
            "tokens_per_forward": total("tokens", method, rows) / total("forwards", method, rows),
            "rows_per_forward": total("rows", method, rows) / total("forwards", method, rows),
            "speed_against_ar": middle,
            "first_quartile": low,
            "third_quartile": high,
            "identical": sum(row[method]["ids"] == row["ar"]["ids"] for row in rows),
        }
    return table


def total(count: str, method: str, rows: list[dict[str, Any]]) -> int:
    return sum(row[method][count] for row in rows)


def print_table(result: dict[str, Any], prompts: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']}, {result['dtype']}, {prompts} prompts")
    for name in ("", "tokens/s", "tokens/fwd", "rows/fwd", "against ar", "quartiles", "same"):
        table.add_column(name, justify="right" if name else "left")
    for method, row in result["methods"].items():
        table.add_row(
            method,
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['rows_per_forward']:.1f}",
            f"{row['speed_against_ar']:.2f}",
            f"{row['first_quartile']:.2f}..{row['third_quartile']:.2f}",
            f"{row['identical']}/{prompts}",
        )
    Console().print(table)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
