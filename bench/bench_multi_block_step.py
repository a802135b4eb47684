"""multi_block_step: a whole forward pass with verification, commit and redraft, for SmolLM2-135M's shape.

A chain of ``rows`` wrong guesses behind ``cached`` tokens, with random weights and with the default model's; and the
layout that decoding uses by default: two blocks of 16 and four candidates.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.decode_setup import DecodeSetup
from bench.models import StepModel, default_model, random_model
from jacobi_decoding.loading import LoadError


def _measure_step(measure: Any, model: StepModel, setup: DecodeSetup) -> None:
    itemsize = model.weights.dtype.itemsize
    work = model.shape.step_work(setup.visible, setup.cached, setup.rows, itemsize)
    # Half a gigabyte of weights: nothing to rotate.
    measure(lambda _: setup.step(), work, prepare=setup.restore, query_tokens=setup.rows)


def _default_model(dtype: torch.dtype) -> StepModel:
    try:
        return default_model(dtype)
    except LoadError as error:
        pytest.skip(str(error))


def test_step_random(measure: Any, dtype: torch.dtype, rows: int, cached: int) -> None:
    model = random_model(dtype)
    _measure_step(measure, model, DecodeSetup(model.weights, rows=rows, cached=cached))


def test_step_model(measure: Any, dtype: torch.dtype, rows: int, cached: int) -> None:
    model = _default_model(dtype)
    _measure_step(measure, model, DecodeSetup(model.weights, rows=rows, cached=cached))


@pytest.mark.parametrize("layout", [(16, 2, 0), (16, 2, 4)], ids=["2x16", "2x16+4x15"])
def test_step_layout(measure: Any, dtype: torch.dtype, layout: tuple[int, int, int]) -> None:
    rows, blocks, candidates = layout
    model = _default_model(dtype)
    setup = DecodeSetup(model.weights, rows=rows, cached=512, blocks=blocks, candidates=candidates)
    _measure_step(measure, model, setup)
