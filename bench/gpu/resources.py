"""What a compiled kernel takes of a multiprocessor, and the rules it is held to.

Three targets: sm_80 (A100), sm_90a (H100, H200), sm_100a (B200). A kernel passes when it compiles, spills no register
(unless it may), contains matrix instructions where it is meant to, and asks for no more shared memory than one thread
block can have.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory of one thread block, bytes, by target."""

ARCHITECTURE = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}

_MMA_PTX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_MMA_SASS = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|IMMA|DMMA)\b")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """Of one kernel: registers per thread, bytes of shared memory per block, bytes of spill stores and loads per
    thread, and which matrix instructions it has ('' for none)."""

    registers: int
    shared: int
    spills: int
    mma: str


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target: what it takes, or the error that kept it from compiling, and what it must obey.

    Host code has neither usage nor error when it passes.
    """

    group: str
    name: str
    target: int
    usage: Usage | None = None
    error: str = ""
    uses_mma: bool = False
    may_spill: bool = False
    seconds: float = 0.0

    def faults(self) -> list[str]:
        """Broken rules, in words; empty when it passes."""
        where = f"{self.group}: {self.name} for {ARCHITECTURE[self.target]}"
        if self.error or self.usage is None:
            return [f"{where}: {self.error}"] if self.error else []
        faults = []
        if self.usage.spills and not self.may_spill:
            faults.append(f"{where}: spills {self.usage.spills} bytes of registers per thread")
        if self.uses_mma and not self.usage.mma:
            faults.append(f"{where}: has no matrix instruction")
        if self.usage.shared > SHARED_LIMIT[self.target]:
            limit = SHARED_LIMIT[self.target] // 1024
            faults.append(f"{where}: needs {self.usage.shared / 1024:.1f} KB of shared memory, the limit is {limit}")
        return faults


def mma_in_ptx(ptx: str) -> str:
    """Kinds of matrix instructions in PTX text, joined by '+'."""
    return "+".join(sorted({match.split(".")[0] for match in _MMA_PTX.findall(ptx)}))


def mma_in_sass(sass: str) -> str:
    """Kinds of matrix instructions in a disassembly, joined by '+'."""
    return "+".join(sorted(set(_MMA_SASS.findall(sass))))


def parse_ptxas(log: str) -> dict[str, Usage]:
    """Usage of every entry function in what ``ptxas -v`` printed; mma stays ''."""
    found: dict[str, Usage] = {}
    pieces = _ENTRY.split(log)
    for name, body in zip(pieces[1::3], pieces[3::3], strict=True):
        spills, used, shared = _SPILLS.search(body), _USED.search(body), _SHARED.search(body)
        found[name] = Usage(
            registers=int(used[1]) if used else 0,
            shared=int(shared[1]) if shared else 0,
            spills=int(spills[2]) + int(spills[3]) if spills else 0,
            mma="",
        )
    return found


def tool(command: Sequence[str | Path]) -> str:
    """Output of a compiler's tool, standard error included; RuntimeError with its last lines when it fails."""
    done = subprocess.run(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        name = Path(command[0]).name
        raise RuntimeError(f"{name} failed:\n{_last_lines(done.stdout, 20)}")
    return done.stdout


def _last_lines(text: str, count: int) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
