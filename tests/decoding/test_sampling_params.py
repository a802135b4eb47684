"""Checks of what a user gives for sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jacobi_decoding.sampling import SamplingParams
from jacobi_kernels.sampling import row_seeds


def test_zero_temperature_is_greedy() -> None:
    assert SamplingParams.create(3, 10).greedy
    assert SamplingParams.create(3, 10, temperature=[0, 0.0, 0], top_k=5, top_p=0.5) == SamplingParams()


def test_one_value_or_one_per_row() -> None:
    params = SamplingParams.create(2, 10, temperature=(0.5, 0), top_k=torch.tensor([3, 0]), top_p=0.25, seed=7)
    assert params.temperature.tolist() == [0.5, 0.0]
    assert params.temperature.dtype == params.top_p.dtype == torch.float32
    assert params.top_k.tolist() == [3, 0]
    assert params.top_k.dtype == torch.int32
    assert params.top_p.tolist() == [0.25, 0.25]
    assert torch.equal(params.seeds, row_seeds(7, 2))
    assert params.logits_scratch.shape == (16, 10)
    assert SamplingParams.create(2, 10, temperature=1, seed=[5, -6]).seeds.tolist() == [5, -6]


def test_logits_are_held_only_for_top_k_and_top_p() -> None:
    for off in ({}, {"top_k": 0}, {"top_p": 1.0}, {"top_k": 0, "top_p": 1}):
        params = SamplingParams.create(2, 10, temperature=1.0, **off)
        assert params.logits_scratch is params.top_k is params.top_p is None
    greedy_row_filters = SamplingParams.create(2, 10, temperature=[0.0, 1.0], top_k=[4, 0])
    assert greedy_row_filters.logits_scratch is None


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert SamplingParams.create(1, 10, temperature=1.0, top_p=1e-300).top_p.item() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, r"temperature must be a number >= 0 \(0 is greedy\), got -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": 1e39}, r"temperature must be a number .* that float32 can hold, got 1e\+39"),
        ({"temperature": [1.0, 10**400]}, r"temperature\[1\] must be a number .* that float32 can hold"),
        ({"seed": 1.5}, "seed must be an integer, or a list with one per row, got 1.5"),
        ({"seed": "x"}, "seed must be an integer, .* got 'x'"),
        ({"seed": [1, 2.5]}, r"seed\[1\] must be an integer, got 2.5"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"temperature": [1.0, -2.0]}, r"temperature\[1\] must be"),
        ({"temperature": [1.0]}, "temperature must be a number or hold one per row: expected 2, got 1"),
        ({"top_k": -3}, r"top_k must be an integer >= 0 \(0 is off\), got -3"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_k": 2**31}, "top_k must be an integer"),
        ({"top_p": 0}, r"top_p must be a number above 0 and at most 1 \(1 is off\), got 0"),
        ({"top_p": 1.01}, "top_p must be"),
        ({"top_p": True}, "top_p must be"),
        ({"seed": [1, 2, 3]}, "seed must be an int or hold one int per row: expected 2, got 3"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams.create(2, 10, **{"temperature": 1.0, **arguments})
