"""Batches as transformers has them (padded rows of token ids) to prompts and limits per row, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from jacobi_kernels.checks import whole_number
from jacobi_kernels.state import MAX_TOKEN, DecodeState, StateColumn


def unpadded_prompts(input_ids: Tensor, attention_mask: Tensor | None, pad_token_id: int | None) -> list[list[int]]:
    """The real tokens of every row; padding may stand on either side but not in the middle.

    input_ids: [batch, prompt] integers. attention_mask: [batch, prompt], or None: as transformers does, pad tokens are
    padding when they stand at a row's start. Raises ValueError.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be an integer tensor of shape [batch, prompt], got {shape}")
    if input_ids.device.type not in ("cpu", "cuda"):
        raise ValueError(f"input_ids must be on the CPU or a GPU, got {input_ids.device}; pass input_ids.cpu()")
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must hold at least one token per row, got shape {list(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        if pad_token_id is not None:  # leading pad tokens, unless the row is nothing else
            leading = (input_ids == pad_token_id).cumprod(dim=1).bool()
            attention_mask &= ~leading | leading.all(dim=1, keepdim=True)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask must be a tensor of input_ids' shape {list(input_ids.shape)}, got {shape}")
    prompts = []
    for b, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)):
        prompt = [token for token, real in zip(ids, mask, strict=True) if real]
        if not prompt:
            raise ValueError(f"row {b} of attention_mask must mark at least one token")
        first = mask.index(True)
        if not all(mask[first : first + len(prompt)]):
            raise ValueError(f"row {b} of attention_mask must mark one run of tokens, padding only before or behind it")
        prompts.append(prompt)
    return prompts


def check_vocabulary(input_ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a token id that the model does not have."""
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids must be token ids within 0..{vocab_size - 1}, got {low if low < 0 else high}")


def checked_limits(max_new_tokens: int | Sequence[int]) -> int | list[int]:
    """max_new_tokens, at least 1 each; ValueError otherwise."""
    if isinstance(max_new_tokens, (list, tuple)):
        return [whole_number(f"max_new_tokens[{b}]", limit, 1, MAX_TOKEN) for b, limit in enumerate(max_new_tokens)]
    return whole_number("max_new_tokens", max_new_tokens, 1, MAX_TOKEN, others=", or a list with one per row")


def stop_lists(eos_token_id: Any) -> list[int] | list[list[int]]:
    """eos_token_id as DecodeState takes it: token ids for all rows, or a list per row; ValueError otherwise."""
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.tolist()
    if eos_token_id is None:
        return []
    if isinstance(eos_token_id, (str, bytes)) or not isinstance(eos_token_id, Iterable):
        return [_stop_token(eos_token_id)]
    rows = list(eos_token_id)
    if rows and all(isinstance(row, (list, tuple)) for row in rows):
        return [[_stop_token(token) for token in row] for row in rows]
    return [_stop_token(token) for token in rows]


def _stop_token(token: Any) -> int:
    return whole_number("eos_token_id", token, 0, MAX_TOKEN, others=", a list of them, or a list of lists, one per row")


def padded_sequences(input_ids: Tensor, state: DecodeState, pad_token_id: int | None) -> Tensor:
    """input_ids with every row's new tokens behind it, then padding: LongTensor [batch, prompt + most new tokens]."""
    rows = [state.generated(b) for b in range(state.batch)]
    longest = max(map(len, rows))
    if pad_token_id is None and any(len(row) < longest for row in rows):
        raise ValueError("pad_token_id must be given: rows end at different lengths and the model has no pad token")
    new = torch.full((len(rows), longest), pad_token_id or 0, dtype=torch.int64)
    for b, row in enumerate(rows):
        new[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return torch.cat([input_ids.long(), new.to(input_ids.device)], dim=1)


def end_row(state: DecodeState, b: int, text_len: int) -> None:
    """End row ``b`` after ``text_len`` tokens of text; what it emitted beyond is dropped."""
    row = state.state[b]
    row[StateColumn.EMITTED] -= int(row[StateColumn.TEXT_LEN]) - text_len
    row[StateColumn.TEXT_LEN] = text_len
    row[StateColumn.DONE] = 1
    state.cache_seqlens[b].clamp_(max=text_len)
    state.segments.view(state.batch, -1, 4)[b, :, 1] = 0
    state.segments.view(state.batch, -1, 4)[b, :, 3] = 0
