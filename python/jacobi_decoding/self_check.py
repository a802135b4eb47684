"""The check that ends wrapping: our forward against the model's own, and against itself one token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jacobi_decoding.devices import runs_triton
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.head import TOLERANCE, HeadTransform, fit_head
from jacobi_decoding.row_guard import RowGuard
from jacobi_kernels.layout import BlockLayout

if TYPE_CHECKING:
    from jacobi_decoding.adapter import ModelAdapter

CHECK_TOKENS = 8
MORE_GPU_TOKENS = 64  # there torch chooses how to sum by the number of rows, too


def run_self_check(adapter: ModelAdapter) -> HeadTransform:
    """Probe a model, compare logits and rows, and return what its head does to logits.

    Raises UnsupportedModelError when the model's logits are not reproduced, or when the hidden states of 8 tokens
    evaluated at once differ in a bit from those evaluated one at a time.
    """
    model = adapter.model
    tokens = _check_tokens(model)
    own_logits = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
    with adapter.wrapped_unchecked():
        probed = _probe(adapter, tokens)
        adapter.check_slots()
        head = fit_head(model, adapter.packed, probed, own_logits)
        count = tokens.shape[1]
        at_once = _forward(adapter, tokens, [count])
        one_by_one = _forward(adapter, tokens, [1] * CHECK_TOKENS + [count - CHECK_TOKENS] * (count > CHECK_TOKENS))
    # The probe attended by the op without a cache, whose sums run in the same order on CPUs only.
    same = _close(probed, at_once) if runs_triton(adapter.device) else torch.equal(probed, at_once)
    for equal, how in ((same, "with the cache"), (torch.equal(at_once, one_by_one), "one token at a time")):
        if not equal:
            raise UnsupportedModelError(
                type(model).__name__,
                f"its hidden states of {count} tokens evaluated {how} differ from those evaluated at once",
                "decode with model.generate",
            )
    return head


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two ways of computing hidden states agree but for rounding."""
    error = (a.float() - b.float()).square().mean().sqrt()
    return bool(error <= TOLERANCE[a.dtype] * a.float().square().mean().sqrt())


def _probe(adapter: ModelAdapter, tokens: Tensor) -> Tensor:
    """Hidden states of ``tokens`` [1, T] without a cache; on the way the attention layers become known."""
    try:
        layout = BlockLayout.chain([tokens.shape[1]]).to(tokens.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        with adapter.hook.probing(layout), RowGuard():
            return adapter.call_decoder(tokens, positions, adapter.empty_cache())
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            type(adapter.model).__name__,
            f"its forward does not run on our attention and cache ({type(error).__name__}: {_line(error)})",
            "decode with model.generate",
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check_tokens(model: Any) -> Tensor:
    """[1, 8] (more on a GPU) token ids spread over the vocabulary, the same in every run."""
    count = CHECK_TOKENS + (MORE_GPU_TOKENS if model.device.type == "cuda" else 0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.tensor([[(7919 * (i + 1)) % vocabulary for i in range(count)]], device=model.device)


def _forward(adapter: ModelAdapter, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Hidden states of ``tokens`` [1, T] evaluated in consecutive blocks of ``lengths`` tokens."""
    cache = adapter.cache_for_slots(1, tokens.shape[1])
    committed = 0
    parts = []
    for length in lengths:
        cache.begin(BlockLayout.chain([length]), torch.tensor([committed], dtype=torch.int32))
        parts.append(adapter.forward(tokens[0, committed : committed + length], cache))
        committed += length
    return torch.cat(parts)
