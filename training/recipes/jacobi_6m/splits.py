"""Templates are divided between the train, dev and test problems: no template of one is seen in another.

A template is a sentence pattern together with the word that makes it particular: a verb in the sentences about what
happened; a container, a time, a number or an ending elsewhere. Its word and its pattern mostly occur in training, each
with other partners; the pair never does. (The hash leaves no training template to the ending "or more".)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from zlib import crc32

SPLITS = ("train", "dev", "test")
SHARES = {"train": 70, "dev": 10, "test": 20}  # per cent of all templates


def split_of(template: object) -> str:
    """The split that owns ``template``."""
    place = crc32(repr(template).encode()) % 100
    for split, share in SHARES.items():
        if place < share:
            return split
        place -= share
    raise AssertionError("shares add up to 100")


def choose(rng: random.Random, split: str, *parts: Sequence[Any]) -> tuple[Any, ...]:
    """One of the split's own templates: an element of each of ``parts``."""
    for _ in range(1000):
        template = tuple(rng.choice(part) for part in parts)
        if split_of(template) == split:
            return template
    raise ValueError(f"no template of {parts} is left for {split}: add patterns or words")
