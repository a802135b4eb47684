"""redraft in the middle of a generation: emission, pool, chain and 4 candidates of one sequence.

Integer rules without memory traffic or arithmetic to speak of, so there is no floor: compare with a whole step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from jacobi_kernels import DecodeState
from tests.kernels.rules_twin import SequenceLists, redraft_twin, verify_twin

ALPHABET = 64  # few different tokens, so that the searches find many places
STEPS_BEFORE = 4  # they feed the pool


def test_redraft(measure: Any, rows: int, cached: int) -> None:
    generator = torch.Generator().manual_seed(rows + cached)

    def draw(count: int) -> list[int]:
        return torch.randint(ALPHABET, (count,), generator=generator).tolist()

    prompt = draw(max(cached, 1))
    start = DecodeState.allocate([prompt], max_new_tokens=1000, block_size=rows, blocks=2, candidates=4)
    arguments = _verified(start, draw)
    decode_steps = 0
    while decode_steps < STEPS_BEFORE:
        start.redraft(*arguments)
        decode_steps += len(start.generated(0)) > 0
        arguments = _verified(start, draw)

    state = copy.deepcopy(start)
    predictions, accepted, count, fixed = arguments
    expected = redraft_twin(start, 0, predictions.tolist(), accepted[: int(count[0])].tolist(), bool(fixed[0]))
    state.redraft(*arguments)
    assert SequenceLists.of(state, 0) == expected

    def prepare() -> None:
        nonlocal state
        state = copy.deepcopy(start)

    measure(lambda _: state.redraft(*arguments), None, prepare=prepare)


def _verified(state: DecodeState, draw: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What argmax_verify might return for random predictions; the cache has advanced as commit would do it."""
    predictions = draw(state.rows_per_sequence)
    accepted, count, fixed = verify_twin(state, predictions)
    state.cache_seqlens += count
    return torch.tensor(predictions, dtype=torch.int32), accepted, count, fixed
