"""Share of the decode time in each op, on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jacobi_decoding.stats import DecodeStats


@contextmanager
def op_profile(stats: DecodeStats, enabled: bool, device: torch.device) -> Iterator[None]:
    """Fill ``stats.op_share``: op -> share of the time, from torch's profiler and the step op's own clock.

    On a GPU: kernel -> share of its time.
    """
    if not enabled:
        yield
        return
    if device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize(device)
        times = {event.key: event.self_device_time_total for event in profiler.key_averages()}
        all_kernels = sum(times.values()) or 1.0
        stats.op_share = {name: t / all_kernels for name, t in sorted(times.items(), key=lambda i: -i[1])}
        return
    torch.ops.jacobi._phase_seconds.default()  # reset
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield
    events = {event.key: event.self_cpu_time_total * 1e-6 for event in profiler.key_averages()}
    total = sum(events.values()) or 1.0
    phases = torch.ops.jacobi._phase_seconds.default().tolist()
    shares = {key.removeprefix("jacobi::"): seconds for key, seconds in events.items() if key.startswith("jacobi::")}
    inside = dict(zip(PHASES, phases, strict=True))
    if "multi_block_step" in shares:
        shares["multi_block_step"] -= sum(inside.values())
        shares.update({f"multi_block_step.{name}": seconds for name, seconds in inside.items()})
    shares["other"] = total - sum(shares.values())
    stats.op_share = {name: seconds / total for name, seconds in sorted(shares.items(), key=lambda i: -i[1])}


# In the order of csrc/cpu/phase_clock.h.
PHASES = ("linear", "norm_rope", "attention", "verify", "commit", "redraft")
