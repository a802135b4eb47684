"""A model in training against its own eager attention with a mask of all pairs, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from jacobi_decoding.errors import UnsupportedModelError
from jacobi_training.batches import make_batch
from jacobi_training.losses import Objective
from jacobi_training.model import TrainingModel, with_lora
from tests.decoding.helpers import FAMILIES, build, family
from tests.training.fit_helpers import reference_losses, samples, tiny


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    """Models this small only lose time to a second thread."""
    torch_threads(1)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_against_reference(
    model: Any, records: list[Any], objective: Objective, tolerance: float = 2e-5, **options: Any
) -> None:
    """Losses and every gradient of ``model`` (float32, eager) equal those of its float64 copy."""
    exact = copy.deepcopy(model).double()
    batch = make_batch(records)
    want = reference_losses(exact, batch, objective)
    objective.total(want, batch.num_ar_rows, batch.num_consistency_rows).backward()
    got = TrainingModel(model, objective, **options)(batch)
    objective.total(got, batch.num_ar_rows, batch.num_consistency_rows).backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0)
    found, expected = gradients(model), gradients(exact)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].double(), gradient, rtol=0, atol=tolerance * float(gradient.abs().max() + 1e-3), msg=name
        )


@pytest.mark.parametrize("context", ["window", "all", "clean"])
@pytest.mark.parametrize("local", [False, True])
def test_losses_and_gradients(context: str, local: bool) -> None:
    check_against_reference(tiny(), samples(3, context=context, local=local), Objective(0.7, 1.3))


@pytest.mark.parametrize("objective", [Objective(consistency="hard"), Objective(temperature=1.7), Objective(0.1, 1)])
def test_objectives(objective: Objective) -> None:
    check_against_reference(tiny(), samples(2), objective)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """Windows, soft caps, scales of logits, biases: what the family's own forward does is what is trained."""
    check_against_reference(family(name), samples(2, size=8), Objective(), tolerance=1e-4)


def test_gradient_checkpointing_and_compiled_layers_change_nothing() -> None:
    batch = make_batch(samples(2))
    found = []
    for options in ({}, {"gradient_checkpointing": True}, {"compile": True}):
        model = tiny()
        training = TrainingModel(model, Objective(), **options)
        saved = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sums = training(batch)
        sums.sum().backward()
        found.append((sums, gradients(model), saved))
    for sums, grads, _ in found[1:]:
        torch.testing.assert_close(sums, found[0][0], rtol=1e-5, atol=0)
        for name, gradient in found[0][1].items():
            torch.testing.assert_close(grads[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=name)
    assert found[1][2] < found[0][2] / 2


def test_bfloat16_is_near_float32_and_another() -> None:
    batch = make_batch(samples(3))
    with torch.no_grad():
        plain = TrainingModel(tiny(), Objective())(batch)
        low = TrainingModel(tiny(), Objective(), precision="bfloat16")(batch)
    assert not torch.equal(plain, low)
    torch.testing.assert_close(low, plain, rtol=3e-2, atol=0)


def test_lora_trains_the_adapters_alone() -> None:
    model = tiny()
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapted = with_lora(model, 4, 8.0)
    training = TrainingModel(adapted, Objective())
    training(make_batch(samples(2))).sum().backward()
    moved = [name for name, p in training.named_parameters() if p.grad is not None]
    assert moved
    assert all("lora_" in name for name in moved)
    assert not any("lm_head" in name for name, _ in training.named_parameters() if "lora_" in name)
    named = with_lora(tiny(), 4, 8.0, ["q_proj"])
    assert {n.split(".")[-4] for n, p in named.named_parameters() if p.requires_grad} == {"q_proj"}
    for name, p in adapted.base_model.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(p, before[name.replace(".base_layer", "")])


def test_a_released_model_has_its_own_attention_again() -> None:
    model = tiny()
    ids = torch.arange(9)[None]
    before = model(input_ids=ids).logits
    training = TrainingModel(model, Objective())
    with pytest.raises(RuntimeError, match="only works inside"):
        model(input_ids=ids)
    training.release()
    assert torch.equal(model.eval()(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"attention_dropout": 0.1}, "attention dropout.*attention_dropout to 0"),
        ({"_class": ("GPT2LMHeadModel", "GPT2Config"), "n_head": 2, "n_embd": 32}, "dropout of 0.1.*config.json"),
    ],
)
def test_dropout_is_refused(config: dict[str, Any], match: str) -> None:
    classes = config.pop("_class", ("LlamaForCausalLM", "LlamaConfig"))
    with pytest.raises(UnsupportedModelError, match=match) as error:
        TrainingModel(build(*classes, num_hidden_layers=1, **config), Objective())
    assert "\n" not in str(error.value)


def test_other_refusals() -> None:
    with pytest.raises(UnsupportedModelError, match="not all float32"):
        TrainingModel(tiny().bfloat16(), Objective())
    with pytest.raises(UnsupportedModelError, match="leave the head out"):
        TrainingModel(with_lora(tiny(), 2, 4.0, ["lm_head"]), Objective())
    with pytest.raises(ValueError, match="precision must be float32 or bfloat16, got 'int8'"):
        TrainingModel(tiny(), Objective(), precision="int8")
