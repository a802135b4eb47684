"""Whole answers, prompt by prompt in turns, and the time that a long prompt takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cpu.plan import AUTO_TARGETS, Contender, lineup
from bench.cpu.ratios import quartiles
from bench.cpu.steps import rotated
from bench.cpu.workers import WorkerError, Workers

TRANSFORMERS_EVERY = 4  # of the prompts: it takes as long as all others together
PREFILL_TEXT = "The quick brown fox jumps over the lazy dog. "
Outcomes = dict[int, dict[str, Any]]  # by prompt: ids, tokens, forwards, seconds


@dataclass(frozen=True)
class Way(Contender):
    """A contender and how it decodes: token by token ('ar') or 'jacobi'."""

    method: str = "ar"


def ways(weight_format: str) -> list[Way]:
    """Ours, token by token first, and its peers."""
    ours, *peers = lineup(weight_format)
    return [
        Way(ours.engine, ours.format, method="ar"),
        Way(ours.engine, ours.format, method="jacobi"),
        *(Way(p.engine, p.format) for p in peers if p.flash_attn is not False),  # llama.cpp's default is on
    ]


def measure_answers(
    workers: Workers, weight_format: str, prompts: Sequence[str], max_new_tokens: int, over: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Rows of the results file; fewer prompts, though at least one, when time is ``over``."""
    everyone = ways(weight_format)
    running: list[Any] = [way for way in everyone if workers.get(*way.worker)]
    outcomes: dict[Way, Outcomes] = {way: {} for way in everyone}
    for index, prompt in enumerate([prompts[0], *prompts], -1):  # the first, once more ahead: a warm-up
        ours = workers.get("jacobi", weight_format)
        if ours is None or (index > 0 and over()):
            break
        ids = ours.ask("tokenize", prompt=prompt)
        for way in rotated(running, index + 1):
            if way.engine == "transformers" and index % TRANSFORMERS_EVERY and index > 0:
                continue
            try:
                outcome = answer(workers, way, ids, max_new_tokens)
            except WorkerError as error:
                workers.fail(way.worker, error)
                running = [w for w in running if w.worker != way.worker]
                continue
            if index >= 0:
                outcomes[way][index] = outcome
    single = outcomes[everyone[0]]
    return [
        answered(way, outcomes[way], single) if way in running and outcomes[way] else unanswered(workers, way)
        for way in everyone
    ]


def answer(workers: Workers, way: Way, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    worker = workers.get(*way.worker)
    if worker is None:
        raise WorkerError(f"{way}: it has failed before")
    found: dict[str, Any] = worker.ask("generate", ids=ids, max_new_tokens=max_new_tokens, method=way.method)
    return found


def answered(way: Way, found: Outcomes, single: Outcomes) -> dict[str, Any]:
    """A way's row. single: our own token by token, in the format that goes with it, with which answers must be equal
    when they are ours, and may when they are a peer's, whose kernels round differently.
    """
    total = {count: sum(o[count] for o in found.values()) for count in ("tokens", "forwards", "seconds")}
    agreeing = sum(found[i]["ids"] == single[i]["ids"] for i in found if i in single)
    row = {
        "engine": way.engine,
        "format": way.format,
        "method": way.method,
        "tokens_per_second": sum(len(o["ids"]) for o in found.values()) / total["seconds"],
        "tokens_per_forward": total["tokens"] / max(total["forwards"], 1),
        "identical": agreeing == len(found),
        "agreeing": agreeing,
        "prompts": len(found),
        "seconds": [found[i]["seconds"] for i in sorted(found)],
    }
    if way.method == "jacobi":
        speeds = [single[i]["seconds"] / found[i]["seconds"] for i in found]
        row |= {"speed_against_ar": quartiles(speeds), "target": AUTO_TARGETS.get(way.format)}
    return row


def unanswered(workers: Workers, way: Way) -> dict[str, Any]:
    names = ("tokens_per_second", "tokens_per_forward", "identical")
    row: dict[str, Any] = {"engine": way.engine, "format": way.format, "method": way.method}
    return row | dict.fromkeys(names) | {"note": workers.reason(*way.worker)}


def measure_prefill(workers: Workers, tokens: int, rounds: range, over: Callable[[], bool]) -> dict[str, Any] | None:
    """Time until the first token behind ``tokens`` prompt tokens, float32, ours and transformers in turns.

    None when one of them is missing or fails. rounds: as measure_steps takes them.
    """
    contenders = [Way("jacobi", "float32"), Way("transformers", "float32")]
    ours = workers.get(*contenders[0].worker)
    if ours is None or not workers.get(*contenders[1].worker):
        return None
    times: dict[str, list[float]] = {way.engine: [] for way in contenders}
    try:
        ids = ours.ask("tokenize", prompt=PREFILL_TEXT * tokens)[:tokens]
        for turn in range(-1, rounds[-1]):  # -1 is a warm-up
            if turn >= rounds[0] and over():
                break
            for way in rotated(contenders, turn + 1):
                seconds = answer(workers, way, ids, 1)["seconds"]
                if turn >= 0:
                    times[way.engine].append(1e3 * seconds)
    except WorkerError as error:
        workers.notes.append(str(error))
        return None
    paired = [a / b for a, b in zip(*times.values(), strict=True)]
    return {"format": "float32", "tokens": len(ids), "rounds_ms": times, "ratio": quartiles(paired), "target": 1.0}
