"""Tokens per forward of four ways to decode the same prompts, in one run.

  ar             token by token, our kernels (block size 1): the output that the others are compared with
  vanilla        Jacobi decoding: one block, no candidates, no pool, nothing taken from the prompt
  ours           multi-block decoding with recycled candidates, as --block-size, --blocks, --candidates,
                 --pool-from-prompt say
  prompt_lookup  transformers' own generate(prompt_lookup_num_tokens=10) on the same model

Counting is the same for all: the forwards that take the prompt in, and the first new token, count on neither side;
tokens per forward = (new tokens - 1) / decode forwards. (transformers verifies guesses in its prompt's forward already;
what it gains there counts for it.) Greedy; the prompt is the user's message in the chat template when there is one.

The outputs of vanilla and ours must equal ar's, token for token: otherwise the exit code is 1. transformers' kernels
round differently: where its output leaves ar's first, its own logits say whether the two tokens are a near-tie.

Each line of a prompts file is a JSON object with "prompt" or "question".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this file is run as a script

from jacobi_decoding.cli import CommandError, Parser, fail, note
from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli.output import check_writable, write_json_atomically

METHODS = ("ar", "vanilla", "ours", "prompt_lookup")
EXACT = ("vanilla", "ours")
AR = {"block_size": 1, "blocks": 1, "candidates": 0, "pool_rows": 0, "pool_from_prompt": False}
NEAR_TIE = {"float32": 1e-3, "bfloat16": 6e-2}  # of the best logit's distance from the mean


@dataclass
class Outcome:
    """One prompt decoded in one way."""

    tokens: int
    decode_tokens: int
    decode_forwards: int
    decode_positions: int  # query tokens that the decode forwards evaluated
    seconds: float
    identical: bool = True
    first_difference: int | None = None  # index of the new token
    near_tie: bool | None = None


def make_parser() -> Parser:
    parser = Parser(prog=Path(__file__).name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="one or more .jsonl files")
    parser.add_argument(
        "--limit", type=shared.integer(1), default=20, metavar="N", help="prompts of each file (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=shared.integer(0),
        metavar="S",
        help="draw the prompts at random with this seed (default: take the first)",
    )
    parser.add_argument(
        "--max-new-tokens", type=shared.integer(2), default=128, metavar="N", help="per prompt (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything to FILE, after each prompt")
    shared.add_model_arguments(parser)
    shared.add_device_argument(parser)
    shared.add_block_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """0: vanilla and ours gave ar's tokens for every prompt; 1: not; 2: bad arguments; 130: interrupted."""
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except (CommandError, ValueError, OSError) as error:
        fail(str(error))
        return 2


def run(args: argparse.Namespace) -> int:
    files = [read_prompts(Path(name), args.limit, args.seed) for name in args.prompts]
    target = None if args.json is None else Path(args.json)
    if target:
        check_writable(target, "--json")
    shared.set_threads(args)
    note("loading the model")
    loaded = shared.load(args)
    runner = Runner(loaded, args)
    result = new_result(loaded, args)
    interrupted = False
    try:
        with progress(sum(map(len, files))) as advance:
            runner.warm_up()
            for name, prompts in zip(args.prompts, files, strict=True):
                result["files"].append({"file": name, "prompts": [], "totals": {}})
                for prompt in prompts:
                    result["files"][-1]["prompts"].append(runner.compare(prompt))
                    add_totals(result)
                    if target:
                        write_json_atomically(target, result)
                    advance()
        result["complete"] = True
    except KeyboardInterrupt:
        interrupted = True
    add_totals(result)
    if target:
        write_json_atomically(target, result)
    print_tables(result)
    if target:
        note(f"results are in {target}")
    if interrupted:
        fail("interrupted: the results are incomplete")
        return 130
    wrong = sum(totals["prompts"] - totals["identical"] for m, totals in result["totals"].items() if m in EXACT)
    if wrong:
        fail(f"{wrong} outputs of vanilla or ours differ from ar's; --json tells which: report it as a defect")
    return 1 if wrong else 0


# Prompts --------------------------------------------------------------------------------------------------------------


def read_prompts(path: Path, limit: int, seed: int | None) -> list[str]:
    """The first ``limit`` prompts of a .jsonl file, or as many drawn at random."""
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                prompt = fields.get("prompt") or fields.get("question")
            except (json.JSONDecodeError, AttributeError):
                raise CommandError(f"{path}:{number} is not a JSON object; each line must be one") from None
            if not isinstance(prompt, str):
                raise CommandError(f"{path}:{number} has neither prompt nor question; add one of them as a string")
            prompts.append(prompt)
    if not prompts:
        raise CommandError(f"{str(path)!r} has no prompts; name another file")
    return prompts[:limit] if seed is None else random.Random(seed).sample(prompts, min(limit, len(prompts)))


# Decoding -------------------------------------------------------------------------------------------------------------


class Runner:
    """Decodes prompts with one model in every way."""

    def __init__(self, loaded: Any, args: argparse.Namespace) -> None:
        from jacobi_decoding import JacobiDecoder

        self.model, self.tokenizer, self.dtype = loaded.model, loaded.tokenizer, args.dtype
        self.decoder = JacobiDecoder(loaded.model, loaded.tokenizer)
        self.max_new_tokens = args.max_new_tokens
        names = ("block_size", "blocks", "candidates", "pool_from_prompt")
        self.settings = {
            "ar": AR,
            "vanilla": AR | {"block_size": args.block_size},
            "ours": {name: getattr(args, name) for name in names},
        }

    def warm_up(self) -> None:
        """First use of code and weights, so that no prompt's seconds hold it."""
        ids = shared.prompt_ids(self.tokenizer, "Hello", raw=False)
        self.jacobi(ids, self.settings["ours"], 2)
        self.prompt_lookup(ids, 2)

    def compare(self, prompt: str) -> dict[str, Any]:
        """One prompt in all ways, for JSON."""
        ids = shared.prompt_ids(self.tokenizer, prompt, raw=False)
        if not ids:
            raise CommandError(f"prompt {prompt!r} has no tokens")
        results = {m: self.jacobi(ids, options, self.max_new_tokens) for m, options in self.settings.items()}
        results["prompt_lookup"] = self.prompt_lookup(ids, self.max_new_tokens)
        expected, _ = results["ar"]
        for method, (tokens, outcome) in results.items():
            outcome.identical = tokens == expected
            if not outcome.identical:
                outcome.first_difference = index = first_difference(tokens, expected)
                if method not in EXACT:
                    outcome.near_tie = self.near_tie(ids, tokens, expected, index)
        methods = {m: {**asdict(outcome), **rates(asdict(outcome))} for m, (_, outcome) in results.items()}
        text = self.tokenizer.decode(expected, skip_special_tokens=True)
        return {"prompt": prompt, "prompt_tokens": len(ids), "text": text, "token_ids": expected, "methods": methods}

    def jacobi(self, ids: list[int], options: dict[str, Any], max_new_tokens: int) -> tuple[list[int], Outcome]:
        import torch

        sequences, stats = self.decoder.generate(
            torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False, return_stats=True, **options
        )
        tokens = sequences[0, len(ids) :].tolist()
        forwards, positions = stats.decode_forwards, stats.positions - len(ids)
        return tokens, Outcome(len(tokens), stats.decode_tokens, forwards, positions, stats.seconds)

    def prompt_lookup(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], Outcome]:
        from jacobi_training.prompt_lookup import prompt_lookup

        done = prompt_lookup(self.model, ids, max_new_tokens)
        counts = (done.decode_tokens, done.decode_forwards, done.decode_positions)
        return done.tokens, Outcome(len(done.tokens), *counts, done.seconds)

    def near_tie(self, ids: list[int], tokens: list[int], expected: list[int], index: int) -> bool:
        """Whether transformers itself finds both tokens within rounding of each other."""
        import torch

        if index >= min(len(tokens), len(expected)):
            return False  # one ended earlier
        with torch.no_grad():
            logits = self.model(torch.tensor([ids + expected[:index]])).logits[0, -1].float()
        gap = abs(float(logits[tokens[index]] - logits[expected[index]]))
        return gap <= NEAR_TIE[self.dtype] * float(logits.max() - logits.mean())


def first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Results --------------------------------------------------------------------------------------------------------------


def new_result(loaded: Any, args: argparse.Namespace) -> dict[str, Any]:
    from bench.environment import environment
    from jacobi_training.prompt_lookup import LOOKUP_TOKENS

    names = ["block_size", "blocks", "candidates", "pool_from_prompt", "max_new_tokens", "limit", "seed"]
    return {
        "complete": False,
        "model": loaded.name,
        "dtype": args.dtype,
        "settings": {name: getattr(args, name) for name in names} | {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        "environment": environment(),
        "files": [],
        "totals": {},
    }


def rates(counts: dict[str, Any]) -> dict[str, float | None]:
    forwards = counts["decode_forwards"]  # 0 when the first token was the last
    return {
        "tokens_per_forward": counts["decode_tokens"] / forwards if forwards else None,
        "positions_per_forward": counts["decode_positions"] / forwards if forwards else None,
    }


def add_totals(result: dict[str, Any]) -> None:
    """Sums over each file's prompts, and over all."""
    every = []
    for file in result["files"]:
        file["totals"] = totals_of(file["prompts"])
        every += file["prompts"]
    result["totals"] = totals_of(every)


def totals_of(prompts: list[dict[str, Any]]) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for method in METHODS if prompts else ():
        rows = [prompt["methods"][method] for prompt in prompts]
        sums = ("tokens", "decode_tokens", "decode_forwards", "decode_positions", "seconds", "identical")
        counts = {name: sum(row[name] for row in rows) for name in sums}
        per_prompt = [row["tokens_per_forward"] for row in rows if row["tokens_per_forward"] is not None]
        totals[method] = {
            "prompts": len(rows),
            **counts,
            "near_ties": sum(bool(row["near_tie"]) for row in rows),
            **rates(counts),
            "lowest": min(per_prompt, default=None),
            "highest": max(per_prompt, default=None),
        }
    return totals


def print_tables(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bench.environment import environment_line

    s = result["settings"]
    console = Console(highlight=False, width=max(Console().width, 110))
    parts = [(file["file"], file["totals"]) for file in result["files"]]
    if len(parts) > 1:
        parts.append(("all files", result["totals"]))
    columns = ("tokens/forward", "least", "most", "tokens", "forwards", "rows/forward", "same as ar", "seconds")
    for title, totals in parts:
        table = Table(title=f"{title} (prompts: {totals['ar']['prompts'] if totals else 0})", box=None)
        table.title_justify = "left"
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for method, t in totals.items():
            table.add_row(
                method,
                _number(t["tokens_per_forward"]),
                _number(t["lowest"]),
                _number(t["highest"]),
                str(t["decode_tokens"]),
                str(t["decode_forwards"]),
                _number(t["positions_per_forward"], 1),
                str(t["identical"]) + (f" + {t['near_ties']} near-ties" if t["near_ties"] else ""),
                f"{t['seconds']:.1f}",
            )
        console.print(table)
        console.print()
    console.print(
        f"{result['model']}, {result['dtype']}; ours: block size {s['block_size']}, {s['blocks']} blocks, "
        f"{s['candidates']} candidates, {'with' if s['pool_from_prompt'] else 'without'} the prompt; "
        f"up to {s['max_new_tokens']} tokens; complete: {'yes' if result['complete'] else 'NO'}\n"
        f"{environment_line(result['environment'])}",
        soft_wrap=True,
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """Shows on stderr how many prompts are done; yields the function that counts one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
