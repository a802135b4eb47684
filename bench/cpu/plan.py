"""What is measured: formats, who is compared in each, cases, and the targets beside which results are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORMATS = ("float32", "bfloat16", "int8", "int4")
PEER_FORMATS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "q8_0", "int4": "q4_1"}
MAIN_CONTEXT = 512
MAIN_TOKENS = (1, 16, 64)
CURVE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
CURVE_CONTEXTS = (0, 512, 4096)
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Contender:
    """One of those that are compared; flash_attn: llama.cpp's setting, None for the others."""

    engine: str
    format: str
    flash_attn: bool | None = None

    @property
    def worker(self) -> tuple[str, str]:
        """The process that runs it."""
        return self.engine, self.format

    def __str__(self) -> str:
        return f"{self.engine} {self.format}"


def lineup(weight_format: str) -> list[Contender]:
    """Ours in ``weight_format`` and its peers."""
    peer = PEER_FORMATS[weight_format]
    found = [Contender("jacobi", weight_format), *(Contender("llama.cpp", peer, on) for on in (True, False))]
    return [*found, Contender("transformers", "float32")] if weight_format == "float32" else found


@dataclass(frozen=True)
class Comparison:
    """Ours at ``tokens`` over a peer at ``peer_tokens`` (MAIN_CONTEXT cached); target: the most that is wanted."""

    format: str
    tokens: int
    peer: str
    peer_format: str
    peer_tokens: int
    target: float | None


def comparisons() -> Sequence[Comparison]:
    targets = {
        ("float32", "llama.cpp"): {1: 1.0, 16: 0.55, 64: 0.60},
        ("float32", "transformers"): {1: None, 16: 0.30, 64: None},
        ("bfloat16", "llama.cpp"): {1: 0.85, 16: 0.5},
        ("int8", "llama.cpp"): {1: 1.1, 16: 0.6},
        ("int4", "llama.cpp"): {1: 1.15, 16: 0.5},
    }
    same = [
        Comparison(own, tokens, peer, "float32" if peer == "transformers" else PEER_FORMATS[own], tokens, target)
        for (own, peer), by_tokens in targets.items()
        for tokens, target in by_tokens.items()
    ]
    return [*same, Comparison("float32", 16, "llama.cpp", "float32", 1, 1.5)]


# (format, tokens): the least share of the floor that is wanted of our steps.
FLOOR_TARGETS = {
    ("float32", 1): 0.85,
    ("float32", 16): 0.65,
    ("float32", 64): 0.65,
    ("bfloat16", 1): 0.75,
    ("bfloat16", 16): 0.65,
    ("bfloat16", 64): 0.65,
}
AUTO_TARGETS = {"float32": 1.15}  # the least speed of block_size='auto' against token by token


@dataclass(frozen=True)
class Plan:
    """How much is measured. rounds, curve_rounds: range(least, most + 1), see measure_steps."""

    tokens: Sequence[int] = MAIN_TOKENS
    rounds: range = range(9, 16)
    curve_tokens: Sequence[int] = CURVE_TOKENS
    curve_contexts: Sequence[int] = CURVE_CONTEXTS
    curve_rounds: range = range(1, 4)
    prompts: int = 20
    max_new_tokens: int = 128
    minutes: float = 18.0


FULL = Plan()
QUICK = Plan(
    rounds=range(2, 3),
    curve_tokens=(1, 8),
    curve_contexts=(0, 512),
    curve_rounds=range(1, 2),
    prompts=2,
    max_new_tokens=16,
    minutes=3.0,
)
