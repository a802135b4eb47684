"""Measures which torch row operations give a row the same bits whatever other rows are evaluated with it.

``python -m tests.decoding.row_ops`` prints the table of docs/notes/row_invariance.md.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTHS = (1, 5, 16, 17, 33, 64, 96, 127, 128, 576, 577, 1365, 1536, 4096)
THREADS = (1, 2, 3, 5)
ROWS = (1, 2, 3, 7, 8, 17, 64)
TOTAL = 65


def _rms_norm(x: Tensor) -> Tensor:
    """As transformers' modelling code writes it."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _layer_norm(x: Tensor) -> Tensor:
    """As Cohere's modelling code writes it."""
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


# What a wrapped model may still leave to torch.
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over a row (float32)": lambda x: x.float().mean(-1, keepdim=True),
    "rsqrt (float32)": lambda x: torch.rsqrt(x.float().abs() + 0.1),
    "RMS norm, written out": _rms_norm,
    "layer norm, written out": _layer_norm,
    "F.rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "F.layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "norm of a row": lambda x: x.norm(dim=-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "cos": torch.cos,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "add, mul, div": lambda x: (x + 0.3) * x / 3.7,
    "sqrt, reciprocal": lambda x: 1 / x.abs().sqrt().clamp(min=0.1),
    "rotary frequencies, outer product": lambda x: x[..., :1] @ torch.ones(1, 64, dtype=x.dtype),
}

# What is ours instead, or refused.
REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "F.linear": lambda x: F.linear(x, _weight(x)),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "mish": F.mish,
    "rsqrt in x's dtype": lambda x: torch.rsqrt(x.abs() + 0.1),
}

_weights: dict[tuple[int, torch.dtype], Tensor] = {}


def _weight(x: Tensor) -> Tensor:
    key = (x.shape[-1], x.dtype)
    if key not in _weights:
        _weights[key] = torch.randn(48, x.shape[-1], generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return _weights[key]


def differing(op: Callable[[Tensor], Tensor], dtype: torch.dtype, width: int) -> list[str]:
    """Where a row's bits differ from those of the row alone with one thread: "rows R threads N layout"."""
    generator = torch.Generator().manual_seed(width)
    wide = (torch.randn(1, TOTAL, width + 3, generator=generator) * 3).to(dtype)
    x = wide[..., 3:].contiguous()
    before = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(1)
        alone = torch.cat([op(x[:, i : i + 1].clone()) for i in range(TOTAL)], 1)
        for threads in THREADS:
            torch.set_num_threads(threads)
            for rows in ROWS:
                for first in (0, 1):
                    part = slice(first, first + rows)
                    # Dense rows, rows inside wider ones (a slice of fused projections), and heads moved in front.
                    for layout, y in (
                        ("dense", op(x[:, part].clone())),
                        ("sliced", op(wide[:, part, 3:])),
                        ("heads", op(x[:, part].clone()[:, :, None].transpose(1, 2)).transpose(1, 2)[:, :, 0]),
                    ):
                        if not torch.equal(y, alone[:, part]):
                            found.append(f"rows {rows} threads {threads} {layout}")
    finally:
        torch.set_num_threads(before)
    return found


def main() -> None:
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {platform.processor()}\n")
    print("| operation | float32 | bfloat16 |\n| --- | --- | --- |")
    for name, op in [*KEPT.items(), *REPLACED.items()]:
        cells = []
        for dtype in (torch.float32, torch.bfloat16):
            bad = [w for w in WIDTHS if differing(op, dtype, w)]
            cells.append("invariant" if not bad else f"differs at {len(bad)} of {len(WIDTHS)} widths")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
