"""A causal language model from transformers in training: its attention is ours, its forward returns losses.

The loss is computed inside ``forward``, so the model works inside wrappers that gather parameters around a forward
(DDP, FSDP2), tied embeddings included, and the logits of all rows never exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi_decoding.adapter import base_model, set_attention
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.head import HeadTransform, match_transform
from jacobi_decoding.packed_weights import is_linear
from jacobi_decoding.position_limit import position_limit
from jacobi_decoding.refusals import refuse_unsupported
from jacobi_kernels.layout import BlockLayout
from jacobi_training import attention
from jacobi_training.fit_config import PRECISIONS
from jacobi_training.losses import Objective, loss_sums

if TYPE_CHECKING:
    from jacobi_training.batches import Batch

PROBE_TOKENS = 8
# Largest root-mean-square difference between our logits and the model's own, as a share of their root mean square.
TOLERANCE = 1e-3


class TrainingModel(nn.Module):
    """See the module's docstring.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        With float32 weights, on one device; trained in place. With LoRA adapters only they are trained.
    objective : Objective
        The weights and kinds of the losses.
    precision : str
        ``bfloat16`` runs the linear layers under autocast; weights, attention and losses stay float32.
    gradient_checkpointing : bool
        Keep only each layer's input and compute the layer again in the backward pass.
    compile : bool
        Compile each decoder layer.

    Raises UnsupportedModelError, one line, for a model whose own logits are not reproduced, and for dropout.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        *,
        precision: str = "float32",
        gradient_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(PRECISIONS)}, got {precision!r}")
        base = base_model(model)
        _refuse(base)
        self.model = model
        self.objective = objective
        self.autocast = precision == "bfloat16"
        self.limit = position_limit(base.get_decoder())
        self.vocabulary = base.get_input_embeddings().num_embeddings
        self._attention_before = base.get_decoder().config._attn_implementation
        self.transform = _probe(base)
        self.train()
        if gradient_checkpointing:
            if not base.supports_gradient_checkpointing:
                raise UnsupportedModelError(
                    type(base).__name__, "it has no gradient checkpointing", "train without --gradient-checkpointing"
                )
            # The older name gives a warning where the newer one exists.
            enable = getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        if compile:
            for layer in self.layers():
                layer.compile(dynamic=True)

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model, below peft's wrapper."""
        return base_model(self.model)

    def layers(self) -> list[nn.Module]:
        """The decoder layers, as the model itself names what must not be split."""
        names = set(self.base._no_split_modules or ())
        return [module for module in self.base.get_decoder().modules() if type(module).__name__ in names]

    def release(self) -> None:
        """Give the model back its own attention; it keeps what it learned."""
        self.base.get_decoder().set_attn_implementation(self._attention_before)

    def forward(self, batch: Batch) -> Tensor:
        """[2] float32: the sums of the batch's AR terms and consistency terms (see :mod:`jacobi_training.losses`)."""
        if (most := int(batch.tokens.max())) >= self.vocabulary:
            raise ValueError(
                f"a sample has token {most}, the model's ids end at {self.vocabulary - 1}; "
                "pack trajectories of this model, or of one with its tokenizer"
            )
        if self.limit.tokens is not None:
            self.limit.check(int(batch.positions.max()) + 1)
        base = self.base
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = _decode(
                base, batch.tokens, batch.positions, (batch.cu_seqlens_q, batch.segments, batch.cu_segments)
            )
        head: Any = base.get_output_embeddings()
        hidden = hidden.to(head.weight.dtype)
        return loss_sums(hidden, head.weight, head.bias, self.transform, batch, self.objective)


def with_lora(model: PreTrainedModel, rank: int, alpha: float, modules: Sequence[str] = ()) -> Any:
    """``model`` with LoRA adapters on the named modules, or on all linear layers but the head; they alone train."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ImportError("peft is not installed; run `pip install peft` or train without LoRA") from None
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(modules) or "all-linear")
    return get_peft_model(model, config)


def _decode(base: Any, tokens: Tensor, positions: Tensor, layout: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Hidden states [R, E] of the rows of a layout: tokens and positions [R] int64."""
    # With a mask of ones transformers does not take positions that start again for packed sequences of its own kind.
    ones = torch.ones_like(tokens)[None]
    with attention.attending(*layout):
        out = base.get_decoder()(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=ones,
            use_cache=False,
            return_dict=True,
        )
    return out.last_hidden_state[0]


def _refuse(base: PreTrainedModel) -> None:
    name = type(base).__name__
    try:
        refuse_unsupported(base)
    except UnsupportedModelError as error:
        remedy = attention.REMEDY if "generate" in error.remedy else error.remedy
        raise UnsupportedModelError(error.what, error.why, remedy) from None
    if any(p.dtype != torch.float32 for p in base.parameters() if p.is_floating_point()):
        raise UnsupportedModelError(name, "its weights are not all float32", "load it with dtype=torch.float32")
    head = base.get_output_embeddings()
    if not (is_linear(head) and isinstance(head, nn.Linear)):
        raise UnsupportedModelError(
            name, f"its head is a {type(head).__name__}, not a linear layer", "leave the head out of the LoRA modules"
        )
    for path, module in base.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            why = f"dropout of {module.p} would be active in training"
            raise UnsupportedModelError(path, why, "set the model's dropout probabilities to 0 in config.json")


@torch.no_grad()
def _probe(base: Any) -> HeadTransform:
    """Switch the model to our attention; check a few logits against its own and learn what it does to them."""
    vocabulary = base.config.get_text_config(decoder=True).vocab_size
    tokens = torch.tensor([(7919 * (i + 1)) % vocabulary for i in range(PROBE_TOKENS)], device=base.device)
    own = base.eval()(input_ids=tokens[None], use_cache=False, return_dict=True).logits[0]
    attention.register()
    set_attention(base.get_decoder(), attention.NAME, attention.REMEDY)
    layout = BlockLayout.chain([PROBE_TOKENS]).to(base.device)
    base.train()  # so that dropout inside attention is seen
    positions = torch.arange(PROBE_TOKENS, device=base.device)
    hidden = _decode(base, tokens, positions, (layout.cu_seqlens_q, layout.segments, layout.cu_segments))
    head = base.get_output_embeddings()
    try:
        return match_transform(base, nn.functional.linear(hidden, head.weight, head.bias), own, TOLERANCE)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(error.what, error.why, attention.REMEDY) from None
