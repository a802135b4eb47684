"""Trains a model on packed samples: optimizer, schedule, checkpoints, metrics, and the Hugging Face checkpoint.

    OUT/settings.json       what the run was begun with
    OUT/metrics.jsonl       a line per optimizer step
    OUT/checkpoints/        the last two
    OUT/                    config, safetensors, tokenizer, README.md (the model card)
    OUT/finished.json       written last

The same data, settings and number of ranks give the same weights bit for bit on a CPU, however often the run was
killed. Nothing in it is random but the start of LoRA adapters: samples come in file order, dropout is refused.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from jacobi_decoding.devices import checked_device, on_device
from jacobi_decoding.loading import load_model
from jacobi_training import checkpoints
from jacobi_training.card import fit_card
from jacobi_training.distributed import Ranks, clip, join_ranks, own_device, spread, whole, without_sync
from jacobi_training.export import FINISHED, METRICS, SETTINGS, merged_copy, write_checkpoint
from jacobi_training.feed import Feed
from jacobi_training.fit_config import FREE_SETTINGS, FitConfig
from jacobi_training.losses import Objective
from jacobi_training.metrics import MetricLog, StepProgress, read_lines
from jacobi_training.model import TrainingModel, with_lora
from jacobi_training.run_settings import claim, only_writer, write_json
from jacobi_training.shards import MANIFEST, ShardReader
from jacobi_training.trajectories import model_fingerprint


@dataclass(frozen=True)
class FitResult:
    """out: the folder with the checkpoint. steps: of the run. metrics: those of every step."""

    out: Path
    steps: int
    metrics: list[dict[str, Any]]


def fit(
    model: str | os.PathLike[str] | Any,
    packed_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    config: FitConfig | None = None,
    *,
    tokenizer: Any = None,
    device: str = "cpu",
    title: str = "fit",
    quiet: bool = False,
) -> FitResult:
    """Train a model on a folder of packed samples; go on where an interrupted run with the same arguments stopped.

    Parameters
    ----------
    model : path or transformers model
        What :func:`jacobi_decoding.loading.load_model` takes, or a float32 model, which is trained in place.
    packed_dir : path
        Folder that ``write_packed`` completed.
    out_dir : path
        New, empty, or begun by an interrupted run.
    config : FitConfig, optional
        Settings.
    tokenizer : optional
        Saved beside the model; by default the one that was loaded with it.
    device : str
        Where training runs: cpu, cuda (with several ranks each rank's own GPU) or cuda:N. On a GPU the same command
        again may differ in rounding.
    title, quiet
        Name of the progress bar; show none.

    Raises
    ------
    ValueError
        Model, samples or checkpoints cannot be used, or the folder was begun with other settings.
    OSError
        ``out_dir`` cannot be written.
    """
    config = config or FitConfig()
    place = checked_device(own_device(device))
    out, ranks = Path(out_dir), join_ranks(device)
    samples = ShardReader(packed_dir, "packed")
    name = Path(model).name if isinstance(model, (str, os.PathLike)) else type(model).__name__
    if isinstance(model, (str, os.PathLike)):
        loaded = load_model(model, torch.float32)
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    model = model.to(place)
    total = config.steps * config.batch_size if config.steps else math.ceil(config.epochs * len(samples))
    if total < 1:
        raise ValueError(f"{os.fspath(packed_dir)!r} holds {len(samples)} samples, of which nothing is to be taken")
    feed = Feed(samples, config.batch_size, total, config.max_rows, ranks, ar_only=not config.consistency_weight)

    settings = {key: value for key, value in asdict(config).items() if key not in FREE_SETTINGS}
    data = hashlib.sha256((Path(packed_dir) / MANIFEST).read_bytes()).hexdigest()
    with only_writer(out) if ranks.first else nullcontext():
        if ranks.first:
            claim(out / SETTINGS, {**settings, "model": model_fingerprint(model), "packed": data})
        ranks.wait()
        if not (out / FINISHED).exists():
            with on_device(place):
                trained, state = _train(model, feed, out, config, ranks, title, quiet)
            if ranks.first:
                metrics = read_lines(out / METRICS)
                card = fit_card(name, samples.manifest, config, metrics)
                write_checkpoint(merged_copy(trained, state), out, config.save_dtype, tokenizer, card)
                write_json(out / FINISHED, {"steps": feed.steps})
            ranks.wait()
    return FitResult(out, feed.steps, read_lines(out / METRICS))


def _train(
    model: Any, feed: Feed, out: Path, config: FitConfig, ranks: Ranks, title: str, quiet: bool
) -> tuple[Any, dict[str, Any]]:
    """Run the steps that are left; the model, with adapters if any, and its whole state (on the first rank)."""
    if config.lora_rank:
        torch.manual_seed(config.seed)
        model = with_lora(model, config.lora_rank, config.lora_alpha, config.lora_modules)
    training = TrainingModel(
        model,
        objective_of(config),
        precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing,
        compile=config.compile,
    )
    try:
        module = spread(training, ranks, config.parallel)
        optimizer = _optimizer(module, config)
        folder = out / "checkpoints"
        with StepProgress(title, feed.steps, ranks.first and not quiet) as progress:
            first = checkpoints.resume(folder, module, optimizer, progress.say)
            board = out / "tensorboard" if config.tensorboard else None
            log = MetricLog(out / METRICS, first, board) if ranks.first else None
            try:
                for index in range(first, feed.steps):
                    values = _step(module, optimizer, feed, index, config, ranks)
                    if log is not None:
                        log.write(values)
                    progress.update(values)
                    if (index + 1) % config.checkpoint_every == 0 or index + 1 == feed.steps:
                        checkpoints.save(folder, index + 1, module, optimizer, ranks)
            finally:
                if log is not None:
                    log.close()
            if log is not None and config.consistency_weight:
                _warn_without_noise(read_lines(out / METRICS), progress)
        return model, {name: whole(value) for name, value in model.state_dict().items()}
    finally:
        training.release()


def _step(
    module: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, index: int, config: FitConfig, ranks: Ranks
) -> dict[str, Any]:
    """One optimizer step; its metrics."""
    start = time.perf_counter()
    step, objective = feed.step(index), objective_of(config)
    lr = config.learning_rate(index, feed.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    device = next(module.parameters()).device
    sums = torch.zeros(2, device=device)
    for i, (on_host, counts) in enumerate(step.batches(), 1):
        batch = on_host.to(device)
        with without_sync(module, last=i == len(step.micro_batches)):
            part = module(batch)
            # Both wrappers average gradients over the ranks; the loss is a sum over them.
            loss = objective.total(part, step.counts.ar, step.counts.consistency) * (ranks.world if counts else 0)
            loss.backward()
        if counts:
            sums += part.detach()
    norm = clip(list(checkpoints.trained(module).values()), config.clip)
    if not math.isfinite(norm):
        raise ValueError(f"step {index + 1}: the gradient is not finite; lower --lr or check the model's weights")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ar, consistency = ranks.sum(sums).tolist()
    return {
        "step": index + 1,
        "loss": float(objective.total(sums, step.counts.ar, step.counts.consistency)),
        "ar_loss": ar / max(step.counts.ar, 1),
        "consistency_loss": consistency / max(step.counts.consistency, 1),
        "lr": lr,
        "grad_norm": norm,
        "rows": step.counts.rows,
        "ar_rows": step.counts.ar,
        "consistency_rows": step.counts.consistency,
        "tokens_per_second": step.counts.rows / (time.perf_counter() - start),
    }


def _warn_without_noise(metrics: list[dict[str, Any]], progress: StepProgress) -> None:
    """Low ratios, or answers of one token, may leave nothing but fixed points; that would go unseen."""
    if not any(line["consistency_rows"] for line in metrics):
        progress.say(
            "no row had a consistency term, since the noisy blocks equal the answers; pack with a higher --min-ratio "
            "and --max-ratio, or take prompts with longer answers"
        )


def objective_of(config: FitConfig) -> Objective:
    """The losses that the settings name."""
    return Objective(config.ar_weight, config.consistency_weight, config.consistency, config.temperature)


def _optimizer(module: nn.Module, config: FitConfig) -> torch.optim.Optimizer:
    parameters = list(checkpoints.trained(module).values())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    # The fused CPU kernel takes no shares of parameters.
    fused = not any(isinstance(p, DTensor) for p in parameters)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, fused=fused)
