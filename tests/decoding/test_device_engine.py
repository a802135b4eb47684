"""The engine whose state lives on a device, on CPU tensors: over the CPU's ops, and over Triton's, interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_decoding import JacobiDecoder, device_engine, step_log
from jacobi_decoding.batching import end_row
from jacobi_decoding.device_engine import DeviceStepEngine
from jacobi_decoding.devices import DeviceError, checked_device, wanted_step_mode
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.flash_prefill import take_in_prompts
from jacobi_decoding.sampling import SamplingParams
from jacobi_decoding.step_log import DeviceStepError
from jacobi_kernels.state import DecodeState, StateColumn
from tests.decoding.helpers import family, prompts

BLOCKS: dict[str, Any] = {"block_size": 4, "blocks": 2, "candidates": 2}
AR: dict[str, Any] = {"block_size": 1, "blocks": 1, "candidates": 0}
CLOCK = ("seconds", "milliseconds_per_step", "tokens_per_second", "backend", "launches")


@pytest.fixture(scope="module")
def model() -> Any:
    return family("llama")


@pytest.fixture(scope="module")
def on_cpu(model: Any) -> JacobiDecoder:
    return JacobiDecoder(model)


@pytest.fixture
def on_device(model: Any) -> JacobiDecoder:
    """A decoder with the device's engine; the CPU's ops do its steps."""
    decoder = JacobiDecoder(model)
    decoder.engine = DeviceStepEngine(model)
    return decoder


def batch(count: int, length: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts and their mask."""
    rows = prompts(count, length=length)
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, count, longest, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, longest - len(row) :] = torch.tensor(row)
        mask[b, longest - len(row) :] = 1
    return ids, mask


def assert_same(on_cpu: JacobiDecoder, on_device: JacobiDecoder, ids: Any, mask: Any = None, **options: Any) -> Any:
    """Tokens and statistics, the clock's apart, are the same; the device's statistics."""
    options = {"max_new_tokens": 24, "pad_token_id": 0, "return_stats": True, **options}
    wanted, theirs = on_cpu.generate(ids, mask, **options)
    found, ours = on_device.generate(ids, mask, **options)
    assert torch.equal(found, wanted)
    assert ours.rows == theirs.rows
    assert len(ours.step_seconds) == len(theirs.step_seconds)
    ours_dict, theirs_dict = ours.to_dict(), theirs.to_dict()
    for name in set(theirs_dict) - set(CLOCK):
        assert ours_dict[name] == theirs_dict[name], name
    return ours


@pytest.mark.parametrize(
    "options",
    [
        AR,
        BLOCKS,
        {"block_size": 8, "blocks": 3, "candidates": 0},
        BLOCKS | {"do_sample": True, "temperature": 0.9, "seed": 3},
        BLOCKS | {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3},
        BLOCKS | {"eos_token_id": 31},
        BLOCKS | {"pool_from_prompt": False, "pool_rows": 0},
        BLOCKS | {"max_new_tokens": 1},
    ],
)
def test_one_prompt(on_cpu: JacobiDecoder, on_device: JacobiDecoder, options: dict[str, Any]) -> None:
    ids = torch.tensor([prompts(2)[1]])
    assert_same(on_cpu, on_device, ids, **options)


@pytest.mark.parametrize("options", [AR, BLOCKS])
def test_batches_and_prompts_of_many_pieces(
    on_cpu: JacobiDecoder, on_device: JacobiDecoder, options: dict[str, Any]
) -> None:
    assert_same(on_cpu, on_device, *batch(4), max_new_tokens=[5, 24, 9, 17], **options)
    assert_same(on_cpu, on_device, *batch(2, length=300), **options)


def test_plans_are_used_again_and_bounded(on_cpu: JacobiDecoder, on_device: JacobiDecoder) -> None:
    engine: Any = on_device.engine
    for length in (9, 12, 15):
        assert_same(on_cpu, on_device, torch.tensor([prompts(1, length=length)[0]]), **BLOCKS)
    assert len(engine._plans) == 1
    for n in range(1, 7):
        assert_same(on_cpu, on_device, torch.tensor([[5, 6, 7]]), block_size=n, max_new_tokens=8)
    assert len(engine._plans) == device_engine.KEPT_PLANS


def test_a_full_log_is_read_on_the_way(
    on_cpu: JacobiDecoder, on_device: JacobiDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "MOST_BYTES", 1)
    assert_same(on_cpu, on_device, *batch(2), **BLOCKS)
    assert next(iter(on_device.engine._plans.values())).log.capacity == 2  # type: ignore[attr-defined]


class Replay:
    """Stands in for a CUDA graph: what was captured runs when it is replayed."""

    def __init__(self, launch: Callable[[], None], stream: Any) -> None:
        self.replay, self.stream = launch, stream
        COUNTED["multi_block_step"] += 7  # as a capture counts launches that it does not make


COUNTED: Counter[str] = Counter()


def test_graphs_and_lagged_words(
    on_cpu: JacobiDecoder, on_device: JacobiDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = on_device.engine
    engine._mode, engine.lag = "graph", 1
    monkeypatch.setattr(device_engine, "capture", Replay)
    monkeypatch.setattr(device_engine, "launch_counts", lambda: Counter(COUNTED))
    ids = torch.tensor([prompts(2)[1]])
    for _ in range(2):  # captured, then used again
        stats = assert_same(on_cpu, on_device, ids, **BLOCKS)
        # One step for the prompt, one to warm up, one more behind the end.
        assert stats.launches == {"multi_block_step": 7 * (stats.forwards - 2 + 1)}
    assert_same(on_cpu, on_device, *batch(3), **BLOCKS)


class Collector:
    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def put(self, ids: torch.Tensor) -> None:
        self.parts.append(ids.flatten().tolist())

    def end(self) -> None:
        self.parts.append([])


def test_streaming(on_cpu: JacobiDecoder, on_device: JacobiDecoder) -> None:
    ids = torch.tensor([prompts(2)[1]])
    streams = [Collector(), Collector()]
    for decoder, stream in zip((on_cpu, on_device), streams, strict=True):
        decoder.generate(ids, max_new_tokens=20, streamer=stream, **BLOCKS)
    assert streams[0].parts == streams[1].parts


def test_a_callback_may_end_rows(on_cpu: JacobiDecoder, on_device: JacobiDecoder) -> None:
    def cut(state: DecodeState) -> None:
        for b in range(state.batch):
            end = int(state.state[b, StateColumn.PROMPT_LEN]) + 6
            if int(state.state[b, StateColumn.TEXT_LEN]) > end and not state.done[b]:
                end_row(state, b, end)

    stats = assert_same(on_cpu, on_device, *batch(3), step_callback=cut, **BLOCKS)
    assert [len(row.text) for row in stats.rows] == [len(p) + 6 for p in prompts(3)]


def test_an_error_column_is_one_line(on_device: JacobiDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = on_device.engine

    def failing_op() -> Callable[..., None]:
        def step(*args: Any, **options: Any) -> None:
            args[11][1, StateColumn.ERROR] = 3

        return step

    monkeypatch.setattr(engine, "step_op", failing_op)
    with pytest.raises(DeviceStepError, match=r"^the step on cpu stopped at row 1: a cache length .* \(code 3\)$"):
        on_device.generate(*batch(2), pad_token_id=0, **BLOCKS)
    monkeypatch.undo()
    on_device.generate(*batch(2), pad_token_id=0, **BLOCKS)


def test_a_step_that_gets_nowhere_ends(on_device: JacobiDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device.engine, "step_op", lambda: lambda *args, **options: None)
    with pytest.raises(DeviceStepError, match="has not ended after 12 steps"):
        on_device.generate(torch.tensor([[5, 6]]), max_new_tokens=10, **BLOCKS)


def test_narrowed_states_decode_the_same(model: Any) -> None:
    engine = JacobiDecoder(model).engine
    state = DecodeState.allocate(prompts(3), max_new_tokens=20, chain_capacity=40, **BLOCKS)
    cache = engine.allocate_cache(3, state.cache_capacity)
    with engine.running():
        engine.step(state, cache, SamplingParams())
        narrow = state.narrowed().to("cpu")
        assert narrow.rows_per_sequence == 4 * 2 + 2 * 3
        wide = [state.text.clone(), *(t.clone() for t in (cache.k_cache, cache.v_cache))]
        shared = [t.clone() for t in (state.pool, state.state, state.cache_seqlens)]
        while state.running:
            engine.step(state, cache, SamplingParams())
        wanted = [state.generated(b) for b in range(3)]
        for t, was in zip((state.pool, state.state, state.cache_seqlens), shared, strict=True):
            t.copy_(was)
        for t, was in zip((state.text, cache.k_cache, cache.v_cache), wide, strict=True):
            t.copy_(was)
        while narrow.running:
            engine.step(narrow, cache, SamplingParams())
    assert [narrow.generated(b) for b in range(3)] == wanted


def test_prompts_taken_in_by_the_model(on_cpu: JacobiDecoder, model: Any) -> None:
    """With transformers' own attention in place of flash-attn: the cache holds what our steps would have put there."""
    engine = DeviceStepEngine(model)
    exact, other = (DecodeState.allocate(prompts(2), max_new_tokens=12, **BLOCKS) for _ in range(2))
    caches = [engine.allocate_cache(2, exact.cache_capacity) for _ in range(2)]
    attention = model.config._attn_implementation
    take_in_prompts(model, other, caches[1], "sdpa")
    assert model.config._attn_implementation == attention
    engine.step(exact, caches[0], SamplingParams())
    assert other.cache_seqlens.tolist() == [len(p) - 1 for p in prompts(2)]
    for b, prompt in enumerate(prompts(2)):
        for mine, theirs in ((caches[0].k_cache, caches[1].k_cache), (caches[0].v_cache, caches[1].v_cache)):
            torch.testing.assert_close(mine[:, b, : len(prompt) - 1], theirs[:, b, : len(prompt) - 1])
    engine.step(other, caches[1], SamplingParams())
    assert [other.emitted(b) for b in range(2)] == [exact.emitted(b) for b in range(2)]


def test_few_rows_are_followed_by_holes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a forward of the model's modules never has fewer rows than torch sums in one way."""
    decoder = JacobiDecoder(family("olmo2"), path="modules")
    ids, mask = batch(2)
    wanted = decoder.generate(ids, mask, max_new_tokens=12, pad_token_id=0, **BLOCKS)
    monkeypatch.setattr("jacobi_decoding.layout_cache.least_rows", lambda device: 32)
    seen: list[int] = []
    decoder.model.model.embed_tokens.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[1]))
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=12, pad_token_id=0, **BLOCKS), wanted)
    assert min(seen) == 32


def test_prefill_is_refused_by_name(on_cpu: JacobiDecoder) -> None:
    with pytest.raises(ValueError, match="prefill must be one of exact, flash-attn, got 'fast'"):
        on_cpu.generate(torch.tensor([[5, 6]]), prefill="fast")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="prefill by flash-attn needs a GPU"):
        on_cpu.generate(torch.tensor([[5, 6]]), prefill="flash-attn")


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    assert checked_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="device 'mps' is not supported; use cpu, cuda or cuda:N"):
        checked_device("mps")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="is a CPU build; install a CUDA build of it"):
        JacobiDecoder(model, device="cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"no GPU or no driver for CUDA 13\.0; see what nvidia-smi says"):
        checked_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert checked_device("cuda") == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="device 'cuda:2': there are 2 GPUs, counted from 0"):
        checked_device("cuda:2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="Triton is not installed"):
        checked_device("cuda")


def test_models_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="there are no kernels for meta; move it to cpu or cuda"):
        JacobiDecoder(family("llama").to("meta"))


def test_step_modes(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    assert wanted_step_mode() == "graph"
    monkeypatch.setenv("JACOBI_STEP", "auto")
    assert (wanted_step_mode(), wanted_step_mode("launches")) == ("auto", "launches")
    monkeypatch.setenv("JACOBI_STEP", "fast")
    with pytest.raises(DeviceError, match="JACOBI_STEP must be one of graph, launches, cooperative, auto, got 'fast'"):
        DeviceStepEngine(model)
    with pytest.raises(DeviceError, match="cooperative needs a GPU"):
        DeviceStepEngine(model, "cooperative")


def test_auto_takes_the_faster(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    engine = DeviceStepEngine(model)
    seconds = {"graph": 2.0, "cooperative": 1.0}
    monkeypatch.setattr(engine, "_measure", lambda: seconds[engine._mode])
    for wanted in ("cooperative", "graph"):
        engine._mode = "auto"
        engine._choose_mode()
        assert engine._mode == wanted
        seconds["graph"] /= 4
    assert engine.backend == "triton"


CODE = """
import json, sys
import torch
from jacobi_decoding import JacobiDecoder
from tests.decoding.helpers import build

sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
model = build("Qwen2ForCausalLM", "Qwen2Config", **sizes, num_attention_heads=2, num_key_value_heads=1)
decoder = JacobiDecoder(model, path=sys.argv[1])
ids = torch.tensor([[7, 8, 9, 7, 8]])
options = json.loads(sys.argv[2])
tokens, stats = decoder.generate(ids, max_new_tokens=4, return_stats=True, **options)
print(json.dumps([tokens.tolist(), stats.to_dict(), [row.chains for row in stats.rows]]))
"""


@pytest.mark.parametrize("path", ["step", "modules"])
def test_triton_in_its_interpreter(path: str) -> None:
    """Tokens and statistics of the CPU's engine, from Triton's kernels."""
    options = {"block_size": 2, "blocks": 1, "candidates": 1}
    results = []
    for backend in ({}, {"JACOBI_BACKEND": "triton", "TRITON_INTERPRET": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", CODE, path, json.dumps(options)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | backend,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    (tokens, stats, chains), (found, ours, our_chains) = results
    assert (found, our_chains) == (tokens, chains)
    assert {k: v for k, v in ours.items() if k not in CLOCK} == {k: v for k, v in stats.items() if k not in CLOCK}
    assert (stats["backend"], ours["backend"]) == ("cpu", "triton")
    assert "launches" not in stats
    launches = ours["launches"]
    assert launches
    assert all(count > 0 for count in launches.values())
    if path == "step":
        assert launches["multi_block_step"] % ours["forwards"] == 0
