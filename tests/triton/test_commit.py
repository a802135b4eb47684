"""commit on the device: rows of every layer against the reference, in place, and nothing touched out of range."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from jacobi_kernels import reference
from jacobi_kernels.triton.commit import commit, compile_cases
from jacobi_kernels.triton.runtime import launches
from tests.kernels.helpers import assert_equal, int32, make_cache

QUERY_ROWS, CAPACITY = 9, 15


def sequences(seed: int, batch: int) -> tuple[list[int], list[list[int]]]:
    """(lengths, accepted rows relative to the sequence): chains, paths with gaps, nothing at all."""
    rng = random.Random(seed)
    lengths = [rng.randint(0, CAPACITY - QUERY_ROWS) for _ in range(batch)]
    rows = []
    for _ in range(batch):
        count = rng.randint(0, QUERY_ROWS)
        rows.append(list(range(count)) if rng.random() < 0.2 else sorted(rng.sample(range(QUERY_ROWS), count)))
    return lengths, rows


def index_tensors(lengths: list[int], rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cache_seqlens, accepted_rows, num_accepted, cu_seqlens_q."""
    batch = len(lengths)
    accepted = torch.full((batch * QUERY_ROWS,), -1, dtype=torch.int32)
    for b, own in enumerate(rows):
        start = b * QUERY_ROWS
        accepted[start : start + len(own)] = torch.tensor(own, dtype=torch.int32) + start
    offsets = torch.arange(batch + 1, dtype=torch.int32) * QUERY_ROWS
    return int32(*lengths), accepted, int32(*map(len, rows)), offsets


def caches(seed: int, batch: int, page_size: int | None, strided: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(k, v, page table or nothing) of two layers, every element different."""
    shape = [2, batch, CAPACITY, 2, 3]
    table = None
    if page_size is not None:
        pages = -(-CAPACITY // page_size)
        shape[1:3] = batch * pages + 1, page_size
        order = torch.randperm(batch * pages + 1, generator=torch.Generator().manual_seed(seed))
        table = order[: batch * pages].to(torch.int32).view(batch, pages)
    both = []
    for sign in (1, -1):
        wide = torch.arange(2 * shape[0] * shape[1] * shape[2] * 6).view(*shape[:2], 2 * shape[2], 2, 3) * sign
        wide = wide.to(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(dtype)  # NaNs and all
        both.append(wide[:, :, ::2] if strided else wide[:, :, : shape[2]].contiguous())
    return both[0], both[1], table  # type: ignore[return-value]


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_rows_move_as_in_the_reference(seed: int, page_size: int | None, dtype: torch.dtype, device: str) -> None:
    lengths, rows = sequences(seed, 3)
    seqlens, accepted, counts, offsets = index_tensors(lengths, rows)
    k, v, table = caches(seed, 3, page_size, seed % 2 == 1, dtype)
    expected = k.clone(), v.clone(), seqlens.clone()
    reference.commit(*expected, accepted, counts, offsets, page_table=table)
    # .to keeps strides of what overlaps nothing
    k, v, seqlens = k.to(device), v.to(device), seqlens.to(device)
    commit(
        k,
        v,
        seqlens,
        accepted.to(device),
        counts.to(device),
        offsets.to(device),
        page_table=None if table is None else table.to(device),
    )
    assert_equal(seqlens.cpu(), expected[2])
    assert torch.equal(bits(k).cpu(), bits(expected[0]))
    assert torch.equal(bits(v).cpu(), bits(expected[1]))


def test_long_paths_are_moved_in_order(device: str) -> None:
    """Every destination is also the source of an earlier row, across tiles of rows."""
    count = 150
    k = torch.arange(float(count + 8)).view(1, 1, -1, 1, 1).to(device)
    v = -k
    lengths = int32(4).to(device)
    rows = torch.arange(count + 2, dtype=torch.int32) + 1
    rows[0] = 0
    commit(k, v, lengths, rows.to(device), int32(count).to(device), int32(0, count + 2).to(device))
    want = torch.cat([torch.arange(5.0), torch.arange(6.0, 5.0 + count)])
    assert torch.equal(k.cpu().flatten()[: 4 + count], want)
    assert torch.equal(v.cpu().flatten()[: 4 + count], -want)
    assert lengths.tolist() == [4 + count]


def test_a_winning_main_chain_stays(device: str) -> None:
    cache = make_cache(1, [3], 9, 2, 8)
    k, v = cache.k[None].to(device), cache.v[None].to(device)
    before = bits(k).clone()
    lengths = int32(3).to(device)
    commit(k, v, lengths, int32(0, 1, 2, -1).to(device), int32(3).to(device), int32(0, 4).to(device))
    assert torch.equal(bits(k), before)
    assert lengths.tolist() == [6]


@pytest.mark.parametrize(
    "change",
    [
        {"cache_seqlens": [13, 2]},
        {"cache_seqlens": [-1, 2]},
        {"cache_seqlens": [10, 2]},  # no room for row 3
        {"num_accepted": [5, 2]},
        {"num_accepted": [-1, 2]},
        {"accepted_rows": [0, 2, 1, -1, 4, 6, -1, -1]},
        {"accepted_rows": [0, 2, 4, -1, 4, 6, -1, -1]},  # another sequence's row
        {"accepted_rows": [-3, 2, 3, -1, 4, 6, -1, -1]},
        {"cu_seqlens_q": [0, 9, 8]},
        {"cu_seqlens_q": [-4, 4, 8]},
        {"page_table": [[0, 1, 7], [3, 4, 5]]},
        {"page_table": [[0, 1, -1], [3, 4, 5]]},
    ],
    ids=str,
)
def test_what_lies_outside_is_left_alone(change: dict[str, list[int]], device: str) -> None:
    """The damaged sequence changes nothing, its neighbour goes on (unless it shares the damaged bound)."""
    arguments: dict[str, list[int]] = {
        "cache_seqlens": [8, 2],
        "accepted_rows": [0, 2, 3, -1, 4, 6, -1, -1],
        "num_accepted": [3, 2],
        "cu_seqlens_q": [0, 4, 8],
    }
    arguments |= change
    tensors = {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in arguments.items()}
    paged = "page_table" in change
    shape = (1, 6, 4, 1, 1) if paged else (1, 2, 12, 1, 1)
    memory = torch.arange(72.0, device=device)  # the cache lies in the middle
    k, v = memory[24:48].view(shape), -memory[24:48].view(shape)
    commit(k, v, **tensors)
    want = torch.arange(24.0, 48.0)
    lengths = list(arguments["cache_seqlens"])
    if arguments["cu_seqlens_q"][1] != 9:
        want[12 + 3] = 24 + 12 + 4  # the neighbour's L + 1 takes L + 2
        lengths[1] += 2
    assert torch.equal(k.cpu().flatten(), want)
    assert torch.equal(v.cpu().flatten(), -want)
    assert torch.equal(memory[:24].cpu(), torch.arange(24.0))
    assert torch.equal(memory[48:].cpu(), torch.arange(48.0, 72.0))
    assert tensors["cache_seqlens"].tolist() == lengths


def test_launches_and_refusals(device: str) -> None:
    k = torch.zeros(1, 1, 8, 2, 4, device=device)
    indices = (int32(0).to(device), int32(0, 1).to(device), int32(1).to(device), int32(0, 2).to(device))
    before = launches["commit"]
    commit(k, torch.zeros_like(k), *indices)
    assert launches["commit"] == before + 2
    with pytest.raises(RuntimeError, match="commit: v_cache must be dense in its last two dimensions"):
        commit(k, torch.zeros(1, 1, 8, 4, 2, device=device).transpose(3, 4), *indices)
    with pytest.raises(RuntimeError, match="commit: accepted_rows must be contiguous"):
        commit(k, torch.zeros_like(k), indices[0], torch.zeros(4, dtype=torch.int32, device=device)[::2], *indices[2:])
    commit(k[:0], torch.zeros_like(k[:0]), *indices)  # no layer: only the lengths move
    assert indices[0].tolist() == [2]


def test_compile_cases_name_every_argument() -> None:
    for case in compile_cases():
        assert list(case.signature) == case.kernel.arg_names
