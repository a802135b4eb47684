"""A row's bits do not depend on how many rows are computed with it, nor on its place among them: every op."""

from __future__ import annotations

import pytest
import torch

from jacobi_kernels import ops
from tests.kernels.helpers import assert_equal, chain_with_candidates, chains, int32, random_linear, random_tensor

ROWS = 130
COUNTS = (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 130)
FLOATS = [torch.float32, torch.bfloat16]


def places(count: int) -> list[slice]:
    """At the beginning, in the middle and at the end."""
    return [slice(start, start + count) for start in sorted({0, (ROWS - count) // 2, ROWS - count})]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [(960, 576), (576, 1536), (40, 100)], ids=str)
def test_packed_linear(device: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    out, inner = size
    weight = random_linear(1, out, inner, dtype).to(device)
    x, bias = random_tensor(2, ROWS, inner, dtype=dtype).to(device), random_tensor(3, out).to(device)
    whole = ops.packed_linear(x, weight, bias, out)
    for count in COUNTS:
        for place in places(count):
            part = ops.packed_linear(x[place], weight, bias, out)
            assert_equal(part, whole[place], f"{count} rows from {place.start}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_activation(device: str, dtype: torch.dtype, kind: str) -> None:
    x = random_tensor(1, ROWS, 77, dtype=dtype).to(device)
    whole = ops.activation(x, kind)
    for count in COUNTS:
        assert_equal(ops.activation(x[-count:], kind), whole[-count:], f"{count} rows")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("cached", [0, 63, 700])
def test_attention_with_kvcache(device: str, dtype: torch.dtype, head_dim: int, cached: int) -> None:
    """A chain in one call, in pieces, and row by row."""
    rows, heads, kv_heads = 40, 6, 2
    q, k, v = (random_tensor(i, rows, h, head_dim, dtype=dtype).to(device) for i, h in ((1, heads), (2, 2), (3, 2)))
    past = random_tensor(4, 2, 1, cached + rows, kv_heads, head_dim, dtype=dtype).to(device)

    def in_pieces(piece: int) -> torch.Tensor:
        caches, outs = past.clone(), []
        for start in range(0, rows, piece):
            part = slice(start, min(start + piece, rows))
            layout = [t.to(device) for t in chains(part.stop - start)]
            length = int32(cached + start).to(device)
            outs.append(
                ops.multi_block_attention_with_kvcache(q[part], k[part], v[part], caches[0], caches[1], length, *layout)
            )
        return torch.cat(outs)

    whole = in_pieces(rows)
    for piece in (1, 7, 16, 33):
        assert_equal(in_pieces(piece), whole, f"pieces of {piece} rows")


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_of_candidates(device: str, dtype: torch.dtype) -> None:
    """A candidate that repeats the chain's tokens gets the chain's bits."""
    cached, length, dim = 100, 9, 64
    layout = chain_with_candidates(length, 2, length - 1)
    order = [*range(length), *range(1, length), *range(1, length)]
    q, k, v = (random_tensor(i, length, h, dim, dtype=dtype)[order].to(device) for i, h in ((1, 4), (2, 2), (3, 2)))
    caches = random_tensor(4, 2, 1, cached + layout.rows, 2, dim, dtype=dtype).to(device)
    out = ops.multi_block_attention_with_kvcache(
        q, k, v, caches[0], caches[1], int32(cached).to(device), *(t.to(device) for t in layout)
    )
    assert_equal(out[length:], out[order[length:]])


@pytest.mark.parametrize("dtype", FLOATS)
def test_argmax_verify(device: str, dtype: torch.dtype) -> None:
    vocab, width = 1000, 96
    hidden, head = (
        random_tensor(1, ROWS, width, dtype=dtype).to(device),
        random_linear(2, vocab, width, dtype).to(device),
    )
    seeds, temperature = torch.tensor([7], device=device), torch.tensor([0.9], device=device)

    def predictions(start: int, count: int, **sampling: torch.Tensor) -> torch.Tensor:
        tokens = torch.zeros(count, dtype=torch.int32, device=device)
        layout = [t.to(device) for t in chains(count)]
        place = slice(start, start + count)
        return ops.argmax_verify(
            hidden[place], head, None, vocab, tokens, None, int32(20 + start).to(device), *layout, **sampling
        )[0]

    for sampling in ({}, {"temperature": temperature, "seeds": seeds}):
        whole = predictions(0, ROWS, **sampling)
        for count in COUNTS:
            for place in places(count):
                assert_equal(predictions(place.start, count, **sampling), whole[place], f"{count} from {place.start}")
