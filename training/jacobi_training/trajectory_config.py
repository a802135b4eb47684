"""Settings of trajectories. Nothing slow is imported, so that the command line can name the choices."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("vocabulary", "prompt", "last")
INITS = (*SOURCES, "mixed")
MOST = 2**20  # of block_size and max_new_tokens


@dataclass(frozen=True)
class TrajectoryConfig:
    """Settings of trajectories.

    Attributes
    ----------
    block_size : int
        n, at least 2.
    max_new_tokens : int
        Longest answer.
    init : str
        Where the guesses of a block come from: ``vocabulary`` (uniform, special tokens apart), ``prompt`` (random
        tokens of the prompt), ``last`` (the last final token repeated, as the decoder fills its chain) or ``mixed``
        (one of these for each block, at random).
    seed : int
        Of the guesses; each prompt has its own stream, by its index.
    limit : int, optional
        Number of distinct prompts to take; None: all.
    repeats : int
        An answer ends when the same 10 tokens stand in it for the ``repeats``-th time; 0: never.
    stop_tokens : tuple of int, optional
        Token ids that end an answer; None: those of the model's generation config, else the tokenizer's.
    shard_size : int
        Prompts of one shard.
    batch_size : int
        Sequences that run side by side; changes speed and memory, never records.

    Raises
    ------
    ValueError
        A value is outside its range.
    """

    block_size: int = 16
    max_new_tokens: int = 256
    init: str = "mixed"
    seed: int = 0
    limit: int | None = None
    repeats: int = 2
    stop_tokens: tuple[int, ...] | None = None
    shard_size: int = 256
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_size", 2, MOST),
            ("max_new_tokens", 1, MOST),
            ("limit", 1, None),
            ("repeats", 0, None),
            ("shard_size", 1, None),
            ("batch_size", 1, None),
        ):
            value = getattr(self, name)
            if value is not None and (value < low or (high is not None and value > high)):
                raise ValueError(f"{name} must be at least {low}{f' and at most {high}' if high else ''}, got {value}")
        if self.init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {self.init!r}")
        if self.repeats == 1:
            raise ValueError("repeats must be 0 (never) or at least 2, got 1")
