"""What the kernel tests share: layouts, caches, instruction sets and error bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import jacobi_kernels  # noqa: F401  (registers the ops)
from jacobi_kernels import reference
from jacobi_kernels.grouped import GroupedMatrix
from jacobi_kernels.packing import pack_weight

THREADS = (1, 2, 3, 5)
ISAS = ("scalar", "avx2", "avx512", "simde")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_linear(seed: int, out_features: int, in_features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A packed weight whose products with normal rows are of size 1."""
    return pack_weight(random_tensor(seed, out_features, in_features, dtype=dtype) / in_features**0.5)


def random_grouped(seed: int, out_features: int, in_features: int, form: str) -> GroupedMatrix:
    """An int8 or int4 matrix with every q, and scales of either sign, zero ones among them."""
    generator, groups = torch.Generator().manual_seed(seed), -(-in_features // 32)
    low, high, dtype = (-128, 128, torch.int8) if form == "int8" else (0, 16, torch.uint8)
    q = torch.randint(low, high, (out_features, 32 * groups), dtype=dtype, generator=generator)
    scale = torch.randn(out_features, groups, generator=generator) / (high * in_features**0.5)
    scale[torch.rand(out_features, groups, generator=generator) < 0.1] = 0.0
    shift = torch.randn(out_features, groups, generator=generator).half() / in_features**0.5
    return GroupedMatrix(form, scale.half(), shift if form == "int4" else None, q, in_features)


# Instruction sets and threads -----------------------------------------------------------------------------------------


def available_isas() -> list[str]:
    """Kernel sets that this machine and build can run."""
    names = []
    for name in ISAS:
        try:
            with isa(name):
                names.append(name)
        except RuntimeError:
            pass
    return names


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Run with another kernel set."""
    before = torch.ops.jacobi._cpu_isa("")
    torch.ops.jacobi._cpu_isa(name)
    try:
        yield
    finally:
        torch.ops.jacobi._cpu_isa(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same_everywhere(run: Any) -> None:
    """``run()`` -> tensors: the same bits with every thread count and every instruction set."""
    expected = run()
    for count in THREADS:
        with threads(count):
            assert_equal(run(), expected, f"{count} threads")
    for name in available_isas():
        with isa(name):
            assert_equal(run(), expected, name)


def assert_equal(actual: Any, expected: Any, what: str = "") -> None:
    """Bit equality of tensors or tuples of them; NaN equals NaN."""
    if isinstance(expected, Tensor):
        actual, expected = (actual,), (expected,)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape, what
        assert a.dtype == e.dtype, what
        same = (a == e) | ((a != a) & (e != e))
        assert bool(same.all()), (
            f"{what}: {int((~same).sum())} of {same.numel()} elements differ, first at {first(~same)}"
        )


def first(mask: Tensor) -> list[int]:
    return mask.nonzero()[0].tolist()


def assert_as_accurate(
    ours: Tensor, low: Tensor, exact: Tensor, factor: float = 2.0, slack: float = 2.0, floor: float = 0.0
) -> None:
    """Our largest error is at most ``factor`` times torch's own plus ``slack`` roundings, or ``floor``."""
    error, allowed = (ours.double() - exact).abs(), (low.double() - exact).abs().max()
    rounding = torch.finfo(ours.dtype).eps * exact.abs().max() / 2
    bound = (factor * allowed + slack * rounding).clamp(min=floor)
    message = f"error {error.max():.3e} at {first(error == error.max())}, allowed {bound:.3e}"
    assert bool((error <= bound).all()), message


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 ``a * b + c`` with one rounding: the product is exact in float64, the sum is rounded to odd there."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # two-sum: what the float64 sum rounded away
    bits = total.view(torch.int64)
    toward_lost = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where((lost != 0) & (bits % 2 == 0), bits + toward_lost, bits)
    return odd.view(torch.float64).float()


# Layouts --------------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The three tensors of a block layout, in the order in which ops take them."""

    cu_seqlens_q: Tensor
    segments: Tensor
    cu_segments: Tensor

    @property
    def rows(self) -> int:
        return int(self.cu_seqlens_q[-1])

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.numel() - 1


def make_layout(
    sequences: Sequence[Sequence[tuple[int, int, int, int]]], row_counts: Sequence[int] | None = None
) -> Layout:
    """Layout from per-sequence segments (start, length, parent, visible), all relative to their sequence.

    ``row_counts`` gives each sequence's query rows; by default they end with its last segment.
    """
    segments, cu_rows, cu_segments = [], [0], [0]
    for b, sequence in enumerate(sequences):
        rows = row_counts[b] if row_counts is not None else max((s + n for s, n, _, _ in sequence), default=0)
        for start, length, parent, visible in sequence:
            segments.append((cu_rows[-1] + start, length, parent + cu_segments[-1] if parent >= 0 else -1, visible))
        cu_rows.append(cu_rows[-1] + rows)
        cu_segments.append(len(segments))
    table = torch.tensor(segments, dtype=torch.int32).reshape(-1, 4)
    return Layout(int32(*cu_rows), table, int32(*cu_segments))


def chains(*lengths: int) -> Layout:
    """One causal run per sequence."""
    return make_layout([[(0, n, -1, 0)] for n in lengths])


def chain_with_candidates(length: int, candidates: int, candidate_length: int, gap: int = 0) -> Layout:
    """One sequence: a main chain and candidates that continue from its first token, ``gap`` holes in front of each."""
    segments = [(0, length, -1, 0)]
    for _ in range(candidates):
        segments.append((segments[-1][0] + segments[-1][1] + gap, candidate_length, 0, 1))
    return make_layout([segments])


def random_layout(seed: int, batch: int, max_segments: int = 5, max_length: int = 8) -> Layout:
    """Ragged batch of random trees: holes, empty segments, siblings, several roots, sequences without rows."""
    rng = random.Random(seed)
    sequences, row_counts = [], []
    for _ in range(batch):
        segments: list[tuple[int, int, int, int]] = []
        row = 0
        for s in range(rng.randint(0 if batch > 1 else 1, max_segments)):
            row += rng.choice((0, 0, 0, 1, 3))
            length = rng.choice((0, *range(1, max_length + 1)))
            parent = rng.randint(-1, s - 1) if rng.random() < 0.9 else -1
            visible = rng.randint(0, segments[parent][1]) if parent >= 0 else 0
            segments.append((row, length, parent, visible))
            row += length
        sequences.append(segments)
        row_counts.append(row + rng.choice((0, 0, 2)))
    return make_layout(sequences, row_counts)


# Caches ---------------------------------------------------------------------------------------------------------------


@dataclass
class Cache:
    """Keys and values of a batch: ``lengths[b]`` committed rows, NaN in every row that nobody may read."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None

    def clone(self) -> Cache:
        return Cache(self.k.clone(), self.v.clone(), self.lengths.clone(), self.page_table)

    def rows(self, b: int, count: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        """Rows ``begin .. begin+count-1`` of sequence b: keys and values ``[count, KVH, D]``."""
        slots = reference.cache_slots(list(range(begin, begin + count)), b, self.k.shape[1], self.page_table)
        return self.k[slots], self.v[slots]


def make_cache(
    seed: int,
    lengths: Sequence[int],
    room: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    page_size: int | None = None,
    strided: bool = False,
) -> Cache:
    """A cache with ``room`` rows behind the longest sequence.

    Committed rows depend on (seed, sequence) only, so a paged and a contiguous cache of one seed hold the same.
    ``page_size`` makes a paged one with shuffled pages; ``strided`` makes the contiguous one a view with gaps.
    """
    batch, capacity = len(lengths), max(lengths, default=0) + room
    page_table = None
    if page_size is None:
        shape: tuple[int, ...] = (batch, capacity, kv_heads, head_dim)
    else:
        max_pages = -(-capacity // page_size)
        order = list(range(batch * max_pages + 1))  # one page stays unused
        random.Random(seed).shuffle(order)
        page_table = torch.tensor(order[: batch * max_pages], dtype=torch.int32).view(batch, max_pages)
        shape = (len(order), page_size, kv_heads, head_dim)
    if strided:
        k, v = torch.full((2, *shape[:2], 2, *shape[2:]), float("nan"), dtype=dtype)[:, :, :, 1]
    else:
        k, v = torch.full((2, *shape), float("nan"), dtype=dtype)
    for b, length in enumerate(lengths):
        slots = reference.cache_slots(list(range(length)), b, shape[1], page_table)
        k[slots] = random_tensor(seed + 2 * b + 1, length, kv_heads, head_dim, dtype=dtype)
        v[slots] = random_tensor(seed + 2 * b + 2, length, kv_heads, head_dim, dtype=dtype)
    return Cache(k, v, torch.tensor(lengths, dtype=torch.int32), page_table)
