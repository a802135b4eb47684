"""All stages of training in rounds over block sizes: trajectories, pack, fit, each from the model of the round before.

    OUT/settings.json                               what the run was begun with
    OUT/round-1-block-16/trajectories, packed, fit  a folder per stage
    OUT/round-1-block-16/round.json                 written when the round is finished
    OUT/                                            the last round's model and the model card of the whole run
    OUT/finished.json                               written last

A stage that is whole is kept, one that was interrupted goes on, so the same command leads to the same weights, bit for
bit on a CPU, however often it was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_decoding.cli import CommandError, note
from jacobi_decoding.cli import arguments as shared
from jacobi_training.cli import fit as fit_command
from jacobi_training.cli import pack as pack_command
from jacobi_training.cli import trajectories as trajectories_command
from jacobi_training.fit_config import FREE_SETTINGS, FitConfig
from jacobi_training.pack_config import PackConfig
from jacobi_training.trajectory_config import MOST, TrajectoryConfig

if TYPE_CHECKING:
    from jacobi_training.distributed import Ranks

ROUND = "round.json"


@dataclass(frozen=True)
class PipelineConfig:
    """Settings of all stages.

    Attributes
    ----------
    block_sizes : tuple of int
        One round each, in this order.
    trajectories, pack, fit
        Settings of the stages; the trajectories' block size is the round's, and ``fit.steps`` are those of the whole
        run, split over the rounds as evenly as can be.
    chat_template : bool
        Make text prompts the user's message in the tokenizer's chat template.
    pack_enough : bool
        Pack every sample as often as the round's steps need, each time with its own noise, instead of
        ``pack.epochs`` times.

    Raises
    ------
    ValueError
        There is no block size, or there are fewer steps than rounds.
    """

    block_sizes: tuple[int, ...] = (16, 32)
    trajectories: TrajectoryConfig = field(default_factory=TrajectoryConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    chat_template: bool = False
    pack_enough: bool = True

    def __post_init__(self) -> None:
        if not self.block_sizes:
            raise ValueError("block_sizes must name at least one block size")
        if self.fit.steps is not None and self.fit.steps < len(self.block_sizes):
            raise ValueError(
                f"steps must be at least 1 for each of {len(self.block_sizes)} rounds, got {self.fit.steps}"
            )

    def steps(self, round_index: int) -> int | None:
        """Optimizer steps of a round."""
        if self.fit.steps is None:
            return None
        rounds = len(self.block_sizes)
        return self.fit.steps * (round_index + 1) // rounds - self.fit.steps * round_index // rounds

    def settings(self) -> dict[str, Any]:
        """What decides the result, by the names of the command line's options."""
        trajectories = {k: v for k, v in asdict(self.trajectories).items() if k not in ("block_size", "batch_size")}
        fit = {k: v for k, v in asdict(self.fit).items() if k not in (*FREE_SETTINGS, "epochs")}
        pack = {**asdict(self.pack), "epochs": None if self._packs_enough else self.pack.epochs}
        own = {"block_sizes": self.block_sizes, "chat_template": self.chat_template}
        # All stages share --seed; where a caller gave them different ones, each counts.
        seeds = {self.trajectories.seed, self.pack.seed, self.fit.seed}
        seed = seeds.pop() if len(seeds) == 1 else [self.trajectories.seed, self.pack.seed, self.fit.seed]
        return {**trajectories, **pack, **fit, **own, "seed": seed}

    @property
    def _packs_enough(self) -> bool:
        return self.pack_enough and self.fit.steps is not None

    def pack_config(self, round_index: int, records: int) -> PackConfig:
        """Packing of a round with that many trajectories."""
        steps = self.steps(round_index)
        if steps is None or not self._packs_enough:
            return self.pack
        return replace(self.pack, epochs=-(-steps * self.fit.batch_size // max(records, 1)))


def run(
    model: str | os.PathLike[str],
    prompts: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    config: PipelineConfig | None = None,
    *,
    device: str = "cpu",
    quiet: bool = False,
) -> Path:
    """Train ``model`` on its own trajectories of ``prompts``; go on where an interrupted run stopped.

    Parameters
    ----------
    model : path
        What :func:`jacobi_decoding.loading.load_model` takes.
    prompts : path
        What :func:`jacobi_training.prompts.read_prompts` takes.
    out_dir : path
        New, empty, or begun by an interrupted run with the same arguments.
    config : PipelineConfig, optional
        Settings.
    device : str
        Where all stages run: cpu, cuda (with several ranks each rank's own GPU) or cuda:N.
    quiet : bool
        Show no progress.

    Returns
    -------
    Path
        ``out_dir``, a Hugging Face checkpoint now.

    Raises
    ------
    ValueError
        Model or prompts cannot be used, a file is damaged, or the folder was begun with other settings.
    OSError
        ``out_dir`` cannot be written.
    """
    import torch

    from jacobi_decoding.devices import checked_device
    from jacobi_decoding.loading import load_model
    from jacobi_training.card import run_card
    from jacobi_training.distributed import join_ranks, own_device
    from jacobi_training.export import FINISHED, SETTINGS, copy_checkpoint
    from jacobi_training.prompts import read_prompts
    from jacobi_training.run_settings import claim, only_writer, write_json
    from jacobi_training.trajectories import model_fingerprint

    config = config or PipelineConfig()
    checked_device(own_device(device))
    out, ranks = Path(out_dir), join_ranks(device)
    loaded = load_model(model, torch.float32)
    read = read_prompts(prompts, loaded.tokenizer, chat_template=config.chat_template)
    digest = hashlib.sha256(json.dumps([[p.index, *p.ids] for p in read]).encode()).hexdigest()
    with only_writer(out) if ranks.first else nullcontext():
        if ranks.first:
            claim(out / SETTINGS, {"model": model_fingerprint(loaded.model), "prompts": digest, **config.settings()})
        ranks.wait()
        source: str | Path = loaded.source
        for index, size in enumerate(config.block_sizes):
            folder = out / f"round-{index + 1}-block-{size}"
            if not (folder / ROUND).exists():
                _round(source, read, folder, index, config, ranks, device, quiet)
            source = folder / "fit"
        if ranks.first and not (out / FINISHED).exists():
            rounds = sorted(out.glob(f"round-*/{ROUND}"), key=lambda path: int(path.parent.name.split("-")[1]))
            summaries = [_read_round(path) for path in rounds]
            copy_checkpoint(Path(source), out, run_card(loaded.name, len(read), config.settings(), summaries))
            write_json(out / FINISHED, {"rounds": len(summaries)})
        ranks.wait()
    return out


def _read_round(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ValueError(f"{str(path)!r} is damaged; delete it and run the same command again") from None


def _round(
    source: str | Path,
    prompts: list[Any],
    folder: Path,
    index: int,
    config: PipelineConfig,
    ranks: Ranks,
    device: str,
    quiet: bool,
) -> None:
    """One round: its three stages, and round.json with what they came to."""
    import torch

    from jacobi_decoding.loading import load_model
    from jacobi_training.distributed import own_device
    from jacobi_training.fit import fit
    from jacobi_training.packing import write_packed
    from jacobi_training.run_settings import write_json
    from jacobi_training.shards import load_manifest, read_records
    from jacobi_training.trajectories import Summary, write_trajectories

    quiet = quiet or not ranks.first
    size = config.block_sizes[index]
    title = f"round {index + 1} of {len(config.block_sizes)}, block size {size}"
    trajectories, packed = folder / "trajectories", folder / "packed"
    loaded = load_model(source, torch.float32, device=own_device(device))
    with nullcontext() if quiet else trajectories_command.progress_bar(f"{title}: trajectories") as progress:
        write_trajectories(
            loaded.model,
            prompts,
            trajectories,
            replace(config.trajectories, block_size=size),
            tokenizer=loaded.tokenizer,
            rank=ranks.rank,
            world_size=ranks.world,
            progress=progress,
        )
    ranks.wait()
    if ranks.first:
        records = load_manifest(trajectories).records
        with nullcontext() if quiet else pack_command.progress_bar() as progress:
            write_packed([trajectories], packed, config.pack_config(index, records), progress=progress)
    ranks.wait()
    settings = replace(config.fit, steps=config.steps(index), epochs=1.0)
    result = fit(source, packed, folder / "fit", settings, device=device, title=f"{title}: fit", quiet=quiet)
    if ranks.first:
        summary = Summary()
        for record in read_records(trajectories):
            summary.add(record)
        report = load_manifest(packed).records
        write_json(
            folder / ROUND,
            {
                "block_size": size,
                "prompts": summary.prompts,
                "tokens": summary.tokens,
                "tokens_per_forward": summary.tpf,
                "iterations_per_block": summary.iterations_per_block,
                "samples": report,
                "steps": result.steps,
                "metrics": result.metrics,
            },
        )
    ranks.wait()


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a run of all stages. Those that must be given are checked by :func:`run_from_args`, since the
    parser also has single stages as subcommands."""
    parser.add_argument("--model", metavar="MODEL", help="the model to train: a folder, a .gguf file, or a hub id")
    parser.add_argument("--out", metavar="DIR", help="folder of the run and of the trained model, new or begun")
    shared.add_device_argument(parser)
    parser.add_argument(
        "--block-sizes",
        type=shared.integer(2, MOST),
        nargs="+",
        default=list(PipelineConfig().block_sizes),
        metavar="N",
        help="a round of training with each, in this order (default: 16 32)",
    )
    parser.add_argument(
        "--epochs",
        type=shared.integer(1),
        metavar="N",
        help="times that every sample is packed, with new noise each time (default: as often as --steps needs, else 1)",
    )
    parser.add_argument("--seed", type=shared.integer(0), default=0, metavar="N", help="of all stages (default: 0)")
    trajectories_command.add_prompt_arguments(parser, required=False)
    own = ("seed", "epochs", "block_size", "batch_size", "shard_size")
    trajectories_command.add_trajectory_arguments(parser, without=own)
    pack_command.add_pack_arguments(parser, without=own)
    fit_command.add_fit_arguments(parser, without=("seed", "epochs"))


def run_from_args(args: argparse.Namespace) -> None:
    """Run all stages; CommandError and the errors of :func:`run`."""
    for name in ("model", "prompts", "out"):
        if getattr(args, name) is None:
            raise CommandError(f"--{name} is missing; give it, or name a stage (see `jacobi train --help`)")
    given = argparse.Namespace(**{k: v for k, v in vars(args).items() if k not in ("epochs", "batch_size")})
    config = PipelineConfig(
        tuple(args.block_sizes),
        trajectories_command.config_from_args(given),
        replace(pack_command.config_from_args(given), epochs=args.epochs or 1),
        replace(fit_command.config_from_args(given), batch_size=args.batch_size),
        args.chat_template,
        pack_enough=args.epochs is None,
    )
    shared.set_threads(args)
    out = run(args.model, args.prompts, args.out, config, device=args.device)
    if int(os.environ.get("RANK", "0")) == 0:
        note(f"the trained model is in {str(out)!r}; try `jacobi generate --model {out} --prompt TEXT`")
