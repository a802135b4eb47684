"""Both attention ops and commit: against the reference, and bit for bit against one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jacobi_kernels import ops, reference
from tests.kernels.helpers import (
    Cache,
    Layout,
    assert_as_accurate,
    assert_equal,
    assert_same_everywhere,
    chain_with_candidates,
    chains,
    int32,
    make_cache,
    make_layout,
    random_layout,
    random_tensor,
    threads,
)

FLOATS = [torch.float32, torch.bfloat16]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_size": 0},
    {"window_size": 7},
    {"softcap": 5.0},
    {"window_size": 70, "softcap": 3.0, "softmax_scale": 0.3},
]


def qkv(seed: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (
        2 * random_tensor(seed, rows, heads, head_dim, dtype=dtype),
        random_tensor(seed + 1, rows, kv_heads, head_dim, dtype=dtype),
        random_tensor(seed + 2, rows, kv_heads, head_dim, dtype=dtype),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, cache: Cache, layout: Layout, **options: Any) -> Tensor:
    """The op on ``cache``, which it changes."""
    return ops.multi_block_attention_with_kvcache(
        q, k, v, cache.k, cache.v, cache.lengths, *layout, page_table=cache.page_table, **options
    )


def one_by_one(q: Tensor, k: Tensor, v: Tensor, cache: Cache, **options: Any) -> Tensor:
    """Rows of a batch of one as autoregressive decoding runs them: one query token per call."""
    cache = cache.clone()
    out = []
    for i in range(q.shape[0]):
        out.append(attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], cache, chains(1), **options))
        cache.lengths += 1
    return torch.cat(out) if out else torch.empty_like(q)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (9, 3, 32), (2, 2, 128), (7, 1, 96), (3, 3, 256)]
)
def test_functional_close_to_float64(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    layout = make_layout(
        [[(0, 70, -1, 0), (72, 9, 0, 65), (81, 3, 1, 4), (84, 2, 1, 0)], [], [(1, 5, -1, 0)]], row_counts=[90, 2, 6]
    )
    q, k, v = qkv(1, layout.rows, heads, kv_heads, head_dim, dtype)
    out, lse = ops.multi_block_attention(q, k, v, *layout, **options)
    exact, exact_lse = reference.multi_block_attention(q, k, v, *layout, **options)
    low, low_lse = reference.multi_block_attention(q, k, v, *layout, **options, dtype=torch.float32)
    live = exact_lse[0].isfinite()
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_as_accurate(out[live], low[live].to(dtype), exact[live], factor=4.0)
    assert_as_accurate(lse[:, live], low_lse[:, live], exact_lse[:, live], factor=4.0)
    assert not out[~live].any()
    assert bool((lse[:, ~live] == -float("inf")).all())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_cached_close_to_float64(page_size: int | None, dtype: torch.dtype, options: dict[str, Any]) -> None:
    layout = make_layout([[(0, 16, -1, 0), (17, 7, 0, 1), (24, 7, 0, 1)], [(0, 1, -1, 0)], [], [(0, 4, -1, 0)]])
    q, k, v = qkv(4, layout.rows, 4, 2, 64, dtype)
    cache = make_cache(5, [100, 0, 3, 64], 32, 2, 64, dtype, page_size)
    expected = cache.clone()
    exact = reference.multi_block_attention_with_kvcache(
        q, k, v, expected.k, expected.v, cache.lengths, *layout, page_table=cache.page_table, **options
    )
    spare = cache.clone()
    low = reference.multi_block_attention_with_kvcache(
        q, k, v, spare.k, spare.v, cache.lengths, *layout, page_table=cache.page_table, **options, dtype=torch.float32
    )
    out = attend(q, k, v, cache, layout, **options)
    assert_as_accurate(out, low.to(dtype), exact, factor=4.0)
    assert_equal((cache.k, cache.v), (expected.k, expected.v), "rows outside the appended ones")
    assert_equal(cache.lengths, expected.lengths)


def test_extreme_scores() -> None:
    q, k, v = qkv(7, 140, 2, 1, 32, torch.float32)
    layout = chains(140)
    for scale in (0.0, 100.0, -100.0, 1e4):
        out, lse = ops.multi_block_attention(q, k, v, *layout, softmax_scale=scale)
        exact, exact_lse = reference.multi_block_attention(q, k, v, *layout, softmax_scale=scale)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        assert bool(out.isfinite().all())
        if abs(scale) <= 100:
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-3)


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("committed", "rows"), [(0, 1), (0, 70), (1, 5), (50, 33), (63, 2), (64, 64), (127, 17), (250, 12), (511, 3)]
)
def test_block_equals_one_token_at_a_time(
    committed: int, rows: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    q, k, v = qkv(10, rows, 4, 2, 48, dtype)
    cache = make_cache(11, [committed], rows, 2, 48, dtype)
    expected = one_by_one(q, k, v, cache, **options)
    assert_equal(attend(q, k, v, cache.clone(), chains(rows), **options), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_prefill_chunks(dtype: torch.dtype) -> None:
    q, k, v = qkv(12, 150, 3, 1, 64, dtype)
    cache = make_cache(13, [10], 150, 1, 64, dtype)
    whole = cache.clone()
    expected = attend(q, k, v, whole, chains(150))
    for size in (1, 7, 16, 64, 65, 149):
        chunked, out = cache.clone(), []
        for part in torch.arange(150).split(size):
            out.append(attend(q[part], k[part], v[part], chunked, chains(len(part))))
            chunked.lengths += len(part)
        assert_equal(torch.cat(out), expected, f"chunks of {size}")
        assert_equal((chunked.k, chunked.v), (whole.k, whole.v), f"cache after chunks of {size}")


@pytest.mark.parametrize("committed", [0, 20, 61, 64, 100])
def test_candidate_with_the_chain_s_tokens(committed: int) -> None:
    layout = chain_with_candidates(12, 3, 11, gap=2)
    q, k, v = qkv(14, layout.rows, 4, 2, 64, torch.float32)
    for start in layout.segments[1:, 0].tolist():
        for t in (q, k, v):
            t[start : start + 11] = t[1:12]
    out = attend(q, k, v, make_cache(15, [committed], layout.rows, 2, 64), layout)
    for start in layout.segments[1:, 0].tolist():
        assert_equal(out[start : start + 11], out[1:12], f"candidate at row {start}")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([32, 40, 64, 80, 96, 128, 192, 256]),
    dtype=st.sampled_from(FLOATS),
    window_size=st.sampled_from([-1, -1, 0, 3, 65, 250]),
    softcap=st.sampled_from([0.0, 0.0, 4.0]),
    page_size=st.sampled_from([None, 1, 7, 16, 64]),
    committed=st.lists(st.sampled_from([0, 1, 5, 60, 63, 64, 65, 200, 250, 256, 511, 530]), min_size=3, max_size=3),
)
def test_every_path_of_a_tree_equals_one_token_at_a_time(
    seed: int,
    batch: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window_size: int,
    softcap: float,
    page_size: int | None,
    committed: list[int],
) -> None:
    layout = random_layout(seed, batch)
    options = {"window_size": window_size, "softcap": softcap}
    q, k, v = qkv(seed, layout.rows, group * kv_heads, kv_heads, head_dim, dtype)
    cache = make_cache(seed, committed[:batch], layout.rows, kv_heads, head_dim, dtype, page_size)
    before = cache.clone()
    out = attend(q, k, v, cache, layout, **options)
    live = torch.zeros(layout.rows, dtype=torch.bool)
    for b, paths in enumerate(reference.segment_paths(layout.segments, layout.cu_segments)):
        alone = make_cache(seed, [0], committed[b] + layout.rows, kv_heads, head_dim, dtype)
        alone.lengths[0] = committed[b]
        alone.k[0, : committed[b]], alone.v[0, : committed[b]] = before.rows(b, committed[b])
        for path in paths:
            live[path] = True
            expected = one_by_one(q[path], k[path], v[path], alone, **options)
            assert_equal(out[path], expected, f"sequence {b}, rows {path}")
        rows = list(range(int(layout.cu_seqlens_q[b]), int(layout.cu_seqlens_q[b + 1])))
        covered = live[rows]
        appended = cache.rows(b, len(rows), committed[b])
        assert_equal((appended[0][covered], appended[1][covered]), (k[rows][covered], v[rows][covered]), "appended")
        assert bool(appended[0][~covered].isnan().all()), "holes are not written"
        assert_equal(cache.rows(b, committed[b]), before.rows(b, committed[b]), "committed rows")
    assert not out[~live].any()


@pytest.mark.parametrize("window_size", [-1, 40, 300])
@pytest.mark.parametrize("committed", [0, 5, 250])
def test_chain_of_one_token_segments(committed: int, window_size: int) -> None:
    """Segments that each continue from the one before, in pieces of 1 to 3 tokens with holes, are one long chain."""
    q, k, v = qkv(18, 400, 4, 1, 32, torch.float32)
    cache = make_cache(19, [committed], 700, 1, 32)
    expected = attend(q, k, v, cache.clone(), chains(400), window_size=window_size)
    ones = make_layout([[(i, 1, i - 1, int(i > 0)) for i in range(400)]])
    assert_equal(attend(q, k, v, cache.clone(), ones, window_size=window_size), expected)
    segments, live, row = [], [], 0
    while len(live) < 400:
        length = min(1 + len(segments) % 3, 400 - len(live))
        segments.append((row, length, len(segments) - 1, segments[-1][1] if segments else 0))
        live += range(row, row + length)
        row += length + int(len(segments) % 4 == 0)
    layout = make_layout([segments])
    spread = [t.new_zeros(layout.rows, *t.shape[1:]) for t in (q, k, v)]
    for wide, narrow in zip(spread, (q, k, v), strict=True):
        wide[live] = narrow
    assert_equal(attend(*spread, cache.clone(), layout, window_size=window_size)[live], expected)


@pytest.mark.parametrize("window_size", [2**31 - 1, 2**31, 2**63 - 1])
def test_a_huge_window_sees_all(window_size: int) -> None:
    layout = chains(70, 5)
    q, k, v = qkv(16, layout.rows, 2, 1, 32, torch.float32)
    cache = make_cache(17, [300, 0], 70, 1, 32)
    expected = attend(q, k, v, cache.clone(), layout)
    assert_equal(attend(q, k, v, cache.clone(), layout, window_size=window_size), expected)
    pair = ops.multi_block_attention(q, k, v, *layout, window_size=window_size)
    assert_equal(pair, ops.multi_block_attention(q, k, v, *layout))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("strided", [False, True])
def test_contiguous_strided_and_paged_caches(strided: bool, dtype: torch.dtype) -> None:
    layout = random_layout(3, 3)
    lengths = [90, 0, 64]
    q, k, v = qkv(20, layout.rows, 6, 2, 64, dtype)
    plain = make_cache(21, lengths, layout.rows, 2, 64, dtype)
    expected = attend(q, k, v, plain, layout)
    if strided:
        cache = make_cache(21, lengths, layout.rows, 2, 64, dtype, strided=True)
        assert not cache.k.is_contiguous()
        assert_equal(attend(q, k, v, cache, layout), expected)
        assert_equal((cache.k, cache.v), (plain.k, plain.v))
    for page_size in (1, 3, 16, 48, 64, 100, 256):
        cache = make_cache(21, lengths, layout.rows, 2, 64, dtype, page_size, strided=strided)
        assert_equal(attend(q, k, v, cache, layout), expected, f"pages of {page_size}")
        for b in range(3):
            count = plain.k.shape[1]
            assert_equal(cache.rows(b, count), plain.rows(b, count), f"cache in pages of {page_size}")


@pytest.mark.parametrize("dtype", FLOATS)
def test_strided_queries_keys_and_values(dtype: torch.dtype) -> None:
    """Slices of one fused projection, as models make them."""
    layout = chains(5, 30)
    fused = random_tensor(22, 35, 4 + 2 + 2, 64, dtype=dtype)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    cache = make_cache(23, [3, 70], 30, 2, 64, dtype)
    expected = attend(q.contiguous(), k.contiguous(), v.contiguous(), cache.clone(), layout)
    assert_equal(attend(q, k, v, cache.clone(), layout), expected)
    expected_pair = ops.multi_block_attention(q.contiguous(), k.contiguous(), v.contiguous(), *layout)
    assert_equal(ops.multi_block_attention(q, k, v, *layout), expected_pair)


@pytest.mark.parametrize("seed", range(6))
def test_functional_equals_empty_cache(seed: int) -> None:
    layout = random_layout(seed, 3, max_length=30)
    q, k, v = qkv(24, layout.rows, 4, 2, 32, torch.float32)
    out, _ = ops.multi_block_attention(q, k, v, *layout, window_size=9)
    assert_equal(attend(q, k, v, make_cache(25, [0, 0, 0], layout.rows, 2, 32), layout, window_size=9), out)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_a_batch_equal_the_sequences_alone(dtype: torch.dtype) -> None:
    lengths, counts = [5, 130, 0, 64], [3, 1, 40, 17]
    layout = chains(*counts)
    q, k, v = qkv(26, layout.rows, 4, 4, 64, dtype)
    cache = make_cache(27, lengths, 40, 4, 64, dtype)
    out = attend(q, k, v, cache.clone(), layout)
    for b, rows in enumerate(torch.arange(layout.rows).split(counts)):
        alone = Cache(cache.k[b : b + 1].clone(), cache.v[b : b + 1].clone(), cache.lengths[b : b + 1], None)
        assert_equal(attend(q[rows], k[rows], v[rows], alone, chains(counts[b])), out[rows], f"sequence {b}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_for_threads_and_instruction_sets(dtype: torch.dtype, options: dict[str, Any]) -> None:
    layout = random_layout(8, 4, max_length=20)
    for heads, kv_heads, head_dim in ((6, 2, 64), (3, 3, 40), (8, 1, 128)):
        q, k, v = qkv(28, layout.rows, heads, kv_heads, head_dim, dtype)
        cache = make_cache(29, [0, 100, 64, 31], layout.rows, kv_heads, head_dim, dtype)
        assert_same_everywhere(lambda q=q, k=k, v=v: ops.multi_block_attention(q, k, v, *layout, **options))
        assert_same_everywhere(lambda q=q, k=k, v=v, cache=cache: attend(q, k, v, cache.clone(), layout, **options))


@pytest.mark.parametrize("window_size", [-1, 100, 256, 600])
@pytest.mark.parametrize("rows", [1, 13, 70])
@pytest.mark.parametrize("committed", [250, 255, 512, 1030, 3000])
def test_long_contexts_over_threads(committed: int, rows: int, window_size: int) -> None:
    """One key/value head and one sequence leave threads no other way than to share the keys of a query."""
    q, k, v = qkv(34, rows, 3, 1, 64, torch.float32)
    cache = make_cache(35, [committed], rows, 1, 64)

    def run(q: Tensor = q) -> Tensor:
        return attend(q, k, v, cache.clone(), chains(rows), window_size=window_size)

    assert_same_everywhere(run)
    expected = one_by_one(q, k, v, cache, window_size=window_size)
    with threads(4):
        assert_equal(run(), expected)
    twin = cache.clone()
    exact, low = (
        reference.multi_block_attention_with_kvcache(
            q, k, v, twin.k, twin.v, cache.lengths, *chains(rows), window_size=window_size, dtype=dtype
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_as_accurate(expected, low, exact, factor=4.0)


def test_threads_disturb_nobody() -> None:
    """Many calls on several threads: a race would show sooner or later."""
    layout = random_layout(5, 2, max_length=20)
    q, k, v = qkv(36, layout.rows, 4, 1, 64, torch.float32)
    cache = make_cache(37, [700, 90], layout.rows, 1, 64)
    expected = attend(q, k, v, cache.clone(), layout)
    with threads(4):
        for _ in range(200):
            assert_equal(attend(q, k, v, cache.clone(), layout), expected)


def test_accepted_candidate_after_commit_equals_autoregressive() -> None:
    """The rows that a winning candidate leaves in the cache are those that one-token steps leave."""
    layout = chain_with_candidates(6, 2, 5)
    q, k, v = qkv(30, layout.rows, 4, 2, 64, torch.float32)
    step = make_cache(31, [62], 40, 2, 64)
    slow = step.clone()
    attend(q, k, v, step, layout)
    accepted = [0, 11, 12, 13]  # first chain token, three tokens of the second candidate
    rows = torch.full((layout.rows,), -1, dtype=torch.int32)
    rows[: len(accepted)] = int32(*accepted)
    ops.commit(step.k[None], step.v[None], step.lengths, rows, int32(len(accepted)), layout.cu_seqlens_q)
    for row in accepted:
        attend(q[row : row + 1], k[row : row + 1], v[row : row + 1], slow, chains(1))
        slow.lengths += 1
    assert_equal(step.lengths, slow.lengths)
    assert_equal(step.rows(0, 66), slow.rows(0, 66))
    after = qkv(33, 3, 4, 2, 64, torch.float32)
    assert_equal(attend(*after, step, chains(3)), one_by_one(*after, slow))


# Commit ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([None, 1, 5, 16]),
    dtype=st.sampled_from(FLOATS),
    layers=st.integers(1, 3),
)
def test_commit(seed: int, page_size: int | None, dtype: torch.dtype, layers: int) -> None:
    layout = random_layout(seed, 3)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((layout.rows,), -1, dtype=torch.int32)
    counts = []
    for b, paths in enumerate(reference.segment_paths(layout.segments, layout.cu_segments)):
        path = max(paths, key=len, default=[])
        path = path[: int(torch.randint(0, len(path) + 1, (), generator=generator))]
        start = int(layout.cu_seqlens_q[b])
        rows[start : start + len(path)] = torch.tensor(path, dtype=torch.int32)
        counts.append(len(path))
    lengths = [0, 7, 33]
    caches = [make_cache(seed + i, lengths, layout.rows, 2, 8, dtype, page_size) for i in range(layers)]
    table = make_cache(seed, lengths, layout.rows, 2, 8, dtype, page_size).page_table
    k = torch.stack([c.k for c in caches])
    k = torch.where(k.isnan(), torch.arange(k.numel()).view_as(k) % 251, k).to(dtype)
    v = -k
    expected = (k.clone(), v.clone(), int32(*lengths))
    actual = (k, v, int32(*lengths))
    num_accepted = int32(*counts)
    reference.commit(*expected, rows, num_accepted, layout.cu_seqlens_q, page_table=table)
    ops.commit(*actual, rows, num_accepted, layout.cu_seqlens_q, page_table=table)
    kept = actual[2].tolist()
    assert_equal(actual[2], expected[2])
    for b, count in enumerate(kept):  # what lies behind the committed rows is nobody's business
        slots = reference.cache_slots(list(range(count)), b, k.shape[2], table)
        for layer in range(layers):
            assert_equal(actual[0][layer][slots], expected[0][layer][slots])
            assert_equal(actual[1][layer][slots], expected[1][layer][slots])
