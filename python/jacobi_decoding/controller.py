"""How many guesses a step should verify: the layout that promises most tokens per second is kept, the rest is cut.

Speed is all that this can change: every guess that is kept is verified as ever, and what is cut was only a guess.

A guess of depth d (the d-th token of a chain or candidate) pays when its chance of being accepted is worth the time it
adds. The chance is p^d, where p, the chance that one more token is right, is learned per kind of guess: how many of the
latest final tokens, together with the guess's first token, stand earlier in the text (0: nowhere, as for the model's
own unconfirmed predictions). The time is the measured time of a step of M query tokens, followed as it drifts.
Guesses are taken in the order of their chances; the number that maximises (tokens expected) / (time of the step) is
kept. (Jacobi decoding pays when tokens per forward exceed t(M) / t(1); this asks the question for every step anew.)
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any

import numpy as np
import torch

from jacobi_decoding.sampling import SamplingParams
from jacobi_kernels.state import DecodeState, StateColumn

AUTO_BLOCK_SIZE, AUTO_BLOCKS, AUTO_CANDIDATES = 16, 1, 3  # what a step may choose from
LONGEST_CONTEXT = 8
# Chance that one more token is right, by context length, before anything is seen, and how many tokens that is worth.
PRIOR = (0.10, 0.30, 0.50, 0.65, 0.70, 0.75, 0.80, 0.80, 0.85)
PRIOR_WEIGHT = 8.0
MEMORY = 0.98  # per observed token: late text counts more
MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
FEW_ROWS = (1, 8, 32)  # for models whose steps are slow
SLOW_STEP = 0.15  # seconds
DRIFT = 0.1  # share of a step's surprise that the cost model takes over


class StepCost:
    """Seconds of a step against its query tokens: measured points, straight lines between, followed as they drift."""

    def __init__(self, rows: tuple[int, ...], seconds: list[float]) -> None:
        self.rows, self.seconds = rows, seconds

    def __call__(self, rows: int) -> float:
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), 1e-9)

    def observe(self, rows: int, seconds: float) -> None:
        """Move the points around ``rows`` towards what a step took; a step that was disturbed moves them little."""
        ratio = min(max(seconds / self(rows), 0.5), 2.0)
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        share = (rows - self.rows[right - 1]) / (self.rows[right] - self.rows[right - 1])
        self.seconds[right - 1] *= ratio ** (DRIFT * min(max(1 - share, 0.0), 1.0))
        self.seconds[right] *= ratio ** (DRIFT * min(max(share, 0.0), 1.0))


def measure_step_cost(engine: Any) -> StepCost:
    """Time steps of 1 to 64 query tokens behind a short prompt: under a second on a 135M model, a few steps on a large
    one. The fastest of each counts."""
    most = MEASURED_ROWS[-1]
    prompt = [(7 * i + 3) % engine.vocab_size for i in range(most)]
    state = DecodeState.allocate(
        [prompt],
        max_new_tokens=32 * (most + 1),
        block_size=most,
        blocks=1,
        candidates=0,
        pool_rows=0,
        pool_from_prompt=False,
    )

    def timed_step(rows: int) -> float:
        state.segments[0, 1] = rows
        start = time.perf_counter()
        engine.step(state, cache, SamplingParams())
        return time.perf_counter() - start

    with engine.running():
        cache = engine.allocate_cache(1, state.cache_capacity)
        engine.step(state, cache, SamplingParams())  # the prompt
        slow = timed_step(1) > SLOW_STEP
        rows, repeats = (FEW_ROWS, 1) if slow else (MEASURED_ROWS, 3)
        seconds = [min(timed_step(m) for _ in range(repeats)) for m in rows]
    return StepCost(rows, [float(t) for t in np.maximum.accumulate(seconds)])


class Controller:
    """Cuts the layout of a DecodeState before each step (:meth:`trim`) and learns from the step (:meth:`observe`)."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._right = [PRIOR_WEIGHT * p for p in PRIOR]
        self._seen = [PRIOR_WEIGHT] * len(PRIOR)
        self._guesses: list[tuple[int, int, list[int], int]] = []  # sequence, text length, tokens, context
        self._rows = 0

    def trim(self, state: DecodeState) -> None:
        """Keep the guesses of the next step that pay; rows in prefill are left alone."""
        lengths = state.segments.view(state.batch, -1, 4)[:, :, 1].tolist()
        columns = state.state.tolist()
        self._guesses = []
        rows = decoding = 0
        chances: list[tuple[float, int, int]] = []  # chance, sequence, segment: ascending depth within a segment
        for b, row in enumerate(columns):
            if row[StateColumn.DONE]:
                continue
            if row[StateColumn.TEXT_LEN] == row[StateColumn.PROMPT_LEN]:
                rows += lengths[b][0]
                continue
            decoding += 1
            for s, guess in enumerate(self._guesses_of(state, b, lengths[b])):
                context = self._context(state, b, row[StateColumn.TEXT_LEN], guess)
                self._guesses.append((b, row[StateColumn.TEXT_LEN], guess, context))
                chance = right = self._right[context] / self._seen[context]
                for _ in guess:
                    chances.append((chance, b, s))
                    chance *= right
        if not decoding:
            return
        chances.sort(key=lambda c: -c[0])  # stable: depths of a segment stay in order
        kept = self._best_count(rows + decoding, decoding, [c[0] for c in chances])
        self._rows = rows + decoding + kept
        keep = [[0] * len(lengths[b]) for b in range(state.batch)]
        for _, b, s in chances[:kept]:
            keep[b][s] += 1
        for b, row in enumerate(columns):
            if not row[StateColumn.DONE] and row[StateColumn.TEXT_LEN] > row[StateColumn.PROMPT_LEN]:
                keep[b][0] += 1  # the final token itself
                lengths[b] = keep[b]
        state.segments[:, 1] = torch.tensor(lengths, dtype=torch.int32).view(-1)

    def observe(self, state: DecodeState, seconds: float) -> None:
        """Learn from the step that followed :meth:`trim`: its time, and which guesses the text has confirmed."""
        if not self._guesses:
            return
        self.cost.observe(self._rows, seconds)
        for b, start, guess, context in self._guesses:
            known = state.text[b, start : int(state.state[b, StateColumn.TEXT_LEN])].tolist()
            for token, final in zip(guess, known, strict=False):
                right = token == final
                self._right[context] = MEMORY * self._right[context] + right
                self._seen[context] = MEMORY * self._seen[context] + 1.0
                if not right:
                    break

    def _best_count(self, rows: int, decoding: int, chances: list[float]) -> int:
        """How many of the likeliest guesses to keep. A second guess for a place counts as if the first did not exist;
        candidates rarely overlap enough for that to matter."""
        best, best_rate, expected = 0, decoding / self.cost(rows), float(decoding)
        for count, chance in enumerate(chances, 1):
            expected += chance
            rate = expected / self.cost(rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    @staticmethod
    def _guesses_of(state: DecodeState, b: int, lengths: list[int]) -> list[list[int]]:
        """The guessed tokens of every segment of sequence b, in segment order; the chain's begin behind its first."""
        first = b * (1 + state.candidates)
        guesses = []
        for s, length in enumerate(lengths):
            start = int(state.segments[first + s, 0])
            guesses.append(state.tokens[start + (s == 0) : start + length].tolist() if length else [])
        return guesses

    @staticmethod
    def _context(state: DecodeState, b: int, text_len: int, guess: list[int]) -> int:
        """Most of the latest final tokens, up to 8, that stand earlier in the usable text with guess[0] behind them."""
        if not guess:
            return 0
        begin = int(state.state[b, StateColumn.POOL_START])
        text = state.text[b].numpy()[begin:text_len]
        ends = np.flatnonzero((text[:-1] == text[-1]) & (text[1:] == guess[0]))
        longest = 0
        for end in ends[-32:].tolist():
            k = 1
            while k < LONGEST_CONTEXT and k <= end and text[end - k] == text[-1 - k]:
                k += 1
            longest = max(longest, k)
        return longest
