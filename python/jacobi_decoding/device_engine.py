"""The step path where the decode state lives on a device: static tensors, one captured graph, one small read per step.

A run goes through two layouts. Prompts are taken in by wide steps, launched one by one: their number follows from the
prompts' lengths. Decode steps have room for ``blocks * block_size`` chain tokens, since a GPU evaluates empty slots
too; the first of them warms the kernels up, the next is captured in a CUDA graph, the others replay it. Tensors that
the graph reads and writes are kept with it and used again by every run of the same capacities.

The host reads one status word per step, copied to pinned memory behind the step. It launches the next step before it
looks at the word, unless somebody wants each step's tokens; a step over sequences that have all ended changes nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from jacobi_decoding.devices import DeviceError, wanted_step_mode
from jacobi_decoding.sampling import SamplingParams
from jacobi_decoding.stats import DecodeStats, RowStats, StepView, count_step
from jacobi_decoding.step_engine import StepCache, StepEngine
from jacobi_decoding.step_log import DeviceStepError, StepLog, raise_step_error
from jacobi_kernels.state import DecodeState, StateColumn
from jacobi_kernels.step_weights import aligned_bytes

PROMPT_SLOTS = 256  # what DecodeState.allocate makes of long prompts by default
TEXT_ROUNDING = 512  # capacities are rounded up to it, so that runs of about one length share a graph
KEPT_PLANS = 4
KEPT_BYTES = 4 << 30  # beside the plan of the present run
MEASURED_STEPS = 8  # of the graph and of the cooperative step, to choose one
COOPERATIVE = "_cooperative_step"

EachStep = Callable[[DecodeState], None]
Prefill = Callable[[DecodeState, StepCache], None]


@dataclass
class Plan:
    """What runs of the same capacities share. state: in decode layout; cache: with room for wide steps as well.

    graph, graph_launches: the captured step and the launches that it replays.
    """

    state: DecodeState
    cache: StepCache
    sampling: SamplingParams
    log: StepLog
    graph: Any = None
    graph_launches: Counter[str] | None = None


class DeviceStepEngine(StepEngine):
    """Steps a model of the Llama kind on the device that its weights are on.

    step_mode: see :func:`jacobi_decoding.devices.wanted_step_mode`. Raises as StepEngine does, and DeviceError for
    a mode that is not available.
    """

    def __init__(self, model: Any, step_mode: str | None = None) -> None:
        super().__init__(model)
        self._mode = self._available(wanted_step_mode(step_mode))
        self._plans: dict[Hashable, Plan] = {}  # the latest last
        self._lock = threading.RLock()
        # A step over sequences that have ended costs nothing that matters, but in the interpreter.
        self.lag = 1 if self.device.type == "cuda" else 0
        self._stream: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def backend(self) -> str:
        """'cuda' when a step is one launch of the CUDA program, else 'triton'."""
        return "cuda" if self._mode == "cooperative" else "triton"

    def _available(self, mode: str) -> str:
        """``mode``, or what it comes to here: without a GPU only single launches exist."""
        if self.device.type == "cpu":
            if mode == "cooperative":
                raise DeviceError("JACOBI_STEP=cooperative needs a GPU; the interpreter runs launches")
            return "launches"
        if _has_cooperative_step():
            return mode
        if mode == "cooperative":
            raise DeviceError(
                "JACOBI_STEP=cooperative: jacobi_kernels._C_cuda is not built; install with nvcc and a CUDA build of "
                "torch, or use JACOBI_STEP=graph"
            )
        return "graph" if mode == "auto" else mode

    def step_op(self) -> Any:
        """The op that a step calls."""
        name = COOPERATIVE if self._mode == "cooperative" else "multi_block_step"
        return getattr(torch.ops.jacobi, name).default

    def workspace_size(self, rows: int, batch: int, segments: int) -> int:
        """Bytes of scratch memory that a step over ``rows`` query slots needs."""
        if self._mode != "cooperative":
            return super().workspace_size(rows, batch, segments)
        size = torch.ops.jacobi._cooperative_workspace_size.default
        return int(size(self.weights().descriptor, rows, batch, segments))

    def step(self, state: DecodeState, cache: StepCache, sampling: SamplingParams) -> None:
        """As StepEngine does. A state on the CPU, for callers that change it between steps, is copied over and back."""
        if state.state.device == self.device:
            super().step(state, cache, sampling)
            return
        there = state.to(self.device)
        super().step(there, cache, sampling)
        for name in ("tokens", "segments", "cache_seqlens", "text", "pool", "state"):
            getattr(state, name).copy_(getattr(there, name))
        raise_step_error(state)

    def run(
        self,
        state: DecodeState,
        sampling: SamplingParams,
        stats: DecodeStats,
        each_step: EachStep | None = None,
        prefill: Prefill | None = None,
    ) -> None:
        """Decode ``state``, a CPU state before its first step, until every row is done; it holds the result then.

        stats: filled in. each_step: called after every step with the state on the device, which it may end rows of.
        prefill: called with state and cache on the device before the first step; it leaves one prompt token to do.
        Raises DeviceStepError, one line, when a step finds a sequence that it cannot run.
        """
        started = time.perf_counter()
        with self._lock, self._on_stream():
            self._choose_mode()
            stats.backend = self.backend
            plan = self._plan_for(state, sampling)
            run = _Run(self, plan, load(plan, state, sampling), state)
            run.go(each_step, prefill)
            result = plan.state.to("cpu")
            state.text.copy_(result.text[:, : state.text.shape[1]])
            state.state.copy_(result.state)
            state.cache_seqlens.copy_(result.cache_seqlens)
            run.account(stats, state)
        stats.seconds = time.perf_counter() - started

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A stream of our own, as captures need; it and the caller's wait for one another."""
        if self._stream is None:
            yield
            return
        callers = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(callers)
        with torch.cuda.stream(self._stream):
            yield
        callers.wait_stream(self._stream)

    def _plan_for(self, state: DecodeState, sampling: SamplingParams) -> Plan:
        """The plan of runs like this one, from an earlier one when there is one."""
        drafts = state.candidates * (state.block_size - 1)
        text = _rounded(state.text.shape[1], TEXT_ROUNDING)
        wide_rows = max(state.rows_per_sequence, PROMPT_SLOTS + drafts)
        stops = _rounded(state.stop_tokens.shape[1], 4)
        given = tuple(getattr(sampling, f.name) is not None for f in fields(sampling))
        settings = (state.block_size, state.blocks, state.candidates, state.spawn_ratio)
        blob = self.weights().blob.data_ptr()
        key = (self._mode, blob, settings, tuple(state.pool.shape), text, wide_rows, stops, given)
        plan = self._plans.pop(key, None)
        if plan is None:
            while self._plans and (len(self._plans) >= KEPT_PLANS or self._kept_bytes() > KEPT_BYTES):
                self._plans.pop(next(iter(self._plans)))
            plan = self._make_plan(state, sampling, text, wide_rows, stops)
        self._plans[key] = plan
        return plan

    def _kept_bytes(self) -> int:
        caches = [plan.cache for plan in self._plans.values()]
        return sum(t.nbytes for cache in caches for t in (cache.k_cache, cache.v_cache, cache.workspace))

    def _make_plan(self, state: DecodeState, sampling: SamplingParams, text: int, wide_rows: int, stops: int) -> Plan:
        narrow = state.narrowed()
        narrow = replace(
            narrow, text=narrow.text.new_zeros(state.batch, text), stop_tokens=narrow.text.new_zeros(state.batch, stops)
        )
        own = _copy_of(narrow, self.device)
        cache = self.allocate_cache(state.batch, text + wide_rows)
        needed = self.workspace_size(state.batch * wide_rows, state.batch, state.segments.shape[0])
        cache.workspace = aligned_bytes(needed, self.device)
        return Plan(own, cache, _sampling_on(sampling, self.device), StepLog(own, text + 2))

    def _choose_mode(self) -> None:
        """Settle what 'auto' means: the faster of graph and cooperative step, measured once."""
        if self._mode != "auto":
            return
        seconds = {}
        for mode in ("graph", "cooperative"):
            self._mode = mode
            try:
                seconds[mode] = self._measure()
            except RuntimeError:  # the CUDA program does not take this model
                if mode == "graph":
                    raise
        self._mode = min(seconds, key=seconds.__getitem__)
        self._plans.clear()

    def _measure(self) -> float:
        """Seconds of some decode steps in the present mode."""
        slots = 64
        state = DecodeState.allocate(
            [[1]],
            max_new_tokens=8 * slots * MEASURED_STEPS,
            block_size=slots,
            blocks=2,
            candidates=4,
            pool_from_prompt=False,
        )
        plan = self._plan_for(state, SamplingParams())
        run = _Run(self, plan, load(plan, state, SamplingParams()), state)
        for _ in range(4):  # the prompt, the first decode step, the capture, a replay
            run.step()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(MEASURED_STEPS):
            run.step()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


class _Run:
    """One run: which layout is next, which launches were made, what the steps have left."""

    def __init__(self, engine: DeviceStepEngine, plan: Plan, wide: DecodeState, state: DecodeState) -> None:
        self.engine, self.plan, self.wide = engine, plan, wide
        prompts = state.state[:, StateColumn.PROMPT_LEN]
        slots = state.rows_per_sequence - state.candidates * (state.block_size - 1)
        self.prompt_steps = math.ceil(int(prompts.max()) / slots)
        # Every step emits a token; one more may be on its way when the last word is read.
        self.most = self.prompt_steps + int((state.state[:, StateColumn.MAX_LEN] - prompts).max()) + 1
        self.state = wide
        self.steps = self.read = 0
        self.views: list[StepView] = []
        self.seconds: list[float] = []
        self.launches: Counter[str] = Counter()

    def go(self, each_step: EachStep | None, prefill: Prefill | None) -> None:
        if prefill is not None:
            prefill(self.wide, self.plan.cache)
            self.prompt_steps = 1
        words = _StatusWords(self.plan.log.status, self.engine.lag if each_step is None else 0)
        while True:
            self.step()
            words.submit()
            found = words.take()
            if found is None:
                continue
            word, seconds = found
            self.seconds.append(seconds)
            if word < 0:
                raise_step_error(self.state)
            if each_step is not None:
                each_step(self.state)
                word = sum(done == 0 for done in self.state.done)
            if word == 0:
                return
            if self.steps >= self.most:
                raise DeviceStepError(f"decoding on {self.engine.device} has not ended after {self.steps} steps")

    def step(self) -> None:
        """Launch the next step."""
        plan, engine = self.plan, self.engine
        if self.steps - self.read == plan.log.capacity:
            self.drain()
        if self.steps == self.prompt_steps:
            narrow = self.wide.narrowed()
            plan.state.tokens.copy_(narrow.tokens)
            plan.state.segments.copy_(narrow.segments)
            self.state = plan.state
        if self.steps <= self.prompt_steps or engine._mode != "graph":
            with self._counted():
                _launch_step(engine, plan, self.state)
        else:
            if plan.graph is None:
                self._capture()
            plan.graph.replay()
            self.launches.update(plan.graph_launches)
        self.steps += 1

    def drain(self) -> None:
        """Read the records that the log holds; waits for the device."""
        self.views += self.plan.log.read(self.steps - self.read)
        self.plan.log.clear()
        self.read = self.steps

    def account(self, stats: DecodeStats, state: DecodeState) -> None:
        """Fill ``stats`` from the log; ``state`` is the final one."""
        self.drain()
        stats.rows = [RowStats() for _ in range(state.batch)]
        afters = [view.columns for view in self.views[1:]] + [state.state.tolist()]
        for view, after, seconds in zip(self.views, afters, self.seconds, strict=False):
            if view.running:
                count_step(stats, view, after, seconds)
        for b, row in enumerate(stats.rows):
            row.text = state.text[b, : int(state.state[b, StateColumn.TEXT_LEN])].tolist()
        stats.launches = dict(self.launches)

    def _capture(self) -> None:
        """Capture a decode step; a capture launches nothing."""
        before = launch_counts()
        self.plan.graph = capture(lambda: _launch_step(self.engine, self.plan, self.state), self.engine._stream)
        self.plan.graph_launches = launch_counts() - before

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = launch_counts()
        yield
        self.launches += launch_counts() - before
        if self.engine._mode == "cooperative":
            self.launches["cooperative_step"] += 1


class _StatusWords:
    """The status word after every step, with the step's seconds, read ``lag`` steps late."""

    def __init__(self, status: Tensor, lag: int) -> None:
        self.status = status
        self.cuda = status.device.type == "cuda"
        self.lag = lag
        self.last: Any = self._mark()
        self.pending: deque[tuple[Tensor, Any]] = deque()
        self.slots = torch.zeros(2, dtype=torch.int32, pin_memory=self.cuda)
        self.count = 0

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def submit(self) -> None:
        """Ask for the word of the step that was just launched."""
        slot = self.slots[self.count % 2 :][:1]
        slot.copy_(self.status, non_blocking=True)
        self.count += 1
        self.pending.append((slot, self._mark()))

    def take(self) -> tuple[int, float] | None:
        """Word and seconds of the oldest step asked for, None while it is too early to wait for it."""
        if len(self.pending) <= self.lag:
            return None
        slot, mark = self.pending.popleft()
        if self.cuda:
            mark.synchronize()
            seconds = self.last.elapsed_time(mark) / 1e3
        else:
            seconds = mark - self.last
        self.last = mark
        return int(slot), seconds


def _launch_step(engine: DeviceStepEngine, plan: Plan, state: DecodeState) -> None:
    """A step and what it leaves for the host: launches only."""
    plan.log.append(state)
    engine.step(state, plan.cache, plan.sampling)
    plan.log.update_status(state)


def load(plan: Plan, state: DecodeState, sampling: SamplingParams) -> DecodeState:
    """Put a run's start into the plan's tensors; the wide state that shares them."""
    own = plan.state
    own.text.zero_()
    own.text[:, : state.text.shape[1]].copy_(state.text)
    own.stop_tokens.fill_(-1)
    own.stop_tokens[:, : state.stop_tokens.shape[1]].copy_(state.stop_tokens)
    for name in ("cache_seqlens", "pool", "state"):
        getattr(own, name).copy_(getattr(state, name))
    for f in fields(sampling):
        if (value := getattr(sampling, f.name)) is not None and f.name != "logits_scratch":
            getattr(plan.sampling, f.name).copy_(value)
    # Rows of another run must not be read; NaN would even spoil sums in which they weigh 0.
    plan.cache.k_cache.zero_()
    plan.cache.v_cache.zero_()
    plan.log.clear()
    shared = {name: getattr(own, name) for name in ("text", "pool", "state", "cache_seqlens", "stop_tokens")}
    return replace(_copy_of(state, own.state.device), **shared)


def capture(launch: Callable[[], None], stream: Any) -> Any:
    """What ``launch`` does on ``stream``, to be replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph


def launch_counts() -> Counter[str]:
    """Launches of Triton kernels since the process began, by op."""
    from jacobi_kernels.triton.runtime import launches

    return Counter(launches)


def _has_cooperative_step() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"jacobi::{COOPERATIVE}", "CUDA")


def _copy_of(state: DecodeState, device: torch.device) -> DecodeState:
    """``state`` with tensors of its own on ``device``."""
    tensors: dict[str, Any] = {
        f.name: t.to(device, copy=True) for f in fields(state) if isinstance(t := getattr(state, f.name), Tensor)
    }
    return replace(state, **tensors)


def _sampling_on(sampling: SamplingParams, device: torch.device) -> SamplingParams:
    tensors = {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    return SamplingParams(**{name: None if t is None else t.to(device, copy=True) for name, t in tensors.items()})


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
