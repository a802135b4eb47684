"""The drafting rules written again, slowly and on lists, and a toy decoder that runs the ops with them.

``redraft_twin`` is the definition of ``torch.ops.jacobi.redraft``: whole lists of matches, no early exits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from jacobi_kernels import ops, reference
from jacobi_kernels.state import DecodeState, StateColumn

Model = Callable[[Sequence[int]], int]  # all tokens so far -> the next one
KEPT_PER_LENGTH = 16
REFILL_SEARCHES = 4


def accept_twin(paths: list[list[int]], free: set[int], x: list[int], y: list[int]) -> list[int]:
    """The longest accepted prefix of any path, the first of its length; rows in ``free`` need no prediction."""
    best: list[int] = []
    for path in paths:
        for k in range(1, len(path) + 1):
            ok = all(path[i] in free or (i > 0 and x[path[i]] == y[path[i - 1]]) for i in range(k))
            if ok and k > len(best):
                best = path[:k]
    return best


def verify_twin(state: DecodeState, predictions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(accepted_rows, num_accepted, fixed_point) of a decode state, as argmax_verify returns them."""
    x = state.tokens.tolist()
    rows = [-1] * len(x)
    counts, fixed = [], []
    for b, paths in enumerate(reference.segment_paths(state.segments, state.cu_segments)):
        free = set(paths[0][: int(state.state[b, StateColumn.NUM_FINAL])])
        best = accept_twin(paths, free, x, predictions)
        start = int(state.cu_seqlens_q[b])
        rows[start : start + len(best)] = best
        counts.append(len(best))
        fixed.append(0 < len(paths[0]) == len(accept_twin(paths[:1], free, x, predictions)))
    int32 = torch.int32
    return torch.tensor(rows, dtype=int32), torch.tensor(counts, dtype=int32), torch.tensor(fixed, dtype=torch.bool)


# Redraft --------------------------------------------------------------------------------------------------------------


@dataclass
class SequenceLists:
    """One sequence as lists."""

    chain: list[int]  # tokens of the main chain
    candidates: list[list[int]]
    cached: int
    text: list[int]
    pool: list[list[int]]  # ring rows, [] = empty
    column: dict[StateColumn, int]

    @classmethod
    def of(cls, state: DecodeState, b: int) -> SequenceLists:
        first, end = state.cu_segments[b : b + 2].tolist()
        runs = [state.tokens[s : s + n].tolist() for s, n, _, _ in state.segments[first:end].tolist()]
        column = {c: int(state.state[b, c]) for c in StateColumn}
        return cls(
            runs[0],
            [run for run in runs[1:] if run],
            int(state.cache_seqlens[b]),
            state.text[b, : column[StateColumn.TEXT_LEN]].tolist(),
            [row[1 : 1 + row[0]] for row in state.pool[b].tolist()],
            column,
        )


def common_suffix(a: Sequence[int], b: Sequence[int], most: int) -> int:
    k = 0
    while k < min(len(a), len(b), most) and a[-1 - k] == b[-1 - k]:
        k += 1
    return k


def matches(q: SequenceLists, run: list[int]) -> list[tuple[int, list[int]]]:
    """(length, continuation) of every place where run's last tokens occur, longest first, then latest first."""
    found, begin, newest = [], q.column[StateColumn.POOL_START], q.column[StateColumn.POOL_NEXT]
    for end in reversed(range(begin + 1, min(len(q.text), len(run) - 1) + 1)):
        found.append((common_suffix(run[begin:end], run, 8), list(islice(cycle(run[end:]), 4096))))
    for age in range(1, len(q.pool) + 1):
        entry = q.pool[(newest - age) % len(q.pool)]
        for end in reversed(range(1, len(entry))):
            found.append((common_suffix(entry[:end], run, 8), entry[end:]))
    ranked = []
    for length in range(8, 0, -1):
        ranked += [m for m in found if m[0] == length][:KEPT_PER_LENGTH]
    return ranked


def prompt_lookup(text: list[int], longest: int = 3) -> list[int] | None:
    """What follows the first earlier occurrence of the longest final n-gram (n <= 3), with period extension."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        for i in range(len(text) - n):
            if text[i : i + n] == text[-n:]:
                return list(islice(cycle(text[i + n :]), 4096))
    return None


def redraft_twin(state: DecodeState, b: int, y_of: list[int], rows: list[int], fixed: bool) -> SequenceLists:
    """What sequence ``b`` of ``state`` must be after redraft; predictions by row, accepted rows of the sequence."""
    C = StateColumn
    q = SequenceLists.of(state, b)
    n, most, col = state.block_size, state.blocks, q.column
    first, end = state.cu_segments[b : b + 2].tolist()
    runs = [list(range(s, s + length)) for s, length, _, _ in state.segments[first:end].tolist()]
    y = [[y_of[row] for row in run] for run in runs]
    a = len(rows)
    old_cached = q.cached - a
    col[C.ACCEPTED], col[C.FIXED_POINT], col[C.EMITTED], col[C.WINNER] = a, int(fixed), 0, 0
    behind: list[int] = []  # guesses for the new chain

    if not col[C.DONE] and len(q.text) >= col[C.MAX_LEN]:
        col[C.DONE] = 2
        q.cached = min(q.cached, len(q.text))
    if a and not col[C.DONE]:
        winner = next(s for s, run in enumerate(runs) if rows[-1] in run)
        col[C.WINNER] = winner
        decode = len(q.text) > col[C.PROMPT_LEN]
        if q.cached >= len(q.text):
            fresh = [int(state.tokens[row]) for row in rows[col[C.NUM_FINAL] :]] + [y_of[rows[-1]]]
            for token in fresh:
                q.text.append(token)
                col[C.EMITTED] += 1
                col[C.DONE] = 1 if token in state.stop_tokens[b].tolist() else 2 * (len(q.text) == col[C.MAX_LEN])
                if col[C.DONE]:
                    q.cached = min(q.cached, len(q.text))
                    break
        if decode and not col[C.DONE]:
            for s, run in enumerate(runs):
                previous = [y_of[runs[0][0]]] if s else []
                tokens = [int(state.tokens[row]) for row in run]
                guess = tokens if s else tokens[1:]
                own = 0 if s else 1
                for token, expected in zip(guess, previous + y[s], strict=False):
                    if token != expected:
                        break
                    own += 1
                at = old_cached + own + (2 if s else 1)
                width = state.pool.shape[2] - 1
                entry = (q.text[max(0, at - 8) : at] + y[s][own:])[:width]
                if run and own < len(run) and not (s and s == winner) and q.pool and entry not in q.pool:
                    q.pool[col[C.POOL_NEXT]] = entry
                    col[C.POOL_NEXT] = (col[C.POOL_NEXT] + 1) % len(q.pool)
            col[C.BLOCK_FILL] += a
            while col[C.BLOCK_FILL] >= n:
                col[C.BLOCK_FILL] -= n
                col[C.ACTIVE] = max(1, col[C.ACTIVE] - 1)
            unchanged = [True] + [x == p for x, p in pairwise_shift(q.chain, y[0])]
            if len(q.chain) >= n and col[C.ACTIVE] < most and sum(unchanged[-n:]) / n >= state.spawn_ratio:
                col[C.ACTIVE] += 1
        behind = y[winner][runs[winner].index(rows[-1]) + 1 :]
        behind += y[0][a + len(behind) :]

    col[C.NUM_FINAL] = 1
    q.chain, q.candidates = [], []
    if not col[C.DONE] and len(q.text) == col[C.PROMPT_LEN] and q.cached < len(q.text):
        room = state.rows_per_sequence - state.candidates * (n - 1)
        q.chain = q.text[q.cached : q.cached + room]
        col[C.NUM_FINAL] = len(q.chain)
    elif not col[C.DONE]:
        left = col[C.MAX_LEN] - len(q.text)
        draft_twin(q, behind, min(n * col[C.ACTIVE], left), min(n - 1, left - 1), state.candidates)
    col[C.TEXT_LEN] = len(q.text)
    return q


def pairwise_shift(chain: list[int], y: list[int]) -> list[tuple[int, int]]:
    """(chain token, prediction at its position) from the second token on."""
    return list(zip(chain[1:], y, strict=False))


def draft_twin(q: SequenceLists, behind: list[int], target: int, limit: int, candidates: int) -> None:
    run = (q.text + behind)[: len(q.text) - 1 + target]
    whole = len(q.text) - 1 + target
    for _ in range(REFILL_SEARCHES):
        found = matches(q, run)
        if len(run) < whole and found:
            run = (run + found[0][1])[:whole]
    run += run[-1:] * (whole - len(run))
    q.chain = run[len(q.text) - 1 :]

    wanted = [m[1] for m in matches(q, q.text)]
    if q.column[StateColumn.POOL_START] == 0 and (own := prompt_lookup(q.text)):
        wanted.insert(0, own)
    for guess in wanted:
        guess = guess[:limit]
        known = [q.chain[1:], *q.candidates]
        if len(q.candidates) == candidates or any(k[: len(guess)] == guess for k in known):
            continue
        shorter = [c for c in q.candidates if guess[: len(c)] == c]
        if shorter:
            q.candidates[q.candidates.index(shorter[0])] = guess
        else:
            q.candidates.append(guess)


# Toy decoding ---------------------------------------------------------------------------------------------------------


def hash_model(seed: int, vocab: int, context: int = 3) -> Model:
    """Next token = hash of the last ``context`` tokens."""

    def model(tokens: Sequence[int]) -> int:
        h = seed * 2654435761 % 2**32
        for token in tokens[-context:]:
            h = (h ^ (token + 1)) * 2246822519 % 2**32
            h ^= h >> 15
        return h % vocab

    return model


def greedy(model: Model, prompt: Sequence[int], max_new: int, stop: Sequence[int] = ()) -> list[int]:
    """Plain autoregressive decoding."""
    out: list[int] = []
    while len(out) < max_new:
        out.append(model([*prompt, *out]))
        if out[-1] in stop:
            break
    return out


class ToyDecoder:
    """Runs a state with toy models through the real commit and redraft; the cache holds each row's token."""

    def __init__(self, state: DecodeState, models: Sequence[Model], twin: bool = False) -> None:
        self.state, self.models, self.twin = state, models, twin
        self.cache = torch.full((1, state.batch, state.cache_capacity, 1, 1), -1.0)
        self.forwards = 0  # decode steps of the longest sequence
        self.accepted: list[list[int]] = []

    def predict(self) -> list[int]:
        state = self.state
        x = state.tokens.tolist()
        y = [-1] * len(x)
        for b, seen in enumerate(reference.row_paths(state.segments, state.cu_segments)):
            cached, start = int(state.cache_seqlens[b]), int(state.cu_seqlens_q[b])
            prefix = [int(t) for t in self.cache[0, b, :cached, 0, 0]]
            final = int(state.state[b, StateColumn.NUM_FINAL])
            for row, path in seen.items():
                self.cache[0, b, cached + row - start] = x[row]
                if not row - start < final - 1:
                    y[row] = self.models[b]([*prefix, *(x[r] for r in path)])
        return y

    def step(self) -> None:
        state = self.state
        self.forwards += any(state.state[:, StateColumn.TEXT_LEN] > state.state[:, StateColumn.PROMPT_LEN])
        y = self.predict()
        rows, counts, fixed = verify_twin(state, y)
        self.accepted.append(counts.tolist())
        ops.commit(self.cache, self.cache.clone(), state.cache_seqlens, rows, counts, state.cu_seqlens_q)
        expected = []
        if self.twin:
            for b, count in enumerate(counts.tolist()):
                start = int(state.cu_seqlens_q[b])
                own = rows[start : start + count].tolist()
                expected.append(redraft_twin(state, b, y, own, bool(fixed[b])))
        state.redraft(torch.tensor(y, dtype=torch.int32), rows, counts, fixed)
        for b in range(state.batch):
            q = SequenceLists.of(state, b)
            if self.twin:
                assert q == expected[b]
            self.check(q, b)

    def check(self, q: SequenceLists, b: int) -> None:
        """What holds after every step, whatever was predicted."""
        state = self.state
        assert [int(t) for t in self.cache[0, b, : q.cached, 0, 0]] == q.text[: q.cached]
        entries = [entry for entry in q.pool if entry]
        assert len({tuple(entry) for entry in entries}) == len(entries), "the pool repeats itself"
        if q.column[StateColumn.DONE]:
            assert not q.chain
            assert not q.candidates
            return
        final = q.column[StateColumn.NUM_FINAL]
        assert q.chain[:final] == q.text[q.cached : q.cached + final]
        for c, guess in enumerate(q.candidates):
            assert len(guess) < state.block_size
            assert q.chain[1 : 1 + len(guess)] != guess, "a candidate repeats the chain"
            for other in q.candidates[c + 1 :]:
                k = min(len(guess), len(other))
                assert guess[:k] != other[:k], "a candidate repeats another"
        decode = len(q.text) > q.column[StateColumn.PROMPT_LEN]
        if decode and state.candidates and q.column[StateColumn.POOL_START] == 0:
            limit = min(state.block_size - 1, q.column[StateColumn.MAX_LEN] - len(q.text) - 1)
            choice = (prompt_lookup(q.text) or [])[:limit]
            assert any(g[: len(choice)] == choice for g in [q.chain[1:], *q.candidates]), (
                "prompt lookup's choice is lost"
            )

    def run(self) -> list[list[int]]:
        while self.state.running:
            self.step()
            assert len(self.accepted) < 4000, "no progress"
        return [self.state.generated(b) for b in range(self.state.batch)]
