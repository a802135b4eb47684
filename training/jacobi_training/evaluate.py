"""A trained model beside its base: tokens per forward, task accuracy, perplexity, latency, and equality with AR.

Every output of Jacobi decoding is compared with what the same model writes token by token with the same kernels; the
task judges those answers. Each run is made once, in batches where that changes no count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import jacobi_decoding
from jacobi_decoding.loading import LoadedModel
from jacobi_training.decode_runs import AR, MULTI_BLOCK, Run, plain
from jacobi_training.model_runs import EvaluationConfig, ModelRuns, Parts
from jacobi_training.prompt_lookup import LOOKUP_TOKENS
from jacobi_training.tasks import Record, find_task

BASE_BLOCK_SIZE = 16


def shipped_prompts() -> Path:
    """The test prompts that the package ships."""
    return Path(jacobi_decoding.__file__).parent / "shipped" / "test.jsonl"


def read_records(path: Path, limit: int | None) -> list[Record]:
    """The first ``limit`` objects of a .jsonl file whose lines ``read_prompts`` has accepted."""
    lines = path.read_bytes().split(b"\n")  # str.splitlines also splits at characters that JSON may hold
    return [json.loads(line) for line in lines if line.strip()][:limit]


def evaluate(
    model: LoadedModel,
    base: LoadedModel | None,
    prompts: Path,
    config: EvaluationConfig,
    parts: Parts,
) -> dict[str, Any]:
    """Measure ``model``, and ``base`` where there is one, on the prompts of a .jsonl file.

    parts: shows progress. Returns plain values for JSON; keys that belong to a missing base or task are None. Raises
    ValueError or OSError, one line, for prompts or models that cannot be used.
    """
    seconds: dict[str, float] = {}
    parts = _timed(parts, seconds)
    started = time.perf_counter()
    sides = {"model": ModelRuns("model", model, prompts, config, parts)}
    if base is not None:
        sides["base"] = ModelRuns("base", base, prompts, config, parts)
    records = read_records(prompts, config.limit)
    task = find_task(config.task, records)
    references = [task.reference(r) if task else r.get("answer") for r in records]

    for side in sides.values():
        side.decode("ar", "one by one", AR)
        if task:
            side.judge(task, records)
    trained, old = sides["model"], sides.get("base")
    for n in config.block_sizes:
        trained.decode(str(n), f"blocks of {n}", plain(n))
    if old:
        old.decode(str(BASE_BLOCK_SIZE), f"blocks of {BASE_BLOCK_SIZE}", plain(BASE_BLOCK_SIZE))
    for side in sides.values():
        side.decode("multi_block", "multi-block", MULTI_BLOCK)
        side.look_up()
        side.measure_blocks()
    perplexity = {
        name: side.perplexity([str(r) for r in references]) if all(isinstance(r, str) for r in references) else None
        for name, side in sides.items()
    }
    latency = trained.latency({"1": AR, str(BASE_BLOCK_SIZE): plain(BASE_BLOCK_SIZE), "multi_block": MULTI_BLOCK})
    seconds["all"] = time.perf_counter() - started
    return _result(trained, old, records, task.NAME if task else None, prompts, config) | {
        "perplexity": perplexity["model"],
        "base_perplexity": perplexity.get("base"),
        "latency": latency,
        "seconds": seconds,
    }


def _result(
    trained: ModelRuns,
    old: ModelRuns | None,
    records: list[Record],
    task: str | None,
    path: Path,
    config: EvaluationConfig,
) -> dict[str, Any]:
    sizes = [str(n) for n in config.block_sizes]
    per_token = trained.characters_per_token()
    tpf = {key: trained.runs[key].tokens_per_forward for key in [*sizes, "multi_block"]}

    def of_base(key: str) -> Run | None:
        return old.runs[key] if old else None

    intervals: dict[str, Any] = {
        "accuracy": trained.accuracy_interval(),
        "base_accuracy": old.accuracy_interval() if old else None,
        "tpf": {key: trained.runs[key].interval(config.seed) for key in sizes},
        "tpf_multi_block": trained.runs["multi_block"].interval(config.seed),
        "base_tpf": {str(BASE_BLOCK_SIZE): _interval(of_base(str(BASE_BLOCK_SIZE)), config.seed)},
        "base_tpf_multi_block": _interval(of_base("multi_block"), config.seed),
        "prompt_lookup_tpf": _interval((old or trained).lookup, config.seed),
        "model_prompt_lookup_tpf": _interval(trained.lookup, config.seed),
    }
    return {
        "model": trained.loaded.name,
        "base": old.loaded.name if old else None,
        "prompts": len(records),
        "accuracy": trained.accuracy,
        "base_accuracy": old.accuracy if old else None,
        "tpf": {key: tpf[key] for key in sizes},
        "tpf_multi_block": tpf["multi_block"],
        "base_tpf": {str(BASE_BLOCK_SIZE): _tpf(of_base(str(BASE_BLOCK_SIZE)))},
        "base_tpf_multi_block": _tpf(of_base("multi_block")),
        "prompt_lookup_tpf": _tpf((old or trained).lookup),
        "model_prompt_lookup_tpf": _tpf(trained.lookup),
        "characters_per_token": per_token,
        "characters_per_forward": {
            key: value * per_token if value and per_token else None for key, value in tpf.items()
        },
        "ar_identical": trained.all_identical and (old is None or old.all_identical),
        "identical": {"model": trained.identical(), "base": old.identical() if old else None},
        "intervals": intervals,
        "fixed_blocks": {"model": trained.blocks, "base": old.blocks if old else None},
        "answer_tokens": sum(map(len, trained.ar.tokens)),
        "prompts_file": path.name,
        "settings": asdict(config)
        | {"task": task, "multi_block": MULTI_BLOCK, "prompt_lookup_tokens": LOOKUP_TOKENS}
        | {"dtype": str(trained.loaded.dtype).removeprefix("torch."), "path": trained.decoder.path}
        | {"device": str(trained.decoder.engine.device), "backend": trained.decoder.engine.backend},
        "environment": {
            "threads": torch.get_num_threads(),
            "kernels": torch.ops.jacobi._cpu_isa(""),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "records": [_record(i, trained, old) for i in range(len(records))],
    }


def _record(i: int, trained: ModelRuns, old: ModelRuns | None) -> dict[str, Any]:
    """One prompt: texts, verdicts, and forwards of each run."""
    result: dict[str, Any] = {"index": trained.prompts[i].index}
    for name, side in (("model", trained), ("base", old)):
        if side is None:
            continue
        verdict = side.verdicts[i] if side.verdicts else None
        result[name] = {
            "text": side.texts[i],
            "correct": verdict.correct if verdict else None,
            "reason": verdict.reason if verdict else None,
            "tokens": len(side.ar.tokens[i]),
            "decode_forwards": {key: run.decoded[i].decode_steps for key, run in side.runs.items()}
            | ({"prompt_lookup": side.lookup.decoded[i].decode_steps} if side.lookup else {}),
        }
    return result


def _tpf(run: Run | None) -> float | None:
    return run.tokens_per_forward if run else None


def _interval(run: Run | None, seed: int) -> tuple[float, float] | None:
    return run.interval(seed) if run else None


def _timed(parts: Parts, seconds: dict[str, float]) -> Parts:
    """``parts`` that notes how long each took."""

    @contextmanager
    def timed(name: str, total: int) -> Iterator[Callable[[int], None]]:
        start = time.perf_counter()
        with parts(name, total) as advance:
            yield advance
        seconds[name] = time.perf_counter() - start

    return timed


__all__ = ["EvaluationConfig", "ModelRuns", "evaluate", "shipped_prompts"]
