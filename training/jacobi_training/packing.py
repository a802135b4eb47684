"""Trajectories to packed samples in training order: which state every block takes, who teaches it, in which order.

Samples come in epochs, each in its own seeded order; folders of several block sizes come one size after another, the
smallest first. A sample's place in that order is its time in the run, which the noise ceiling follows.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Protocol

from jacobi_training.layout import block_sizes, check_fields, check_ids, count_rows
from jacobi_training.noise import Target, noise_ratio, pick_state
from jacobi_training.pack_config import PackConfig
from jacobi_training.shards import ShardError, ShardReader, ShardWriter

KIND = "packed"
SHARD_SIZE = 1024  # samples


class Records(Protocol):
    """Trajectory records by index: a list, or a reader of shards."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass
class Histogram:
    """Noise ratios of blocks with guesses: ten bins [i/10, (i + 1)/10), and one for 1 alone.

    wanted: by the schedule, empty when it wants none. reached: of the states taken.
    """

    wanted: list[int] = field(default_factory=lambda: [0] * 11)
    reached: list[int] = field(default_factory=lambda: [0] * 11)

    def add(self, sample: Mapping[str, Any]) -> None:
        for block in sample["blocks"]:
            if len(block["noisy"]) > 1:
                self.reached[_bin(block["ratio"])] += 1
                if block["target"] is not None:
                    self.wanted[_bin(block["target"])] += 1


@dataclass
class PackReport:
    """What was packed.

    samples, blocks, rows, ar_rows, consistency_rows: of all packed records. by_block_size: samples of each size. cut:
    samples whose answer was cut to fit. too_long, empty: samples left out since not one block fits, or there is none.
    """

    samples: int = 0
    blocks: int = 0
    rows: int = 0
    ar_rows: int = 0
    consistency_rows: int = 0
    cut: int = 0
    too_long: int = 0
    empty: int = 0
    by_block_size: dict[int, int] = field(default_factory=dict)
    histogram: Histogram = field(default_factory=Histogram)

    def add(self, sample: Mapping[str, Any]) -> None:
        counts = count_rows(sample)
        self.samples += 1
        self.blocks += len(sample["blocks"])
        self.rows += counts.rows
        self.ar_rows += counts.ar
        self.consistency_rows += counts.consistency
        self.by_block_size[sample["block_size"]] = self.by_block_size.get(sample["block_size"], 0) + 1
        self.histogram.add(sample)


def write_packed(
    trajectory_dirs: Sequence[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    config: PackConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Pack folders of trajectories into a folder of samples in training order, and write the report into its manifest.

    Parameters
    ----------
    trajectory_dirs : sequence of path
        Folders of trajectories, one block size each; several of the same size count as one.
    out_dir : path
        New, empty, or one that an interrupted call with the same arguments has begun: it is completed.
    config : PackConfig
        Settings.
    progress : callable, optional
        Called with (records behind, all records) after each.

    Raises
    ------
    ValueError
        A folder or record is not what it should be, or there is nothing to pack; the message names shard and line.
    OSError
        ``out_dir`` cannot be written.
    """
    readers = [ShardReader(folder, "trajectories") for folder in trajectory_dirs]
    sources = _by_block_size(readers)
    models = {reader.manifest.model for reader in readers}
    report = PackReport()
    samples = packed_samples(sources, config, report, progress)
    first = next(samples)  # or an error, before the folder is begun with these settings
    settings = {"trajectories": [_fingerprint(reader) for reader in readers], **asdict(config)}
    writer = ShardWriter(out_dir, KIND, settings, model=models.pop() if len(models) == 1 else None)
    writer.write_all(chain([first], samples), SHARD_SIZE, report=lambda: asdict(report))
    return report


def packed_samples(
    sources: Mapping[int, Records],
    config: PackConfig,
    report: PackReport,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Packed samples in training order, counted in ``report``; ``sources`` are trajectory records by block size.

    ValueError at the end when there was none.
    """
    total = config.epochs * sum(map(len, sources.values()))
    behind = 0
    for block_size in sorted(sources):
        records = sources[block_size]
        for epoch in range(config.epochs):
            order = list(range(len(records)))
            random.Random(f"{config.seed}/{block_size}/{epoch}").shuffle(order)
            for index in order:
                # Seeded by the sample, so that no other sample can change its states.
                rng = random.Random(f"{config.seed}/{block_size}/{epoch}/{index}")
                record, place = records[index], behind / max(total - 1, 1)
                fitting, blocks = blocks_that_fit(record, config), len(record["blocks"])
                if fitting:
                    phase = config.noise.phase(epoch, random.Random(f"{config.seed}/{block_size}/phase/{index}"))
                    targets = config.noise.targets(fitting, place, rng, phase)
                    sample = pack_sample(record, targets, config, rng, phase)
                    report.add(sample)
                    report.cut += fitting < blocks
                    yield sample
                elif blocks:
                    report.too_long += 1
                else:
                    report.empty += 1
                behind += 1
                if progress:
                    progress(behind, total)
    if not report.samples:
        raise ValueError(
            f"nothing to pack: of {total} samples {report.too_long} need more than {config.max_length} rows and "
            f"{report.empty} have an empty answer; raise max_length or take other trajectories"
        )


def pack_sample(
    record: Mapping[str, Any], targets: Sequence[Target], config: PackConfig, rng: random.Random, phase: int = 0
) -> dict[str, Any]:
    """Packed sample of a trajectory record's first ``len(targets)`` blocks.

    A block's ``ratio`` is that of the state taken, its ``target`` the wanted one, None where the schedule wants none.
    ``rng`` is used by random states alone. ``phase`` is the shift of the windows that the targets were made with.
    """
    blocks = []
    for block, target in zip(record["blocks"], targets, strict=False):
        states = block["states"]
        ratios = [noise_ratio(state, states[-1]) for state in states]
        picked = pick_state(ratios, target, rng)
        teacher = states[min(picked + 1, len(states) - 1)] if config.mode == "local" else None
        blocks.append({"noisy": states[picked], "ratio": ratios[picked], "target": target.ratio, "teacher": teacher})
    return {
        "index": record["index"],
        "prompt_ids": record["prompt_ids"],
        "answer_ids": record["answer_ids"][: len(targets) * record["block_size"]],
        "block_size": record["block_size"],
        "context": config.context,
        "window": config.window,
        "phase": phase,
        "blocks": blocks,
    }


def blocks_that_fit(record: Mapping[str, Any], config: PackConfig) -> int:
    """How many leading blocks of a trajectory record a sample of at most ``max_length`` rows can have."""
    room = (config.max_length - len(record["prompt_ids"])) // (3 if config.mode == "local" else 2)
    length = len(record["answer_ids"])
    return len(record["blocks"]) if length <= room else max(room, 0) // record["block_size"]


def check_trajectory(record: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, unless the record is a trajectory whose blocks end in the answer."""
    check_fields(record, {"index": int, "prompt_ids": list, "answer_ids": list, "block_size": int, "blocks": list})
    check_ids(record["prompt_ids"], "prompt_ids")
    check_ids(record["answer_ids"], "answer_ids")
    if not record["prompt_ids"]:
        raise ValueError("prompt_ids must hold at least one id")
    n, answer = record["block_size"], record["answer_ids"]
    if n < 1:
        raise ValueError(f"block_size must be at least 1, got {n}")
    sizes = block_sizes(len(answer), n)
    if len(record["blocks"]) != len(sizes):
        raise ValueError(f"an answer of {len(answer)} ids has {len(sizes)} blocks of {n}, got {len(record['blocks'])}")
    for j, (block, size) in enumerate(zip(record["blocks"], sizes, strict=True)):
        check_fields(block, {"states": list}, f"blocks[{j}]: ")
        clean = answer[j * n : j * n + size]
        for s, state in enumerate(block["states"]):
            check_ids(state, f"blocks[{j}].states[{s}]")
            if len(state) != size or state[0] != clean[0]:
                raise ValueError(
                    f"blocks[{j}].states[{s}] must hold {size} ids and begin with the answer's {clean[0]}, "
                    f"got {len(state)} ids"
                )
        if not block["states"] or block["states"][-1] != clean:
            raise ValueError(f"blocks[{j}].states must end in the answer's ids of that block")


@dataclass(frozen=True)
class _Source:
    """Checked records of one block size, from one folder or several."""

    block_size: int
    places: list[tuple[ShardReader, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return _checked(*self.places[index], self.block_size)


def _by_block_size(readers: Sequence[ShardReader]) -> dict[int, _Source]:
    sources: dict[int, _Source] = {}
    for reader in readers:
        if len(reader):
            block_size = _checked(reader, 0)["block_size"]
            source = sources.setdefault(block_size, _Source(block_size))
            source.places.extend((reader, index) for index in range(len(reader)))
    return sources


def _checked(reader: ShardReader, index: int, block_size: int | None = None) -> dict[str, Any]:
    """Record ``index`` of a folder; ShardError, naming shard and line, when it is not a trajectory of that size."""
    record = reader[index]
    try:
        check_trajectory(record)
        if block_size not in (None, record["block_size"]):
            raise ValueError(f"block_size is {record['block_size']}, but {block_size} at the start of the folder")
    except ValueError as error:
        raise ShardError(f"{reader.where(index)} is not a trajectory: {error}; make the folder again") from None
    return record


def _fingerprint(reader: ShardReader) -> str:
    return hashlib.sha256("".join(shard.sha256 for shard in reader.manifest.shards).encode()).hexdigest()[:16]


def _bin(ratio: float) -> int:
    # 0.3 * 10 may come out below 3.
    return min(int(ratio * 10 + 1e-9), 10)
