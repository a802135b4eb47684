"""How the minutes of a run are shared among its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

SHARES = {"steps": 3.0, "generate": 5.0, "curve": 1.5, "prefill": 1.0, "memory": 1.5}
FLOAT32_SHARE = 2.0  # it has one peer more, and the longest steps


def shares(parts: list[str]) -> dict[str, float]:
    """Weights of parts named ``kind`` or ``kind format``."""
    return {part: SHARES.get(part.split()[0], 0.5) * (FLOAT32_SHARE if "float32" in part else 1.0) for part in parts}


class Budget:
    """Deadlines of parts that are taken in the order of ``weights``; what one leaves over goes to the later ones."""

    def __init__(
        self, minutes: float, weights: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.weights, self.clock = dict(weights), clock
        self.end = clock() + 60 * minutes

    def deadline(self, part: str) -> float:
        """When ``part``, which starts now, should end."""
        names = list(self.weights)
        later = sum(self.weights[name] for name in names[names.index(part) :])
        now = self.clock()
        return now + max(self.end - now, 0) * self.weights[part] / later

    def over(self, deadline: float) -> bool:
        return self.clock() >= deadline
