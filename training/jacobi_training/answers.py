"""One answer while it is decoded block by block: what its blocks start from, their states, and where it ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jacobi_training.prompts import Prompt
from jacobi_training.shards import Record
from jacobi_training.trajectory_config import SOURCES, TrajectoryConfig

REPEATED_NGRAM = 10


class Guesser:
    """The first guesses of a block: a function of seed, prompt index and block number, whatever the sharding."""

    def __init__(self, config: TrajectoryConfig, vocab_size: int, special: Sequence[int], tokenizer: Any) -> None:
        self.config = config
        # Embeddings may have padding rows that no token uses.
        known = vocab_size if tokenizer is None else min(vocab_size, len(tokenizer))
        excluded = set(special)
        self.vocabulary = [t for t in range(known) if t not in excluded] or list(range(vocab_size))

    def guesses(self, prompt: Prompt, block: int, last: int) -> list[int]:
        """n - 1 guesses behind ``last``, the first token of the block."""
        count = self.config.block_size - 1
        generator = random.Random(f"{self.config.seed}/{prompt.index}/{block}")
        init = self.config.init
        if init == "mixed":
            init = generator.choice(SOURCES)
        if init == "last":
            return [last] * count
        return generator.choices(self.vocabulary if init == "vocabulary" else prompt.ids, k=count)


class Answer:
    """One prompt's answer while it is decoded, and the states of its open block."""

    def __init__(self, prompt: Prompt, config: TrajectoryConfig, stops: Sequence[int], guesser: Guesser) -> None:
        self.prompt, self.config, self.stops, self.guesser = prompt, config, stops, guesser
        self.ids: list[int] = []
        self.stop: str | None = None
        self.blocks: list[list[list[int]]] = []
        self.states: list[list[int]] = []  # of the open block, each of the block's full width
        self.final = 0  # leading tokens of the open block that are in the cache
        self._ngrams: Counter[tuple[int, ...]] = Counter()

    @property
    def start(self) -> int:
        """Where the open block begins in the answer."""
        return len(self.blocks) * self.config.block_size

    @property
    def chain(self) -> list[int]:
        """What the next forward evaluates: the open block from its first token that is not in the cache."""
        return self.states[-1][self.final :]

    def receive(self, emitted: Sequence[int], accepted: int, chain: Sequence[int]) -> None:
        """Take in a step: tokens that became final, rows accepted, and the op's next chain (last final token first).

        ``chain`` is empty behind a stop token: the op drafts no more, and the answer's end says what the state is.
        """
        if self.states:  # none yet behind the prompt
            state = self.states[-1]
            self.final += accepted
            if chain and self.final < len(state):  # else it was the fixed point
                self.states.append([*state[: self.final], *chain[: len(state) - self.final]])
        for token in emitted:
            if self.stop is None:
                self._append(token)
        if self.stop is not None:
            self._cut()

    def _append(self, token: int) -> None:
        if not self.states or len(self.ids) == self.start + len(self.states[0]):
            self._open_block(token)
        self.ids.append(token)
        ngram = tuple(self.ids[-REPEATED_NGRAM:])
        if len(ngram) == REPEATED_NGRAM:
            self._ngrams[ngram] += 1
        if token in self.stops:
            self.stop = "eos"
        elif self.config.repeats and self._ngrams[ngram] >= self.config.repeats:
            self.stop = "repetition"
        elif len(self.ids) == self.config.max_new_tokens:
            self.stop = "length"

    def _open_block(self, token: int) -> None:
        if self.states:
            self.blocks.append(self.states)
        width = min(self.config.block_size, self.config.max_new_tokens - self.start)
        guesses = self.guesser.guesses(self.prompt, len(self.blocks), token)
        self.states = [[token, *guesses[: width - 1]]]
        self.final = 0

    def _cut(self) -> None:
        """End the last block with the answer; states that differ only behind its end become one."""
        fixed = self.ids[self.start :]
        cut = [state[: len(fixed)] for state in self.states]
        states = [state for s, state in enumerate(cut) if s == 0 or state != cut[s - 1]]
        self.blocks.append(states if states[-1] == fixed else [*states, fixed])

    def record(self) -> Record:
        return {
            "index": self.prompt.index,
            "prompt_ids": list(self.prompt.ids),
            "block_size": self.config.block_size,
            "answer_ids": self.ids,
            "stop": self.stop,
            "blocks": [{"states": states} for states in self.blocks],
        }
