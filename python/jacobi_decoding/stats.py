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
        return result


class StatsRecorder:
    """Watches a decode state: :meth:`before` and :meth:`after` each step."""

    def __init__(self, stats: DecodeStats, state: DecodeState) -> None:
        self.stats, self.state = stats, state
        stats.rows = [RowStats() for _ in range(state.batch)]
        self._started = time.perf_counter()

    def before(self) -> None:
        """Note the layout that the coming step evaluates."""
        state = self.state
        columns = state.state.tolist()
        lengths = state.segments[:, 1].view(state.batch, -1)
        chain_lengths = lengths[:, 0].tolist()
        self.stats.positions += int(lengths.sum())
        self._decoding = []
        for b, row in enumerate(columns):
            decoding = row[StateColumn.DONE] == 0 and row[StateColumn.TEXT_LEN] > row[StateColumn.PROMPT_LEN]
            self._decoding.append(decoding)
            if decoding:
                first = b * state.rows_per_sequence
                chain = state.tokens[first : first + chain_lengths[b]].tolist()
                self.stats.rows[b].chains.append((row[StateColumn.TEXT_LEN] - 1, chain))
        self._was_running = [row[StateColumn.DONE] == 0 for row in columns]
        self._step_started = time.perf_counter()

    def after(self) -> float:
        """Count what the step did; its seconds."""
        seconds = time.perf_counter() - self._step_started
        stats = self.stats
        stats.forwards += 1
        if any(self._decoding):
            stats.step_seconds.append(seconds)
        else:
            stats.prefill_forwards += 1
        for b, row in enumerate(self.state.state.tolist()):
            if self._decoding[b]:
                stats.rows[b].accepted.append(row[StateColumn.ACCEPTED])
                stats.rows[b].emitted.append(row[StateColumn.EMITTED])
            elif self._was_running[b]:
                stats.rows[b].prefill_steps += 1
                stats.rows[b].prefill_tokens += row[StateColumn.EMITTED]
        return seconds

    def finish(self) -> DecodeStats:
        """Close the account; the texts are complete."""
        self.stats.seconds = time.perf_counter() - self._started
        for b, row in enumerate(self.stats.rows):
            row.text = self.state.text[b, : int(self.state.state[b, StateColumn.TEXT_LEN])].tolist()
        return self.stats
