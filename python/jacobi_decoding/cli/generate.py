"""Continue a prompt by multi-block Jacobi decoding.

The prompt becomes the user's message in the tokenizer's chat template when it has one; --raw passes it as it stands.
Greedy by default; --temperature above 0 samples. Blocks and candidates change the speed, never the tokens:
--block-size 1 --blocks 1 --candidates 0 is token-by-token decoding with the same kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_decoding.cli import CommandError, note
from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli.output import warnings_as_notes

if TYPE_CHECKING:
    from jacobi_decoding.loading import LoadedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file; - is standard input")
    prompt.add_argument("--chat", action="store_true", help="a conversation: one message a line, until end of input")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    shared.add_model_arguments(parser, packed=True)
    shared.add_device_argument(parser)
    shared.add_block_arguments(parser, adaptive=True)
    group = parser.add_argument_group("sampling and length")
    group.add_argument(
        "--max-new-tokens", type=shared.integer(1), default=128, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--temperature", type=shared.number(0), default=0.0, metavar="T", help="0: greedy (default: %(default)g)"
    )
    group.add_argument(
        "--top-k", type=shared.integer(0), default=0, metavar="K", help="0 is off (default: %(default)s)"
    )
    group.add_argument(
        "--top-p",
        type=shared.number(0, 1, above=True),
        default=1.0,
        metavar="P",
        help="1: off (default: %(default)g)",
    )
    group.add_argument(
        "--seed", type=shared.integer(-(2**63)), default=0, metavar="S", help="of the samples (default: %(default)s)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    group = parser.add_argument_group("output")
    group.add_argument("--stream", action="store_true", help="print text as it becomes final")
    group.add_argument("--stats", action="store_true", help="print statistics on standard error")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object: text, token_ids, prompt_ids, model, settings, stats"
    )
    group = parser.add_argument_group("how it runs")
    group.add_argument(
        "--path",
        choices=["auto", "step", "modules"],
        default="auto",
        help="step: the whole step is one op; modules: the model's own modules call our kernels (default: %(default)s)",
    )
    group.add_argument(
        "--step",
        choices=["graph", "launches", "cooperative", "auto"],
        help="on a GPU: a captured graph of launches, launches one by one, one cooperative launch, or the faster of "
        "graph and cooperative (default: JACOBI_STEP, else graph)",
    )
    group.add_argument(
        "--prefill",
        choices=["exact", "flash-attn"],
        default="exact",
        help="flash-attn: take prompts in by that package; the output may then differ from token-by-token decoding "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    _check(args)
    prompt = _read_prompt(args)
    shared.set_threads(args)
    loaded = shared.load(args, packed=True)
    from jacobi_decoding import JacobiDecoder

    decoder = JacobiDecoder(loaded.model, loaded.tokenizer, path=args.path, step_mode=args.step)
    if prompt is None:
        _chat(args, loaded, decoder)
        return
    ids = shared.prompt_ids(loaded.tokenizer, prompt, raw=args.raw)
    if not ids:
        raise CommandError("the prompt has no tokens; give it some text")
    new_ids, stats = _generate(args, loaded, decoder, ids, stream=args.stream)
    text = loaded.tokenizer.decode(new_ids, skip_special_tokens=True)  # type: ignore[union-attr]
    if args.json:
        result = {
            "text": text,
            "token_ids": new_ids,
            "prompt_ids": ids,
            "model": loaded.name,
            "settings": _settings(args),
            "stats": stats,
        }
        print(json.dumps(result, ensure_ascii=False))
    elif not args.stream:
        print(text)
    if args.stats:
        _print_stats(stats)


def _check(args: argparse.Namespace) -> None:
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        raise CommandError("--top-k and --top-p take part in sampling only; give --temperature above 0 as well")
    if args.json and (args.stream or args.chat):
        raise CommandError("--json prints one object at the end; leave out --stream and --chat")
    if args.chat and args.raw:
        raise CommandError("--chat needs the chat template; leave out --raw")


def _read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt's text, or None for a conversation."""
    if args.chat:
        return None
    if args.prompt_file is None:
        return _utf8("--prompt", lambda: args.prompt)
    if args.prompt_file == "-":
        return _utf8("standard input", sys.stdin.read)
    try:
        return _utf8(repr(args.prompt_file), lambda: Path(args.prompt_file).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {args.prompt_file!r}: {error.strerror}; check --prompt-file") from None


def _utf8(source: str, read: Callable[[], str]) -> str:
    """What ``read`` returns; CommandError for bytes that are not UTF-8, which Python may pass as surrogates."""
    try:
        text = read()
        text.encode()
    except UnicodeError:
        raise CommandError(f"{source} is not UTF-8 text; convert it first") from None
    return text


def _generate(
    args: argparse.Namespace, loaded: LoadedModel, decoder: Any, ids: list[int], *, stream: bool
) -> tuple[list[int], dict[str, Any]]:
    """New token ids and statistics of one request."""
    import torch
    from transformers import TextStreamer

    options: dict[str, Any] = {"eos_token_id": None} if args.ignore_eos else {}
    if stream:
        options["streamer"] = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    with warnings_as_notes():
        sequences, stats = decoder.generate(
            torch.tensor([ids]),
            max_new_tokens=args.max_new_tokens,
            block_size=args.block_size,
            blocks=args.blocks,
            candidates=args.candidates,
            pool_from_prompt=args.pool_from_prompt,
            prefill=args.prefill,
            do_sample=args.temperature > 0,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            return_stats=True,
            **options,
        )
    return sequences[0, len(ids) :].tolist(), {"path": decoder.path, **stats.to_dict()}


def _chat(args: argparse.Namespace, loaded: LoadedModel, decoder: Any) -> None:
    """Messages from standard input, answers streamed to standard output."""
    tokenizer = loaded.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise CommandError(f"{loaded.name} has no chat template; use --prompt")
    if sys.stdin.isatty():
        note("one message a line; end with Ctrl-D")
    messages: list[dict[str, str]] = []
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = _utf8("standard input", sys.stdin.readline)
        if not line:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        new_ids, stats = _generate(args, loaded, decoder, shared.chat_ids(tokenizer, messages), stream=True)
        messages.append({"role": "assistant", "content": tokenizer.decode(new_ids, skip_special_tokens=True)})
        if args.stats:
            _print_stats(stats)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = "dtype device block_size blocks candidates pool_from_prompt max_new_tokens temperature top_k top_p seed"
    return {name: getattr(args, name) for name in [*names.split(), "prefill", "ignore_eos", "raw"]}


def _print_stats(stats: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in stats.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(stderr=True).print(table)
