"""What the benchmark of single ops runs: one function per op, which makes the inputs, checks a result and times it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.bench_attention import training_sample
from bench.bench_consistency_loss import gradients, roles, total
from bench.floor import Work
from bench.gpu.measure import Timer, attempt
from bench.measure import assert_close
from bench.models import QWEN_1_5B, QWEN_7B, SMOLLM2, Shape
from jacobi_kernels import BlockLayout, DecodeState, StateColumn, ops, reference
from jacobi_kernels.packing import pack_weight

SHAPES = {"SmolLM2-135M": SMOLLM2, "Qwen2.5-1.5B": QWEN_1_5B, "Qwen2.5-7B": QWEN_7B}
TINY = Shape(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, vocab=80)
ROWS = (1, 16, 64, 128)
CACHED = 2048
CHECK_ROWS = 8  # of a result, against the reference in float64


@dataclass(frozen=True)
class Case:
    """One row of the table; ``detail`` is a matrix, a pass or ''."""

    op: str
    model: str
    shape: Shape
    rows: int
    cached: int = 0
    detail: str = ""

    @property
    def key(self) -> str:
        parts = (self.op, self.model, self.detail, f"T={self.rows}", f"L={self.cached}" if self.cached else "")
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Bench:
    """Where and in what type cases run."""

    timer: Timer
    dtype: torch.dtype

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.timer.device).to(self.dtype)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.timer.device)

    def layout(self, layout: BlockLayout) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (layout.cu_seqlens_q, layout.segments, layout.cu_segments)
        return tuple(t.to(self.timer.device) for t in tensors)  # type: ignore[return-value]

    def time(
        self,
        run: Callable[[int], Any],
        work: Work | None,
        copies: int = 1,
        prepare: Callable[[], Any] | None = None,
        peers: dict[str, Callable[[int], Any] | str] | None = None,
    ) -> dict[str, Any]:
        """The row of a case: our time in a graph and from Python, and the peers' times in a graph, in microseconds.

        A peer that is a string is not run, and says why.
        """
        inside, eager = self.timer.graph(run, copies, prepare), self.timer.eager(run, copies, prepare)
        row: dict[str, Any] = {"us": inside.median, "low": inside.low, "high": inside.high, "eager_us": eager.median}
        if work is not None:
            row |= {"bytes": work.bytes, "flops": work.flops}
        row["peers"] = {}
        for name, peer in (peers or {}).items():
            if isinstance(peer, str):
                row["peers"][name] = peer
                continue
            result = attempt(lambda peer=peer: {"us": self.timer.graph(peer, copies).median})
            row["peers"][name] = result.get("us", result.get("error"))
        return row


def packed_linear(bench: Bench, case: Case) -> dict[str, Any]:
    n, k = case.shape.linears[case.detail]
    plain = bench.randn(n, k) / k**0.5
    weight, x = pack_weight(plain), bench.randn(case.rows, k)
    out = ops.packed_linear(x, weight, None, n)
    assert_close(out[-CHECK_ROWS:], x[-CHECK_ROWS:].double() @ plain.double().T, "packed_linear")
    work = Work(plain.nbytes + x.nbytes + out.nbytes, 2 * case.rows * n * k)
    copies = bench.timer.copies(plain.nbytes)
    ours, theirs = ([w.clone() for _ in range(copies)] for w in (weight, plain))
    return bench.time(
        lambda i: ops.packed_linear(x, ours[i], None, n),
        work,
        copies,
        peers={"torch linear": lambda i: F.linear(x, theirs[i])},
    )


def activation(bench: Bench, case: Case) -> dict[str, Any]:
    x = bench.randn(case.rows, case.shape.ffn)
    assert_close(ops.activation(x, "silu"), F.silu(x.double()), "activation")
    copies = bench.timer.copies(2 * x.nbytes)
    rotated = [x.clone() for _ in range(copies)]
    return bench.time(
        lambda i: ops.activation(rotated[i], "silu"),
        Work(2 * x.nbytes),
        copies,
        peers={"torch silu": lambda i: F.silu(rotated[i])},
    )


def attention(bench: Bench, case: Case) -> dict[str, Any]:
    s, rows, cached = case.shape, case.rows, case.cached
    q, k, v = (bench.randn(rows, heads, s.head_dim) for heads in (s.heads, s.kv_heads, s.kv_heads))
    work = s.attention_work(rows * cached + rows * (rows + 1) // 2, cached, rows, q.element_size())
    copies = bench.timer.copies(work.bytes)
    caches = bench.randn(2, 1, cached + rows, s.kv_heads, s.head_dim).repeat(copies, 1, 1, 1, 1, 1)
    lengths, layout = bench.int32(cached), bench.layout(BlockLayout.chain([rows]))

    def ours(i: int) -> Tensor:
        return ops.multi_block_attention_with_kvcache(q, k, v, caches[i, 0], caches[i, 1], lengths, *layout)

    out = ours(0)
    keys, values = caches[0, :, 0].double()
    assert_close(out[-1], reference.attend(q[-1].double(), keys, values, None, -1, 0.0)[0], "attention")
    heads_first = q.transpose(0, 1)[None].contiguous()

    def flash(i: int) -> Tensor:
        """torch's own flash kernel; a causal mask is aligned to the last key."""
        k_heads, v_heads = caches[i].transpose(2, 3)
        result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(heads_first, k_heads, v_heads, 0.0, True)[0]
        return result

    def flash_attn() -> Callable[[int], Any] | str:
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError:
            return "not installed"
        lengths_all = bench.int32(cached + rows)
        return lambda i: flash_attn_with_kvcache(
            q[None], caches[i, 0], caches[i, 1], cache_seqlens=lengths_all, causal=True
        )

    on_gpu: Callable[[int], Any] | str = flash if bench.timer.on_gpu else "needs a GPU"
    return bench.time(ours, work, copies, peers={"SDPA flash": on_gpu, "flash-attn": flash_attn()})


def argmax_verify(bench: Bench, case: Case) -> dict[str, Any]:
    s, rows = case.shape, case.rows
    plain = bench.randn(s.vocab, s.hidden) / s.hidden**0.5
    head, hidden = pack_weight(plain), bench.randn(rows, s.hidden)
    layout, length = bench.layout(BlockLayout.chain([rows])), bench.int32(8)
    tokens = torch.randint(s.vocab, (rows,), device=bench.timer.device, dtype=torch.int32)

    def run(weight: Tensor) -> Tensor:
        return ops.argmax_verify(hidden, weight, None, s.vocab, tokens, None, length, *layout)[0]

    logits = hidden[-CHECK_ROWS:].double() @ plain.double().T
    missed = logits.amax(1) - logits.gather(1, run(head)[-CHECK_ROWS:].long()[:, None])[:, 0]
    assert float(missed.max()) <= 1e-4 * float(logits.max()), (
        f"a prediction is {float(missed.max()):.3g} below the best"
    )
    copies = bench.timer.copies(plain.nbytes)
    ours, theirs = ([w.clone() for _ in range(copies)] for w in (head, plain))
    return bench.time(
        lambda i: run(ours[i]),
        Work(plain.nbytes, 2 * rows * s.vocab * s.hidden),
        copies,
        peers={"torch linear, argmax": lambda i: F.linear(hidden, theirs[i]).argmax(dim=1)},
    )


def commit(bench: Bench, case: Case) -> dict[str, Any]:
    """A candidate of ``rows`` tokens has won, so its keys and values move in every layer."""
    s, rows = case.shape, case.rows
    accepted = bench.int32(0, *range(rows, 2 * rows - 1), *[-1] * rows)
    cu_rows, count = bench.int32(0, 2 * rows), bench.int32(rows)
    caches = bench.randn(2, s.layers, 1, 2 * rows, s.kv_heads, s.head_dim)
    expected, length = caches.clone(), bench.int32(0)
    reference.commit(expected[0], expected[1], length, accepted, count, cu_rows)
    ours, lengths = caches.clone(), bench.int32(0)
    ops.commit(ours[0], ours[1], lengths, accepted, count, cu_rows)
    assert torch.equal(ours, expected), "commit moved other rows than the reference"
    copies = bench.timer.copies(caches.nbytes)
    rotated = caches.repeat(copies, 1, 1, 1, 1, 1, 1)
    lengths = lengths.new_zeros(copies, 1)
    moved = 2 * 2 * s.layers * (rows - 1) * s.kv_heads * s.head_dim * caches.element_size()
    return bench.time(
        lambda i: ops.commit(rotated[i, 0], rotated[i, 1], lengths[i], accepted, count, cu_rows),
        Work(moved),
        copies,
        prepare=lengths.zero_,
    )


def redraft(bench: Bench, case: Case) -> dict[str, Any]:
    """Two blocks and four candidates in the middle of a text; every guess was wrong but the first."""
    generator = torch.Generator().manual_seed(case.rows)
    prompt = torch.randint(64, (case.cached,), generator=generator).tolist()
    state = DecodeState.allocate([prompt], max_new_tokens=1000, block_size=case.rows, blocks=2, candidates=4)
    slots = state.rows_per_sequence
    predictions = torch.randint(64, (slots,), generator=generator, dtype=torch.int32)
    accepted = torch.full((slots,), -1, dtype=torch.int32)
    accepted[0] = 0
    state.segments[1:, 1] = 0
    state.segments[0, 1] = 2 * case.rows
    state.tokens[: 2 * case.rows] = 65
    state.cache_seqlens[0] = case.cached
    row = state.state[0]
    row[StateColumn.NUM_FINAL], row[StateColumn.ACTIVE] = 1, 2
    device = bench.timer.device
    start, work_state = state.to(device), replace(state, **_clones(state)).to(device)
    arguments = (
        predictions.to(device),
        accepted.to(device),
        bench.int32(1),
        torch.zeros(1, dtype=torch.bool).to(device),
    )

    def prepare() -> None:
        for name, saved in _clones(start).items():
            getattr(work_state, name).copy_(saved)

    return bench.time(lambda _: work_state.redraft(*arguments), None, prepare=prepare)


def _clones(state: DecodeState) -> dict[str, Any]:
    names = ("tokens", "segments", "cache_seqlens", "text", "pool", "state")
    return {name: getattr(state, name).clone() for name in names}


def training_attention(bench: Bench, case: Case) -> dict[str, Any]:
    """One packed training sample, forward, or forward and backward."""
    s = case.shape
    sample = training_sample(prompt=16, block=4, blocks=2) if case.rows < 128 else training_sample(128, 16, 24)
    rows, layout = sample.rows, bench.layout(sample)
    inputs = [bench.randn(rows, heads, s.head_dim) for heads in (s.heads, s.kv_heads, s.kv_heads)]
    leaves = [t.requires_grad_() for t in inputs]
    weight = bench.randn(rows, s.heads, s.head_dim)
    visible = float((sample.positions(torch.zeros(1, dtype=torch.int32)) + 1).sum())
    elements = (2 if case.detail == "forward" else 6) * (s.heads + s.kv_heads) * rows * s.head_dim
    factor = 4 if case.detail == "forward" else 14
    work = Work(elements * weight.element_size(), factor * s.heads * s.head_dim * visible)

    def forward(_: int) -> Any:
        with torch.no_grad():
            return ops.multi_block_attention(*inputs, *layout)[0]

    def both(_: int) -> Any:
        return torch.autograd.grad(ops.multi_block_attention(*leaves, *layout)[0], leaves, weight)

    return bench.time(forward if case.detail == "forward" else both, work)


def consistency_loss(bench: Bench, case: Case) -> dict[str, Any]:
    """The two losses of a training batch, alone or with gradients to hidden states and head."""
    s, rows = case.shape, case.rows
    hidden, head = bench.randn(rows, s.hidden), bench.randn(s.vocab, s.hidden) / s.hidden**0.5
    targets, teachers = (t.to(bench.timer.device) for t in roles(rows, s.vocab))
    work = Work(head.nbytes, (2 if case.detail == "forward" else 6) * rows * s.vocab * s.hidden)

    def forward(_: int) -> Any:
        with torch.no_grad():
            return total(ops.consistency_loss, hidden, head, targets, teachers)

    def both(_: int) -> Any:
        return gradients(ops.consistency_loss, hidden, head, targets, teachers)

    exact = total(reference.consistency_loss, hidden[-rows:], head, targets, teachers) if rows <= 64 else None
    if exact is not None:
        assert_close(forward(0)[None].float(), exact[None], "consistency_loss")
    return bench.time(forward if case.detail == "forward" else both, work)


OPS: dict[str, Callable[[Bench, Case], dict[str, Any]]] = {
    "packed_linear": packed_linear,
    "activation": activation,
    "multi_block_attention_with_kvcache": attention,
    "argmax_verify": argmax_verify,
    "commit": commit,
    "redraft": redraft,
    "multi_block_attention": training_attention,
    "consistency_loss": consistency_loss,
}


def cases() -> list[Case]:
    """All rows of the table."""
    found = []
    for model, shape in SHAPES.items():
        for rows in ROWS:
            found += [Case("packed_linear", model, shape, rows, detail=m) for m in list(shape.linears)[:-1]]
            found.append(Case("argmax_verify", model, shape, rows))
            found.append(Case("multi_block_attention_with_kvcache", model, shape, rows, CACHED))
        found.append(Case("multi_block_attention_with_kvcache", model, shape, 64, 8 * CACHED))
        found.append(Case("activation", model, shape, 64))
        found.append(Case("commit", model, shape, 16))
    found += [Case("redraft", "any", SMOLLM2, rows, CACHED) for rows in (16, 64)]
    found += [Case("multi_block_attention", "SmolLM2-135M", SMOLLM2, 896, detail=d) for d in ("forward", "training")]
    found += [Case("consistency_loss", "SmolLM2-135M", SMOLLM2, 1024, detail=d) for d in ("forward", "training")]
    return found


def tiny_cases() -> list[Case]:
    """One small case per op, for a self-test."""
    found = [
        Case("packed_linear", "tiny", TINY, 3, detail="qkv"),
        Case("activation", "tiny", TINY, 3),
        Case("multi_block_attention_with_kvcache", "tiny", TINY, 3, 20),
        Case("argmax_verify", "tiny", TINY, 3),
        Case("commit", "tiny", TINY, 3),
        Case("redraft", "any", TINY, 4, 20),
    ]
    for op in ("multi_block_attention", "consistency_loss"):
        found += [Case(op, "tiny", TINY, 8, detail=d) for d in ("forward", "training")]
    return found
