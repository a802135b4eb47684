"""Settings of packing. Nothing slow is imported, so that the command line can name the choices.

Modes:

    progressive   states by the noise schedule, taught by the fixed point (Jacobi Forcing, arXiv 2512.14681)
    global        one random state per block, taught by the fixed point (CLLM, arXiv 2403.00835; context clean there)
    local         one random state per block, or by a schedule, taught by the next state of its trajectory (CLLM)
"""

from __future__ import annotations

from dataclasses import dataclass

from jacobi_training.noise import NoiseSchedule

MODES = ("progressive", "global", "local")
CONTEXTS = ("window", "all", "clean")


@dataclass(frozen=True)
class PackConfig:
    """Settings of packing.

    Attributes
    ----------
    mode : str
        ``progressive``, ``global`` or ``local``.
    schedule : str, optional
        ``linear``, ``random``, ``reverse`` or ``cyclic``; by default linear in mode progressive and any state in the
        others. Mode global has none.
    context : str
        What a noisy block continues: ``window`` (noisy blocks of its window), ``all`` noisy blocks, ``clean`` ones.
    window : int
        Blocks of a window, of the schedule and of the context.
    min_ratio, max_ratio, ceiling, ceiling_low, ceiling_share
        See :class:`jacobi_training.noise.NoiseSchedule`.
    epochs : int
        How often every sample of a block size is packed, each time with its own states.
    max_length : int
        Most rows of a packed sample: prompt, clean, noisy and, in mode local, teacher tokens. Longer answers are cut
        behind the last block that fits.
    seed : int
        Of the order and of random states.

    Raises
    ------
    ValueError
        A value is outside its range, or mode global has a schedule.
    """

    mode: str = "progressive"
    schedule: str | None = None
    context: str = "window"
    window: int = 4
    min_ratio: float = 0.0
    max_ratio: float = 1.0
    ceiling: str = "constant"
    ceiling_low: float = 0.25
    ceiling_share: float = 0.5
    epochs: int = 1
    max_length: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.context not in CONTEXTS:
            raise ValueError(f"context must be one of {', '.join(CONTEXTS)}, got {self.context!r}")
        if self.mode == "global" and self.schedule is not None:
            raise ValueError(
                f"mode global takes random states, not by schedule {self.schedule!r}; leave out the schedule"
            )
        for name in ("epochs", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        _ = self.noise

    @property
    def noise(self) -> NoiseSchedule:
        """The noise schedule that these settings make."""
        kind = self.schedule or ("linear" if self.mode == "progressive" else "any")
        return NoiseSchedule(
            kind, self.window, self.min_ratio, self.max_ratio, self.ceiling, self.ceiling_low, self.ceiling_share
        )
