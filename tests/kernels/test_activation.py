"""activation: values against float64, one element independent of all others."""

from __future__ import annotations

import pytest
import torch

from jacobi_kernels import ops, reference
from jacobi_kernels._ops import ACTIVATIONS
from tests.kernels.helpers import assert_as_accurate, assert_equal, assert_same_everywhere, random_tensor

FLOATS = [torch.float32, torch.bfloat16]


def sweep(dtype: torch.dtype) -> torch.Tensor:
    """Both signs, from subnormal to huge, dense where the functions bend."""
    logs = torch.logspace(-40, 30, 1001)
    dense = torch.linspace(0, 120, 40001)
    x = torch.cat([logs, dense]).sort().values
    return torch.cat([-x.flip(0), x]).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_close_to_float64(kind: str, dtype: torch.dtype) -> None:
    x = sweep(dtype)
    ours, exact = ops.activation(x, kind), reference.activation(x, kind)
    low = reference.activation(x, kind, dtype=torch.float32).to(dtype)
    assert bool((ours.isfinite() == low.isfinite()).all())
    for part in torch.arange(x.numel())[low.isfinite()].split(500):  # neighbours: the error of torch nearby
        # floor: far to the left gelu cancels to 0 in float64 too
        assert_as_accurate(ours[part], low[part], exact[part], factor=4.0, slack=4.0, floor=1e-12)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_special_values(kind: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), 0.0, -0.0])
    ours, expected = ops.activation(x, kind), reference.activation(x, kind).float()
    assert_equal(ours, expected)
    if kind in ("sigmoid", "tanh"):  # the others are 0 * inf in some formulas
        negative = torch.tensor([-float("inf")])
        assert_equal(ops.activation(negative, kind), reference.activation(negative, kind).float())


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_bfloat16_is_float32_rounded_once(kind: str) -> None:
    x = sweep(torch.bfloat16)
    assert_equal(ops.activation(x, kind), ops.activation(x.float(), kind).bfloat16())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_elements_do_not_depend_on_their_place(kind: str, dtype: torch.dtype) -> None:
    x = 4 * random_tensor(1, 1365, dtype=dtype)
    expected = ops.activation(x, kind)
    for begin, end in ((0, 1), (1, 16), (3, 20), (5, 1365), (1364, 1365)):
        assert_equal(ops.activation(x[begin:end].clone(), kind), expected[begin:end], f"{begin}:{end}")
    assert_equal(ops.activation(x.view(5, 273), kind), expected.view(5, 273), "shape")
    assert_equal(ops.activation(x.view(5, 273).T, kind), expected.view(5, 273).T, "transposed")


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_same_bits_for_threads_and_instruction_sets(kind: str) -> None:
    x = torch.cat([sweep(torch.float32)[::3], 3 * random_tensor(2, 100_003)])
    assert_same_everywhere(lambda: (ops.activation(x, kind), ops.activation(x.bfloat16(), kind)))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalar_and_empty(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 0.5)
    assert ops.activation(x, "silu").shape == shape
    if shape == ():
        torch.testing.assert_close(ops.activation(x, "silu"), torch.nn.functional.silu(x))
