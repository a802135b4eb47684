"""Attention over the cache in Triton: against reference and CPU op, and bit for bit against one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jacobi_kernels import reference
from tests.kernels.helpers import (
    Cache,
    Layout,
    assert_as_accurate,
    assert_equal,
    chain_with_candidates,
    chains,
    int32,
    make_cache,
    make_layout,
    random_layout,
    random_tensor,
)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_size": 0},
    {"window_size": 7},
    {"window_size": 70, "softcap": 3.0, "softmax_scale": 0.3},
]
EMPTY = torch.zeros(3, 0, 1, 16)
SHARED, OTHER = torch.zeros(2, 1, 1, 1, 16)
TREE = make_layout([[(0, 9, -1, 0), (10, 5, 0, 1), (15, 4, 0, 1)], [(0, 1, -1, 0)], [], [(0, 3, -1, 0)]])
DEEP = make_layout(
    [[(0, 3, -1, 0), (3, 2, 0, 2), (6, 2, 1, 1), (8, 1, 2, 0), (9, 1, 3, 1)], [], [(1, 2, -1, 0), (3, 1, -1, 0)]],
    row_counts=[11, 2, 4],
)


def qkv(seed: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (
        2 * random_tensor(seed, rows, heads, head_dim, dtype=dtype),
        random_tensor(seed + 1, rows, kv_heads, head_dim, dtype=dtype),
        random_tensor(seed + 2, rows, kv_heads, head_dim, dtype=dtype),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, cache: Cache, layout: Layout, device: str, **options: Any) -> Tensor:
    """The op on ``cache``, which it changes."""
    from jacobi_kernels.triton.multi_block_attention_with_kvcache import multi_block_attention_with_kvcache

    def there(t: Tensor | None) -> Tensor | None:
        return t if t is None or device == "cpu" else t.to(device)

    k_cache, v_cache = there(cache.k), there(cache.v)
    out = multi_block_attention_with_kvcache(
        *map(there, (q, k, v)),
        k_cache,
        v_cache,
        *map(there, (cache.lengths, *layout)),
        page_table=there(cache.page_table),
        **options,
    )
    if device != "cpu":
        cache.k.copy_(k_cache), cache.v.copy_(v_cache)
    return out.cpu()


def one_by_one(q: Tensor, k: Tensor, v: Tensor, cache: Cache, device: str, **options: Any) -> Tensor:
    """Rows of a batch of one as autoregressive decoding runs them: one query token per call."""
    cache = cache.clone()
    out = []
    for i in range(q.shape[0]):
        out.append(attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], cache, chains(1), device, **options))
        cache.lengths += 1
    return torch.cat(out) if out else torch.empty_like(q)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "page_size"), [*zip(OPTIONS, (None, 16, None, 16), strict=True), ({}, 16)], ids=str
)
def test_close_to_float64_and_to_the_cpu_op(
    options: dict[str, Any], page_size: int | None, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        q, k, v = qkv(4, TREE.rows, 4, 2, 32, dtype)
        cache = make_cache(5, [260, 0, 3, 64], 24, 2, 32, dtype, page_size)
        twins = [cache.clone() for _ in range(3)]
        exact, low = (
            reference.multi_block_attention_with_kvcache(
                q, k, v, twin.k, twin.v, cache.lengths, *TREE, page_table=cache.page_table, **options, dtype=precision
            )
            for twin, precision in zip(twins, (torch.float64, torch.float32), strict=False)
        )
        out = attend(q, k, v, cache, TREE, device, **options)
        assert_as_accurate(out, low.to(dtype), exact, factor=4.0)
        assert not out[9].any()
        assert_equal((cache.k, cache.v), (twins[0].k, twins[0].v), "rows outside the appended ones")
        cpu = torch.ops.jacobi.multi_block_attention_with_kvcache(
            q, k, v, twins[2].k, twins[2].v, cache.lengths, *TREE, page_table=cache.page_table, **options
        )
        torch.testing.assert_close(out, cpu, rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=2e-5)
        assert_equal((cache.k, cache.v), (twins[2].k, twins[2].v))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 128), (1, 1, 80), (2, 2, 96), (4, 1, 256), (40, 1, 8)]
)
def test_heads(heads: int, kv_heads: int, head_dim: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    layout = chain_with_candidates(5, 1, 4)
    for dtype in dtypes:
        q, k, v = qkv(6, layout.rows, heads, kv_heads, head_dim, dtype)
        cache = make_cache(7, [70], layout.rows, kv_heads, head_dim, dtype)
        twins = cache.clone(), cache.clone()
        exact, low = (
            reference.multi_block_attention_with_kvcache(
                q, k, v, twin.k, twin.v, cache.lengths, *layout, dtype=precision
            )
            for twin, precision in zip(twins, (torch.float64, torch.float32), strict=True)
        )
        assert_as_accurate(attend(q, k, v, cache, layout, device), low.to(dtype), exact, factor=4.0)


def test_extreme_scores(device: str) -> None:
    layout = chains(30)
    q, k, v = qkv(8, 30, 2, 1, 16, torch.float32)
    for scale in (0.0, 100.0, -100.0, 1e4):
        cache = make_cache(9, [50], 30, 1, 16)
        twin = cache.clone()
        exact = reference.multi_block_attention_with_kvcache(
            q, k, v, twin.k, twin.v, cache.lengths, *layout, softmax_scale=scale
        )
        out = attend(q, k, v, cache, layout, device, softmax_scale=scale)
        assert bool(out.isfinite().all())
        if abs(scale) <= 100:
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-3)


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committed", "rows", "options"),
    [
        (0, 5, {}),
        (60, 6, {}),
        (63, 2, {"window_size": 0}),
        (64, 3, {"softcap": 3.0}),
        (126, 3, {"window_size": 65}),
        (252, 6, {}),
        (252, 6, {"window_size": 100, "softcap": 2.0}),
        (511, 3, {"window_size": 254}),
    ],
)
def test_block_equals_one_token_at_a_time(
    committed: int, rows: int, options: dict[str, Any], device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        q, k, v = qkv(10, rows, 6, 2, 24, dtype)
        cache = make_cache(11, [committed], rows, 2, 24, dtype)
        expected = one_by_one(q, k, v, cache, device, **options)
        assert_equal(attend(q, k, v, cache.clone(), chains(rows), device, **options), expected)


@pytest.mark.parametrize(
    ("layout", "page_size"), [(DEEP, 7), (random_layout(1, 2, 3, 3), None), (random_layout(4, 2, 3, 3), 7)]
)
def test_every_path_of_a_tree_equals_one_token_at_a_time(
    layout: Layout, page_size: int | None, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    committed = [61, 5, 254][: layout.batch]
    options: dict[str, Any] = {"window_size": 66} if page_size else {}
    for dtype in dtypes:
        q, k, v = qkv(12, layout.rows, 3, 1, 16, dtype)
        cache = make_cache(13, committed, layout.rows, 1, 16, dtype, page_size)
        before = cache.clone()
        out = attend(q, k, v, cache, layout, device, **options)
        live = torch.zeros(layout.rows, dtype=torch.bool)
        for b, paths in enumerate(reference.segment_paths(layout.segments, layout.cu_segments)):
            alone = make_cache(13, [0], committed[b] + layout.rows, 1, 16, dtype)
            alone.lengths[0] = committed[b]
            alone.k[0, : committed[b]], alone.v[0, : committed[b]] = before.rows(b, committed[b])
            prefixes = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
            longest = [p for p in prefixes if not any(p != o and o[: len(p)] == p for o in prefixes)]
            for path in map(list, longest):
                live[path] = True
                expected = one_by_one(q[path], k[path], v[path], alone, device, **options)
                assert_equal(out[path], expected, f"sequence {b}, rows {path}")
            rows = list(range(int(layout.cu_seqlens_q[b]), int(layout.cu_seqlens_q[b + 1])))
            covered = live[rows]
            appended = cache.rows(b, len(rows), committed[b])
            assert_equal((appended[0][covered], appended[1][covered]), (k[rows][covered], v[rows][covered]))
            assert bool(appended[0][~covered].isnan().all()), "holes are not written"
            assert_equal(cache.rows(b, committed[b]), before.rows(b, committed[b]), "committed rows")
        assert not out[~live].any()


@pytest.mark.parametrize("committed", [0, 251])
def test_chain_of_one_token_segments(committed: int, device: str) -> None:
    q, k, v = qkv(18, 12, 4, 1, 16, torch.float32)
    cache = make_cache(19, [committed], 12, 1, 16)
    expected = attend(q, k, v, cache.clone(), chains(12), device)
    ones = make_layout([[(i, 1, i - 1, int(i > 0)) for i in range(12)]])
    assert_equal(attend(q, k, v, cache.clone(), ones, device), expected)


def test_splits_side_by_side_and_in_turn(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Where the splits run is a matter of speed."""
    from jacobi_kernels.triton import multi_block_attention_with_kvcache as module

    for options in ({}, {"window_size": 300}):
        layout = chains(2, 3)
        q, k, v = qkv(20, layout.rows, 3, 1, 16, torch.float32)
        cache = make_cache(21, [520, 254], layout.rows, 1, 16)
        expected = attend(q, k, v, cache.clone(), layout, device, **options)
        with monkeypatch.context() as patch:
            patch.setattr(module, "PROGRAMS", 1)
            sizes = (layout.rows, layout.batch, 3, 1, 16, cache.k.shape[1], torch.float32)
            assert module.attention_workspace_size(*sizes) == 0
            assert_equal(attend(q, k, v, cache.clone(), layout, device, **options), expected, str(options))


def test_room_behind_the_sequences_changes_nothing(device: str) -> None:
    layout = chains(3, 2)
    q, k, v = qkv(22, layout.rows, 2, 1, 16, torch.float32)
    tight, wide = (make_cache(23, [60, 255], room, 1, 16) for room in (3, 600))
    assert_equal(attend(q, k, v, tight, layout, device), attend(q, k, v, wide, layout, device))


@pytest.mark.parametrize("strided", [False, True])
def test_contiguous_strided_and_paged_caches(strided: bool, device: str) -> None:
    lengths = [90, 0, 64, 1]
    fused = random_tensor(24, TREE.rows, 4 + 2 + 2, 16)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]  # slices of one projection, as models make them
    plain = make_cache(25, lengths, TREE.rows, 2, 16)
    expected = attend(q.contiguous(), k.contiguous(), v.contiguous(), plain, TREE, device)
    for page_size in (None, 48) if strided else (1, 256):
        cache = make_cache(25, lengths, TREE.rows, 2, 16, page_size=page_size, strided=strided)
        assert_equal(attend(q, k, v, cache, TREE, device), expected, f"pages of {page_size}")
        for b in range(TREE.batch):
            count = plain.k.shape[1]
            assert_equal(cache.rows(b, count), plain.rows(b, count), f"cache in pages of {page_size}")


def test_rows_of_a_batch_equal_the_sequences_alone(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    lengths, counts = [5, 130, 0, 64], [3, 1, 9, 2]
    layout = chains(*counts)
    for dtype in dtypes:
        q, k, v = qkv(26, layout.rows, 2, 2, 16, dtype)
        cache = make_cache(27, lengths, 9, 2, 16, dtype)
        out = attend(q, k, v, cache.clone(), layout, device)
        for b, rows in enumerate(torch.arange(layout.rows).split(counts)):
            alone = Cache(cache.k[b : b + 1].clone(), cache.v[b : b + 1].clone(), cache.lengths[b : b + 1], None)
            assert_equal(attend(q[rows], k[rows], v[rows], alone, chains(counts[b]), device), out[rows])


# Arguments ------------------------------------------------------------------------------------------------------------


def test_the_inner_function_takes_views_another_type_and_buffers(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    from jacobi_kernels.triton.multi_block_attention_with_kvcache import attend_with_kvcache, attention_workspace_size
    from jacobi_kernels.triton.plan import plan_rows

    layers = 2
    for dtype in dtypes:
        q, k, v = qkv(30, TREE.rows, 4, 2, 16, dtype)
        cache = make_cache(31, [70, 0, 3, 260], TREE.rows, 2, 16, dtype)
        expected = attend(q, k, v, cache.clone(), TREE, device)
        fused = torch.cat([q, k, v], 1).to(device, torch.float32)
        caches = torch.stack([cache.k, cache.v], 1).repeat(layers, 1, 1, 1, 1, 1).to(device)
        layout = tuple(t.to(device) for t in TREE)
        lengths = cache.lengths.to(device)
        plan = plan_rows(*layout, lengths, TREE.rows)
        size = attention_workspace_size(TREE.rows, TREE.batch, 4, 2, 16, caches.shape[3], dtype)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
        for layer in range(layers):
            wide = torch.full((TREE.rows, 6, 16), float("nan"), device=device)
            out = attend_with_kvcache(
                fused[:, :4],
                fused[:, 4:6],
                fused[:, 6:],
                *caches[layer].unbind(1),
                lengths,
                *layout,
                plan,
                out=wide[:, :4],
                workspace=workspace,
            )
            assert_equal(out.to(dtype).cpu(), expected, f"layer {layer}")
            assert bool(wide[:, 4:].isnan().all())


def test_a_sequence_with_a_bad_length_or_page_is_left_out(device: str) -> None:
    layout = chains(3, 3, 3)
    q, k, v = qkv(32, 9, 2, 1, 16, torch.float32)
    cache = make_cache(33, [10, 10, 10], 4, 1, 16)
    expected = attend(q, k, v, cache.clone(), layout, device)
    for length in (-1, -(2**31), 12, 2**31 - 1):
        bad = cache.clone()
        bad.lengths[1] = length
        out = attend(q, k, v, bad, layout, device)
        assert not out[3:6].any()
        assert_equal((out[:3], out[6:]), (expected[:3], expected[6:]))
        assert_equal((bad.k[1], bad.v[1]), (cache.k[1], cache.v[1]))
    paged = make_cache(33, [10, 10, 10], 6, 1, 16, page_size=4)
    for index, page in ((0, -1), (3, 13), (1, 2**31 - 1), (2, -(2**31))):
        bad = paged.clone()
        bad.page_table = paged.page_table.clone()
        bad.page_table[1, index] = page
        out = attend(q, k, v, bad, layout, device)
        assert not out[3:6].any()
        assert_equal((out[:3], out[6:]), (expected[:3], expected[6:]))
        assert_equal(
            (bad.k[paged.page_table[1].long()], bad.v[paged.page_table[1].long()]),
            (paged.k[paged.page_table[1].long()], paged.v[paged.page_table[1].long()]),
        )


def test_no_stray_access_with_a_plan_that_checked_nothing(device: str) -> None:
    from jacobi_kernels.triton.multi_block_attention_with_kvcache import attend_with_kvcache
    from jacobi_kernels.triton.plan import plan_rows

    layout = tuple(t.to(device) for t in chains(3, 3, 3))
    q, k, v = (t.to(device) for t in qkv(34, 9, 2, 1, 16, torch.float32))
    lengths = int32(-5, 11, 2**31 - 1).to(device)
    slots = torch.zeros(2, 5, 12, 1, 16, device=device)
    caches = slots[:, 1:4]
    attend_with_kvcache(q, k, v, *caches, lengths, *layout, plan_rows(*layout, lengths, 9))
    assert not slots[:, 0].any()
    assert not slots[:, 4].any()
    table = torch.tensor([[0, -1, 3], [2**31 - 1, 9, 1], [1, 1, 1]], dtype=torch.int32, device=device)
    slots = torch.zeros(2, 5, 4, 1, 16, device=device)
    attend_with_kvcache(q, k, v, *slots[:, 1:4], lengths, *layout, plan_rows(*layout, lengths, 9), page_table=table)
    assert not slots[:, 0].any()
    assert not slots[:, 4].any()


def test_broken_layouts_are_holes(device: str) -> None:
    q, k, v = qkv(36, 6, 2, 1, 16, torch.float32)
    for segment in ((0, 9, -1, 0), (0, -1, -1, 0), (0, 4, 0, 0), (0, 4, -1, 2), (-3, 4, -1, 0)):
        cache = make_cache(37, [5], 10, 1, 16)
        layout = Layout(int32(0, 6), int32(*segment)[None], int32(0, 1))
        before = cache.clone()
        assert not attend(q, k, v, cache, layout, device).any()
        assert_equal((cache.k, cache.v), (before.k, before.v))


def test_nothing_to_do(device: str) -> None:
    for layout in (make_layout([[]]), make_layout([[], []]), make_layout([])):
        q, k, v = qkv(38, 0, 2, 1, 16, torch.float32)
        cache = make_cache(39, [3] * layout.batch, 2, 1, 16)
        assert attend(q, k, v, cache, layout, device).shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": torch.zeros(1, 14, 2, 16)}, r"k_cache must have shape"),
        ({"q": torch.zeros(7, 4, 32)[:, :, ::2]}, "q must be dense in its last two dimensions"),
        ({"v_cache": torch.zeros(14, 1, 1, 16).transpose(0, 1)[:, ::1]}, None),
        ({"v_cache": torch.zeros(1, 28, 1, 16)[:, ::2]}, "v_cache must have k_cache's strides"),
        ({"k_cache": torch.zeros(1, 1, 1, 16).expand(1, 14, 1, 16)}, "v_cache must have k_cache's strides"),
        ({"k_cache": SHARED, "v_cache": SHARED}, "k_cache and v_cache must not share memory"),
        ({"k_cache": SHARED.expand(1, 14, 1, 16), "v_cache": OTHER.expand(1, 14, 1, 16)}, "k_cache must not hold rows"),
        ({"window_size": -2}, "window_size must be -1"),
        ({"softcap": -1.0}, "softcap must be at least 0"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
        ({"page_table": torch.zeros(1, 1, dtype=torch.int32), "k_cache": EMPTY, "v_cache": EMPTY}, "page_size must be"),
        ({"segments": torch.zeros(4, 1, dtype=torch.int32).T}, None),
        ({"segments": torch.zeros(2, 4, 1, dtype=torch.int32)[:, :, 0].T[:2].T}, r"segments must have shape"),
    ],
)
def test_refusals(change: dict[str, Any], message: str | None, device: str) -> None:
    from jacobi_kernels.triton.multi_block_attention_with_kvcache import multi_block_attention_with_kvcache

    q, k, v = qkv(40, 7, 4, 1, 16, torch.float32)
    cache = make_cache(41, [7], 7, 1, 16)
    names = ("q", "k", "v", "k_cache", "v_cache", "cache_seqlens", "cu_seqlens_q", "segments", "cu_segments")
    values = dict(zip(names, (q, k, v, cache.k, cache.v, cache.lengths, *chains(7)), strict=True))
    values = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in {**values, **change}.items()}
    positional = [values.pop(name) for name in names]
    if message is None:
        multi_block_attention_with_kvcache(*positional, **values)
        return
    with pytest.raises(RuntimeError, match=f"^multi_block_attention_with_kvcache: {message}"):
        multi_block_attention_with_kvcache(*positional, **values)
