"""Decode steps in interleaved rounds: in each, everyone once on every case, in rotating order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.cpu.floors import Ceiling, Limits, floor_ms, step_work
from bench.cpu.plan import Contender
from bench.cpu.workers import WorkerError, Workers
from bench.models import Shape

REPEATS = 3
Case = tuple[int, int]  # cached tokens, tokens evaluated
Row = dict[str, Any]


def measure_steps(
    workers: Workers,
    cases: Sequence[Case],
    contenders: Iterable[Contender],
    rounds: range,
    over: Callable[[], bool],
    ceiling: Ceiling | None = None,
) -> list[Row]:
    """Rows of the results file, those of a contender that is missing or fails with a note instead of times.

    rounds: as many of them as there is time for, until it is ``over``; range(least, most + 1).
    ceiling: the machine's limits are measured in each round too, for a floor of each.
    """
    everyone = list(contenders)
    running = [c for c in everyone if workers.get(*c.worker)]
    times: dict[tuple[Contender, Case], list[float]] = {(c, case): [] for c in everyone for case in cases}
    limits: list[Limits] = []
    for turn in range(rounds[-1]):
        if turn >= rounds[0] and over():
            break
        if ceiling is not None:
            limits.append(ceiling.now())
        for case in cases:
            for contender in rotated(running, turn):
                try:
                    times[contender, case].append(one_turn(workers, contender, case))
                except WorkerError as error:
                    workers.fail(contender.worker, error)
                    running = [c for c in running if c.worker != contender.worker]
    shape = model_shape(workers, running)
    return [
        measured(workers, c, case, seconds, shape, limits) if c in running else missing(workers, c, case)
        for (c, case), seconds in times.items()
    ]


def rotated(items: Sequence[Contender], turn: int) -> list[Contender]:
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def one_turn(workers: Workers, contender: Contender, case: Case) -> float:
    """Median seconds of REPEATS steps, behind one that is not counted."""
    worker = workers.get(*contender.worker)
    if worker is None:  # its other setting failed in this round
        raise WorkerError(f"{contender}: it has failed before")
    context, tokens = case
    seconds = worker.ask("steps", context=context, tokens=tokens, flash_attn=contender.flash_attn, repeats=REPEATS)
    return statistics.median(seconds)


def model_shape(workers: Workers, contenders: Iterable[Contender]) -> Shape | None:
    """The model's sizes, which our own worker knows."""
    for contender in contenders:
        worker = workers.get(*contender.worker)
        if worker is not None and "shape" in worker.facts:
            return Shape(**worker.facts["shape"])
    return None


def named(contender: Contender, case: Case) -> Row:
    row: Row = {"engine": contender.engine, "format": contender.format, "context": case[0], "tokens": case[1]}
    return row if contender.flash_attn is None else row | {"flash_attn": contender.flash_attn}


def measured(
    workers: Workers, contender: Contender, case: Case, seconds: list[float], shape: Shape | None, limits: list[Limits]
) -> Row:
    ms = [1e3 * s for s in seconds]
    row = named(contender, case) | {"ms_median": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms)}
    row |= {"rounds_ms": ms, "floor_ms": None}
    worker = workers.get(*contender.worker)
    if shape is not None and worker is not None:
        row |= step_work(shape, *case, worker.facts["weight_bytes"], worker.facts["cache_itemsize"])
        row["rounds_floor_ms"] = [floor_ms(row, of_round) for of_round in limits]
    return row


def missing(workers: Workers, contender: Contender, case: Case) -> Row:
    row = named(contender, case) | {"ms_median": None, "ms_min": None, "ms_max": None, "floor_ms": None}
    return row | {"note": workers.reason(*contender.worker)}
