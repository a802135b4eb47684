"""consistency_loss in Triton: values and gradients against float64 autograd of materialised logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels.triton import consistency_loss_backward as backward_module
from jacobi_kernels.triton.consistency_loss import consistency_loss
from jacobi_kernels.triton.consistency_loss_backward import consistency_loss_backward
from tests.kernels.helpers import assert_as_accurate, assert_equal
from tests.kernels.test_consistency_loss import OPTIONS, Case, index, make_case


def run(case: Case, device: str, **options: float) -> list[Tensor]:
    """nll, consistency, and the gradients of hidden, lm_head and, if there is one, bias."""
    *arguments, weights = (None if t is None else t.to(device) for t in case)
    nll, consistency, lse = consistency_loss(*arguments, **options)
    gradients = consistency_loss_backward(*weights, *arguments, lse, **options)
    return [t.cpu() for t in (nll, consistency, *gradients[: len(case.leaves)])]


def check(case: Case, device: str, **options: float) -> None:
    exact, low = case.define(torch.float64, **options), case.define(torch.float32, **options)
    # A loss is a difference of numbers as large as the logits: a few of their roundings are in it, however small it is.
    logits = case.hidden.double() @ case.lm_head.double().T * options.get("logit_scale", 1.0)
    largest = float(logits.abs().max()) / options.get("temperature", 1.0) if logits.numel() else 0.0
    floors = [4 * torch.finfo(torch.float32).eps * largest] * 2
    # Probabilities exp(z - lse) carry the rounding of lse, which is as large as the logits.
    floors += [torch.finfo(torch.float32).eps * largest * float(t.abs().max()) if t.numel() else 0.0 for t in exact[2:]]
    if case.hidden.dtype == case.lm_head.dtype == torch.bfloat16:  # logit gradients are rounded before the products
        floors[2:] = [2.0**-8 * float(t.abs().max()) for t in exact[2:]]
    ours = run(case, device, **options)
    assert [(t.shape, t.dtype) for t in ours[2:]] == [(t.shape, t.dtype) for t in case.leaves]
    for mine, theirs, true, floor in zip(ours, low, exact, floors, strict=True):
        if true.numel():
            assert_as_accurate(mine, theirs.to(mine.dtype), true, factor=6.0, slack=6.0, floor=floor)


# Values and gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 5, 7), (9, 33, 300), (70, 24, 400)])
def test_close_to_float64(
    rows: int, width: int, vocab: int, options: str, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        check(make_case(1, rows, width, vocab, dtype), device, **OPTIONS[options])


def test_mixed_types(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    for dtype in dtypes:
        for head_dtype in dtypes:
            check(make_case(3, 20, 40, 290, dtype, head_dtype, bias=dtype == head_dtype), device)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 50),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 127, 129, 260]),
    options=st.sampled_from(sorted(OPTIONS)),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows: int, width: int, vocab: int, options: str, bias: bool, seed: int, device: str) -> None:
    check(make_case(seed, rows, width, vocab, bias=bias), device, **OPTIONS[options])


def test_large_logits(device: str) -> None:
    """Differences of hundreds between logits, tiles that are far below the largest, ties at the top."""
    case = make_case(4, 30, 20, 500, size=150.0)
    case.lm_head[400] = case.lm_head[3]
    check(case, device)
    check(case, device, temperature=3.0)


def test_masked_tokens(device: str) -> None:
    """A bias of -inf takes tokens out of the softmax, whole tiles of them too."""
    case = make_case(5, 12, 8, 700)
    case.bias[:300] = -float("inf")
    targets = torch.where(case.targets >= 0, 300 + case.targets % 400, case.targets)
    case = case._replace(targets=targets, teachers=torch.full_like(case.teachers, -1))
    nll, _, d_hidden, d_lm_head, d_bias = run(case, device)
    allowed = case._replace(lm_head=case.lm_head[300:], bias=case.bias[300:], targets=targets - 300 * (targets >= 0))
    exact = allowed.define(torch.float64)
    torch.testing.assert_close(nll.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_hidden.double(), exact[2], rtol=1e-5, atol=1e-5)
    assert not d_lm_head[:300].any()
    assert not d_bias[:300].any()
    torch.testing.assert_close(d_lm_head[300:].double(), exact[3], rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_row_and_its_students(device: str) -> None:
    case = make_case(6, 6, 8, 300)._replace(targets=index(1, 2, 3, -1, -1, 4), teachers=index(-1, -1, -1, 0, 1, -1))
    clean = run(case, device)
    case.hidden[1, 3] = float("nan")
    nll, consistency, d_hidden, *_ = run(case, device)
    assert nll.isnan().tolist() == [False, True, False, False, False, False]
    assert consistency.isnan().tolist() == [False] * 4 + [True, False]
    rows = [0, 2, 3, 5]
    assert_equal((nll[rows], consistency[rows], d_hidden[rows]), tuple(r[rows] for r in clean[:3]))


# Teachers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "teachers",
    [
        (-1, 0, 1, 2, 3),  # a chain: every teacher but the first is a student
        (3, 3, 3, -1, 3),  # one teacher of all
        (1, 0, 3, 4, 2),  # cycles
        (0, 1, 2, 3, 4),  # everybody's own
    ],
)
def test_roles_of_teachers(teachers: tuple[int, ...], device: str) -> None:
    case = make_case(7, 5, 12, 290)._replace(teachers=index(*teachers))
    for targets in (index(-1, -1, -1, -1, -1), index(0, 5, -1, 289, 256)):
        check(case._replace(targets=targets), device, temperature=0.5)


def test_no_gradient_into_the_teacher(device: str) -> None:
    case = make_case(8, 4, 10, 300)._replace(targets=index(-1, -1, -1, -1), teachers=index(2, 2, -1, -1))
    d_hidden = run(case, device)[2]
    assert bool(d_hidden[:2].any(1).all())
    assert not d_hidden[2:].any()
    one = case._replace(teachers=index(2, -1, -1, -1))
    equal = run(one._replace(hidden=one.hidden[[2, 2, 2, 2]]), device)
    assert not any(bool(gradient.any()) for gradient in equal[2:]), "a student that agrees has no gradient"


def test_indices_that_do_not_exist_are_none(device: str) -> None:
    case = make_case(9, 6, 8, 40)._replace(
        targets=index(3, 40, -7, 2**40, 5, -1), teachers=index(6, 2, -5, 2**33, 0, -1)
    )
    good = case._replace(targets=index(3, -1, -1, -1, 5, -1), teachers=index(-1, 2, -1, -1, 0, -1))
    assert_equal(tuple(run(case, device)), tuple(run(good, device)))


def test_rows_without_a_part_change_nothing(device: str) -> None:
    case = make_case(9, 12, 16, 300)
    idle = case._replace(
        hidden=torch.cat([case.hidden, torch.full((5, 16), torch.nan)]),
        targets=F.pad(case.targets, (0, 5), value=-1),
        teachers=F.pad(case.teachers, (0, 5), value=-1),
        weights=F.pad(case.weights, (0, 5), value=1.0),
    )
    small, large = run(case, device), run(idle, device)
    for a, b in zip(small[:3], large[:3], strict=True):
        assert_equal(b[:12], a)
        assert not b[12:].any()
    assert_equal(tuple(large[3:]), tuple(small[3:]))


@pytest.mark.parametrize("rows", [0, 3])
def test_no_losses(rows: int, device: str) -> None:
    none = torch.full((rows,), -1)
    case = make_case(10, rows, 8, 20)._replace(targets=none, teachers=none)
    assert not any(bool(result.any()) for result in run(case, device))


# Scratch and results --------------------------------------------------------------------------------------------------


def test_chunks_of_the_vocabulary(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """du of 128 tokens at a time, the last chunk partly behind the vocabulary."""
    case = make_case(11, 40, 24, 400)
    whole = run(case, device)
    monkeypatch.setattr(backward_module, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(backward_module, "MIN_COLUMNS", 128)
    assert backward_module.chunk_columns(40, 400, 4) == 128
    check(case, device)
    chunked = run(case, device)
    assert_equal(tuple(chunked[3:]), tuple(whole[3:]), "a token's gradient does not depend on its chunk")
    assert_equal(tuple(run(case, device)), tuple(chunked), "again")


def test_only_what_is_asked_for(device: str) -> None:
    case = make_case(12, 10, 12, 100)
    everything = run(case, device)
    *arguments, weights = (None if t is None else t.to(device) for t in case)
    lse = consistency_loss(*arguments)[2]
    for hidden_grad, lm_head_grad in ((True, False), (False, True), (False, False)):
        options: dict[str, Any] = {"hidden_grad": hidden_grad, "lm_head_grad": lm_head_grad}
        results = [t.cpu() for t in consistency_loss_backward(*weights, *arguments, lse, **options)]
        for kept, result, expected in zip((hidden_grad, lm_head_grad, True), results, everything[2:], strict=True):
            assert_equal(result, expected if kept else expected.new_empty((0,)))


def test_hidden_may_be_strided(device: str) -> None:
    case = make_case(13, 8, 12, 100)
    wide = torch.zeros(12, 8, 3).permute(1, 0, 2)[:, :, 1]
    wide.copy_(case.hidden)
    assert_equal(tuple(run(case._replace(hidden=wide), device)), tuple(run(case, device)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.zeros(4, 9)}, r"lm_head must have shape \[V, E\] = \[\*, 9\], got \[20, 8\]"),
        ({"lm_head": torch.zeros(8, 20).T}, "lm_head must be contiguous"),
        ({"lm_head": torch.zeros(0, 8), "bias": None}, "number of rows of lm_head must be at least 1, got 0"),
        ({"targets": index(1, 2, 3, 4).int()}, "targets must be int64, got int32"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0"),
        ({"logit_scale": float("nan")}, "logit_scale must be positive, got nan"),
        ({"softcap": -1.0}, r"softcap must be at least 0 \(0: off\), got -1"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str, device: str) -> None:
    arguments = {**make_case(21, 4, 8, 20)._asdict(), **changed}
    arguments.pop("weights")
    arguments = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    with pytest.raises(RuntimeError, match=f"^consistency_loss: {message}"):
        consistency_loss(**arguments)
    zeros = torch.zeros(2, 4, device=device)
    with pytest.raises(RuntimeError, match=f"^consistency_loss_backward: {message}"):
        consistency_loss_backward(*zeros, lse=zeros, **arguments)
