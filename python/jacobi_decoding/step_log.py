"""What steps on a device leave for the host: a record of each, read once in the end, and one status word.

A record is the step's beginning: state columns, segment lengths and main chain of every row. What the step did is the
beginning of the next one. Records are appended by a counter on the device, so that a captured graph appends too.
"""

from __future__ import annotations

import torch

from jacobi_decoding.stats import StepView
from jacobi_kernels.state import STATE_COLUMNS, STEP_ERRORS, DecodeState, StateColumn

MOST_BYTES = 64 << 20  # of the records; they are read in between when a run has more steps


class DeviceStepError(RuntimeError):
    """A step on the device found a sequence that it cannot run; one line."""


class StepLog:
    """Records of up to ``capacity`` steps of states like ``state``.

    status: [1] int32 on the device: rows that run, or minus the largest code of STEP_ERRORS.
    """

    def __init__(self, state: DecodeState, steps: int) -> None:
        self._segments = 1 + state.candidates
        self._chain = state.blocks * state.block_size
        width = STATE_COLUMNS + self._segments + self._chain
        self.capacity = max(2, min(steps, MOST_BYTES // (4 * state.batch * width)))
        device = state.state.device
        self._records = torch.zeros(self.capacity, state.batch, width, dtype=torch.int32, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)

    def append(self, state: DecodeState) -> None:
        """Record the step that ``state`` is laid out for. Launches only."""
        chains = state.tokens.view(state.batch, -1)[:, : self._chain]
        lengths = state.segments.view(state.batch, -1, 4)[:, :, 1]
        self._records.index_copy_(0, self._next, torch.cat([state.state, lengths, chains], dim=1)[None])
        self._next.add_(1)

    def update_status(self, state: DecodeState) -> None:
        """Set :attr:`status` to what ``state`` says. Launches only."""
        errors = state.state[:, StateColumn.ERROR]
        running = (state.state[:, StateColumn.DONE] | errors).eq(0).sum(dtype=torch.int32)
        worst = errors.amax()
        self.status.copy_(torch.where(worst > 0, -worst, running))

    def clear(self) -> None:
        """Start again from the first record."""
        self._next.zero_()

    def read(self, count: int) -> list[StepView]:
        """The first ``count`` records; waits for the device."""
        records = self._records[:count].cpu()
        bounds = (STATE_COLUMNS, STATE_COLUMNS + self._segments)
        columns, lengths, chains = (part.tolist() for part in records.tensor_split(bounds, dim=2))
        return [StepView(*step) for step in zip(columns, lengths, chains, strict=True)]


def raise_step_error(state: DecodeState) -> None:
    """Raise DeviceStepError for the first row whose ERROR is set."""
    for b, code in enumerate(state.state[:, StateColumn.ERROR].tolist()):
        if code:
            raise DeviceStepError(
                f"the step on {state.state.device} stopped at row {b}: {STEP_ERRORS.get(code, 'unknown')} (code {code})"
            )
