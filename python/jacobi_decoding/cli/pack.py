"""Pack a model's weights into one file for torch.ops.jacobi.multi_block_step.

The file holds the packed weights and their descriptor; examples/step_loop.py decodes from it with torch and
jacobi_kernels alone. Models of the Llama kind only; the others run through their own modules.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jacobi_decoding.cli import CommandError, note
from jacobi_decoding.cli import arguments as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="a .safetensors file, replaced if it exists")


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.suffix != ".safetensors":
        raise CommandError(f"--out must end in .safetensors, got {args.out!r}")
    if not out.absolute().parent.is_dir():
        raise CommandError(f"folder {str(out.absolute().parent)!r} does not exist; create it or change --out")
    loaded = shared.load(args, need_tokenizer=False)
    from jacobi_decoding.step_model import describe_step_model
    from jacobi_kernels.step_weights import save_step_weights

    save_step_weights(describe_step_model(loaded.model).pack(), out)
    note(f"{loaded.name} in {args.dtype}: {out.stat().st_size / 1e6:.0f} MB in {out}")
