"""What a model does inside fixed blocks: iterations to the fixed point, fast-forwarded and stationary tokens.

The definitions are those of CLLM (section 4.3), on trajectories whose blocks start from random tokens of the prompt. A
token is right when it equals the fixed point's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from jacobi_training.trajectories import iterations

State = Sequence[int]


def fast_forwarded(states: Sequence[State]) -> int:
    """Tokens by which the right run at a block's start grew beyond one per iteration."""
    runs = [_right_run(state, states[-1]) for state in states]
    return sum(max(0, after - before - 1) for before, after in pairwise(runs))


def stationary(states: Sequence[State]) -> int:
    """Tokens that were predicted right while a token before them was wrong, and stayed right.

    The first state holds guesses, not predictions, and counts for nothing.
    """
    fixed = states[-1]
    found = 0
    for i, token in enumerate(fixed):
        wrong = [s for s, state in enumerate(states) if state[i] != token]
        settled = max(wrong[-1] + 1 if wrong else 0, 1)  # first prediction from which on it was right
        found += settled < len(states) and _right_run(states[settled], fixed) < i
    return found


def _right_run(state: State, fixed: State) -> int:
    return next((i for i, (a, b) in enumerate(zip(state, fixed, strict=True)) if a != b), len(fixed))


def block_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Means per block over trajectory records, and tokens per forward of the blocks themselves."""
    blocks = steps = ahead = kept = tokens = 0
    for record in records:
        states = [block["states"] for block in record["blocks"]]
        blocks += len(states)
        steps += sum(iterations(s, i == len(states) - 1) for i, s in enumerate(states))
        ahead += sum(map(fast_forwarded, states))
        kept += sum(map(stationary, states))
        tokens += len(record["answer_ids"]) - 1
    return {
        "blocks": blocks,
        "iterations": steps / blocks if blocks else None,
        "fast_forwarded_tokens": ahead / blocks if blocks else None,
        "stationary_tokens": kept / blocks if blocks else None,
        "tokens_per_forward": tokens / steps if steps else None,
    }
