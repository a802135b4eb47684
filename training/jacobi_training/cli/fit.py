"""Train a model on packed samples: losses, optimizer, checkpoints.

The same command again goes on where an interrupted run stopped, and gives the same weights bit for bit. --out ends up
with a Hugging Face checkpoint, metrics.jsonl (a line per optimizer step) and README.md, a model card. Several ranks:
`torchrun --nproc-per-node 2 --no-python jacobi train fit ...`, or the like with accelerate launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

from jacobi_decoding.cli import arguments as shared
from jacobi_training.fit_config import CONSISTENCY_KINDS, LR_SCHEDULES, PARALLEL, PRECISIONS, FitConfig

COUNT, POSITIVE = shared.integer(1), shared.number(0, above=True)
WEIGHT, SHARE = shared.number(0), shared.number(0, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a folder with config.json, a .gguf file, or a hub id that is in the local cache",
    )
    parser.add_argument("--packed", required=True, metavar="DIR", help="folder of packed samples")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the trained model")
    shared.add_device_argument(parser)
    add_fit_arguments(parser)


def add_fit_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """The settings of training, for this stage and for a run of all stages; :func:`config_from_args` reads them.

    without: fields of FitConfig that the parser has already, or that are to keep their default.
    """
    defaults = asdict(FitConfig())
    group = parser.add_argument_group("losses and optimizer")

    def add(name: str, text: str, **options: Any) -> None:
        if name in without:
            return
        shown = "" if defaults[name] in (None, (), False) else " (default: %(default)s)"
        group.add_argument("--" + name.replace("_", "-"), default=defaults[name], help=text + shown, **options)

    add("steps", "optimizer steps (default: as many as --epochs takes)", type=COUNT, metavar="N")
    add("epochs", "times to go through the samples, without --steps", type=POSITIVE, metavar="N")
    add("batch_size", "samples of an optimizer step, over all ranks", type=COUNT, metavar="N")
    add("max_rows", "rows (tokens in all versions) of a micro-batch", type=COUNT, metavar="N")
    add("ar_weight", "weight of the AR loss", type=WEIGHT, metavar="W")
    add("consistency_weight", "weight of the consistency loss; 0 trains on the answers alone", type=WEIGHT, metavar="W")
    add("consistency", "toward the teacher's distribution, or the fixed point's token", choices=CONSISTENCY_KINDS)
    add("temperature", "of both distributions of soft consistency", type=POSITIVE, metavar="T")
    add("lr", "peak learning rate", type=POSITIVE, metavar="R")
    add("lr_schedule", "how it goes on after the warm-up", choices=LR_SCHEDULES)
    add("warmup", "share of the steps in which it rises", type=SHARE, metavar="S")
    add("min_lr", "where cosine ends, as a share of the peak", type=SHARE, metavar="S")
    add("beta1", "of AdamW", type=SHARE, metavar="B")
    add("beta2", "of AdamW", type=SHARE, metavar="B")
    add("weight_decay", "of AdamW, on matrices only", type=WEIGHT, metavar="D")
    add("clip", "largest gradient norm, 0: any", type=WEIGHT, metavar="N")
    add(
        "lora_rank",
        "train LoRA adapters of this rank, merged in the end; 0: train all weights",
        type=shared.integer(0),
        metavar="R",
    )
    add("lora_alpha", "scale of the adapters times their rank", type=POSITIVE, metavar="A")
    add(
        "lora_modules",
        "modules with an adapter, such as q_proj v_proj (default: all linear layers but the head)",
        nargs="+",
        metavar="NAME",
    )
    add("seed", "of the adapters' start", type=shared.integer(0), metavar="N")
    group = parser.add_argument_group("how training runs")
    add("precision", "of the linear layers; weights, attention and losses are float32", choices=PRECISIONS)
    add("save_dtype", "of the final checkpoint", choices=PRECISIONS)
    add("gradient_checkpointing", "compute layers again in the backward pass to save memory", action="store_true")
    add("compile", "compile the decoder layers (takes a minute, then saves a part of each step)", action="store_true")
    add("parallel", "with several ranks: a copy of the model on each, or a share of it", choices=PARALLEL)
    add("checkpoint_every", "steps between checkpoints, of which two are kept", type=COUNT, metavar="N")
    add("tensorboard", "write OUT/tensorboard as well", action="store_true")


def config_from_args(args: argparse.Namespace) -> FitConfig:
    """The settings that the options name; a field without an option keeps its default."""
    given = vars(args)
    values = {f.name: given[f.name] for f in fields(FitConfig) if f.name in given}
    if "lora_modules" in values:
        values["lora_modules"] = tuple(values["lora_modules"])
    return FitConfig(**values)


def run(args: argparse.Namespace) -> None:
    config = config_from_args(args)
    from jacobi_decoding.cli import note
    from jacobi_training.distributed import join_ranks
    from jacobi_training.fit import fit

    shared.set_threads(args)
    result = fit(args.model, args.packed, args.out, config, device=args.device)
    if join_ranks().first:
        losses = ""
        if result.metrics:  # metrics.jsonl of a finished run may be gone
            last = result.metrics[-1]
            losses = f", AR loss {last['ar_loss']:.4g}, consistency loss {last['consistency_loss']:.4g}"
        note(f"{result.steps} steps{losses}; the model is in {str(result.out)!r}")
