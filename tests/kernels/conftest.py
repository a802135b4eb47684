"""Kernel tests run on one thread unless they choose otherwise: tiny ops gain nothing from more, and lose a lot when
other programs keep the cores busy. assert_same_everywhere covers the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.helpers import threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield
