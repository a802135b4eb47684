"""consistency_loss: values and gradients against float64 autograd of materialised logits, the same bits everywhere."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels import ops, reference
from tests.conftest import ROOT
from tests.kernels.helpers import assert_as_accurate, assert_equal, assert_same_everywhere, random_tensor

FLOATS = [torch.float32, torch.bfloat16]
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 2.5},
    "everything": {"temperature": 0.7, "logit_scale": 1.5, "softcap": 4.0},
}


class Case(NamedTuple):
    """Arguments of the op, and the weight of every result in a total whose gradient is compared."""

    hidden: Tensor
    lm_head: Tensor
    bias: Tensor | None
    targets: Tensor
    teachers: Tensor
    weights: Tensor  # [2, R]

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.lm_head, self.bias) if t is not None]

    def run(self, **options: float) -> list[Tensor]:
        """nll, consistency, and the gradients of the leaves."""
        return differentiate(ops.consistency_loss, self, self.leaves, options)

    def define(self, dtype: torch.dtype, **options: float) -> list[Tensor]:
        """The same by the reference, everything in ``dtype``."""
        leaves = [t.to(dtype) for t in self.leaves]
        return differentiate(reference.consistency_loss, self, leaves, {**options, "dtype": dtype})


def differentiate(loss: Any, case: Case, leaves: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    bias = None if case.bias is None else leaves[2]
    results = loss(leaves[0], leaves[1], bias, case.targets, case.teachers, **options)
    total = sum((r * w.to(r.dtype)).sum() for r, w in zip(results, case.weights, strict=True))
    return [*(r.detach() for r in results), *torch.autograd.grad(total, leaves)]


def make_case(
    seed: int,
    rows: int,
    width: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    head_dtype: torch.dtype | None = None,
    bias: bool = True,
    size: float = 3.0,
) -> Case:
    """Random roles: targets, teachers, both and neither; teachers that are students, chains and cycles of them."""
    generator = torch.Generator().manual_seed(seed)
    head_dtype = dtype if head_dtype is None else head_dtype
    some = torch.rand(2, rows, generator=generator) < 0.6
    targets = torch.randint(vocab, (rows,), generator=generator).where(some[0], -1)
    teachers = torch.randint(max(rows, 1), (rows,), generator=generator).where(some[1], -1)
    return Case(
        random_tensor(seed + 1, rows, width, dtype=dtype),
        (size * random_tensor(seed + 2, vocab, width) / width**0.5).to(head_dtype),
        random_tensor(seed + 3, vocab, dtype=head_dtype) if bias else None,
        targets,
        teachers,
        random_tensor(seed + 4, 2, rows),
    )


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def check(case: Case, **options: float) -> None:
    exact, low = case.define(torch.float64, **options), case.define(torch.float32, **options)
    # A loss is a difference of numbers as large as the logits: a few of their roundings are in it, however small it is.
    logits = case.hidden.double() @ case.lm_head.double().T * options.get("logit_scale", 1.0)
    largest = float(logits.abs().max()) / options.get("temperature", 1.0) if logits.numel() else 0.0
    floors = [4 * torch.finfo(torch.float32).eps * largest] * 2 + [0.0] * len(case.leaves)
    for ours, theirs, true, floor in zip(case.run(**options), low, exact, floors, strict=True):
        if true.numel():
            assert_as_accurate(ours, theirs.to(ours.dtype), true, factor=6.0, slack=6.0, floor=floor)


# Values and gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 5, 7), (9, 33, 300), (61, 48, 256), (110, 24, 777)])
def test_close_to_float64(rows: int, width: int, vocab: int, dtype: torch.dtype, options: str) -> None:
    case = make_case(1, rows, width, vocab, dtype)
    if rows == 1:
        case = case._replace(targets=index(3), teachers=index(0))
    check(case, **OPTIONS[options])


def test_more_rows_than_one_chain_of_the_weights_gradient() -> None:
    check(make_case(2, 1300, 16, 40))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
def test_dtypes(dtype: torch.dtype, head_dtype: torch.dtype, bias: bool) -> None:
    case = make_case(3, 20, 40, 290, dtype, head_dtype, bias)
    check(case)
    nll, consistency, *gradients = case.run()
    assert nll.dtype == consistency.dtype == torch.float32
    assert [g.dtype for g in gradients] == [t.dtype for t in case.leaves]


@settings(max_examples=60)
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 50),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 255, 257, 530]),
    options=st.sampled_from(sorted(OPTIONS)),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows: int, width: int, vocab: int, options: str, bias: bool, seed: int) -> None:
    check(make_case(seed, rows, width, vocab, bias=bias), **OPTIONS[options])


def test_large_logits() -> None:
    """Differences of hundreds between logits, tiles that are far below the largest, ties at the top."""
    case = make_case(4, 30, 20, 700, size=150.0)
    case.lm_head[600] = case.lm_head[3]
    check(case)
    check(case, temperature=3.0)


def test_masked_tokens() -> None:
    """A bias of -inf takes tokens out of the softmax, whole tiles of them too."""
    case = make_case(5, 12, 8, 700)
    case.bias[:300] = -float("inf")
    targets = torch.where(case.targets >= 0, 300 + case.targets % 400, case.targets)
    case = case._replace(targets=targets, teachers=torch.full_like(case.teachers, -1))
    nll, _, d_hidden, d_lm_head, d_bias = case.run()
    allowed = case._replace(lm_head=case.lm_head[300:], bias=case.bias[300:], targets=targets - 300 * (targets >= 0))
    exact = allowed.define(torch.float64)
    torch.testing.assert_close(nll.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_hidden.double(), exact[2], rtol=1e-5, atol=1e-5)
    assert not d_lm_head[:300].any()
    assert not d_bias[:300].any()
    torch.testing.assert_close(d_lm_head[300:].double(), exact[3], rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_row_and_its_students() -> None:
    case = make_case(6, 6, 8, 300)._replace(targets=index(1, 2, 3, -1, -1, 4), teachers=index(-1, -1, -1, 0, 1, -1))
    clean = case.run()
    case.hidden[1, 3] = float("nan")
    nll, consistency, d_hidden, *_ = case.run()
    assert nll.isnan().tolist() == [False, True, False, False, False, False]
    assert consistency.isnan().tolist() == [False] * 4 + [True, False]
    rows = [0, 2, 3, 5]
    assert_equal((nll[rows], consistency[rows], d_hidden[rows]), tuple(r[rows] for r in clean[:3]))


# Teachers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "teachers",
    [
        (-1, 0, 1, 2, 3),  # a chain: every teacher but the first is a student
        (1, 2, 3, 4, -1),
        (3, 3, 3, -1, 3),  # one teacher of all
        (1, 0, 3, 4, 2),  # cycles
        (0, 1, 2, 3, 4),  # everybody's own
    ],
)
def test_roles_of_teachers(teachers: tuple[int, ...]) -> None:
    case = make_case(7, 5, 12, 290)._replace(teachers=index(*teachers))
    for targets in (index(-1, -1, -1, -1, -1), index(0, 5, -1, 289, 256)):
        check(case._replace(targets=targets))
        check(case._replace(targets=targets), temperature=0.5)


def test_no_gradient_into_the_teacher() -> None:
    case = make_case(8, 4, 10, 300)._replace(targets=index(-1, -1, -1, -1), teachers=index(2, 2, -1, -1))
    d_hidden = case.run()[2]
    assert bool(d_hidden[:2].any(1).all())
    assert not d_hidden[2:].any()
    one = case._replace(teachers=index(2, -1, -1, -1))
    for student in (one, one._replace(hidden=one.hidden[[2, 2, 2, 2]])):
        assert_equal(student.run()[2][1:], torch.zeros(3, 10))
    equal = one._replace(hidden=one.hidden[[2, 2, 2, 2]]).run()
    assert not any(bool(gradient.any()) for gradient in equal[2:]), "a student that agrees has no gradient"


def test_rows_without_a_part_change_nothing() -> None:
    case = make_case(9, 12, 16, 300)
    idle = case._replace(
        hidden=torch.cat([case.hidden, random_tensor(99, 5, 16)]),
        targets=F.pad(case.targets, (0, 5), value=-1),
        teachers=F.pad(case.teachers, (0, 5), value=-1),
        weights=F.pad(case.weights, (0, 5), value=1.0),
    )
    small, large = case.run(), idle.run()
    for a, b in zip(small[:3], large[:3], strict=True):
        assert_equal(b[:12], a)
        assert not b[12:].any()
    assert_equal(tuple(large[3:]), tuple(small[3:]))


@pytest.mark.parametrize("rows", [0, 3])
def test_no_losses(rows: int) -> None:
    none = torch.full((rows,), -1)
    case = make_case(10, rows, 8, 20)._replace(targets=none, teachers=none)
    assert not any(bool(result.any()) for result in case.run())


def test_tied_weights_and_frozen_ones() -> None:
    """The head is the embedding, whose own gradient adds up; a frozen head or frozen hidden states get none."""
    tokens, case = index(3, 1, 250, 299, 7, 3), make_case(11, 6, 16, 300)
    gradients = []
    for loss, dtype in ((ops.consistency_loss, torch.float32), (reference.consistency_loss, torch.float64)):
        embedding = case.lm_head.to(dtype, copy=True).requires_grad_()
        nll, consistency = loss(torch.tanh(embedding[tokens]), embedding, None, case.targets, case.teachers)
        (nll.sum() + 2 * consistency.sum()).backward()
        gradients.append(embedding.grad)
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-6)
    full = case.run()
    for kept in range(3):
        leaves = [t.clone().requires_grad_(i == kept) for i, t in enumerate(case.leaves)]
        results = ops.consistency_loss(*leaves, case.targets, case.teachers)
        sum((r * w).sum() for r, w in zip(results, case.weights, strict=True)).backward()
        assert_equal(leaves[kept].grad, full[2 + kept], "alone")
        assert [leaf.grad is not None for leaf in leaves] == [i == kept for i in range(3)]


def test_one_loss_alone_and_expanded_gradients() -> None:
    case = make_case(12, 10, 12, 100)
    for kept in (0, 1):
        weights = torch.zeros(2, 10)
        weights[kept] = 1
        hidden = case.hidden.clone().requires_grad_()
        ops.consistency_loss(hidden, *case[1:5])[kept].sum().backward()
        assert_equal(hidden.grad, case._replace(weights=weights).run()[2])


def test_hidden_may_be_strided() -> None:
    case = make_case(13, 8, 12, 100)
    wide = torch.zeros(12, 8, 3).permute(1, 0, 2)[:, :, 1]
    wide.copy_(case.hidden)
    assert not wide.is_contiguous()
    assert_equal(ops.consistency_loss(wide, *case[1:5]), ops.consistency_loss(*case[:5]))


def test_finite_differences() -> None:
    """The derivative along a direction, without autograd on either side."""
    case = make_case(14, 7, 6, 270)
    teacher = reference.consistency_loss(*case[:5])[1]
    gradient = case.run()[2].double()
    direction = random_tensor(15, 7, 6).double()
    student = case.teachers >= 0
    step = 1e-5

    def total(hidden: Tensor) -> Tensor:
        logits = hidden @ case.lm_head.double().T + case.bias.double()
        fixed = case.hidden.double() @ case.lm_head.double().T + case.bias.double()
        nll = F.cross_entropy(logits, case.targets, ignore_index=-1, reduction="none")
        soft = -(fixed.softmax(1)[case.teachers] * logits.log_softmax(1)).sum(1).where(student, 0.0)
        assert_as_accurate(soft.float(), teacher.float(), teacher, slack=1e6)
        return (case.weights.double() * torch.stack([nll, soft])).sum()

    moved = [total(case.hidden.double() + sign * step * direction) for sign in (1, -1)]
    slope = float(moved[0] - moved[1]) / (2 * step)
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-5)


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "everything"])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 8, 300), (50, 20, 530), (101, 9, 20)])
def test_same_bits_for_threads_and_instruction_sets(rows: int, width: int, vocab: int, options: str) -> None:
    for dtype in FLOATS:
        case = make_case(16, rows, width, vocab, dtype)
        assert_same_everywhere(lambda case=case: tuple(case.run(**OPTIONS[options])))


def test_a_row_depends_on_itself_and_its_teacher() -> None:
    case = make_case(17, 60, 24, 530)
    everything = case.run(temperature=1.3)
    for r in range(60):
        t = int(case.teachers[r])
        pair = [r] if t < 0 else [r, t]
        alone = case._replace(
            hidden=case.hidden[pair],
            targets=index(int(case.targets[r]), -1)[: len(pair)],
            teachers=index(-1 if t < 0 else 1, -1)[: len(pair)],
            weights=case.weights[:, pair],
        ).run(temperature=1.3)
        assert_equal([a[0] for a in alone[:3]], [e[r] for e in everything[:3]], f"row {r}")


# In torch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "everything"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_opcheck_with_gradients(dtype: torch.dtype, options: str) -> None:
    case = make_case(18, 9, 8, 40, dtype)
    leaves = [t.clone().requires_grad_() for t in case.leaves]
    torch.library.opcheck(
        torch.ops.jacobi.consistency_loss.default, (*leaves, case.targets, case.teachers), OPTIONS[options]
    )
    torch.library.opcheck(torch.ops.jacobi.consistency_loss.default, (leaves[0], leaves[1], None, *case[3:5]))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_step(backend: str) -> None:
    def step(hidden: Tensor, lm_head: Tensor, targets: Tensor, teachers: Tensor) -> Tensor:
        nll, consistency = ops.consistency_loss(torch.tanh(hidden), lm_head, None, targets, teachers, temperature=0.8)
        return nll.sum() + 0.5 * consistency.sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for rows in (5, 8):
        case = make_case(19, rows, 8, 40)
        results = []
        for function in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in case.leaves[:2]]
            loss = function(*leaves, case.targets, case.teachers)
            loss.backward()
            results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_no_second_derivative() -> None:
    case = make_case(20, 4, 8, 20)
    hidden = case.hidden.clone().requires_grad_()
    nll, _ = ops.consistency_loss(hidden, *case[1:5])
    with pytest.raises(RuntimeError, match=r"consistency_loss_backward: .* requires grad but the op has no backward"):
        torch.autograd.grad((nll * hidden.sum()).sum(), hidden, create_graph=True)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(4, 9)}, r"lm_head must have shape \[V, E\] = \[\*, 9\], got \[20, 8\]"),
    ({"hidden": torch.zeros(4, 2, 4)}, r"hidden must have shape \[R, E\]"),
    ({"hidden": torch.zeros(4, 8).double()}, "hidden must be float32 or bfloat16, got float64"),
    ({"lm_head": torch.zeros(8, 20).T}, "lm_head must be contiguous"),
    ({"lm_head": torch.zeros(20, 8).half()}, "lm_head must be float32 or bfloat16, got float16"),
    ({"lm_head": torch.zeros(0, 8), "bias": None}, "number of rows of lm_head must be at least 1, got 0"),
    ({"bias": torch.zeros(19)}, r"bias must have shape \[V\] = \[20\], got \[19\]"),
    ({"targets": index(1, 2, 3)}, r"targets must have shape \[R\] = \[4\], got \[3\]"),
    ({"targets": index(1, 2, 3, 4).int()}, "targets must be int64, got int32"),
    ({"targets": index(1, 20, -1, 3)}, r"targets\[1\] must be a token id or -1 \(-1\.\.19\), got 20"),
    ({"targets": index(1, 2, -100, 3)}, r"targets\[2\] must be a token id or -1 .*, got -100"),
    ({"teachers": index(0, 1, 2, 4)}, r"teachers\[3\] must be a row of hidden or -1 \(-1\.\.3\), got 4"),
    ({"teachers": index(-2, 1, 2, 3)}, r"teachers\[0\] must be a row of hidden or -1 .*, got -2"),
    ({"temperature": 0.0}, "temperature must be above 0, got 0"),
    ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
    ({"logit_scale": -1.0}, "logit_scale must be positive, got -1"),
    ({"softcap": -1.0}, r"softcap must be at least 0 \(0: off\), got -1"),
]


@pytest.mark.parametrize(("changed", "message"), CHANGES)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    case = make_case(21, 4, 8, 20)
    arguments = {**dict(zip(Case._fields[:5], case[:5], strict=True)), **changed}
    with pytest.raises(RuntimeError, match=f"^consistency_loss: {message}"):
        ops.consistency_loss(**arguments)
    with pytest.raises(RuntimeError, match=f"^consistency_loss_backward: {message}"):
        ops.consistency_loss_backward(torch.zeros(4), torch.zeros(4), lse=torch.zeros(2, 4), **arguments)


def test_backward_refuses() -> None:
    case = make_case(22, 4, 8, 20)
    good, grads = torch.zeros(2, 4), (torch.zeros(4), torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"consistency_loss_backward: lse must have shape \[2, R\] = \[2, 4\]"):
        ops.consistency_loss_backward(*grads, *case[:5], good[0])
    with pytest.raises(RuntimeError, match=r"consistency_loss_backward: grad_nll must have shape \[R\] = \[4\]"):
        ops.consistency_loss_backward(torch.zeros(5), grads[1], *case[:5], good)
    with pytest.raises(RuntimeError, match="consistency_loss_backward: grad_consistency must be float32"):
        ops.consistency_loss_backward(grads[0], grads[1].double(), *case[:5], good)


# Memory ---------------------------------------------------------------------------------------------------------------


def grow(rows: int, width: int, vocab: int) -> None:
    """Print by how many bytes one forward and backward raise the peak of this process."""
    case = make_case(23, rows, width, vocab)
    leaves = [t.requires_grad_() for t in case.leaves]
    ops.consistency_loss(leaves[0][:1], leaves[1], leaves[2], index(0), index(-1))  # code and threads are loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nll, consistency = ops.consistency_loss(*leaves, case.targets, case.teachers)
    (nll.sum() + consistency.sum()).backward()
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def test_memory_is_that_of_rows_not_of_logits() -> None:
    rows, width, vocab = 800, 32, 40_000
    code = f"from tests.kernels.test_consistency_loss import grow; grow({rows}, {width}, {vocab})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    results = 4 * (rows * width + vocab * width + vocab)
    scratch = 4 * (rows * (3 * width + 800) + 1024 * width)
    assert int(done.stdout) < results + scratch + 8 * 2**20
    assert results + scratch + 8 * 2**20 < 4 * rows * vocab / 4, "the bound means something"
