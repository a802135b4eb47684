"""The real model on real prompts: our tokens, for every way to decode, against transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jacobi_decoding import JacobiDecoder

NEW_TOKENS = 32
BLOCKS: dict[str, Any] = {"block_size": 16, "blocks": 2, "candidates": 4}
TIE = 1e-3  # two best logits closer than this are decided by rounding


def prompt_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    message = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded["input_ids"]  # type: ignore[no-any-return]


def gap_at_first_difference(model: Any, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Distance of the two best logits where the two texts part."""
    length = min(ours.shape[1], theirs.shape[1])
    first = int((ours[0, :length] != theirs[0, :length]).nonzero()[0])
    with torch.no_grad():
        best = model(theirs[:, :first]).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def test_greedy_equals_transformers(smollm2: Any, prompts: list[dict[str, Any]], record_property: Any) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    found_attention = model.config._attn_implementation
    decoder = JacobiDecoder(model)
    ties, tokens, forwards = 0, 0, 0
    model.set_attn_implementation("eager")
    try:
        for entry in prompts:
            ids = prompt_ids(tokenizer, entry["prompt"])
            theirs = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
            ours, stats = decoder.generate(ids, max_new_tokens=NEW_TOKENS, return_stats=True, **BLOCKS)
            tokens, forwards = tokens + stats.decode_tokens, forwards + stats.decode_forwards
            if not torch.equal(ours, theirs):
                assert gap_at_first_difference(model, ours, theirs) < TIE, entry["id"]
                ties += 1
    finally:
        model.set_attn_implementation(found_attention)
    print(f"{len(prompts)} prompts, {ties} parted at a tie, {tokens / forwards:.2f} tokens per forward")
    record_property("ties", ties)
    record_property("tokens_per_forward", tokens / forwards)
    assert len(prompts) >= 20
    assert ties <= 2
    assert forwards < tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["step", "modules"])
def test_blocks_change_no_token(smollm2: Any, prompts: list[dict[str, Any]], path: Any, dtype: torch.dtype) -> None:
    model = smollm2.model if dtype == torch.float32 else as_bfloat16(smollm2.model)
    decoder = JacobiDecoder(model, path=path)
    for entry in prompts[::8]:
        ids = prompt_ids(smollm2.tokenizer, entry["prompt"])
        for sampling in ({}, {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": 7}):
            options: dict[str, Any] = {"max_new_tokens": 20, **sampling}
            one_by_one = decoder.generate(ids, block_size=1, blocks=1, candidates=0, **options)
            assert torch.equal(decoder.generate(ids, block_size=8, blocks=2, candidates=3, **options), one_by_one)


def as_bfloat16(model: Any) -> Any:
    copy = type(model)(model.config).to(torch.bfloat16).eval()
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    return copy


def test_a_long_text_crosses_many_tiles(smollm2: Any) -> None:
    """700 tokens of prompt: several prefill chunks and attention tiles, then blocks across their borders."""
    ids = smollm2.tokenizer("The quick brown fox jumps over the lazy dog. " * 70, return_tensors="pt")["input_ids"]
    assert ids.shape[1] > 600
    decoder = JacobiDecoder(smollm2.model)
    one_by_one = decoder.generate(ids, max_new_tokens=48, block_size=1, blocks=1, candidates=0)
    blocked, stats = decoder.generate(ids, max_new_tokens=48, return_stats=True, **BLOCKS)
    assert torch.equal(blocked, one_by_one)
    assert stats.tokens_per_forward > 4, "a repeated sentence is in the pool"
