"""``model.generate(custom_generate=jacobi_generate)``: what it is handed is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from jacobi_decoding import JacobiDecoder, jacobi_generate
from tests.decoding.helpers import FAMILIES, build


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> Any:
    model_class, config_class, config = FAMILIES[request.param]
    return build(model_class, config_class, **config)


IDS = torch.tensor([[5, 17, 230, 4, 99, 17, 230]])
BATCH = torch.tensor([[0, 0, 5, 17], [7, 8, 9, 10]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def test_greedy(model: Any) -> None:
    wanted = model.generate(IDS, max_new_tokens=30, do_sample=False)
    found = model.generate(
        IDS, max_new_tokens=30, do_sample=False, custom_generate=jacobi_generate, block_size=8, candidates=2
    )
    assert torch.equal(found, wanted)


def test_a_padded_batch_with_stop_tokens(model: Any) -> None:
    options: dict[str, Any] = {
        "attention_mask": MASK,
        "max_new_tokens": 30,
        "do_sample": False,
        "eos_token_id": [11, 52, 200, 31, 77],
        "pad_token_id": 0,
    }
    wanted = model.generate(BATCH, **options)
    assert torch.equal(model.generate(BATCH, custom_generate=jacobi_generate, **options), wanted)


def test_lengths(model: Any) -> None:
    wanted = model.generate(IDS, max_length=20, do_sample=False)
    assert torch.equal(model.generate(IDS, max_length=20, do_sample=False, custom_generate=jacobi_generate), wanted)


def test_sampling_is_the_decoder_s(model: Any) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.8}
    found = model.generate(IDS, max_new_tokens=25, custom_generate=jacobi_generate, seed=4, **options)
    wanted = JacobiDecoder(model).generate(
        IDS, max_new_tokens=25, seed=4, block_size=1, blocks=1, candidates=0, **options
    )
    assert torch.equal(found, wanted)
    other = model.generate(IDS, max_new_tokens=25, custom_generate=jacobi_generate, seed=5, **options)
    assert not torch.equal(found, other)


def test_several_samples_of_a_prompt(model: Any) -> None:
    found = model.generate(
        IDS, max_new_tokens=12, do_sample=True, num_return_sequences=3, seed=1, custom_generate=jacobi_generate
    )
    assert found.shape == (3, IDS.shape[1] + 12)
    assert len({tuple(row.tolist()) for row in found}) == 3


class StopAt(StoppingCriteria):
    """Stops when the text holds `count` new tokens; as a criterion of the user's own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, dtype=torch.bool)


def test_position_ids(model: Any) -> None:
    options: dict[str, Any] = {
        "attention_mask": MASK,
        "max_new_tokens": 9,
        "do_sample": False,
        "pad_token_id": 0,
        "custom_generate": jacobi_generate,
    }
    wanted = model.generate(BATCH, **options)
    places = (MASK.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(model.generate(BATCH, position_ids=places, **options), wanted)
    for other in (places + 1, torch.arange(4)[None]):
        with pytest.raises(ValueError, match=r"position_ids must count .* leave position_ids out"):
            model.generate(BATCH, position_ids=other, **options)
    found = model.generate(IDS, position_ids=torch.arange(7)[None], max_new_tokens=3, custom_generate=jacobi_generate)
    assert found.shape == (1, 10)


@pytest.mark.parametrize("new", [1, 5, 13])
def test_a_stopping_criterion(model: Any, new: int) -> None:
    criteria = StoppingCriteriaList([StopAt(IDS.shape[1] + new)])
    wanted = model.generate(IDS, max_new_tokens=30, do_sample=False, stopping_criteria=criteria)
    found = model.generate(
        IDS, max_new_tokens=30, do_sample=False, stopping_criteria=criteria, custom_generate=jacobi_generate
    )
    assert torch.equal(found, wanted)
    assert found.shape[1] == IDS.shape[1] + new


def test_stop_strings(smollm2: Any) -> None:
    """As a criterion: generate keeps its tokenizer argument, which stop_strings needs, from custom functions."""
    ids = smollm2.tokenizer("A list of colours: red, green, blue,", return_tensors="pt")["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    free = smollm2.model.generate(ids, **options)
    word = smollm2.tokenizer.decode(free[0, ids.shape[1] + 5])
    criteria = StoppingCriteriaList([StopStringCriteria(smollm2.tokenizer, [word])])
    wanted = smollm2.model.generate(ids, stopping_criteria=criteria, **options)
    found = smollm2.model.generate(ids, stopping_criteria=criteria, custom_generate=jacobi_generate, **options)
    assert torch.equal(found, wanted)
    assert found.shape[1] < free.shape[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"min_new_tokens": 4, "eos_token_id": 5}, "MinLengthLogitsProcessor"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper"),
    ],
)
def test_refused_by_name(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.generate(IDS, max_new_tokens=4, custom_generate=jacobi_generate, **{"do_sample": False, **options})


def test_processors_and_criteria_of_the_user_s_own(model: Any) -> None:
    class Bias:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 1

    with pytest.raises(ValueError, match="Bias"):
        model.generate(
            IDS, max_new_tokens=4, logits_processor=LogitsProcessorList([Bias()]), custom_generate=jacobi_generate
        )
    with pytest.raises(ValueError, match="StopAt"):
        model.generate(
            BATCH,
            attention_mask=MASK,
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([StopAt(6)]),
            custom_generate=jacobi_generate,
        )
