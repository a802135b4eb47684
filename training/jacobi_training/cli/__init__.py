"""Train a model to decode several tokens per forward pass, on its own Jacobi trajectories.

Without a stage all of them run, in rounds over the block sizes: trajectories, pack, fit. Everything is written below
--out; the same command again continues where an interrupted one stopped.
"""

from __future__ import annotations

import argparse
import importlib

STAGES = ("trajectories", "pack", "fit", "evaluate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from jacobi_training.pipeline import add_pipeline_arguments

    add_pipeline_arguments(parser)
    stages = parser.add_subparsers(title="single stages", metavar="STAGE", dest="stage", parser_class=type(parser))
    for name in STAGES:
        module = importlib.import_module(f"jacobi_training.cli.{name}")
        description = (module.__doc__ or "").strip()
        stage = stages.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(stage)
        stage.set_defaults(run_stage=module.run)


def run(args: argparse.Namespace) -> int | None:
    if args.stage is not None:
        return args.run_stage(args)
    from jacobi_training.pipeline import run_from_args

    run_from_args(args)
    return None
