"""Noise: how far a state is from the fixed point, and which state every block of a sample takes.

The *noise ratio* of a state is its share of unconverged guesses: with n tokens, the first of them final, and the first
difference from the fixed point at f (1 <= f, or n when there is none),

    ratio = (n - f) / (n - 1)

0 is the fixed point and 1 an init whose first guess is wrong. This is the ratio of the progressive noise schedule of
Jacobi Forcing (arXiv 2512.14681; ``(n - f) / n`` in its released code) counted over the n - 1 tokens that can be wrong,
so that 1 can be reached. A block of one token has no guess; its ratio is 0.

The wanted ratio of block j depends on its place i = (j + phase) mod w in a window of w blocks and on the time in the
run:

    linear    min at the first block of a window, rising to the ceiling at its last, then again (the paper's)
    reverse   the ceiling first, falling to min
    random    uniform between min and the ceiling
    cyclic    no ratio: the (1 + i)-th state before the fixed point (the released code's variant)
    any       no ratio: any state before the fixed point, with equal chances (CLLM, arXiv 2403.00835, global loss)

Jacobi Forcing has phase 0, so an answer shorter than w never reaches the ceiling and one of a single block has
nothing to learn; here linear, reverse and cyclic have a phase per sample and epoch, so every block meets every level.

The ceiling is max, or rises or falls between a low value and max over the first part of the run. Where there is no
wanted ratio, states outside min..ceiling are left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

SCHEDULES = ("linear", "random", "reverse", "cyclic")
PHASED = ("linear", "reverse", "cyclic")  # a block's place in its window counts
CEILINGS = ("constant", "rising", "falling")


def noise_ratio(state: Sequence[int], fixed_point: Sequence[int]) -> float:
    """Noise ratio of a state, see the module; ``state`` and ``fixed_point`` have the same length."""
    guesses = len(fixed_point) - 1
    if guesses < 1:
        return 0.0
    return min(len(fixed_point) - first_difference(state, fixed_point), guesses) / guesses


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """First place where two equally long sequences differ; their length when they do not."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))


@dataclass(frozen=True)
class Target:
    """What a block's state is picked by.

    Attributes
    ----------
    low, high : float
        Range of ratios; ``high`` is the ceiling at this time of the run.
    ratio : float, optional
        Wanted ratio: the nearest state is taken.
    back : tuple of int, optional
        (j + phase, w) of the cyclic schedule. With neither, any state within the range is taken.
    """

    low: float
    high: float
    ratio: float | None = None
    back: tuple[int, int] | None = None


@dataclass(frozen=True)
class NoiseSchedule:
    """The schedule of a run.

    Attributes
    ----------
    kind : str
        ``linear``, ``random``, ``reverse``, ``cyclic`` or ``any``.
    window : int
        w, blocks of a window.
    low, high : float
        Least and greatest ratio, 0 <= low <= high <= 1.
    ceiling : str
        ``constant``: ``high`` throughout; ``rising``: from ``ceiling_low`` to ``high``; ``falling``: the way back.
    ceiling_low : float
        The ceiling at its lowest, low <= ceiling_low <= high.
    ceiling_share : float
        Share of the run, in (0, 1], over which the ceiling moves; after it the ceiling stays.

    Raises
    ------
    ValueError
        A value is outside its range.
    """

    kind: str = "linear"
    window: int = 4
    low: float = 0.0
    high: float = 1.0
    ceiling: str = "constant"
    ceiling_low: float = 0.25
    ceiling_share: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in (*SCHEDULES, "any"):
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.kind!r}")
        if self.ceiling not in CEILINGS:
            raise ValueError(f"ceiling must be one of {', '.join(CEILINGS)}, got {self.ceiling!r}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1 block, got {self.window}")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(
                f"noise ratios must satisfy 0 <= min_ratio <= max_ratio <= 1, got {self.low:g} and {self.high:g}"
            )
        if self.ceiling != "constant" and not self.low <= self.ceiling_low <= self.high:
            raise ValueError(
                f"ceiling_low must lie between min_ratio {self.low:g} and max_ratio {self.high:g}, "
                f"got {self.ceiling_low:g}"
            )
        if not 0 < self.ceiling_share <= 1:
            raise ValueError(f"ceiling_share must be above 0 and at most 1, got {self.ceiling_share:g}")

    def ceiling_at(self, progress: float) -> float:
        """Greatest ratio wanted when the share ``progress`` of the run, in [0, 1], is behind."""
        if self.ceiling == "constant":
            return self.high
        moved = min(progress / self.ceiling_share, 1.0)
        begin, end = (self.ceiling_low, self.high) if self.ceiling == "rising" else (self.high, self.ceiling_low)
        return begin + (end - begin) * moved if moved < 1 else end

    def phase(self, epoch: int, rng: random.Random) -> int:
        """Blocks by which a sample's windows are shifted in an epoch, in [0, w).

        ``rng`` is seeded by the sample but not by the epoch: in w epochs each block meets each level once.
        """
        return (rng.randrange(self.window) + epoch) % self.window if self.kind in PHASED else 0

    def targets(self, blocks: int, progress: float, rng: random.Random, phase: int = 0) -> list[Target]:
        """One target per block of a sample that is trained on when ``progress`` of the run is behind."""
        high = self.ceiling_at(progress)
        return [self._target(j + phase, high, rng) for j in range(blocks)]

    def _target(self, j: int, high: float, rng: random.Random) -> Target:
        if self.kind == "any":
            return Target(self.low, high)
        if self.kind == "cyclic":
            return Target(self.low, high, back=(j, self.window))
        if self.kind == "random":
            return Target(self.low, high, ratio=rng.uniform(self.low, high))
        # A window of one block has one level: the noisiest, since min is 0 by default and 0 teaches nothing.
        level = j % self.window / (self.window - 1) if self.window > 1 else 1.0
        if self.kind == "reverse" and self.window > 1:
            level = 1.0 - level
        return Target(self.low, high, ratio=self.low + (high - self.low) * level)


def pick_state(ratios: Sequence[float], target: Target, rng: random.Random) -> int:
    """Index of the state that a block takes.

    ``ratios`` are those of the states in the order of the trajectory, the fixed point last. A wanted ratio takes the
    nearest state, the noisier of two that are equally near. Without one, only states before the fixed point and within
    the range are candidates; when there is none, the state nearest to the range is taken.
    """
    if target.ratio is not None:
        wanted = target.ratio
        return min(range(len(ratios)), key=lambda s: (_distance(ratios[s], wanted), -ratios[s], s))
    candidates = [s for s in range(len(ratios) - 2, -1, -1) if target.low <= ratios[s] <= target.high]
    if not candidates:
        return min(range(len(ratios)), key=lambda s: (_outside(ratios[s], target), -ratios[s], s))
    if target.back is not None:
        j, window = target.back
        return candidates[j % min(window, len(candidates))]
    return rng.choice(candidates)


def _distance(ratio: float, wanted: float) -> float:
    # Rounded, so that ratios equally near on paper tie whatever their last bits are.
    return round(math.fabs(ratio - wanted), 12)


def _outside(ratio: float, target: Target) -> float:
    return max(target.low - ratio, ratio - target.high, 0.0)
