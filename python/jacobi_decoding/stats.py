"""What a decode run did: counted from the decode state before and after each step."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jacobi_kernels.state import DecodeState, StateColumn


@dataclass
class RowStats:
    """One sequence.

    decode_steps: forwards in which it decoded; accepted: accepted tokens of each of them; emitted: emitted tokens of
    each; chains: for each, the position of the chain's first token and the chain as it was evaluated.
    """

    prefill_steps: int = 0
    prefill_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    chains: list[tuple[int, list[int]]] = field(default_factory=list)
    text: list[int] = field(default_factory=list)

    @property
    def decode_steps(self) -> int:
        return len(self.emitted)

    @property
    def decode_tokens(self) -> int:
        return sum(self.emitted)

    def iterations_per_block(self, block_size: int) -> list[int]:
        """Decode steps that each closed block of ``block_size`` committed tokens took."""
        blocks, steps, filled = [], 0, 0
        for accepted in self.accepted:
            steps += 1
            filled += accepted
            while filled >= block_size:
                blocks.append(steps)
                steps, filled = 0, filled - block_size
        return blocks

    def stationary_tokens(self) -> int:
        """Tokens that a chain had right while an earlier token of that chain was still wrong, and that stayed right.

        (CLLM, section 4.3 calls them stationary tokens.)
        """
        stationary: set[int] = set()
        changed: set[int] = set()
        for start, chain in reversed(self.chains):
            wrong_before = False
            for position, token in enumerate(chain[: len(self.text) - start], start):
                if token != self.text[position]:
                    wrong_before = True
                    changed.add(position)
                elif wrong_before and position not in changed:
                    stationary.add(position)
        return len(stationary)


@dataclass
class DecodeStats:
    """Statistics of one call of generate.

    tokens_per_forward counts decode forwards only, as published figures do: tokens that decode steps emitted divided by
    decode steps, over all rows; token-by-token decoding is exactly 1. The first token of each row comes from prefill.
    """

    backend: str
    path: str
    block_size: int
    blocks: int
    candidates: int
    adaptive: bool = False  # a controller cut each step's layout to what pays
    rows: list[RowStats] = field(default_factory=list)
    forwards: int = 0  # calls of the model, prefill included
    prefill_forwards: int = 0  # calls in which no row decoded
    positions: int = 0  # query tokens evaluated in all of them
    seconds: float = 0.0  # whole call
    step_seconds: list[float] = field(default_factory=list)  # of the forwards in which a row decoded
    op_share: dict[str, float] | None = None  # share of the steps' time, on request
    launches: dict[str, int] | None = None  # kernel launches by op, of the backends triton and cuda

    @property
    def decode_forwards(self) -> int:
        return self.forwards - self.prefill_forwards

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(row.prefill_tokens + row.decode_tokens for row in self.rows)

    @property
    def decode_tokens(self) -> int:
        return sum(row.decode_tokens for row in self.rows)

    @property
    def tokens_per_forward(self) -> float:
        steps = sum(row.decode_steps for row in self.rows)
        return self.decode_tokens / steps if steps else 1.0

    @property
    def fast_forwarded_tokens(self) -> int:
        """Tokens that decode steps emitted beyond one each."""
        return sum(emitted - 1 for row in self.rows for emitted in row.emitted)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings, for JSON."""
        iterations = [n for row in self.rows for n in row.iterations_per_block(self.block_size)]
        result = {
            "backend": self.backend,
            "path": self.path,
            "block_size": self.block_size,
            "blocks": self.blocks,
            "candidates": self.candidates,
            "adaptive": self.adaptive,
            "forwards": self.forwards,
            "prefill_forwards": self.prefill_forwards,
            "decode_forwards": self.decode_forwards,
            "positions": self.positions,
            "tokens": self.tokens,
            "decode_tokens": self.decode_tokens,
            "tokens_per_forward": self.tokens_per_forward,
            "accepted_histogram": dict(sorted(Counter(a for row in self.rows for a in row.accepted).items())),
            "iterations_per_block": statistics.fmean(iterations) if iterations else None,
            "fast_forwarded_tokens": self.fast_forwarded_tokens,
            "stationary_tokens": sum(row.stationary_tokens() for row in self.rows),
            "seconds": self.seconds,
            "milliseconds_per_step": 1e3 * statistics.median(self.step_seconds) if self.step_seconds else None,
            "tokens_per_second": self.tokens / self.seconds if self.seconds > 0 else None,
        }
        if self.op_share is not None:
            result["op_share"] = self.op_share
        if self.launches is not None:
            result["launches"] = self.launches
        return result


@dataclass(frozen=True)
class StepView:
    """What one step began with: the columns of every row's state, segment lengths (main chain first), chain tokens."""

    columns: list[list[int]]
    lengths: list[list[int]]
    chains: list[list[int]]  # at least as many tokens as the main chain has

    @property
    def running(self) -> bool:
        """Whether a row was not done: a step of nothing else is none."""
        return any(row[StateColumn.DONE] == 0 for row in self.columns)

    @classmethod
    def of(cls, state: DecodeState) -> StepView:
        """The step that ``state`` is laid out for."""
        lengths = state.segments[:, 1].view(state.batch, -1).tolist()
        longest = max(row[0] for row in lengths)
        chains = state.tokens.view(state.batch, -1)[:, :longest].tolist()
        return cls(state.state.tolist(), lengths, chains)


def count_step(stats: DecodeStats, before: StepView, after: list[list[int]], seconds: float) -> None:
    """Add a step to ``stats``; ``after``: the columns of every row's state when it had ended."""
    stats.forwards += 1
    decoding = [
        c[StateColumn.DONE] == 0 and c[StateColumn.TEXT_LEN] > c[StateColumn.PROMPT_LEN] for c in before.columns
    ]
    stats.positions += sum(map(sum, before.lengths))
    if any(decoding):
        stats.step_seconds.append(seconds)
    else:
        stats.prefill_forwards += 1
    for b, row in enumerate(stats.rows):
        if decoding[b]:
            chain = before.chains[b][: before.lengths[b][0]]
            row.chains.append((before.columns[b][StateColumn.TEXT_LEN] - 1, chain))
            row.accepted.append(after[b][StateColumn.ACCEPTED])
            row.emitted.append(after[b][StateColumn.EMITTED])
        elif before.columns[b][StateColumn.DONE] == 0:
            row.prefill_steps += 1
            row.prefill_tokens += after[b][StateColumn.EMITTED]


class StatsRecorder:
    """Watches a decode state on the CPU: :meth:`before` and :meth:`after` each step."""

    def __init__(self, stats: DecodeStats, state: DecodeState) -> None:
        self.stats, self.state = stats, state
        stats.rows = [RowStats() for _ in range(state.batch)]
        self._started = time.perf_counter()

    def before(self) -> None:
        """Note the layout that the coming step evaluates."""
        self._before = StepView.of(self.state)
        self._step_started = time.perf_counter()

    def after(self) -> float:
        """Count what the step did; its seconds."""
        seconds = time.perf_counter() - self._step_started
        count_step(self.stats, self._before, self.state.state.tolist(), seconds)
        return seconds

    def finish(self) -> DecodeStats:
        """Close the account; the texts are complete."""
        self.stats.seconds = time.perf_counter() - self._started
        for b, row in enumerate(self.stats.rows):
            row.text = self.state.text[b, : int(self.state.state[b, StateColumn.TEXT_LEN])].tolist()
        return self.stats
