"""Measure a trained model beside its base: tokens per forward, accuracy, equality with one-by-one decoding.

By default the shipped pair on the shipped test prompts. Prompts are a .jsonl file with prompt, question, prompt_ids or
messages in each line; files of the shipped task, of GSM8K (question, answer) and of HumanEval (task_id, prompt, test,
entry_point) are recognised, and their answers checked. The prompt becomes the user's message in the chat template when
the tokenizer has one. Exit code 1: an output differs from that of the same model one by one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jacobi_decoding.cli import CommandError, fail, note
from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli.output import check_writable, warnings_as_notes, write_json_atomically

MODEL, BASE = "jacobi-6m", "jacobi-6m-base"
TASKS = ("auto", "worded", "gsm8k", "humaneval", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--model", metavar="MODEL", help=f"the trained model, a folder or a name (default: {MODEL})")
    group.add_argument(
        "--base",
        metavar="MODEL",
        help=f"the model that it was trained from (default: {BASE}; none when --model is given)",
    )
    group.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of weights, cache and activations (default: %(default)s)",
    )
    shared.add_device_argument(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", metavar="FILE", help="a .jsonl file (default: the shipped test prompts)")
    group.add_argument("--limit", type=shared.integer(1), metavar="N", help="the first N prompts only (default: all)")
    group.add_argument(
        "--task", choices=TASKS, default="auto", help="how answers are checked; auto: by the fields (default: auto)"
    )
    group.add_argument("--raw", action="store_true", help="do not apply the chat template")
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--block-sizes",
        type=shared.integer(2, 4096),
        nargs="+",
        default=[8, 16, 32],
        metavar="N",
        help="of plain Jacobi decoding (default: 8 16 32)",
    )
    group.add_argument(
        "--max-new-tokens", type=shared.integer(2), default=256, metavar="N", help="per prompt (default: %(default)s)"
    )
    group.add_argument(
        "--batch-size",
        type=shared.integer(1, 1024),
        default=8,
        metavar="N",
        help="prompts decoded side by side; it changes no figure but the seconds (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=shared.integer(0), default=0, metavar="S", help="of the 95%% intervals (default: %(default)s)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write all figures and answers to FILE")
    group.add_argument("--plot", metavar="FILE", help="draw the tokens per forward to FILE, a .png or .svg")


def run(args: argparse.Namespace) -> int:
    target = None if args.json is None else Path(args.json)
    plot = None if args.plot is None else Path(args.plot)
    if target:
        check_writable(target, "--json")
    if plot:
        check_writable(plot, "--plot")
        from jacobi_training.report import check_plot

        check_plot(plot)
    import transformers

    from jacobi_training.evaluate import EvaluationConfig, evaluate, shipped_prompts
    from jacobi_training.report import print_report, show_part, write_plot

    shared.set_threads(args)
    prompts = shipped_prompts() if args.prompts is None else Path(args.prompts)
    if not prompts.is_file():
        raise CommandError(f"prompts file {str(prompts)!r} does not exist; name a .jsonl file with --prompts")
    model = _load(args.model or MODEL, args)
    base_name = BASE if args.model is None and args.base is None else args.base
    base = None if base_name is None else _load(base_name, args)
    config = EvaluationConfig(
        task=args.task,
        limit=args.limit,
        block_sizes=tuple(dict.fromkeys(args.block_sizes)),
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        raw=args.raw,
        seed=args.seed,
    )
    transformers.utils.logging.set_verbosity_error()  # prompt lookup's remarks, once per prompt
    with warnings_as_notes():
        result = evaluate(model, base, prompts, config, show_part)
    print_report(result)
    if target:
        write_json_atomically(target, result)
        note(f"figures and answers are in {target}")
    if plot:
        write_plot(plot, result)
        note(f"the plot is in {plot}")
    if not result["ar_identical"]:
        fail("outputs differ from those of the same model one by one; 'identical' in --json counts them: report it")
        return 1
    return 0


def _load(name: str, args: argparse.Namespace) -> Any:
    from jacobi_decoding.loading import load_model

    return load_model(name, args.dtype, device=args.device, progress=note)
