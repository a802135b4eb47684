"""packed_linear on Triton: values against float64, a row independent of the number of rows and of its place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jacobi_kernels import reference
from jacobi_kernels.packing import unpack_weight
from jacobi_kernels.triton import packed_linear as module
from jacobi_kernels.triton.packed_linear import packed_linear
from tests.kernels.helpers import assert_as_accurate, assert_equal, random_linear, random_tensor

SHAPES = [(1, 1, 1), (3, 17, 5), (7, 64, 16), (13, 123, 33), (2, 1365, 48), (70, 96, 1365), (130, 2100, 192)]


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_close_to_float64(rows: int, k: int, n: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        for weight_dtype in dtypes:
            x, bias = random_tensor(1, rows, k, dtype=dtype), random_tensor(2, n)
            packed = random_linear(3, n, k, weight_dtype)
            ours = packed_linear(x.to(device), packed.to(device), bias.to(device), n).cpu()
            rounded = x.to(weight_dtype)  # float32 rows of a bfloat16 weight are rounded
            low = F.linear(rounded.float(), unpack_weight(packed, n).float(), bias).to(dtype)
            assert_as_accurate(ours, low, reference.packed_linear(rounded, packed, bias, n), factor=8.0)


@pytest.mark.parametrize(("k", "n"), [(64, 48), (123, 333), (1365, 33), (2048, 64)])
def test_rows_do_not_depend_on_their_number(k: int, n: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        x = random_tensor(7, 150, k, dtype=dtype).to(device)
        packed, bias = random_linear(8, n, k, dtype).to(device), random_tensor(9, n).to(device)
        expected = packed_linear(x, packed, bias, n)
        for begin, end in ((0, 1), (149, 150), (3, 5), (0, 16), (1, 18), (7, 70), (20, 149)):
            assert_equal(packed_linear(x[begin:end], packed, bias, n), expected[begin:end], f"rows {begin}:{end}")


def test_gathered_rows_up_to_a_count(device: str) -> None:
    """What the step uses: row i is row rows[i] of x, and rows from count on are left as they were."""
    k, n = 600, 40
    x, packed = random_tensor(1, 90, k).to(device), random_linear(2, n, k).to(device)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3)).int().to(device)
    cut = module.tiling(n, k, packed.dtype)
    assert cut.parts == 2
    whole, some = torch.full((2, 2, 90, n), -1.0, device=device)
    module.launch_product("test", x, packed, whole, n, cut)
    module.launch_product("test", x, packed, some, n, cut, rows=order, count=torch.tensor([70]).int().to(device))
    assert_equal(some[:, :70], whole[:, order.long()][:, :70])
    assert bool((some[:, 70:] == -1).all())


def test_leading_dimensions_and_strides(device: str) -> None:
    packed = random_linear(13, 21, 24).to(device)
    x = random_tensor(14, 2, 3, 48).to(device)
    flat = packed_linear(x[..., :24].reshape(6, 24).contiguous(), packed, None, 21)
    assert_equal(packed_linear(x[..., :24], packed, None, 21), flat.view(2, 3, 21), "row stride")
    assert_equal(packed_linear(x[0, 0, :24], packed, None, 21), flat[0], "vector")


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24)])
def test_no_rows(shape: tuple[int, ...], device: str) -> None:
    result = packed_linear(torch.empty(shape, device=device), random_linear(15, 21, 24).to(device), None, 21)
    assert result.shape == (*shape[:-1], 21)


def test_nothing_to_sum(device: str) -> None:
    bias = random_tensor(18, 21).to(device)
    result = packed_linear(torch.empty(3, 0, device=device), torch.empty(2, 0, 16, device=device), bias, 21)
    assert_equal(result, bias.expand(3, 21))


@pytest.mark.parametrize(
    ("shape", "out_features", "message"),
    [
        ((3, 20), 21, r"weight must have shape \[ceil\(out_features/16\), in_features, 16\] = \[2, 20, 16\]"),
        ((3, 24), 33, r"weight must have shape"),
        ((3, 24), 16, r"weight must have shape"),
        ((3, 24), 22, r"bias must have shape \[out_features\] = \[22\], got \[21\]"),
    ],
)
def test_refusals(shape: tuple[int, ...], out_features: int, message: str, device: str) -> None:
    weight, bias = random_linear(15, 21, 24).to(device), torch.zeros(21, device=device)
    with pytest.raises(RuntimeError, match="packed_linear: " + message):
        packed_linear(torch.zeros(shape, device=device), weight, bias, out_features)
    with pytest.raises(RuntimeError, match="packed_linear: bias must be contiguous"):
        packed_linear(torch.zeros(3, 24, device=device), weight, torch.zeros(21, 2, device=device)[:, 0], 21)


def test_nan_and_infinity_stay_in_their_row(device: str) -> None:
    packed, x = random_linear(16, 40, 32).to(device), random_tensor(17, 4, 32).to(device)
    clean = packed_linear(x, packed, None, 40)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    result = packed_linear(x, packed, None, 40)
    assert_equal(result[0::3], clean[0::3])
    assert bool(result[1].isnan().all())
    assert bool(result[2].isinf().all())


def test_the_tiling_depends_on_the_weight_alone() -> None:
    """Parts cover k without overlap, whatever the shape."""
    for n in (1, 40, 576, 960, 1024, 4608, 17920, 152064):
        for k in (1, 33, 512, 576, 1536, 3584, 18944):
            for dtype in (torch.float32, torch.bfloat16):
                cut = module.tiling(n, k, dtype)
                assert (cut.parts - 1) * cut.part < k <= cut.parts * cut.part
                assert module.tiling(n, k, dtype, max_parts=1).parts == 1
