"""The block layout of a packed sample, and which of its rows teach which.

A sample has P prompt tokens and an answer of A tokens in blocks of n; block j has a clean version (the answer) and a
noisy one (a state of its trajectory), and with the local loss a teacher state as well. Clean block j continues clean
block j - 1, the first one the prompt. Noisy block j continues, by the sample's context,

    clean    clean block j - 1 (the prompt for j = 0)
    all      noisy block j - 1 (the prompt for j = 0)
    window   noisy block j - 1, but clean block j - 1 at the first block of every window of w blocks, which is where
             (j + phase) mod w = 0; the sample's phase, 0 where it has none, shifts its windows

A teacher state continues what its noisy block continues. Versions of the same block have the same positions.

Blocks that continue one another whole are one segment, since attention gathers the path of a segment once:

    rows        0 .. P + A             P + A .. P + 2A          P + 2A .. P + 3A
                prompt, clean          noisy                    teacher states (local loss only)
    segments    one                    one per context window   one per block

so answer place a has its clean row at P + a, its noisy row at P + A + a and its teacher state's row at P + 2A + a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jacobi_training.pack_config import CONTEXTS


@dataclass(frozen=True)
class SampleLayout:
    """Rows and segments of one sample, R rows.

    Attributes
    ----------
    tokens : ndarray
        ``[R]`` int64.
    segments : list of tuple
        (start, length, parent, visible), counted inside the sample, as ``BlockLayout.from_segments`` takes them.
    targets : ndarray
        ``[R]`` int64: the next answer token for the last prompt row and the clean rows, else -1.
    teachers : ndarray
        ``[R]`` int64: row whose prediction a noisy row must give, else -1.
    hard_targets : ndarray
        ``[R]`` int64: the next answer token for the noisy rows that have a teacher, else -1.
    """

    tokens: np.ndarray
    segments: list[tuple[int, int, int, int]]
    targets: np.ndarray
    teachers: np.ndarray
    hard_targets: np.ndarray


@dataclass(frozen=True)
class RowCounts:
    """What a sample brings to a batch: all rows, rows with an AR term and rows with a consistency term."""

    rows: int
    ar: int
    consistency: int


def sample_layout(sample: Mapping[str, Any]) -> SampleLayout:
    """Layout of a packed sample; ValueError, in one line, when the record is not one."""
    check_sample(sample)
    answer = np.asarray(sample["answer_ids"], dtype=np.int64)
    start, length, local = len(sample["prompt_ids"]), len(answer), is_local(sample)
    runs = [np.asarray(sample["prompt_ids"], dtype=np.int64), answer, _joined(sample, "noisy")]
    if local:
        runs.append(_joined(sample, "teacher"))
    tokens = np.concatenate(runs)

    windows = context_windows(sample)
    segments = [(0, start + length, -1, 0)]
    segments += [(start + length + first, end - first, 0, start + first) for first, end in windows]
    if local:
        for parent, (first, end) in enumerate(windows, 1):
            for place in range(first, end, sample["block_size"]):
                size = min(sample["block_size"], end - place)
                segments.append((start + 2 * length + place, size, parent, place - first))

    targets, teachers, hard_targets = (np.full(len(tokens), -1, dtype=np.int64) for _ in range(3))
    targets[start - 1 : start + length - 1] = answer
    taught = np.flatnonzero(taught_places(sample))
    rows = start + length + taught
    teachers[rows] = taught + start + (2 * length if local else 0)
    hard_targets[rows] = answer[taught + 1]
    return SampleLayout(tokens, segments, targets, teachers, hard_targets)


def count_rows(sample: Mapping[str, Any]) -> RowCounts:
    """Row counts of a packed sample, without its layout; ValueError when the record is not one."""
    check_sample(sample)
    length = len(sample["answer_ids"])
    rows = len(sample["prompt_ids"]) + (3 if is_local(sample) else 2) * length
    return RowCounts(rows, length, int(np.count_nonzero(taught_places(sample))))


def taught_places(sample: Mapping[str, Any]) -> np.ndarray:
    """``[A]`` bool: answer places whose noisy row carries a consistency term.

    Those are the rows whose path differs from the path of their teacher row, on which the prediction would be the same:
    all rows behind the first difference inside the context window, or inside the block when the teacher is a state
    (which continues what the noisy block continues). The last place has no term: what follows the answer is unknown.
    """
    length = len(sample["answer_ids"])
    if not length:
        return np.zeros(0, dtype=bool)
    if is_local(sample):
        teacher, step = _joined(sample, "teacher"), sample["block_size"]
        runs = [(place, min(place + step, length)) for place in range(0, length, step)]
    else:
        teacher, runs = np.asarray(sample["answer_ids"], dtype=np.int64), context_windows(sample)
    taught = _joined(sample, "noisy") != teacher
    for first, end in runs:
        taught[first:end] = np.logical_or.accumulate(taught[first:end])
    taught[-1] = False
    return taught


def context_windows(sample: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Runs [first, end) of answer places whose noisy blocks continue one another."""
    length = len(sample["answer_ids"])
    blocks = {"clean": 1, "window": sample["window"], "all": max(len(sample["blocks"]), 1)}[sample["context"]]
    step = blocks * sample["block_size"]
    # The phase cuts the front off the first window.
    cut = sample.get("phase", 0) * sample["block_size"] if sample["context"] == "window" and length else 0
    return [(max(first, 0), min(first + step, length)) for first in range(-cut, length, step)]


def is_local(sample: Mapping[str, Any]) -> bool:
    """Whether the teachers of a packed sample are neighbouring states."""
    return bool(sample["blocks"]) and sample["blocks"][0]["teacher"] is not None


def check_sample(sample: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, unless the record is a packed sample."""
    check_fields(sample, {"prompt_ids": list, "answer_ids": list, "block_size": int, "blocks": list, "window": int})
    if sample.get("context") not in CONTEXTS:
        raise ValueError(f"context must be one of {', '.join(CONTEXTS)}, got {sample.get('context')!r}")
    check_ids(sample["prompt_ids"], "prompt_ids")
    check_ids(sample["answer_ids"], "answer_ids")
    if not sample["prompt_ids"]:
        raise ValueError("prompt_ids must hold at least one id")
    for name in ("block_size", "window"):
        if sample[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {sample[name]}")
    phase = sample.get("phase", 0)
    if type(phase) is not int or not 0 <= phase < sample["window"]:
        raise ValueError(f"phase must be at least 0 and less than the window, {sample['window']}, got {phase!r:.40}")
    sizes = block_sizes(len(sample["answer_ids"]), sample["block_size"])
    if len(sample["blocks"]) != len(sizes):
        raise ValueError(
            f"an answer of {len(sample['answer_ids'])} ids has {len(sizes)} blocks of "
            f"{sample['block_size']}, got {len(sample['blocks'])}"
        )
    local = is_local(sample)
    for j, (block, size) in enumerate(zip(sample["blocks"], sizes, strict=True)):
        check_fields(block, {"noisy": list}, f"blocks[{j}]: ")
        versions = {"noisy": block["noisy"]}
        if local:
            check_fields(block, {"teacher": list}, f"blocks[{j}]: ")
            versions["teacher"] = block["teacher"]
        elif block.get("teacher") is not None:
            raise ValueError(f"blocks[{j}]: teacher must be null, as in the first block, or a list in every block")
        for name, ids in versions.items():
            check_ids(ids, f"blocks[{j}].{name}")
            if len(ids) != size:
                raise ValueError(f"blocks[{j}].{name} must hold {size} ids, got {len(ids)}")


def block_sizes(length: int, block_size: int) -> list[int]:
    """Tokens of every block of an answer; only the last block may be shorter."""
    return [min(block_size, length - place) for place in range(0, length, block_size)]


def check_fields(record: Any, fields: Mapping[str, type], where: str = "") -> None:
    """Raise ValueError unless ``record`` is an object that has the fields, each of its type."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}a record must be an object, got {type(record).__name__}")
    for name, kind in fields.items():
        if name not in record:
            raise ValueError(f"{where}{name} is missing")
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise ValueError(f"{where}{name} must be of type {kind.__name__}, got {record[name]!r:.40}")


def check_ids(ids: Sequence[Any], name: str) -> None:
    """Raise ValueError unless all are token ids."""
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < 2**31:
            raise ValueError(f"{name}[{i}] must be a token id, got {token!r:.40}")


def _joined(sample: Mapping[str, Any], name: str) -> np.ndarray:
    """``[A]`` int64: one version of all blocks, in order."""
    return np.asarray([token for block in sample["blocks"] for token in block[name]], dtype=np.int64)
