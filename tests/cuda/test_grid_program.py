"""The GPU step's program on the host: the CPU op's decoding, and bits that no grid, block or batch changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jacobi_kernels import StateColumn, StepWeights, _host
from tests.cuda.grid import Case, Run, random_model
from tests.kernels.helpers import assert_equal

VOCAB = 61
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "inv_freq": 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16),
}
# Odd sizes, a partial and scaled rotation, layers without it, windows, soft cap: no published model.
EVERY_OPTION: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 33,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 10,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "inv_freq": torch.tensor([1.0, 0.3, 0.05]),
    "norm_eps": 1e-3,
    "softmax_scale": 0.4,
    "rope_scale": 1.2,
    "logit_scale": 0.7,
    "logit_softcap": 6.0,
    "windows": (-1, 0, 11),
    "use_rope": (True, False, True),
}
# Products of bfloat16 are split over k here.
MILLION: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 192,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1003,
    "inv_freq": 1.0 / 10000 ** (torch.arange(0, 32, 2) / 32),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [2], [7, 8, 7, 8, 7, 8, 7]]
CASES = [
    Case(),
    Case(5, 2),
    Case(8, 3, 2),
    Case(4, 2, 3, chain_capacity=9, page_size=5),
    Case(6, 1, 4, temperature=0.9),
    Case(16, 2, 1, chain_capacity=40, page_size=64, temperature=1.3),
]


def same_steps(weights: StepWeights, prompts: list[list[int]], case: Case, blocks: int, backwards: bool) -> int:
    """Decodes on the CPU and on a grid, comparing every bit of what a step changes; the number of steps."""
    expected, ours = Run.start(weights, prompts, case), Run.start(weights, prompts, case)
    steps = 0
    while expected.state.running:
        expected.step(weights)
        ours.step(weights, blocks, backwards)
        steps += 1
        assert_equal(ours.tensors(), expected.tensors(), f"step {steps} of {case}, {blocks} blocks")
    return steps


def generate(
    weights: StepWeights, prompts: list[list[int]], case: Case, blocks: int | None, backwards: bool = False
) -> Run:
    run = Run.start(weights, prompts, case)
    for _ in range(200):
        if not run.state.running:
            return run
        run.step(weights, blocks, backwards)
    raise AssertionError("decoding does not end")


def texts(run: Run) -> list[list[int]]:
    return [run.state.generated(b) for b in range(run.state.batch)]


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, torch.dtype], StepWeights]:
    return {
        (name, dtype): random_model(config, dtype, **options)
        for dtype in (torch.float32, torch.bfloat16)
        for name, config, options in (
            ("small", SMALL, {"tied": True}),
            ("norms", SMALL, {"head_norms": True}),
            ("every option", EVERY_OPTION, {"biases": True, "head_norms": True}),
            ("million", MILLION, {"biases": True}),
        )
    }


# float32: the CPU op's bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_steps_are_the_cpu_op_s(models: dict[tuple[str, torch.dtype], StepWeights], case: Case) -> None:
    assert same_steps(models["small", torch.float32], PROMPTS, case, 3, backwards=True) > 1


@pytest.mark.parametrize(("name", "blocks"), [("norms", 1), ("norms", 132), ("every option", 4), ("every option", 13)])
def test_float32_steps_on_any_grid(models: dict[tuple[str, torch.dtype], StepWeights], name: str, blocks: int) -> None:
    same_steps(models[name, torch.float32], PROMPTS, CASES[2], blocks, backwards=blocks % 2 == 1)


def test_a_million_parameters(models: dict[tuple[str, torch.dtype], StepWeights]) -> None:
    prompts = [[(7 * i * i + 3 * i) % 1003 for i in range(150)], [5, 6, 7, 5, 6, 7]]
    same_steps(models["million", torch.float32], prompts, Case(8, 2, 2, new_tokens=7), 24, backwards=False)


def test_text_over_several_spans_and_waves(models: dict[tuple[str, torch.dtype], StepWeights]) -> None:
    """Attention over 10 spans of 256 slots: with 515 query slots a wave takes 7 of them."""
    weights = random_model(SMALL | {"num_layers": 1}, torch.float32, tied=True)
    prompt = [(5 * i * i + i // 7) % VOCAB for i in range(2400)]
    run = Run.start(weights, [prompt], Case(4, 1, 1, chain_capacity=512, new_tokens=4))
    while int(run.state.state[0, StateColumn.TEXT_LEN]) - int(run.state.cache_seqlens[0]) > 512:
        run.step(weights)
    other = Run.start(weights, [prompt], Case(4, 1, 1, chain_capacity=512, new_tokens=4))
    for ours, theirs in zip(other.tensors(), run.tensors(), strict=True):
        ours.copy_(theirs)
    while run.state.running:
        run.step(weights)
        other.step(weights, 5)
        assert_equal(other.tensors(), run.tensors())


# bfloat16: one bit pattern, close to the CPU's ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "norms", "every option"])
def test_bfloat16_blocks_change_nothing(models: dict[tuple[str, torch.dtype], StepWeights], name: str) -> None:
    weights = models[name, torch.bfloat16]
    slow = generate(weights, PROMPTS, Case(new_tokens=16), 1)
    for i, case in enumerate(replace(c, new_tokens=16) for c in CASES[1:4]):
        fast = generate(weights, PROMPTS, case, (2, 7, 132)[i], backwards=i == 1)
        assert texts(fast) == texts(slow), case
        if case.page_size is not None:
            continue
        for b, prompt in enumerate(PROMPTS):
            length = len(prompt) + case.new_tokens - 2
            for ours, expected in ((fast.k, slow.k), (fast.v, slow.v)):
                assert_equal(ours[:, b, :length], expected[:, b, :length], f"{case}, sequence {b}")


def test_bfloat16_grids_and_batches_give_equal_bits(models: dict[tuple[str, torch.dtype], StepWeights]) -> None:
    weights, case = models["million", torch.bfloat16], Case(6, 2, 1, new_tokens=6)
    together = generate(weights, PROMPTS, case, 24)
    assert_equal(generate(weights, PROMPTS, case, 5, backwards=True).tensors(), together.tensors())
    for b in range(2):
        alone = generate(weights, PROMPTS[b : b + 1], case, 3)
        assert texts(alone) == [together.state.generated(b)]
        length = len(PROMPTS[b]) + case.new_tokens - 2
        assert_equal(alone.k[:, 0, :length], together.k[:, b, :length])
        assert_equal(alone.v[:, 0, :length], together.v[:, b, :length])


def test_bfloat16_is_close_to_the_cpu_s(models: dict[tuple[str, torch.dtype], StepWeights]) -> None:
    """The CPU op keeps activations in float32; the first keys and values still agree to some roundings."""
    weights, case = models["small", torch.bfloat16], Case(1, new_tokens=1)
    ours, theirs = generate(weights, PROMPTS, case, 2), generate(weights, PROMPTS, case, None)
    for b, prompt in enumerate(PROMPTS):
        for a, e in ((ours.k, theirs.k), (ours.v, theirs.v)):
            mine, expected = a[:, b, : len(prompt)].float(), e[:, b, : len(prompt)].float()
            assert float((mine - expected).abs().max()) <= 0.03 * float(expected.abs().max())


# Work, errors, refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("columns", "k", "pair"), [(96, 64, 0), (1536, 8960, 0), (2048, 1536, 0), (17920, 1536, 560)])
def test_a_product_s_stages_cover_it_once(columns: int, k: int, pair: int, wide: bool) -> None:
    """Whatever the grid, every (item, 64 rows, step of k) has one stage, ascending in k with no other's between."""
    rows, step = 130, 32 if wide else 64
    splits: set[frozenset[tuple[int, int]]] = set()
    for blocks in (1, 7, 132):
        seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for block in range(blocks):
            for split, first, count, row, at in _host.product_stages(columns, k, rows, pair, wide, block, blocks):
                assert 1 <= count <= (4 if pair else 8)
                for item in range(first, first + count):
                    seen.setdefault((item, row), []).append((split, at))
        items = pair or columns // 16
        assert set(seen) == {(item, row) for item in range(items) for row in (0, 64, 128)}
        for stages in seen.values():
            assert sorted(at for _, at in stages) == list(range(-(-k // step)))
            for split in {s for s, _ in stages}:
                own = [at for s, at in stages if s == split]
                assert own == list(range(own[0], own[0] + len(own)))
        splits |= {frozenset(stages) for stages in seen.values()}
    assert len(splits) == 1  # where k is split depends on nothing else
    assert wide or pair or k < 512 or len({s for s, _ in next(iter(splits))}) > 1


def test_a_bad_sequence_is_left_alone(models: dict[tuple[str, torch.dtype], StepWeights]) -> None:
    weights, case = models["small", torch.float32], Case(4, 2, 2, page_size=8)
    breaks: list[tuple[int, Any]] = [
        (1, lambda run: run.state.segments[1 * 3, 1].fill_(1000)),
        (1, lambda run: run.state.segments[1 * 3 + 1, 2].fill_(1 * 3 + 2)),
        (2, lambda run: run.state.tokens[run.state.rows_per_sequence].fill_(VOCAB)),
        (3, lambda run: run.state.cache_seqlens[1].fill_(10**6)),
        (3, lambda run: run.state.cache_seqlens[1].fill_(-1)),
        (4, lambda run: run.page_table[1, 0].fill_(-5)),
        (4, lambda run: run.page_table[1, 0].fill_(10**6)),
        (5, lambda run: run.state.state[1, StateColumn.ACTIVE].fill_(9)),
        (5, lambda run: run.state.pool[1, 3, 0].fill_(10**6)),
    ]
    for code, damage in breaks:
        expected, run = Run.start(weights, PROMPTS, case), Run.start(weights, PROMPTS, case)
        for _ in range(2):
            expected.step(weights)
            run.step(weights)
        damage(run)
        before = [t.clone() for t in run.tensors()]
        for _ in range(2):
            expected.step(weights)
            run.step(weights, 3)
            assert run.state.state[:, StateColumn.ERROR].tolist() == [0, code, 0]
        run.state.state[1, StateColumn.ERROR] = 0
        assert [run.state.generated(b) for b in (0, 2)] == [expected.state.generated(b) for b in (0, 2)], code
        for ours, old in zip(run.tensors()[:5], before[:5], strict=True):
            per = ours.shape[0] // 3
            assert_equal(ours[per : 2 * per], old[per : 2 * per], f"error {code}")


def test_refusals(models: dict[tuple[str, torch.dtype], StepWeights]) -> None:
    weights = models["small", torch.float32]
    run = Run.start(weights, PROMPTS, CASES[1])
    run.sampling = {"top_k": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="samples without top-k and top-p"):
        run.step(weights, 2)
    run.sampling, run.k, run.v = {}, run.k.bfloat16(), run.v.bfloat16()
    with pytest.raises(RuntimeError, match="caches of the weights' type"):
        run.step(weights, 2)
    words = random_model(SMALL | {"head_dim": 144}, torch.float32).descriptor
    assert _host.grid_workspace(words.data_ptr(), words.numel(), 8, 1, 1) == -1
