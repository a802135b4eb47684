"""transformers' own hook: ``model.generate(..., custom_generate=jacobi_generate, block_size=16, ...)``.

What generate hands over is honoured exactly or refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from jacobi_decoding.batching import end_row
from jacobi_decoding.decoder import StepCallback, cached_decoder
from jacobi_kernels.state import DecodeState, StateColumn

# What generate prepares for the model's forward and the decoder makes for itself.
_PREPARED = {"attention_mask", "position_ids", "cache", "past_key_values", "logits_to_keep", "use_cache"}
_WARPERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}
_UNSUPPORTED_CONFIG = {
    "num_beams": (None, 1),
    "return_dict_in_generate": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
}


def jacobi_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    block_size: int | Literal["auto"] = "auto",
    blocks: int = 2,
    candidates: int = 4,
    pool_from_prompt: bool = True,
    seed: int | None = None,
    token_streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Decode by Jacobi steps inside ``model.generate``; returns what it returns, LongTensor [batch, prompt + new].

    block_size, blocks, candidates, pool_from_prompt, seed: as in :meth:`JacobiDecoder.generate`; pass them to generate.
    token_streamer: a streamer; generate keeps its own ``streamer`` argument from custom functions.
    Temperature, top-k and top-p, lengths, stop tokens, stop strings and time limits are honoured, other stopping
    criteria for a batch of one. Beams, other logits processors and further outputs raise a ValueError.
    A cache of the user's own that is handed in empty stays empty: generate prepares an empty one itself, so the two
    cannot be told apart.
    """
    _check_config(generation_config)
    _check_model_kwargs(model_kwargs)
    limit = generation_config.max_length - input_ids.shape[1]
    stops: list[int] = []
    criteria = []
    for criterion in stopping_criteria:
        name = type(criterion).__name__
        if name == "MaxLengthCriteria":
            limit = min(limit, criterion.max_length - input_ids.shape[1])
        elif name == "EosTokenCriteria":
            stops += [int(token) for token in criterion.eos_token_id.flatten()]
        elif name in ("StopStringCriteria", "MaxTimeCriteria") or input_ids.shape[0] == 1:
            criteria.append(criterion)
        else:
            raise ValueError(f"stopping criterion {name} is not supported for a batch; decode row by row")
    if limit < 1:
        raise ValueError(f"max_length {generation_config.max_length} leaves no new token after {input_ids.shape[1]}")
    mask = model_kwargs.get("attention_mask")  # generate drops one that is all ones
    mask = mask if mask is not None else torch.ones_like(input_ids)
    _check_position_ids(model_kwargs.get("position_ids"), mask)
    pad = getattr(generation_config, "_pad_token_tensor", None)
    return cached_decoder(model).generate(
        input_ids,
        mask,
        max_new_tokens=limit,
        block_size=block_size,
        blocks=blocks,
        candidates=candidates,
        pool_from_prompt=pool_from_prompt,
        do_sample=bool(generation_config.do_sample),
        seed=seed,
        eos_token_id=sorted(set(stops)) or None,
        pad_token_id=None if pad is None else int(pad),
        streamer=token_streamer,
        step_callback=_criteria_callback(criteria) if criteria else None,
        **_warpers(logits_processor),
    )


def _warpers(processors: Sequence[Any]) -> dict[str, Any]:
    """Temperature, top_k and top_p of the warpers; ValueError for any other processor or order."""
    options: dict[str, Any] = {}
    for processor in processors:
        name = type(processor).__name__
        if name not in _WARPERS:
            raise ValueError(f"logits processor {name} is not supported by Jacobi decoding; leave its option out")
        options[_WARPERS[name]] = getattr(processor, _WARPERS[name])
    names = [type(processor).__name__ for processor in processors]
    if names != [name for name in _WARPERS if name in names]:
        raise ValueError(f"logits processors must be temperature, top-k, top-p in this order, each once, got {names}")
    return options


def _check_config(config: Any) -> None:
    for option, allowed in _UNSUPPORTED_CONFIG.items():
        value = getattr(config, option, None)
        if value not in allowed:
            raise ValueError(f"generation option {option}={value} is not supported by Jacobi decoding; leave it out")


def _check_model_kwargs(model_kwargs: dict[str, Any]) -> None:
    unknown = {name for name, value in model_kwargs.items() if value is not None} - _PREPARED
    if unknown:
        raise ValueError(f"model argument {sorted(unknown)[0]} is not supported by Jacobi decoding; leave it out")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"{name} must be empty: Jacobi decoding keeps its own cache; pass the whole prompt instead"
            )


def _check_position_ids(position_ids: Tensor | None, mask: Tensor) -> None:
    """ValueError unless every real token has the position that generate prepares: its place among the real tokens."""
    if position_ids is None:
        return
    wanted = mask.long().cumsum(-1) - 1
    fits = position_ids.shape[-1] == mask.shape[-1] and position_ids.shape[-2:-1] in ((1,), mask.shape[:1])
    if not fits or not bool(((position_ids == wanted) | (mask == 0)).all()):
        raise ValueError(
            "position_ids must count each row's tokens from 0, as generate does by itself; leave position_ids out"
        )


def _criteria_callback(criteria: Sequence[Any]) -> StepCallback:
    """Ends a row at the first emitted token after which a criterion is met, as token-by-token decoding would."""

    def check(state: DecodeState) -> None:
        for b in range(state.batch):
            row = state.state[b]
            length, emitted = int(row[StateColumn.TEXT_LEN]), int(row[StateColumn.EMITTED])
            for end in range(length - emitted + 1, length + 1):
                ids = state.text[b : b + 1, :end].long()
                if any(bool(criterion(ids, None).any()) for criterion in criteria):
                    end_row(state, b, end)
                    break

    return check
