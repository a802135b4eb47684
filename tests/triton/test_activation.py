"""activation on Triton: the CPU kernels' bits, one element independent of all others."""

from __future__ import annotations

import pytest
import torch

from jacobi_kernels import reference
from jacobi_kernels._ops import ACTIVATIONS
from jacobi_kernels.triton.activation import activation
from tests.kernels.helpers import assert_as_accurate, assert_equal, random_tensor
from tests.kernels.test_activation import sweep


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_close_to_float64(kind: str, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        x = sweep(dtype)[:: 3 if device == "cpu" else 1]
        ours, exact = activation(x.to(device), kind).cpu(), reference.activation(x, kind)
        low = reference.activation(x, kind, dtype=torch.float32).to(dtype)
        assert bool((ours.isfinite() == low.isfinite()).all())
        for part in torch.arange(x.numel())[low.isfinite()].split(500):
            assert_as_accurate(ours[part], low[part], exact[part], factor=4.0, slack=4.0, floor=1e-12)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_bits_of_the_cpu_kernels(kind: str, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """All of them on a GPU; the interpreter's fma may round a value in many millions otherwise."""
    for dtype in dtypes:
        x = sweep(dtype)
        assert_equal(activation(x.to(device), kind).cpu(), torch.ops.jacobi.activation.default(x, kind))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_special_values(kind: str, device: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), 0.0, -0.0])
    assert_equal(activation(x.to(device), kind).cpu(), reference.activation(x, kind).float())


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_elements_do_not_depend_on_their_place(kind: str, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        x = (4 * random_tensor(1, 1365, dtype=dtype)).to(device)
        expected = activation(x, kind)
        for begin, end in ((0, 1), (3, 20), (1364, 1365)):
            assert_equal(activation(x[begin:end].clone(), kind), expected[begin:end], f"{begin}:{end}")
        assert_equal(activation(x.view(5, 273).T, kind), expected.view(5, 273).T, "transposed")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalar_and_empty(shape: tuple[int, ...], device: str) -> None:
    assert activation(torch.full(shape, 0.5, device=device), "silu").shape == shape


def test_refusal(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"activation: kind must be one of .*, got 'swish'"):
        activation(torch.zeros(3, device=device), "swish")
    with pytest.raises(RuntimeError, match=r"activation: x must be float32 or bfloat16, got float64"):
        activation(torch.zeros(3, dtype=torch.float64, device=device), "silu")
