"""argmax_verify on Triton: the CPU op's predictions and acceptance, greedy and sampled, row by row the same."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jacobi_kernels import reference
from jacobi_kernels.packing import pack_weight
from jacobi_kernels.triton.argmax_verify import argmax_verify
from tests.kernels.helpers import Layout, assert_equal, chains, int32, make_layout, random_layout
from tests.kernels.test_argmax_verify import Head, follow_predictions, positions

SAMPLERS = [(0.0, 0, 1.0), (0.9, 0, 1.0), (1.1, 20, 1.0), (0.7, 0, 0.9), (1.3, 50, 0.8)]


def on_device(case: Head, device: str, **options: Any) -> tuple[Tensor, ...]:
    """The Triton op's results, on the CPU."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    arguments = (case.hidden, case.weight, case.bias, case.vocab, case.tokens, case.num_final, case.lengths)
    options = {name: there(value) for name, value in options.items()}
    results = argmax_verify(*map(there, arguments), *(t.to(device) for t in case.layout), **options)
    return tuple(t.cpu() for t in results)


def on_cpu(case: Head, **options: Any) -> tuple[Tensor, ...]:
    op = torch.ops.jacobi.argmax_verify.default
    arguments = (case.hidden, case.weight, case.bias, case.vocab, case.tokens, case.num_final, case.lengths)
    return op(*arguments, *case.layout, **options)


@pytest.mark.parametrize("seed", range(8))
def test_integer_logits(seed: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Small integers make every sum exact: predictions equal the reference's, ties included."""
    for dtype in dtypes:
        batch, vocab = 1 + seed % 3, (1, 17, 130, 700)[seed % 4]
        case = Head(seed, random_layout(seed, batch), vocab, 8, dtype)
        generator = torch.Generator().manual_seed(seed)
        case.hidden = torch.randint(-2, 3, case.hidden.shape, generator=generator).to(dtype)
        case.weight = pack_weight(torch.randint(-1, 2, (vocab, 8), generator=generator).to(dtype))
        case.bias = torch.randint(-1, 2, (vocab,), generator=generator).to(dtype) if seed % 2 else None
        case.tokens = torch.randint(0, min(vocab, 3), (case.layout.rows,), generator=generator, dtype=torch.int32)
        final = (None, 0, 1, 2, 5, 20, None, 1)[seed]
        case.num_final = None if final is None else torch.full((batch,), final, dtype=torch.int32)
        assert_equal(on_device(case, device), case.run(reference.argmax_verify))


@pytest.mark.parametrize("options", [{}, {"logit_scale": 3.0, "softcap": 30.0}], ids=str)
def test_greedy_picks_the_largest_logit(
    options: dict[str, float], device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        case = Head(1, chains(70), 1365, 96, dtype, bias=True)
        chosen = on_device(case, device, **options)[0].long()
        logits = reference.token_logits(case.hidden, case.weight, case.bias, 1365, **options)
        lost = logits.max(1).values - logits.gather(1, chosen[:, None])[:, 0]
        assert float(lost.max()) <= 1e-5 * float(logits.abs().max())


def test_ties_nan_and_infinity(device: str) -> None:
    case = Head(3, chains(3), 40, 1)
    case.hidden = torch.ones(3, 1)
    values = torch.zeros(40)
    values[[17, 33]] = 2.0
    case.weight = pack_weight(values[:, None])
    case.bias = torch.zeros(40)
    assert on_device(case, device)[0].tolist() == [17] * 3
    case.bias[[21, 38]] = math.nan
    for sampler in SAMPLERS:
        assert on_device(case, device, **case.sampling(*sampler))[0].tolist() == [21] * 3
    case.bias = torch.full((40,), -math.inf)
    assert on_device(case, device)[0].tolist() == [0] * 3
    case.bias[39] = 0.0
    for sampler in SAMPLERS:
        assert on_device(case, device, **case.sampling(*sampler))[0].tolist() == [39] * 3
    case.bias[12] = math.inf
    assert on_device(case, device)[0].tolist() == [12] * 3


@pytest.mark.parametrize("seed", range(12))
def test_longest_accepted_path(seed: int, device: str) -> None:
    case = Head(seed, random_layout(seed, 1 + seed % 4, max_segments=7), 6, 16)
    follow_predictions(case, on_device(case, device)[0], seed, (0.5, 0.8, 0.95, 1.0)[seed % 4])
    final = (None, 1, 3)[seed % 3]
    case.num_final = None if final is None else torch.full((case.layout.batch,), final, dtype=torch.int32)
    predictions, *accepted = on_device(case, device)
    assert_equal(tuple(accepted), reference.accept(predictions, case.tokens, case.num_final, *case.layout))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_samples_are_those_of_the_cpu_op(sampler: tuple[float, int, float], device: str) -> None:
    """Integer hidden states and weights make the logits equal; noise and filters then decide alike."""
    case = Head(6, make_layout([[(0, 3, -1, 0), (4, 2, 0, 1)], [(0, 4, -1, 0)]]), 300)
    generator = torch.Generator().manual_seed(1)
    case.hidden = torch.randint(-2, 3, case.hidden.shape, generator=generator).float()
    case.weight = pack_weight(torch.randint(-1, 2, (300, 32), generator=generator).float())
    for seed in (5, -(2**63)):
        seeds = {"seeds": torch.tensor([seed, 7])}
        ours = on_device(case, device, **case.sampling(*sampler, rows=3) | seeds)
        assert_equal(ours, on_cpu(case, **case.sampling(*sampler) | seeds))


@pytest.mark.parametrize("sampler", SAMPLERS[:4], ids=str)
def test_rows_equal_one_token_at_a_time(
    sampler: tuple[float, int, float], device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """A row's prediction depends on its hidden state, its position and its request's seed alone."""
    for dtype in dtypes:
        case = Head(12, random_layout(14, 2), 1365, 64, dtype, bias=True)
        few = device == "cpu" and sampler[1:] != (0, 1.0)  # filters are slow in the interpreter
        seeds = case.sampling(*sampler)["seeds"]
        predictions = on_device(case, device, **case.sampling(*sampler))[0]
        where = positions(case.layout, case.lengths)
        for b, rows in enumerate(reference.row_paths(case.layout.segments, case.layout.cu_segments)):
            for row in list(rows)[:: 9 if few else 3]:
                alone = copy.copy(case)
                alone.layout, alone.lengths = chains(1), int32(where[row] - 1)
                alone.hidden, alone.tokens = case.hidden[row : row + 1], case.tokens[:1]
                options = alone.sampling(*sampler, rows=2) | {"seeds": seeds[b : b + 1]}
                assert_equal(on_device(alone, device, **options)[0], predictions[row : row + 1], f"row {row}")
        assert sum(p >= 0 for p in predictions.tolist()) == len(where)


def test_top_k_keeps_ties_and_top_p_breaks_them_by_id(device: str) -> None:
    rows = 5 if device == "cpu" else 300
    case = Head(11, chains(rows), 8, 1)
    case.hidden = torch.ones(rows, 1)
    case.weight = pack_weight(torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0, 0.0, 3.0, 3.0])[:, None])
    for options, allowed in (
        ({"top_k": 2}, {1, 3, 4, 6, 7}),
        ({"top_p": 0.5}, {1, 3, 4}),
        ({"top_k": 5, "top_p": 0.5}, {1, 3, 4}),
        ({"top_p": 1e-6}, {1}),
    ):
        chosen = on_device(case, device, **case.sampling(1.0, **options))[0]
        assert set(chosen.tolist()) <= allowed
        assert_equal(chosen, on_cpu(case, **case.sampling(1.0, **options))[0])


def test_a_layout_that_breaks_a_rule_gives_nothing(device: str) -> None:
    case = Head(4, make_layout([[(0, 4, -1, 0)], [(0, 3, -1, 0)]]), 20)
    case.layout = Layout(case.layout.cu_seqlens_q, int32(0, 9, -1, 0, 4, 3, -1, 0).view(2, 4), case.layout.cu_segments)
    predictions, rows, counts, fixed = on_device(case, device)
    assert predictions[:4].tolist() == rows[:4].tolist() == [-1] * 4
    assert bool((predictions[4:] >= 0).all())
    assert counts[0] == 0
    assert not fixed[0]


def test_no_rows_and_no_sequences(device: str) -> None:
    case = Head(16, make_layout([[], [(0, 0, -1, 0)]]), 30)
    predictions, rows, counts, fixed = on_device(case, device)
    assert predictions.shape == rows.shape == (0,)
    assert counts.tolist() == [0, 0]
    assert fixed.tolist() == [False, False]
    assert [t.shape for t in on_device(Head(16, make_layout([]), 30), device)] == [(0,), (0,), (0,), (0,)]


def test_refusals(device: str) -> None:
    case = Head(1, chains(2), 20)
    options = case.sampling(1.0, top_k=3)
    with pytest.raises(RuntimeError, match="argmax_verify: seeds must be given with temperature"):
        on_device(case, device, **options | {"seeds": None})
    with pytest.raises(RuntimeError, match="argmax_verify: logits_scratch must be given with top_k or top_p"):
        on_device(case, device, **options | {"logits_scratch": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": (slice(1), ...)}, r"lm_head must have shape \[ceil\(vocab_size/16\), in_features, 16\]"),
        ({"tokens": slice(4)}, r"tokens must have shape \[T\] = \[5\], got \[4\]"),
        ({"lengths": slice(1)}, r"cache_seqlens must have shape \[B\] = \[2\], got \[1\]"),
        ({"vocab": 0, "weight": slice(0), "logits_scratch": (slice(None), slice(0))}, "vocab_size must be at least 1"),
        ({"temperature": slice(1)}, r"temperature must have shape \[B\] = \[2\], got \[1\]"),
        ({"logits_scratch": (slice(None), slice(20))}, r"logits_scratch must have shape \[rows, vocab_size\]"),
        ({"logits_scratch": slice(1)}, "logits_scratch must have 2 to 16 rows, got 1"),
        ({"hidden": torch.float64}, "hidden must be float32 or bfloat16, got float64"),
        ({"tokens": torch.int64}, "tokens must be int32, got int64"),
        ({"seeds": torch.int32}, "seeds must be int64, got int32"),
        ({"logits_scratch": "strided"}, r"logits_scratch must be contiguous, got shape \[16, 30\] with strides"),
        ({"tokens": "strided"}, r"tokens must be contiguous, got shape \[5\] with strides \[2\]"),
        ({"temperature": "strided"}, "temperature must be contiguous"),
    ],
    ids=str,
)
def test_arguments_that_kernels_cannot_take_are_refused(change: dict[str, Any], message: str, device: str) -> None:
    """Before anything is launched, which would read or write beside them."""
    case = Head(9, chains(3, 2), 30, 8)
    options = case.sampling(1.0, top_k=3)
    for name, how in change.items():
        value = options[name] if name in options else getattr(case, name)
        if how == "strided":
            changed = value.new_zeros((*value.shape, 2))[..., 0]
        elif isinstance(how, torch.dtype):
            changed = value.to(how)
        else:
            changed = how if name == "vocab" else value[how]
        if name in options:
            options[name] = changed
        else:
            setattr(case, name, changed)
    with pytest.raises(RuntimeError, match="argmax_verify: " + message):
        on_device(case, device, **options)


def test_values_out_of_range_do_no_harm(device: str) -> None:
    """Nothing can be raised for them on a device: the mass of no token is kept as the first token's."""
    case = Head(7, chains(5, 3), 50, 8)
    greedy = on_device(case, device)[0]
    for share in (0.0, -1.0, 1e-38):
        assert_equal(on_device(case, device, **case.sampling(1.0, top_p=share))[0], greedy)
    case.num_final = torch.full((2,), -(2**31), dtype=torch.int32)
    assert_equal(on_device(case, device)[0], greedy)


def test_infinite_logits_win_by_id(device: str) -> None:
    case = Head(5, chains(4), 50, 8)
    case.bias = torch.zeros(50)
    case.bias[[7, 9, 33]] = math.inf
    case.bias[2] = -math.inf
    for sampler in (*SAMPLERS, (1.0, 5, 0.5), (1e-38, 2, 0.9)):
        options = case.sampling(*sampler)
        assert on_device(case, device, **options)[0].tolist() == [7] * 4
        assert on_cpu(case, **options)[0].tolist() == [7] * 4
