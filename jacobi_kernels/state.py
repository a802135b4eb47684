"""The decode state that a caller owns: plain int32 tensors, allocated once and changed in place by the ops.

Query slots of sequence b are rows ``b * R .. (b + 1) * R`` with ``R = rows_per_sequence = chain_capacity +
candidates * (block_size - 1)``: first the main chain (segment 0 of the sequence), then the candidates, each continuing
from the chain's first token. Starts are fixed; a step only changes lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from numbers import Integral
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from jacobi_kernels import ops
from jacobi_kernels.checks import whole_number
from jacobi_kernels.layout import BlockLayout

STATE_COLUMNS = 16
MATCH_TOKENS = 8  # context in front of a pool entry's tail, and the longest match
MAX_TOKEN = 2**31 - 1
MAX_DRAFT_OPTION = 2**20  # of block_size, blocks and candidates, as the ops check

T = TypeVar("T")


class StateColumn(IntEnum):
    """Columns of ``DecodeState.state``, as in csrc/common/state.h."""

    TEXT_LEN = 0
    """Final tokens in ``text``: the prompt, then what was emitted."""
    PROMPT_LEN = 1
    MAX_LEN = 2
    """Text length at which generation ends."""
    NUM_FINAL = 3
    """Leading chain tokens that are final in the current layout: a piece of the prompt, or 1."""
    ACTIVE = 4
    """Active blocks; the chain is ``block_size * ACTIVE`` tokens long."""
    BLOCK_FILL = 5
    """Tokens committed in the open block."""
    POOL_NEXT = 6
    """Ring index of the next pool entry."""
    POOL_START = 7
    """First text index that guesses may be taken from: 0, or PROMPT_LEN to leave the prompt out."""
    DONE = 8
    """0 running, 1 stopped by a stop token, 2 by its length."""
    ACCEPTED = 9
    """Tokens accepted by the last step."""
    WINNER = 10
    """Winning segment of the last step, 0 = main chain."""
    EMITTED = 11
    """Tokens emitted by the last step."""
    FIXED_POINT = 12
    """1 when the last step accepted its whole main chain."""
    ERROR = 13
    """Why a GPU step stopped the sequence, which it left unchanged: a key of :data:`STEP_ERRORS`; 0 is fine. CPU ops
    raise instead and leave it 0."""


class StepError(IntEnum):
    """Values of the column ERROR, as in csrc/common/state.h."""

    NONE = 0
    LAYOUT = 1
    TOKEN = 2
    CACHE_LENGTH = 3
    PAGE_TABLE = 4
    STATE = 5


STEP_ERRORS = {
    StepError.LAYOUT: "the block layout breaks a rule",
    StepError.TOKEN: "a token is outside the vocabulary",
    StepError.CACHE_LENGTH: "a cache length is out of range",
    StepError.PAGE_TABLE: "the page table names a page outside the cache",
    StepError.STATE: "a column of the decode state is out of range",
}
"""What the codes of ``StateColumn.ERROR`` mean, as in csrc/common/state.h."""


@dataclass
class DecodeState:
    """State of a batch of B sequences; :meth:`allocate` makes one that is ready for its first step.

    Attributes
    ----------
    tokens : Tensor
        ``[B * rows_per_sequence]`` int32, the query tokens; rows outside all segments hold no meaning.
    segments, cu_seqlens_q, cu_segments : Tensor
        Block layout of the next step, ``[B * (1 + candidates), 4]`` and twice ``[B + 1]`` int32.
    cache_seqlens : Tensor
        ``[B]`` int32, tokens in the KV cache.
    text : Tensor
        ``[B, text_capacity]`` int32, every final token; ``state[b, TEXT_LEN]`` of them count.
    pool : Tensor
        ``[B, pool_rows, 1 + width]`` int32, ring of (length, tokens...).
    state : Tensor
        ``[B, 16]`` int32, columns of :class:`StateColumn`.
    stop_tokens : Tensor
        ``[B, stops]`` int32, padded with -1.
    block_size, blocks, candidates : int
        n, K (most active blocks) and C, as the ops get them: :meth:`allocate` lowers n and K to what can be used.
    spawn_ratio : float
        Share of unchanged chain tokens at which one more block becomes active.
    """

    tokens: Tensor
    segments: Tensor
    cu_seqlens_q: Tensor
    cu_segments: Tensor
    cache_seqlens: Tensor
    text: Tensor
    pool: Tensor
    state: Tensor
    stop_tokens: Tensor
    block_size: int
    blocks: int
    candidates: int
    spawn_ratio: float

    @classmethod
    def allocate(
        cls,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        block_size: int,
        blocks: int,
        candidates: int,
        chain_capacity: int | None = None,
        pool_rows: int = 32,
        pool_from_prompt: bool | Sequence[bool] = True,
        stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
        spawn_ratio: float = 0.85,
    ) -> DecodeState:
        """Allocate the state for ``prompts`` and lay out the first step (the first piece of every prompt).

        Parameters
        ----------
        prompts : sequence of token id sequences
            At least one token each.
        max_new_tokens : int or one per sequence
            Most tokens to emit; 0 leaves a sequence done from the start.
        block_size, blocks, candidates : int
            n >= 1, K >= 1, C >= 0. A chain is never longer than the tokens left, so n is lowered to the largest
            max_new_tokens + 1, then K to the blocks of n that cover it: memory follows the tokens that are wanted.
            The state's attributes hold the lowered values.
        chain_capacity : int, optional
            Query slots of the main chain, at least ``blocks * block_size``; also the most prompt tokens that one step
            takes in. By default up to 256 where prompts are that long.
        pool_rows : int
            Entries of the pool; 0 for none.
        pool_from_prompt : bool or one per sequence
            Whether guesses may be taken from the prompt.
        stop_tokens : token ids for all sequences, or one sequence of token ids per prompt
            Tokens that end a sequence (and are kept).
        spawn_ratio : float
            Within 0..1.

        Raises
        ------
        ValueError
            Naming the argument, its value and what was expected.
        """
        batch = len(prompts)
        if batch == 0:
            raise ValueError("prompts must hold at least one sequence")
        block_size = whole_number("block_size", block_size, 1, MAX_DRAFT_OPTION)
        blocks = whole_number("blocks", blocks, 1, MAX_DRAFT_OPTION)
        candidates = whole_number("candidates", candidates, 0, MAX_DRAFT_OPTION)
        if not 0.0 <= spawn_ratio <= 1.0:
            raise ValueError(f"spawn_ratio must be within 0..1, got {spawn_ratio}")
        pool_rows = whole_number("pool_rows", pool_rows, 0, MAX_TOKEN)
        for b, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompts[{b}] must hold at least one token")
            _check_tokens(f"prompts[{b}]", prompt)
        limits = [
            whole_number("max_new_tokens", limit, 0, MAX_TOKEN - len(prompt))
            for limit, prompt in zip(_per_sequence("max_new_tokens", max_new_tokens, batch), prompts, strict=True)
        ]
        from_prompt = _per_sequence("pool_from_prompt", pool_from_prompt, batch)
        stops = _stop_lists(stop_tokens, batch)

        longest = max(len(prompt) for prompt in prompts)
        block_size = min(block_size, max(limits) + 1)
        blocks = min(blocks, -(-(max(limits) + 1) // block_size))
        chain = blocks * block_size
        if chain_capacity is None:
            chain_capacity = max(chain, min(256, longest))
        elif chain_capacity < chain:
            raise ValueError(f"chain_capacity must be at least blocks * block_size = {chain}, got {chain_capacity}")
        rows = chain_capacity + candidates * (block_size - 1)
        if batch * rows > MAX_TOKEN:
            raise ValueError(f"{batch} sequences of {rows} query slots do not fit into 31 bits: lower block_size")

        text = torch.zeros(
            batch, max(len(p) + limit for p, limit in zip(prompts, limits, strict=True)), dtype=torch.int32
        )
        state = torch.zeros(batch, STATE_COLUMNS, dtype=torch.int32)
        stop = torch.full((batch, max(map(len, stops))), -1, dtype=torch.int32)
        segments = torch.zeros(batch, 1 + candidates, 4, dtype=torch.int32)
        segments[:, :, 0] = _segment_starts(batch, chain_capacity, candidates, block_size)
        segments[:, 0, 2] = -1
        segments[:, 1:, 2] = (torch.arange(batch, dtype=torch.int32) * (1 + candidates))[:, None]
        for b, prompt in enumerate(prompts):
            length = len(prompt)
            text[b, :length] = torch.as_tensor(prompt, dtype=torch.int32)
            stop[b, : len(stops[b])] = torch.tensor(stops[b], dtype=torch.int32)
            state[b, StateColumn.TEXT_LEN] = state[b, StateColumn.PROMPT_LEN] = length
            state[b, StateColumn.MAX_LEN] = length + limits[b]
            state[b, StateColumn.NUM_FINAL] = state[b, StateColumn.ACTIVE] = 1
            state[b, StateColumn.POOL_START] = 0 if from_prompt[b] else length

        self = cls(
            tokens=torch.zeros(batch * rows, dtype=torch.int32),
            segments=segments.view(-1, 4),
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * rows,
            cu_segments=torch.arange(batch + 1, dtype=torch.int32) * (1 + candidates),
            cache_seqlens=torch.zeros(batch, dtype=torch.int32),
            text=text,
            pool=torch.zeros(batch, pool_rows, 1 + MATCH_TOKENS + chain, dtype=torch.int32),
            state=state,
            stop_tokens=stop,
            block_size=block_size,
            blocks=blocks,
            candidates=candidates,
            spawn_ratio=spawn_ratio,
        )
        self.lay_out()
        return self

    def to(self, device: torch.device | str) -> DecodeState:
        """The same state with its tensors on ``device``; tensors that are there already are shared."""
        tensors: dict[str, Any] = {
            f.name: t.to(device) for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)

    def narrowed(self) -> DecodeState:
        """The same state with ``blocks * block_size`` slots for main chains, all that decode steps use.

        For a state whose prompts have been taken in; wide chains are for prompts. Tensors are shared but for
        ``tokens``, ``segments`` and ``cu_seqlens_q``. (CPU kernels skip empty slots, GPU kernels evaluate them.)
        """
        chain, drafts = self.blocks * self.block_size, self.candidates * (self.block_size - 1)
        wide = self.rows_per_sequence - drafts
        tokens = self.tokens.view(self.batch, -1)
        segments = self.segments.clone().view(self.batch, -1, 4)
        starts = _segment_starts(self.batch, chain, self.candidates, self.block_size)
        segments[:, :, 0] = starts.to(segments.device)
        segments[:, 0, 1].clamp_(max=chain)
        bounds = torch.arange(self.batch + 1, dtype=torch.int32) * (chain + drafts)
        return replace(
            self,
            tokens=torch.cat([tokens[:, :chain], tokens[:, wide:]], dim=1).view(-1),
            segments=segments.view(-1, 4),
            cu_seqlens_q=bounds.to(self.tokens.device),
        )

    def lay_out(self) -> None:
        """Lay out a first step, from the tokens that the cache holds already: the next piece of every prompt."""
        nothing = torch.full_like(self.tokens, -1)
        none_accepted = torch.zeros_like(self.cache_seqlens)
        self.redraft(nothing, nothing, none_accepted, none_accepted.bool())

    def redraft(self, predictions: Tensor, accepted_rows: Tensor, num_accepted: Tensor, fixed_point: Tensor) -> None:
        """Call :func:`jacobi_kernels.ops.redraft` on this state with the results of ``argmax_verify``."""
        ops.redraft(
            predictions,
            accepted_rows,
            num_accepted,
            fixed_point,
            self.tokens,
            self.segments,
            self.cu_seqlens_q,
            self.cu_segments,
            self.cache_seqlens,
            self.text,
            self.pool,
            self.state,
            self.stop_tokens,
            block_size=self.block_size,
            blocks=self.blocks,
            candidates=self.candidates,
            spawn_ratio=self.spawn_ratio,
        )

    @property
    def batch(self) -> int:
        """B."""
        return self.state.shape[0]

    @property
    def rows_per_sequence(self) -> int:
        """Query slots of one sequence."""
        return self.tokens.shape[0] // self.batch

    @property
    def cache_capacity(self) -> int:
        """Rows per sequence that the KV cache needs: the longest text and one step's query slots."""
        return self.text.shape[1] + self.rows_per_sequence

    @property
    def layout(self) -> BlockLayout:
        """The block layout of the next step; its tensors are this state's own."""
        return BlockLayout(self.cu_seqlens_q, self.segments, self.cu_segments)

    @property
    def num_final(self) -> Tensor:
        """``[B]`` int32 copy of NUM_FINAL, as ``argmax_verify`` takes it."""
        return self.state[:, StateColumn.NUM_FINAL].contiguous()

    @property
    def done(self) -> list[int]:
        """DONE of every sequence: 0 running, 1 stop token, 2 length."""
        return cast("list[int]", self.state[:, StateColumn.DONE].tolist())

    @property
    def running(self) -> bool:
        """Whether any sequence is not done."""
        return not all(self.done)

    def emitted(self, b: int) -> list[int]:
        """Tokens that the last step emitted for sequence ``b``."""
        length = int(self.state[b, StateColumn.TEXT_LEN])
        return cast("list[int]", self.text[b, length - int(self.state[b, StateColumn.EMITTED]) : length].tolist())

    def generated(self, b: int) -> list[int]:
        """All tokens emitted for sequence ``b`` so far."""
        row = self.state[b]
        return cast("list[int]", self.text[b, row[StateColumn.PROMPT_LEN] : row[StateColumn.TEXT_LEN]].tolist())


def _segment_starts(batch: int, chain_capacity: int, candidates: int, block_size: int) -> Tensor:
    """``[B, 1 + C]`` int32: first query row of every main chain and candidate."""
    rows = chain_capacity + candidates * (block_size - 1)
    starts = torch.arange(batch, dtype=torch.int32)[:, None].repeat(1, 1 + candidates) * rows
    starts[:, 1:] += chain_capacity + torch.arange(candidates, dtype=torch.int32) * (block_size - 1)
    return starts


def _check_tokens(name: str, tokens: Sequence[int]) -> None:
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high > MAX_TOKEN:
        raise ValueError(f"{name} must hold token ids within 0..2**31 - 1, got {low if low < 0 else high}")


def _per_sequence(name: str, value: T | Sequence[T], batch: int) -> list[T]:
    if not isinstance(value, Sequence):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(f"{name} must be one value or one per sequence ({batch}), got {len(value)}")
    return list(value)


def _stop_lists(stop_tokens: Sequence[int] | Sequence[Sequence[int]], batch: int) -> list[list[int]]:
    if all(isinstance(token, Integral) for token in stop_tokens):
        lists = [list(cast("Sequence[int]", stop_tokens))] * batch
    else:
        lists = [list(row) for row in cast("Sequence[Sequence[int]]", stop_tokens)]
        if len(lists) != batch:
            raise ValueError(
                f"stop_tokens must be token ids, or one list per sequence ({batch}), got {len(lists)} lists"
            )
    for b, row in enumerate(lists):
        _check_tokens(f"stop_tokens[{b}]", row)
    return lists
