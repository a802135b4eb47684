"""What a check of an answer gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """correct: whether the answer is right. reason: why not, in a few words."""

    correct: bool
    reason: str = ""
