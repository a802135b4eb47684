"""Settings of a run of optimizer steps. Nothing slow is imported, so that the command line can name the choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

LR_SCHEDULES = ("cosine", "constant")
CONSISTENCY_KINDS = ("soft", "hard")
PRECISIONS = ("float32", "bfloat16")
PARALLEL = ("ddp", "fsdp2")
# They change how a run is carried out, not what comes out of it (but for rounding), so a later run may differ in them.
FREE_SETTINGS = ("checkpoint_every", "tensorboard", "parallel", "gradient_checkpointing", "max_rows")


@dataclass(frozen=True)
class FitConfig:
    """Settings of a run.

    Attributes
    ----------
    steps : int, optional
        Optimizer steps; by default as many as ``epochs`` take.
    epochs : float
        Times the packed samples are gone through, when ``steps`` is not given.
    batch_size : int
        Packed samples of an optimizer step, over all ranks.
    max_rows : int
        Rows of a micro-batch: an optimizer step is accumulated from as many as it takes.
    lr, lr_schedule, warmup, min_lr : float, str, float, float
        Peak learning rate; ``cosine`` (down to ``min_lr`` times the peak) or ``constant``; share of the steps in which
        it rises from 0.
    beta1, beta2, weight_decay, clip : float
        Of AdamW, decay on matrices only; largest gradient norm, 0 for no limit.
    ar_weight, consistency_weight, consistency, temperature
        See :class:`jacobi_training.losses.Objective`. With ``consistency_weight`` 0 the noisy blocks are left out.
    precision : str
        ``float32`` or ``bfloat16`` (linear layers under autocast).
    gradient_checkpointing, compile : bool
        See :class:`jacobi_training.model.TrainingModel`.
    lora_rank, lora_alpha, lora_modules : int, float, tuple of str
        Train LoRA adapters of this rank (0: train all weights) on the named modules (none: all linear layers but the
        head).
    save_dtype : str
        Of the final checkpoint's weights.
    parallel : str
        ``ddp`` or ``fsdp2``, when there are several ranks.
    checkpoint_every : int
        Steps between checkpoints.
    tensorboard : bool
        Write TensorBoard events as well.
    seed : int
        Of the LoRA adapters' start.

    Raises
    ------
    ValueError
        A value is outside its range.
    """

    steps: int | None = None
    epochs: float = 1.0
    batch_size: int = 16
    max_rows: int = 8192
    lr: float = 1e-4
    lr_schedule: str = "cosine"
    warmup: float = 0.03
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    ar_weight: float = 1.0
    consistency_weight: float = 1.0
    consistency: str = "soft"
    temperature: float = 1.0
    precision: str = "float32"
    gradient_checkpointing: bool = False
    compile: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_modules: tuple[str, ...] = ()
    save_dtype: str = "float32"
    parallel: str = "ddp"
    checkpoint_every: int = 50
    tensorboard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (
            ("lr_schedule", LR_SCHEDULES),
            ("precision", PRECISIONS),
            ("save_dtype", PRECISIONS),
            ("parallel", PARALLEL),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}")
        for name, low in (("batch_size", 1), ("max_rows", 1), ("checkpoint_every", 1), ("lora_rank", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        for name, low, high in (
            ("epochs", 0, math.inf),
            ("lr", 0, math.inf),
            ("warmup", 0, 1),
            ("min_lr", 0, 1),
            ("beta1", 0, 1),
            ("beta2", 0, 1),
            ("weight_decay", 0, math.inf),
            ("clip", 0, math.inf),
        ):
            if not low <= getattr(self, name) <= high or math.isinf(getattr(self, name)):
                most = "" if math.isinf(high) else f" and at most {high}"
                raise ValueError(f"{name} must be at least {low}{most}, got {getattr(self, name)}")
        if self.lora_modules and not self.lora_rank:
            raise ValueError("lora_modules have no effect without adapters; give a lora_rank, or leave them out")
        check_objective(self.ar_weight, self.consistency_weight, self.consistency, self.temperature)

    def learning_rate(self, step: int, steps: int) -> float:
        """Of the step with number ``step`` (from 0) out of ``steps``."""
        warm = math.ceil(self.warmup * steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        if self.lr_schedule == "constant":
            return self.lr
        done = (step - warm) / max(steps - warm, 1)
        return self.lr * (self.min_lr + (1 - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def check_objective(ar_weight: float, consistency_weight: float, consistency: str, temperature: float) -> None:
    """Raise ValueError for losses that have no meaning; see :class:`jacobi_training.losses.Objective`."""
    if consistency not in CONSISTENCY_KINDS:
        expected = " or ".join(CONSISTENCY_KINDS)
        raise ValueError(f"consistency must be {expected}, got {consistency!r}")
    if not (ar_weight >= 0 and consistency_weight >= 0 and ar_weight + consistency_weight > 0):
        got = f"ar_weight {ar_weight} and consistency_weight {consistency_weight}"
        raise ValueError(f"the loss weights must not be negative, and one must be above 0, got {got}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if consistency == "hard" and temperature != 1:
        raise ValueError("a temperature has no meaning for hard consistency; use soft, or leave temperature at 1")
