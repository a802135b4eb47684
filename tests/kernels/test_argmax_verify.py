"""argmax_verify: greedy predictions, acceptance over random trees, and sampling that is exact in law and in bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jacobi_kernels import ops, reference
from jacobi_kernels.grouped import pack_grouped
from jacobi_kernels.packing import pack_weight
from jacobi_kernels.sampling import row_seeds, splitmix64
from tests.kernels.helpers import (
    Layout,
    assert_equal,
    assert_same_everywhere,
    chain_with_candidates,
    chains,
    int32,
    make_layout,
    random_grouped,
    random_layout,
    random_linear,
    random_tensor,
    threads,
)

FLOATS = [torch.float32, torch.bfloat16]


class Head:
    """A head, hidden states for a layout, and the op on them."""

    def __init__(
        self,
        seed: int,
        layout: Layout,
        vocab: int,
        width: int = 32,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
    ) -> None:
        self.layout, self.vocab = layout, vocab
        self.hidden = random_tensor(seed, layout.rows, width, dtype=dtype)
        self.weight = random_linear(seed + 1, vocab, width, dtype)
        self.bias = random_tensor(seed + 2, vocab) if bias else None
        self.tokens = torch.zeros(layout.rows, dtype=torch.int32)
        self.lengths = torch.full((layout.batch,), 5, dtype=torch.int32)
        self.num_final: Tensor | None = None

    def run(self, function: Any = ops.argmax_verify, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return function(
            self.hidden,
            self.weight,
            self.bias,
            self.vocab,
            self.tokens,
            self.num_final,
            self.lengths,
            *self.layout,
            **options,
        )

    def sampling(self, temperature: float, top_k: int = 0, top_p: float = 1.0, seed: int = 0, rows: int = 16) -> dict:
        batch = self.layout.batch
        return {
            "temperature": torch.full((batch,), temperature),
            "top_k": torch.full((batch,), top_k, dtype=torch.int32),
            "top_p": torch.full((batch,), top_p),
            "seeds": row_seeds(seed, batch),
            "logits_scratch": torch.full((rows, self.vocab), math.nan),
        }


def positions(layout: Layout, lengths: Tensor) -> dict[int, int]:
    """Position of the predicted token after each live row."""
    paths = reference.row_paths(layout.segments, layout.cu_segments)
    return {row: int(lengths[b]) + len(path) for b, seen in enumerate(paths) for row, path in seen.items()}


# Greedy ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    vocab=st.integers(1, 200),
    dtype=st.sampled_from(FLOATS),
    bias=st.booleans(),
    final=st.sampled_from([None, 0, 1, 2, 5, 20]),
)
def test_integer_logits(seed: int, batch: int, vocab: int, dtype: torch.dtype, bias: bool, final: int | None) -> None:
    """Small integers make every sum exact: predictions equal the reference's, ties included."""
    case = Head(seed, random_layout(seed, batch), vocab, 8, dtype)
    generator = torch.Generator().manual_seed(seed)
    case.hidden = torch.randint(-2, 3, case.hidden.shape, generator=generator).to(dtype)
    case.weight = pack_weight(torch.randint(-1, 2, (vocab, 8), generator=generator).to(dtype))
    case.bias = torch.randint(-1, 2, (vocab,), generator=generator).to(dtype) if bias else None
    case.tokens = torch.randint(0, min(vocab, 3), (case.layout.rows,), generator=generator, dtype=torch.int32)
    case.num_final = None if final is None else torch.full((batch,), final, dtype=torch.int32)
    assert_equal(case.run(), case.run(reference.argmax_verify))


@pytest.mark.parametrize(
    "options", [{}, {"logit_scale": 0.3}, {"softcap": 2.0}, {"logit_scale": 3.0, "softcap": 30.0}], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [1, 16, 1365])
def test_greedy_picks_the_largest_logit(vocab: int, dtype: torch.dtype, bias: bool, options: dict[str, float]) -> None:
    case = Head(1, chains(30), vocab, 96, dtype, bias)
    chosen = case.run(**options)[0].long()
    logits = reference.token_logits(case.hidden, case.weight, case.bias, vocab, **options)
    lost = logits.max(1).values - logits.gather(1, chosen[:, None])[:, 0]
    assert float(lost.max()) <= 1e-5 * float(logits.abs().max())


def test_ties_nan_and_infinity() -> None:
    case = Head(3, chains(6), 40, 1)
    case.hidden = torch.ones(6, 1)
    values = torch.zeros(40)
    values[[17, 33]] = 2.0
    case.weight = pack_weight(values[:, None])
    assert case.run()[0].tolist() == [17] * 6
    case.bias = torch.zeros(40)
    case.bias[[21, 38]] = math.nan
    assert case.run()[0].tolist() == [21] * 6
    case.bias = torch.full((40,), -math.inf)
    assert case.run()[0].tolist() == [0] * 6
    case.bias[39] = 0.0
    assert case.run()[0].tolist() == [39] * 6
    case.bias[12] = math.inf
    assert case.run()[0].tolist() == [12] * 6


# int8 and int4 --------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    rows=st.integers(1, 70),
    vocab=st.integers(1, 200),
    width=st.integers(1, 140),
    form=st.sampled_from(["int8", "int4"]),
    dtype=st.sampled_from(FLOATS),
    sampler=st.sampled_from([None, (0.8, 0, 1.0), (1.0, 9, 0.9)]),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_int8_and_int4_have_the_bits_of_their_float32_values(
    rows: int,
    vocab: int,
    width: int,
    form: str,
    dtype: torch.dtype,
    sampler: tuple[float, int, float] | None,
    count: int,
    seed: int,
) -> None:
    """Of the logits too, which the scratch keeps."""
    case, matrix = Head(seed, chains(rows), vocab, width, dtype, bias=True), random_grouped(seed, vocab, width, form)
    results = []
    for weight in (pack_weight(matrix.dequantize()), pack_grouped(matrix)):
        case.weight = weight
        options = {} if sampler is None else case.sampling(*sampler)
        with threads(count):
            results.append((*case.run(**options), *([options["logits_scratch"]] if options else [])))
    assert_equal(results[1], results[0])
    logits = reference.token_logits(case.hidden, case.weight, case.bias, vocab)
    lost = logits.max(1).values - logits.gather(1, case.run()[0].long()[:, None])[:, 0]
    assert float(lost.max()) <= 1e-5 * float(logits.abs().max())


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_int8_and_int4_are_the_same_everywhere(form: str) -> None:
    case = Head(30, chains(33), 1365, 100)
    case.weight = pack_grouped(random_grouped(31, 1365, 100, form))
    assert_same_everywhere(lambda: case.run(**case.sampling(0.8, 20, 0.9)))


# Acceptance -----------------------------------------------------------------------------------------------------------


def follow_predictions(case: Head, predictions: Tensor, seed: int, agree: float) -> None:
    """Tokens that equal the prediction of the row before them on their path, with probability ``agree``."""
    generator = torch.Generator().manual_seed(seed)
    for seen in reference.row_paths(case.layout.segments, case.layout.cu_segments):
        for row, path in seen.items():
            same = len(path) > 1 and float(torch.rand((), generator=generator)) < agree
            case.tokens[row] = (
                predictions[path[-2]] if same else int(torch.randint(0, case.vocab, (), generator=generator))
            )


@settings(max_examples=150)
@given(
    seed=st.integers(0, 100_000),
    batch=st.integers(1, 4),
    agree=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
    final=st.sampled_from([None, 1, 3]),
)
def test_longest_accepted_path(seed: int, batch: int, agree: float, final: int | None) -> None:
    case = Head(seed, random_layout(seed, batch, max_segments=7), 6, 16)
    follow_predictions(case, case.run()[0], seed, agree)
    case.num_final = None if final is None else torch.full((batch,), final, dtype=torch.int32)
    predictions, *accepted = case.run()
    expected = reference.accept(predictions, case.tokens, case.num_final, *case.layout)
    assert_equal(tuple(accepted), expected)


def test_acceptance_by_hand() -> None:
    """The head predicts t + 1 after token t, which the hidden state shows."""

    def verify(layout: Layout, tokens: list[int], num_final: int | None = None) -> tuple[list[int], int, bool]:
        case = Head(0, layout, 20)
        case.tokens = int32(*tokens)
        case.hidden = torch.eye(20)[case.tokens.long()]
        case.weight = pack_weight(torch.eye(20).roll(1, 0))
        case.num_final = None if num_final is None else int32(num_final)
        _, rows, count, fixed = case.run()
        return rows[: int(count)].tolist(), int(count), bool(fixed)

    two = chain_with_candidates(4, 2, 3)
    assert verify(two, [1, 2, 3, 4, 9, 9, 9, 9, 9, 9]) == ([0, 1, 2, 3], 4, True)
    assert verify(two, [1, 2, 9, 9, 9, 9, 9, 2, 3, 9]) == ([0, 7, 8], 3, False)
    assert verify(two, [1, 2, 9, 9, 2, 9, 9, 2, 9, 9]) == ([0, 1], 2, False), "ties go to the main chain"
    assert verify(two, [1, 9, 9, 9, 2, 9, 9, 2, 9, 9]) == ([0, 4], 2, False), "then to the lowest candidate"
    assert verify(two, [1, 9, 3, 4, 9, 3, 4, 9, 9, 9]) == ([0], 1, False), "nothing is accepted behind a rejection"
    assert verify(two, [1, 9, 3, 4, 9, 3, 4, 9, 9, 9], 3) == ([0, 1, 2, 3], 4, True), "final tokens need no match"
    nested = make_layout([[(0, 3, -1, 0), (3, 2, 0, 2), (5, 2, 1, 1), (7, 3, 2, 0)]])
    assert verify(nested, [1, 2, 9, 3, 9, 4, 5, 4, 5, 6]) == ([0, 1, 3, 7, 8, 9], 6, False), "sibling of a nested one"
    assert verify(make_layout([[(0, 0, -1, 0)]]), []) == ([], 0, False), "nothing to verify"


def test_predictions_behind_final_tokens_only() -> None:
    case = Head(5, make_layout([[(0, 6, -1, 0), (7, 2, 0, 1)], [(0, 4, -1, 0)]]), 50)
    case.num_final = int32(4, 9)
    predictions = case.run()[0].tolist()
    full = Head(5, case.layout, 50).run()[0].tolist()
    assert predictions[:3] == [-1] * 3
    assert predictions[3:6] == full[3:6]
    assert predictions[6] == -1
    assert predictions[7:9] == full[7:9]
    assert predictions[9:] == [-1] * 4


# Sampling -------------------------------------------------------------------------------------------------------------


def test_seeds_of_rows() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # published test value
    assert row_seeds(7, 3)[0] == row_seeds(7, 1)[0]
    assert len(set(row_seeds(7, 100).tolist()) | set(row_seeds(8, 100).tolist())) == 200
    assert row_seeds([3, -4], 2).tolist() == [3, -4]
    assert row_seeds(-1, 1).dtype == torch.int64
    with pytest.raises(ValueError, match="expected 3, got 2"):
        row_seeds([1, 2], 3)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (40, 0.9)])
def test_sample_is_the_argmax_of_logits_plus_noise(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    """The documented noise in float64; only where two scores are closer than rounding may another token win."""
    case = Head(6, random_layout(12, 3), 300, bias=True)
    options = case.sampling(temperature, top_k, top_p)
    options["seeds"] = torch.tensor([seed, 5, seed])
    chosen = case.run(**options)[0].tolist()
    logits = reference.token_logits(case.hidden, case.weight, case.bias, case.vocab)
    where = positions(case.layout, case.lengths)
    assert len(where) > 20
    for b, rows in enumerate(reference.row_paths(case.layout.segments, case.layout.cu_segments)):
        for row in rows:
            z = reference.warp_logits(logits[row], temperature, top_k, top_p)
            noise = reference.gumbel_noise(int(options["seeds"][b]), where[row], torch.arange(300))
            scores = z + noise
            assert float(scores.max() - scores[chosen[row]]) <= 1e-5 * float(z[z.isfinite()].abs().max() + 10)


def test_zero_temperature_is_greedy_per_sequence() -> None:
    case = Head(7, chains(9, 9), 100)
    greedy = case.run()[0]
    options = case.sampling(1.0, 3, 0.5)
    options["temperature"] = torch.tensor([0.0, 1.0])
    mixed = case.run(**options)[0]
    assert_equal(mixed[:9], greedy[:9])
    assert not torch.equal(mixed[9:], greedy[9:])


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """The statistic over cells expected at least 5 times (the rest pooled), and its 99.99% quantile."""
    expected = probabilities * counts.sum()
    order = expected.argsort(descending=True)
    counts, expected = counts[order].double(), expected[order]
    cells = int((expected >= 5).sum())
    pooled = expected[cells:].sum()
    if pooled > 5:
        counts = torch.cat([counts[:cells], counts[cells:].sum()[None]])
        expected = torch.cat([expected[:cells], pooled[None]])
    else:
        counts, expected = counts[:cells], expected[:cells]
    k = len(expected) - 1
    quantile = k * (1 - 2 / (9 * k) + 3.719 * math.sqrt(2 / (9 * k))) ** 3  # Wilson and Hilferty
    return float(((counts - expected) ** 2 / expected).sum()), quantile


@pytest.mark.parametrize("over", ["positions", "seeds"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (2.0, 0, 1.0), (1.0, 6, 1.0), (1.0, 0, 0.8), (0.8, 20, 0.9)],
)
def test_distribution(temperature: float, top_k: int, top_p: float, over: str) -> None:
    """Counts over positions (or rows of a batch) fit the softmax that transformers' warpers give."""
    draws, vocab = 20_000, 50
    case = Head(8, chains(draws) if over == "positions" else chains(*[1] * draws), vocab, 16)
    case.hidden = random_tensor(19, 1, 16).repeat(draws, 1)
    counts = torch.bincount(case.run(**case.sampling(temperature, top_k, top_p, seed=11))[0].long(), minlength=vocab)
    z = reference.token_logits(case.hidden[:1], case.weight, None, vocab)
    z = TemperatureLogitsWarper(temperature)(torch.empty(0), z)
    if top_k:
        z = TopKLogitsWarper(top_k)(torch.empty(0), z)
    if top_p < 1:
        z = TopPLogitsWarper(top_p)(torch.empty(0), z)
    probabilities = torch.softmax(z[0], 0)
    assert not counts[probabilities == 0].any(), "filtered tokens are never drawn"
    statistic, quantile = chi_square(counts, probabilities)
    assert statistic < quantile


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of samples at positions p and p + 1, and under seeds s and s + 1, fill the product distribution."""
    draws, vocab = 20_000, 4
    case = Head(10, chains(draws), vocab, 4)
    case.hidden = torch.zeros(draws, 4)
    samples = [case.run(**case.sampling(1.0) | {"seeds": torch.tensor([s])})[0].long() for s in (3, 4)]
    uniform = torch.full((vocab**2,), 1 / vocab**2, dtype=torch.float64)
    for pairs in (samples[0][:-1:2] * vocab + samples[0][1::2], samples[0] * vocab + samples[1]):
        statistic, quantile = chi_square(torch.bincount(pairs, minlength=vocab**2), uniform)
        assert statistic < quantile


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6]),
)
def test_reference_filters_as_transformers_does(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * random_tensor(seed, 1, 120).double()
    z = TemperatureLogitsWarper(temperature)(torch.empty(0), logits)
    if top_k:
        z = TopKLogitsWarper(top_k)(torch.empty(0), z)
    if top_p < 1:
        z = TopPLogitsWarper(top_p)(torch.empty(0), z)
    torch.testing.assert_close(reference.warp_logits(logits[0], temperature, top_k, top_p), z[0])


def test_top_k_keeps_ties_and_top_p_breaks_them_by_id() -> None:
    case = Head(11, chains(300), 8, 1)
    case.hidden = torch.ones(300, 1)
    case.weight = pack_weight(torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0, 0.0, 3.0, 3.0])[:, None])
    assert set(case.run(**case.sampling(1.0, top_k=2))[0].tolist()) == {1, 3, 4, 6, 7}
    assert set(case.run(**case.sampling(1.0, top_p=0.5))[0].tolist()) == {1, 3, 4}
    assert set(case.run(**case.sampling(1.0, top_k=5, top_p=0.5))[0].tolist()) == {1, 3, 4}
    assert set(case.run(**case.sampling(1.0, top_p=1e-6))[0].tolist()) == {1}


ALL_SAMPLERS = [(0.0, 0, 1.0), (0.9, 0, 1.0), (1.1, 20, 1.0), (0.7, 0, 0.9), (1.3, 50, 0.8), (1.0, 0, 0.9999999)]


@pytest.mark.parametrize("sampler", ALL_SAMPLERS, ids=str)
@pytest.mark.parametrize("vocab", [5, 100, 3000])
def test_nan_wins_and_minus_infinity_never_does(vocab: int, sampler: tuple[float, int, float]) -> None:
    case = Head(17, chains(20), vocab, 4)
    generator = torch.Generator().manual_seed(vocab)
    case.bias = torch.zeros(vocab)
    case.bias[::2] = -math.inf
    assert all(token % 2 == 1 for token in case.run(**case.sampling(*sampler))[0].tolist())
    for share in (0.01, 0.3, 0.9, 1.0):
        case.bias[torch.rand(vocab, generator=generator) < share] = math.nan
        case.bias[-1] = math.nan
        lowest = int(case.bias.isnan().nonzero()[0])
        assert case.run(**case.sampling(*sampler))[0].tolist() == [lowest] * 20


def test_infinite_logits_win_by_id_under_any_sampler() -> None:
    case = Head(5, chains(4), 50, 8)
    case.bias = torch.zeros(50)
    case.bias[[7, 9, 33]] = math.inf
    for sampler in (*ALL_SAMPLERS, (1.0, 5, 0.5), (1e-38, 2, 0.9)):
        assert case.run(**case.sampling(*sampler))[0].tolist() == [7] * 4


# Exactness ------------------------------------------------------------------------------------------------------------

SAMPLERS = ALL_SAMPLERS[:5]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_equal_one_token_at_a_time(dtype: torch.dtype, sampler: tuple[float, int, float]) -> None:
    """A row's prediction depends on its hidden state, its position and its request's seed alone."""
    case = Head(12, random_layout(14, 3), 1365, 64, dtype, bias=True)
    predictions = case.run(**case.sampling(*sampler))[0]
    where = positions(case.layout, case.lengths)
    for b, rows in enumerate(reference.row_paths(case.layout.segments, case.layout.cu_segments)):
        for row in rows:
            alone = copy.copy(case)
            alone.layout, alone.lengths = chains(1), int32(where[row] - 1)
            alone.hidden, alone.tokens = case.hidden[row : row + 1], case.tokens[:1]
            options = alone.sampling(*sampler, rows=2) | {"seeds": case.sampling(*sampler)["seeds"][b : b + 1]}
            assert_equal(alone.run(**options)[0], predictions[row : row + 1], f"row {row}")
    assert sum(p >= 0 for p in predictions.tolist()) == len(where)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1365), (33, 1365), (20, 17), (7, 1)])
def test_same_bits_for_threads_and_instruction_sets(rows: int, vocab: int, sampler: tuple[float, int, float]) -> None:
    for dtype in FLOATS:
        case = Head(13, chains(rows, 2), vocab, 48, dtype, bias=True)
        case.hidden[:, 1:] = 0  # few distinct logits: ties everywhere
        case.weight[:, 0] = case.weight[:, 0].round()
        case.bias = None
        assert_same_everywhere(lambda case=case: case.run(**case.sampling(*sampler)))


@pytest.mark.parametrize("sampler", SAMPLERS[2:], ids=str)
def test_any_number_of_scratch_rows(sampler: tuple[float, int, float]) -> None:
    case = Head(14, chains(37), 500)
    expected = case.run(**case.sampling(*sampler, rows=16))
    for rows in (2, 3, 5, 15):
        assert_equal(case.run(**case.sampling(*sampler, rows=rows)), expected, f"{rows} rows of scratch")


def test_filters_that_keep_everything_change_nothing() -> None:
    case = Head(15, chains(64), 500)
    plain = case.run(**case.sampling(0.8))
    assert_equal(case.run(**case.sampling(0.8, top_k=500)), plain, "top_k = vocab")
    assert_equal(case.run(**case.sampling(0.8, top_k=1)), case.run(), "top_k = 1 is greedy")


def test_no_rows_and_no_sequences() -> None:
    case = Head(16, make_layout([[], [(0, 0, -1, 0)]]), 30)
    predictions, rows, counts, fixed = case.run()
    assert predictions.shape == rows.shape == (0,)
    assert counts.tolist() == [0, 0]
    assert fixed.tolist() == [False, False]
    assert [t.shape for t in Head(16, make_layout([]), 30).run()] == [(0,), (0,), (0,), (0,)]
