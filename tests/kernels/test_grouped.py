"""int8 and int4 weights: GGUF's values bit for bit, packing back and forth, error of quantisation, refusals."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels.grouped import (
    GroupedMatrix,
    dequantize_packed,
    from_gguf,
    pack_grouped,
    quantize,
    unpack_grouped,
)
from tests.kernels.helpers import assert_equal, random_grouped, random_tensor

FORMATS = ["int8", "int4"]
KINDS = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


# GGUF -----------------------------------------------------------------------------------------------------------------


def random_blocks(kind: str, rows: int, groups: int, seed: int) -> Tensor:
    """Any bytes, with scales that are finite: subnormal and negative ones too."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, groups, KINDS[kind]), dtype=torch.uint8, generator=generator)
    for at in range(1, 4 if kind == "Q4_1" else 2, 2):
        blocks[:, :, at] &= 0b11101011  # the exponent's high byte: not all ones, and below 2^12
    return blocks.flatten(1)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(KINDS)), rows=st.integers(1, 40), groups=st.integers(1, 5), seed=st.integers(0, 10_000)
)
def test_values_are_gguf_s(kind: str, rows: int, groups: int, seed: int) -> None:
    blocks = random_blocks(kind, rows, groups, seed)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    matrix = from_gguf(blocks, kind, 32 * groups)
    assert matrix.format == ("int8" if kind == "Q8_0" else "int4")
    assert matrix.shape == (rows, 32 * groups)
    assert_equal(matrix.dequantize(), expected)
    assert_equal(dequantize_packed(pack_grouped(matrix), rows, 32 * groups), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_gguf_quantises(kind: str) -> None:
    weight = random_tensor(1, 24, 96).numpy()
    blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    matrix = from_gguf(torch.from_numpy(blocks), kind, 96)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert_equal(matrix.dequantize(), torch.from_numpy(expected))


def test_gguf_refusals() -> None:
    blocks = random_blocks("Q8_0", 3, 2, 0)
    with pytest.raises(ValueError, match=r"from_gguf: kind must be one of Q8_0, Q4_0, Q4_1, got 'Q5_0'"):
        from_gguf(blocks, "Q5_0", 64)
    for wrong, k in ((blocks[:, 1:], 64), (blocks, 63), (blocks, 96), (blocks[0], 64), (blocks.view(torch.int8), 64)):
        with pytest.raises(ValueError, match=r"from_gguf: blocks must be uint8 \[n, 34 k / 32\]"):
            from_gguf(wrong, "Q8_0", k)
    blocks[1, 35] = 0x7C  # the scale of row 1's second block
    with pytest.raises(ValueError, match="scale holds NaN or infinity"):
        from_gguf(blocks, "Q8_0", 64)
    large = torch.zeros(1, 18, dtype=torch.uint8)
    large[0, :2] = torch.tensor([8192.0], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match="min holds NaN or infinity"):
        from_gguf(large, "Q4_0", 32)


# Packing --------------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(form=st.sampled_from(FORMATS), n=st.integers(1, 70), k=st.integers(1, 140), seed=st.integers(0, 10_000))
def test_packing_round_trip(form: str, n: int, k: int, seed: int) -> None:
    matrix = random_grouped(seed, n, k, form)
    packed = pack_grouped(matrix)
    assert packed.shape == (-(-n // 16), -(-k // 32), 544 if form == "int8" else 320)
    again = unpack_grouped(packed, n, k)
    assert (again.format, again.shape) == (form, (n, k))
    assert_equal(again.scale, matrix.scale)
    assert_equal(again.q[:, :k], matrix.q[:, :k])
    if matrix.min is not None and again.min is not None:
        assert_equal(again.min, matrix.min)
    assert_equal(dequantize_packed(packed, n, k), matrix.dequantize())
    whole = unpack_grouped(packed, 16 * packed.shape[0], 32 * packed.shape[1])
    assert not whole.q[n:].any(), "columns past n are zero"
    assert not whole.q[:, k:].any(), "q past k is zero"
    assert not whole.scale[n:].any()


def test_records_by_hand() -> None:
    """Row 17 is column 1 of the second panel; value 35 is value 3 of the second group."""
    scale, low = torch.zeros(18, 2).half(), torch.zeros(18, 2).half()
    scale[17, 1], low[17, 1] = 0.5, -2.0
    q = torch.zeros(18, 64, dtype=torch.int8)
    q[17, 35] = -7
    record = pack_grouped(GroupedMatrix("int8", scale, None, q, 64))[1, 1]
    assert record[:32].view(torch.float16)[1] == 0.5
    assert record[32:].view(torch.int8)[16 * 3 + 1] == -7
    assert int((record != 0).sum()) == 2
    q = torch.zeros(18, 64, dtype=torch.uint8)
    q[17, 34], q[17, 35] = 5, 9
    matrix = GroupedMatrix("int4", scale, low, q, 64)
    record = pack_grouped(matrix)[1, 1]
    assert record[:32].view(torch.float16)[1] == 0.5
    assert record[32:64].view(torch.float16)[1] == -2.0
    assert record[64 + 16 * 1 + 1] == 5 + 16 * 9
    assert int((record != 0).sum()) == 3
    assert matrix.dequantize()[17, 34:36].tolist() == [0.5, 2.5]


def test_unpacking_refuses() -> None:
    packed = pack_grouped(random_grouped(0, 20, 40, "int8"))
    message = r"packed must be uint8 \[ceil\(out_features/16\), ceil\(in_features/32\), record\] = \[2, 2, 544 or 320\]"
    for wrong in (packed[:1], packed[:, :1], packed[..., :300], packed.view(torch.int8), packed[0]):
        with pytest.raises(ValueError, match=message):
            unpack_grouped(wrong, 20, 40)


# Quantisation ---------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    n=st.integers(1, 20),
    k=st.integers(1, 100),
    size=st.sampled_from([2.0**-9, 0.02, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 0.0, 3.0, -50.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10_000),
)
def test_error_is_half_a_step(n: int, k: int, size: float, shift: float, dtype: torch.dtype, seed: int) -> None:
    """And, of int4, what the smallest value of a group loses in float16."""
    weight = (size * (random_tensor(seed, n, k) + shift)).to(dtype)
    padded = torch.nn.functional.pad(weight.float(), (0, -k % 32)).unflatten(1, (-1, 32))
    for form in FORMATS:
        matrix = quantize(weight, form)
        error = (matrix.dequantize() - weight.float()).abs()
        error = torch.nn.functional.pad(error, (0, -k % 32)).unflatten(1, (-1, 32)).amax(2)
        rounding = 0.0 if matrix.min is None else padded.abs().amax(2) * 2**-11
        assert bool((error <= 0.502 * matrix.scale.float() + rounding + 1e-7).all()), form
        steps = 127 if form == "int8" else 15
        extent = padded.abs().amax(2) if form == "int8" else weight.float().max() - weight.float().min()
        assert bool((matrix.scale.float() <= (1.001 * extent + rounding) / steps + 1e-7).all()), (
            "no coarser than it must"
        )


@pytest.mark.parametrize("form", FORMATS)
def test_quantising_again_changes_nothing(form: str) -> None:
    once = quantize(random_tensor(3, 33, 77), form).dequantize()
    if form == "int4":  # a scale is rounded anew from max - min
        assert_equal(quantize(once, form).q, quantize(random_tensor(3, 33, 77), form).q)
    else:
        assert_equal(quantize(once, form).dequantize(), once)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_quantised_alone(form: str) -> None:
    weight = random_tensor(4, 50, 70)
    whole, part = quantize(weight, form), quantize(weight[16:40], form)
    assert_equal(whole.rows(16, 40).dequantize(), part.dequantize())
    assert_equal(quantize(weight.T.contiguous().T, form).dequantize(), whole.dequantize())


@pytest.mark.parametrize("form", FORMATS)
def test_constant_groups_are_exact(form: str) -> None:
    weight = torch.tensor([0.0, 1.5, -2.25])[:, None].expand(3, 45)
    matrix = quantize(weight, form)
    if form == "int4":
        assert_equal(matrix.dequantize(), weight)
    else:
        assert bool(((matrix.dequantize() - weight).abs() <= weight.abs() * 2**-11).all())
    assert not matrix.dequantize()[0].any()


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_quantising_refuses(form: str) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        weight = torch.ones(4, 40)
        weight[2, 39] = value
        with pytest.raises(ValueError, match=r"^layers\.0\.up holds NaN or infinity$"):
            quantize(weight, form, "layers.0.up")
    weight = torch.ones(4, 40)
    weight[1, 2] = -1e8
    with pytest.raises(ValueError, match=f"weight holds values too large for {form}, whose scales are float16"):
        quantize(weight, form)
    with pytest.raises(ValueError, match=r"weight must be floats \[out_features, in_features\], got int64 \[4, 4\]"):
        quantize(torch.ones(4, 4, dtype=torch.int64), form)
    with pytest.raises(ValueError, match=r"weight must be floats .*, got float32 \[4\]"):
        quantize(torch.ones(4), form)


def test_formats_are_named() -> None:
    with pytest.raises(ValueError, match="quantize: format must be int8 or int4, got 'int3'"):
        quantize(torch.ones(4, 4), "int3")
    with pytest.raises(ValueError, match="GroupedMatrix: format must be int8 or int4, got 'float32'"):
        GroupedMatrix("float32", torch.ones(1, 1).half(), None, torch.ones(1, 32, dtype=torch.int8), 32)


HALF, Q8, Q4 = torch.ones(2, 2).half(), torch.ones(2, 64, dtype=torch.int8), torch.ones(2, 64, dtype=torch.uint8)
WRONG: list[tuple[tuple[Any, ...], str]] = [
    (("int8", HALF.float(), None, Q8, 64), r"scale must be float16 \[2, 2\], got float32 \[2, 2\]"),
    (("int8", HALF, None, Q8, 65), r"scale must be float16 \[2, 3\], got float16 \[2, 2\]"),
    (("int8", HALF, None, Q8, 32), r"scale must be float16 \[2, 1\], got float16 \[2, 2\]"),
    (("int8", HALF, None, Q8[:, :63], 64), r"q must be int8 \[2, 64\], got int8 \[2, 63\]"),
    (("int8", HALF, None, Q4, 64), r"q must be int8 \[2, 64\], got uint8 \[2, 64\]"),
    (("int8", HALF, HALF, Q8, 64), "int4 has a min and int8 has none, got int8"),
    (("int4", HALF, None, Q4, 64), "int4 has a min and int8 has none, got int4"),
    (("int4", HALF, HALF[:1], Q4, 64), r"min must be float16 \[2, 2\], got float16 \[1, 2\]"),
    (("int4", HALF, HALF, 16 * Q4, 64), r"q of int4 must be within 0\.\.15, got 16"),
    (("int4", HALF, HALF * float("inf"), Q4, 64), "min holds NaN or infinity"),
    (("int8", HALF * float("nan"), None, Q8, 64), "scale holds NaN or infinity"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_matrix_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match="^GroupedMatrix: " + message):
        GroupedMatrix(*arguments)


def test_arrays_of_a_file_are_left_alone() -> None:
    blocks = random_blocks("Q4_1", 4, 2, 7)
    before = blocks.clone()
    pack_grouped(from_gguf(blocks, "Q4_1", 64))
    assert_equal(blocks, before)
