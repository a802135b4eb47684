"""A process that holds one engine and does what it is told: JSON lines on stdin, one JSON line back for each.

    python -m bench.cpu.worker --engine jacobi --format float32 --threads 2 [--model PATH]

The first reply comes without a request, when the engine is loaded: what it is. Requests are {"do": name, ...arguments}.
Replies are {"result": ...} or {"error": one line}. Between requests the process sleeps in a read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO


class Stepper(Protocol):
    """One decode step that can be repeated from the same place."""

    def restore(self) -> None: ...

    def step(self) -> None: ...


class Engine(Protocol):
    """What a worker can hold; an engine may lack what it cannot do."""

    def facts(self) -> dict[str, Any]:
        """weight_bytes and cache_itemsize for the floor; whatever else is worth keeping."""
        ...

    def stepper(self, context: int, tokens: int, flash_attn: bool | None) -> Stepper:
        """A step that evaluates ``tokens`` tokens behind ``context`` cached ones and predicts behind each."""
        ...

    def generate(self, ids: list[int], max_new_tokens: int, method: str) -> dict[str, Any]:
        """Greedy tokens, how many were decoded in how many forwards (the prompt's apart)."""
        ...


def create(engine: str, weight_format: str, model: str | None, threads: int) -> Any:
    """The engine of that name; its libraries are imported here, not before."""
    if engine == "machine":
        from bench.cpu.machine import Machine

        return Machine(threads)
    if engine == "jacobi":
        from bench.cpu.jacobi_engine import JacobiEngine

        return JacobiEngine(model, weight_format, threads)
    if engine == "transformers":
        from bench.cpu.transformers_engine import TransformersEngine

        return TransformersEngine(model, threads)
    from bench.cpu.llama_engine import LlamaEngine

    return LlamaEngine(model, threads)


def steps(engine: Engine, context: int, tokens: int, flash_attn: bool | None, repeats: int) -> list[float]:
    """Seconds of ``repeats`` steps; one more before them is not counted: it wakes threads and warms caches."""
    stepper = engine.stepper(context, tokens, flash_attn)
    seconds = []
    for _ in range(1 + repeats):
        stepper.restore()
        start = time.perf_counter()
        stepper.step()
        seconds.append(time.perf_counter() - start)
    stepper.restore()
    return seconds[1:]


def generate(engine: Engine, ids: list[int], max_new_tokens: int, method: str) -> dict[str, Any]:
    """What the engine returns, and the seconds of the whole call."""
    start = time.perf_counter()
    outcome = engine.generate(ids, max_new_tokens, method)
    return outcome | {"seconds": time.perf_counter() - start}


def serve(engine: Any, requests: TextIO, reply: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until there are no more."""
    shared: dict[str, Callable[..., Any]] = {"steps": steps, "generate": generate}
    for line in requests:
        request = json.loads(line)
        name = request.pop("do")
        try:
            result = shared[name](engine, **request) if name in shared else getattr(engine, name)(**request)
        except Exception as error:
            reply({"error": one_line(error)})
        else:
            reply({"result": result})


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, choices=["machine", "jacobi", "llama.cpp", "transformers"])
    parser.add_argument("--format", default="float32")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the replies

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = create(args.engine, args.format, args.model, args.threads)
        facts = engine.facts()
    except Exception as error:
        reply({"error": one_line(error)})
        return
    reply({"result": facts})
    serve(engine, sys.stdin, reply)


if __name__ == "__main__":
    main()
