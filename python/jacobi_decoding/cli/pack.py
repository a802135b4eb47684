"""Pack a model's weights into one file for torch.ops.jacobi.multi_block_step.

The file holds the packed weights and their descriptor; examples/step_loop.py decodes from it with torch and
jacobi_kernels alone. Models of the Llama kind only; the others run through their own modules.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jacobi_decoding.cli import CommandError, note
from jacobi_decoding.cli import arguments as shared
from jacobi_decoding.cli.output import cannot_write, check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model_arguments(parser, packed=True)
    parser.add_argument("--out", required=True, metavar="FILE", help="a .safetensors file, replaced if it exists")


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.suffix != ".safetensors":
        raise CommandError(f"--out must end in .safetensors, got {args.out!r}")
    check_writable(out, "--out")
    loaded = shared.load(args, need_tokenizer=False, packed=True)
    from safetensors import SafetensorError

    from jacobi_decoding.weights_source import weights_source
    from jacobi_kernels.step_weights import save_step_weights

    weights = weights_source(loaded.model).weights()
    try:
        save_step_weights(weights, out)
    except (OSError, SafetensorError) as error:
        raise cannot_write(out, error, "--out") from None
    note(f"{loaded.name} in {args.dtype}: {out.stat().st_size / 1e6:.0f} MB in {out}")
