"""Decode steps and whole answers on this CPU, beside llama.cpp and transformers, in at most 20 minutes on two cores.

  steps    float32, bfloat16, int8 and int4 weights (llama.cpp: F32, BF16, Q8_0, Q4_1; transformers: float32, sdpa),
           1, 16 and 64 tokens behind 512, predictions behind every token in every engine. Everyone takes turns in each
           round; a ratio is the median over the rounds of our time over the peer's in the same round. llama.cpp counts
           with flash attention on or off, whichever is faster.
  floors   memory and arithmetic that a step needs at least, by the machine's limits, which each round measures anew.
  curve    our steps of 1 to 128 tokens behind 0, 512 and 4096.
  answers  prompt by prompt in turns: token by token, block_size='auto', llama.cpp, transformers (every fourth prompt).
  prefill  until the first token behind 512, beside transformers.
  memory   peak of loading and a short answer, beside a process that imports torch.

Every engine has a process of its own, and one computes at a time, all with the same number of threads. Where time runs
short, rounds and prompts are cut, but no target's rounds below 9. llama.cpp is measured where llama-cpp-python is
installed (CMAKE_ARGS=-DGGML_NATIVE=ON pip install '.[llama]'); its rows say 'not installed' otherwise. Its model files
(1 GB) are made once, in .cache/bench. Leave the machine alone while this runs.

Text on stdout, JSON in --out. Exit code 1: an answer of 'auto' differs from token by token.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench.cpu.plan import FORMATS, FULL, QUICK
from bench.environment import ROOT
from jacobi_decoding.cli import CommandError, Parser, fail, note
from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli.output import check_writable, write_json_atomically

OUT = ROOT / "bench" / "results" / "cpu.json"
PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"


def make_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a little of everything, in some two minutes: no figures")
    parser.add_argument("--out", metavar="FILE", help=f"the JSON file (default: {OUT.relative_to(ROOT)})")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a .gguf file, or what else `jacobi generate` takes, without llama.cpp (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="F", help="some of %(choices)s"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", default=str(PROMPTS), help="a .jsonl file with 'prompt' or 'question' fields"
    )
    parser.add_argument("--threads", type=shared.integer(1, 1024), metavar="N", help="of every engine (default: all)")
    parser.add_argument(
        "--minutes", type=shared.number(0.0), metavar="T", help=f"about how long (default: {FULL.minutes:g})"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: an answer differs; 2: bad arguments, or no limits of the machine; 130: interrupted."""
    args = make_parser().parse_args(argv)
    try:
        return measure(args)
    except KeyboardInterrupt:
        fail("interrupted: --out has the formats that were done")
        return 130
    except (CommandError, ValueError, OSError) as error:
        fail(str(error))
        return 2


def measure(args: argparse.Namespace) -> int:
    from bench.cpu.report import print_report
    from bench.cpu.run import run
    from bench.cpu.workers import WorkerError
    from bench.tokens_per_forward import read_prompts

    out = Path(args.out or OUT)
    if not args.out:
        out.parent.mkdir(exist_ok=True)
    check_writable(out, "--out")
    plan = QUICK if args.quick else FULL
    if args.minutes is not None:
        plan = replace(plan, minutes=args.minutes)
    prompts = read_prompts(Path(args.prompts), plan.prompts, None)
    threads = args.threads or len(os.sched_getaffinity(0))
    try:
        result = run(
            plan, args.model, prompts, args.formats, threads, lambda found: write_json_atomically(out, found, "--out")
        )
    except WorkerError as error:
        raise CommandError(str(error)) from error
    print_report(result)
    note(f"results are in {out}")
    different = [way for way in result["end_to_end"] if way["method"] == "jacobi" and way["identical"] is False]
    for way in different:
        fail(f"{way['prompts'] - way['agreeing']} answers in {way['format']} differ from token by token: a defect")
    return 1 if different else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
