"""A decode step's milliseconds by phase, by its own clock: wrong guesses behind cached tokens."""

from __future__ import annotations

import argparse

import torch

from bench.decode_setup import DecodeSetup
from jacobi_decoding import load_model
from jacobi_decoding.profiling import PHASES
from jacobi_kernels.grouped import FORMATS

WARMUP, STEPS = 4, 20


def phases(setup: DecodeSetup, steps: int = STEPS) -> dict[str, float]:
    """Phase -> mean milliseconds of a step."""
    for _ in range(WARMUP):
        setup.restore()
        setup.step()
    torch.ops.jacobi._phase_seconds.default()  # reset
    for _ in range(steps):
        setup.restore()
        setup.step()
    seconds = torch.ops.jacobi._phase_seconds.default().tolist()
    return {name: 1e3 * total / steps for name, total in zip(PHASES, seconds, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="what `jacobi generate` takes (default: the default model)")
    parser.add_argument("--dtype", nargs="+", choices=FORMATS, default=["float32", "int8"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--cached", type=int, default=512)
    args = parser.parse_args()
    for dtype in args.dtype:
        weights = load_model(args.model, dtype, packed=True).model.weights
        for tokens in args.tokens:
            found = phases(DecodeSetup(weights, rows=tokens, cached=args.cached))
            print(f"{dtype} {tokens:4} tokens: " + ", ".join(f"{name} {ms:.2f}" for name, ms in found.items()))


if __name__ == "__main__":
    main()
