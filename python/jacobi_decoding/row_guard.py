"""Refuses torch functions whose row results depend on the number of rows.

Linear layers and activation modules of a wrapped model are ours. What is left is torch's: sums along a row,
element-wise arithmetic, rotary embeddings. docs/notes/row_invariance.md has what was measured: most are row
invariant, the ones below are not. The probe runs the model's forward under this guard, so a product or a sigmoid that
the modelling code calls as a function is found by name, whether or not the self-check's few rows happen to agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from jacobi_decoding.errors import UnsupportedModelError

# torch splits the sum of a single row over threads from this many elements on.
SPLIT_ROW = 32768

# fmt: off
_PRODUCTS = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv",
    "einsum", "bilinear", "tensordot", "inner", "dot", "chain_matmul", "multi_dot", "_grouped_mm", "grouped_mm",
    "_scaled_mm", "scaled_mm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "scaled_dot_product_attention",
    "multi_head_attention_forward"
})
_ELEMENTWISE = frozenset({
    "silu", "silu_", "gelu", "sigmoid", "sigmoid_", "softplus", "mish", "mish_", "glu", "logsigmoid", "elu", "elu_",
    "selu", "selu_", "celu", "celu_", "expit", "logit", "log_sigmoid", "hardswish"
})
_SUMS = frozenset({
    "sum", "mean", "nansum", "nanmean", "logsumexp", "var", "std", "var_mean", "std_mean", "norm"
})
_RANDOM = frozenset({"dropout", "alpha_dropout", "feature_alpha_dropout", "rand", "rand_like", "randn", "bernoulli"})
# fmt: on


class RowGuard(TorchFunctionMode):
    """While active, raises UnsupportedModelError at the first torch function that is not row invariant."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _PRODUCTS and not _outer_product(name, args):
            raise _refusal(name, "a matrix product outside nn.Linear and Conv1D")
        if name in _ELEMENTWISE:
            raise _refusal(name, "an activation called as a function, not as a module")
        if name == "rsqrt" and _first(args).dtype == torch.bfloat16:
            raise _refusal(name, "a reciprocal square root in bfloat16")
        if name in _SUMS and _first(args).dim() and _first(args).shape[-1] >= SPLIT_ROW:
            raise _refusal(name, f"a sum over {SPLIT_ROW} or more elements")
        kwargs = kwargs or {}
        if name in _RANDOM and kwargs.get("training", True) and _argument(args, kwargs, 1, "p", 1.0):
            raise UnsupportedModelError(f"torch's {name}", "the model's forward is random", "call model.eval() first")
        return function(*args, **kwargs)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[index] if len(args) > index else default)


def _first(args: tuple[Any, ...]) -> Tensor:
    return args[0] if args and isinstance(args[0], Tensor) else torch.empty(0)


def _outer_product(name: str, args: tuple[Any, ...]) -> bool:
    """A product over one element rounds once, however it is computed (rotary angles before transformers 5.18)."""
    return name in ("matmul", "__matmul__", "bmm", "mm") and _first(args).dim() > 0 and _first(args).shape[-1] == 1


def _refusal(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model's forward calls torch's {name}",
        f"{what}: its result for a token depends on how many tokens are evaluated together",
        "decode this model with model.generate",
    )
