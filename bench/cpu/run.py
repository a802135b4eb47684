"""The whole benchmark: its parts in order, within the minutes that it may take, into one result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.cpu.answers import measure_answers, measure_prefill
from bench.cpu.budget import Budget, shares
from bench.cpu.floors import Ceiling, add_floors
from bench.cpu.memory import measure_memory
from bench.cpu.plan import MAIN_CONTEXT, PEER_FORMATS, PREFILL_TOKENS, Contender, Plan, lineup
from bench.cpu.ratios import floor_shares, ratios
from bench.cpu.steps import measure_steps
from bench.cpu.targets import targets
from bench.cpu.workers import Worker, Workers
from bench.environment import ROOT
from jacobi_decoding.cli import note

Result = dict[str, Any]
NO_AMX = (
    "as it is compiled here it crashes with weights in its layouts for this CPU, so it is measured without them; "
    "a compiler that does not break its AMX code, as gcc 12 does, may make it much faster at 16 tokens and more"
)
CONVERTED = ROOT / ".cache" / "bench"  # .gguf files in llama.cpp's formats; ignored by git


def run(
    plan: Plan,
    model: str | None,
    prompts: Sequence[str],
    formats: Sequence[str],
    threads: int,
    save: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Everything of ``plan``. save: called after each format with what there is.

    Raises WorkerError when the machine's limits cannot be measured.
    """
    start = time.monotonic()
    budget = Budget(plan.minutes, shares(parts(formats)))
    notes: list[str] = []
    result: Result = {"complete": False, "model": model or "the default model", "machine": {}, "steps": []}
    result |= {"ratios": [], "floor_shares": [], "end_to_end": [], "prefill": None, "memory": [], "targets": []}
    result |= {"engines": {}, "notes": notes, "settings": {"max_new_tokens": plan.max_new_tokens}}
    machine = Worker("machine", "float32", None, threads)
    ceiling = Ceiling(lambda repeats: dict(machine.ask("limits", repeats=repeats)))

    def summarise() -> None:
        add_floors(result["steps"], ceiling.best)
        result["machine"] = machine.facts | ceiling.best
        main = [row for row in result["steps"] if row["part"] == "main"]
        result["ratios"], result["floor_shares"] = ratios(main), floor_shares(main)
        result["targets"], result["seconds"] = targets(result), time.monotonic() - start
        save(result)

    try:
        ceiling.now(repeats=7)
        for name in formats:
            models = {("jacobi", name): model, ("transformers", "float32"): model}
            models["llama.cpp", PEER_FORMATS[name]] = llama_model(model, PEER_FORMATS[name], notes)
            with Workers(models, threads, notes) as workers:
                measure_format(plan, name, workers, budget, ceiling, prompts, result)
            summarise()
        note(f"memory: {', '.join(formats)}")
        result["memory"] = measure_memory(model, list(formats), notes)
        ceiling.now(repeats=7)
        result["complete"] = True
        summarise()
    finally:
        machine.close()
    return result


def parts(formats: Sequence[str]) -> list[str]:
    """In the order in which they are taken."""
    found = []
    for name in formats:
        found += [f"steps {name}", *([f"prefill {name}"] if name == "float32" else [])]
        found += [f"generate {name}", f"curve {name}"]
    return [*found, "memory"]


def measure_format(
    plan: Plan,
    name: str,
    workers: Workers,
    budget: Budget,
    ceiling: Ceiling,
    prompts: Sequence[str],
    result: Result,
) -> None:
    """All parts of one format, added to ``result``."""

    def begin(part: str) -> Callable[[], bool]:
        deadline = budget.deadline(part)
        note(f"{part}: up to {max(deadline - budget.clock(), 0):.0f} s")
        return lambda: budget.over(deadline)

    over = begin(f"steps {name}")
    for contender in lineup(name):
        worker = workers.get(*contender.worker)
        if worker is not None:
            result["engines"][str(contender)] = worker.facts
            if worker.facts.get("repacks") is False and (warning := f"{contender}: {NO_AMX}") not in result["notes"]:
                result["notes"].append(warning)
    cases = [(MAIN_CONTEXT, tokens) for tokens in plan.tokens]
    rows = measure_steps(workers, cases, lineup(name), plan.rounds, over, ceiling)
    result["steps"] += [row | {"part": "main"} for row in rows]
    if name == "float32":
        over = begin(f"prefill {name}")
        result["prefill"] = measure_prefill(workers, PREFILL_TOKENS, plan.rounds, over)
    over = begin(f"generate {name}")
    result["end_to_end"] += measure_answers(workers, name, prompts[: plan.prompts], plan.max_new_tokens, over)
    over = begin(f"curve {name}")
    for context in plan.curve_contexts:
        for tokens in plan.curve_tokens:
            rows = measure_steps(workers, [(context, tokens)], [Contender("jacobi", name)], plan.curve_rounds, over)
            result["steps"] += [row | {"part": "curve"} for row in rows]


def llama_model(model: str | None, weight_format: str, notes: list[str]) -> str | None:
    """The .gguf file for llama.cpp in that format, made when it is missing; None where there can be none."""
    if find_spec("llama_cpp") is None:
        return None
    from bench.cpu.gguf_files import converted
    from jacobi_decoding.loading import default_model_path

    source = default_model_path() if model is None else Path(model)
    if source.suffix != ".gguf":
        return None
    try:
        return str(converted(source, weight_format, CONVERTED))
    except (OSError, ValueError, NotImplementedError) as error:
        notes.append(f"llama.cpp {weight_format}: {source} cannot be converted: {error}")
        return None
