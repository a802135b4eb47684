"""packed_linear: values against float64 and against its own rounding order, rows independent of everything else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels import ops, reference
from jacobi_kernels.grouped import pack_grouped
from jacobi_kernels.packing import pack_weight, unpack_weight
from tests.kernels.helpers import (
    assert_as_accurate,
    assert_equal,
    assert_same_everywhere,
    fma32,
    random_grouped,
    random_linear,
    random_tensor,
    threads,
)

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1, 1), (3, 17, 5), (7, 64, 16), (13, 123, 33), (2, 1365, 48), (70, 96, 1365), (5, 576, 192)]


def sequential_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op's definition, bit by bit: one chain of float32 fma over k, then the bias, then one rounding."""
    x32, w32 = x.float(), weight.float()
    total = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(x.shape[1]):
        total = fma32(x32[:, k : k + 1], w32[:, k], total)
    return (total if bias is None else total + bias.float()).to(x.dtype)


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_close_to_float64(rows: int, k: int, n: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, bias = random_tensor(1, rows, k, dtype=dtype), random_tensor(2, n)
    packed = random_linear(3, n, k, weight_dtype)
    weight = unpack_weight(packed, n)
    low = F.linear(x.float(), weight.float(), bias).to(dtype)
    exact = reference.packed_linear(x, packed, bias, n)
    # A single chain over k is less accurate than the lanes that torch sums; never more than this much.
    assert_as_accurate(ops.packed_linear(x, packed, bias, n), low, exact, factor=8.0)


@pytest.mark.parametrize("bias_dtype", [None, *FLOATS])
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 7, 20), (5, 64, 33), (14, 200, 70)])
def test_rounds_in_sequential_order(
    rows: int, k: int, n: int, dtype: torch.dtype, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> None:
    x, packed = random_tensor(4, rows, k, dtype=dtype), random_linear(5, n, k, weight_dtype)
    bias = None if bias_dtype is None else random_tensor(6, n, dtype=bias_dtype)
    expected = sequential_product(x, unpack_weight(packed, n), bias)
    assert_equal(ops.packed_linear(x, packed, bias, n), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("k", "n"), [(64, 48), (123, 1365), (1365, 33)])
def test_rows_do_not_depend_on_their_number(k: int, n: int, dtype: torch.dtype) -> None:
    x, packed, bias = random_tensor(7, 64, k, dtype=dtype), random_linear(8, n, k, dtype), random_tensor(9, n)
    expected = torch.cat([ops.packed_linear(x[i : i + 1], packed, bias, n) for i in range(64)])
    for rows in (2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 25, 31, 64):
        assert_equal(ops.packed_linear(x[:rows], packed, bias, n), expected[:rows], f"{rows} rows")
        assert_equal(ops.packed_linear(x[-rows:], packed, bias, n), expected[-rows:], f"last {rows} rows")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1365, 1365), (17, 100, 1365), (33, 64, 40)])
def test_same_bits_for_threads_and_instruction_sets(rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, packed, bias = random_tensor(10, rows, k, dtype=dtype), random_linear(11, n, k, dtype), random_tensor(12, n)
    assert_same_everywhere(lambda: ops.packed_linear(x, packed, bias, n))


@settings(max_examples=60)
@given(
    rows=st.integers(0, 20),
    k=st.integers(1, 80),
    n=st.integers(1, 80),
    dtype=st.sampled_from(FLOATS),
    weight_dtype=st.sampled_from(FLOATS),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    rows: int, k: int, n: int, dtype: torch.dtype, weight_dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    x, packed = random_tensor(seed, rows, k, dtype=dtype), random_linear(seed + 1, n, k, weight_dtype)
    bias = random_tensor(seed + 2, n, dtype=weight_dtype) if with_bias else None
    result = ops.packed_linear(x, packed, bias, n)
    assert_equal(result, sequential_product(x, unpack_weight(packed, n), bias))


@settings(max_examples=80)
@given(
    rows=st.integers(1, 70),
    k=st.integers(1, 200),
    n=st.integers(1, 100),
    form=st.sampled_from(["int8", "int4"]),
    dtype=st.sampled_from(FLOATS),
    with_bias=st.booleans(),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_int8_and_int4_have_the_bits_of_their_float32_values(
    rows: int, k: int, n: int, form: str, dtype: torch.dtype, with_bias: bool, count: int, seed: int
) -> None:
    x, matrix = random_tensor(seed, rows, k, dtype=dtype), random_grouped(seed, n, k, form)
    bias = random_tensor(seed + 2, n) if with_bias else None
    packed, values = pack_grouped(matrix), pack_weight(matrix.dequantize())
    with threads(count):
        result = ops.packed_linear(x, packed, bias, n)
        assert_equal(result, ops.packed_linear(x, values, bias, n))
    assert_equal(ops.packed_linear(x[-1:], packed, bias, n), result[-1:], "one row")
    expected = reference.packed_linear(x, values, bias, n)
    assert_equal(reference.packed_linear(x, packed, bias, n), expected, "the reference")


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1365, 333), (17, 100, 1365), (130, 576, 40)])
def test_int8_and_int4_are_the_same_everywhere(rows: int, k: int, n: int, form: str) -> None:
    x, packed = random_tensor(20, rows, k), pack_grouped(random_grouped(21, n, k, form))
    assert_same_everywhere(lambda: ops.packed_linear(x, packed, None, n))


def test_leading_dimensions_and_strides() -> None:
    packed = random_linear(13, 21, 24)
    x = random_tensor(14, 2, 3, 48)
    flat = ops.packed_linear(x[..., :24].reshape(6, 24).contiguous(), packed, None, 21)
    assert_equal(ops.packed_linear(x[..., :24], packed, None, 21), flat.view(2, 3, 21), "row stride")
    assert_equal(
        ops.packed_linear(x[..., ::2], packed, None, 21),
        ops.packed_linear(x[..., ::2].contiguous(), packed, None, 21),
        "column stride",
    )
    assert_equal(ops.packed_linear(x[0, 0, :24], packed, None, 21), flat[0], "vector")


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    result = ops.packed_linear(torch.empty(shape), random_linear(15, 21, 24), None, 21)
    assert result.shape == (*shape[:-1], 21)


def test_nan_and_infinity_stay_in_their_row() -> None:
    packed, x = random_linear(16, 40, 32), random_tensor(17, 4, 32)
    clean = ops.packed_linear(x, packed, None, 40)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    result = ops.packed_linear(x, packed, None, 40)
    assert_equal(result[0::3], clean[0::3])
    assert bool(result[1].isnan().all())
    assert bool(result[2].isinf().all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(1, 3), (16, 8), (17, 5), (1365, 2)])
def test_packing_round_trip(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random_tensor(18, n, k, dtype=dtype)
    packed = pack_weight(weight.T.contiguous().T)
    assert packed.shape == (-(-n // 16), k, 16)
    assert packed.is_contiguous()
    assert packed[(n - 1) // 16, k - 1, (n - 1) % 16] == weight[n - 1, k - 1]
    assert_equal(unpack_weight(packed, n), weight)
    assert not unpack_weight(packed, 16 * packed.shape[0])[n:].any()


def test_packing_refuses() -> None:
    weight = torch.ones(4, 4)
    weight[1, 2] = float("inf")
    with pytest.raises(ValueError, match=r"layers\.0\.up holds NaN or infinity"):
        pack_weight(weight, "layers.0.up")
    with pytest.raises(ValueError, match="head must be float32 or bfloat16, got float16"):
        pack_weight(torch.ones(4, 4, dtype=torch.float16), "head")
    with pytest.raises(ValueError, match=r"weight must have shape \[out_features, in_features\], got \[4\]"):
        pack_weight(torch.ones(4))
    with pytest.raises(ValueError, match=r"packed must have shape .* = \[2, \*, 16\], got \[1, 4, 16\]"):
        unpack_weight(pack_weight(torch.ones(4, 4)), 17)
