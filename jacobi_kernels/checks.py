"""The check of an integer argument that every layer shares."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def whole_number(name: str, value: Any, low: int | None = None, high: int | None = None, *, others: str = "") -> int:
    """``value`` as an int within low..high (None: no bound); a ValueError that names the argument otherwise.

    others: what the argument may be besides, for the message.
    """
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits or (low is not None and value < low) or (high is not None and value > high):
        least = "" if low is None else f" of at least {low}"
        most = "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} must be an integer{least}{most}{others}, got {value!r}")
    return int(value)
