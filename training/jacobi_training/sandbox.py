"""Runs Python code that a model wrote in a process of its own that can do little: compute, for a while, in some memory.

The child (``sandbox_child.py``) limits itself before it runs the code: CPU time, memory, file size and processes by
rlimits; writing outside an empty temporary directory and starting programs by Landlock; processes, signals and the
network by seccomp; capabilities are dropped. What the kernel does not offer is left out, and the outcome names what
held. It guards against what language models write by mistake; it is not meant to hold an attacker.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal[
    "passed", "failed", "exited", "cpu time", "wall time", "memory", "processes", "file size", "forbidden", "killed"
]

PROTECTIONS = ("rlimits", "landlock", "capabilities", "seccomp")
_CHILD = Path(__file__).with_name("sandbox_child.py")
_VERDICT_BYTES = 8192  # below a pipe's capacity: the child never waits for a reader
_OF_SIGNAL: dict[int, tuple[Status, str]] = {
    signal.SIGXCPU: ("cpu time", "used all of its CPU time"),
    signal.SIGXFSZ: ("file size", "wrote a file larger than it may"),
}


@dataclass(frozen=True)
class Limits:
    """What the code may use."""

    cpu_seconds: int = 5
    wall_seconds: float = 30.0  # generous: what code takes on a busy machine should not decide
    memory_mb: int = 512  # address space, with the interpreter's own 30 or so
    file_kb: int = 1024  # of each file


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    status: 'passed' ran to its end; 'failed' raised; 'exited' ended the process itself; 'forbidden' asked for what is
    not allowed (a file outside its directory, a program, the network); 'killed' by another signal; the others name the
    limit that was hit. message: why, in one line. protections: those of PROTECTIONS that held.
    """

    status: Status
    message: str
    seconds: float
    protections: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def run_python(code: str, limits: Limits | None = None) -> Outcome:
    """Run ``code`` as a module of its own; only a run that reaches its end without an exception has passed.

    Never raises for what the code does; OSError when no process can be started.
    """
    limits = limits or Limits()
    nonce = secrets.token_hex(16)  # a verdict without it was not written by the child's own code
    order = {"code": code, "nonce": nonce, "limits": asdict(limits)}
    start = time.perf_counter()
    with _folder() as folder, tempfile.TemporaryFile() as orders:
        orders.write(json.dumps(order).encode())
        orders.seek(0)
        # -I -S: neither the environment, nor the user's packages, nor the current directory are looked at.
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD)],
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder},
            stdin=orders,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as child:
            try:
                exit_code: int | None = child.wait(limits.wall_seconds)
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                _end(child)
            assert child.stdout is not None
            verdict = _read_verdict(os.read(child.stdout.fileno(), _VERDICT_BYTES), nonce)
    seconds = time.perf_counter() - start
    status, message = _judge(exit_code, verdict, limits)
    return Outcome(status, message, seconds, tuple(verdict.get("protections", ())))


@contextmanager
def _folder() -> Iterator[str]:
    """An empty directory, removed behind the run with whatever the code left there."""
    folder = tempfile.mkdtemp(prefix="jacobi-sandbox-")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:  # folders nested by the thousand, which rm does not recurse into
            subprocess.run(["rm", "-rf", folder], check=False)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child, and what it may have started where forks could not be forbidden."""
    if child.poll() is None:
        child.kill()
    with suppress(OSError):  # nobody left in its group
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read_verdict(data: bytes, nonce: str) -> dict[str, Any]:
    """What the child wrote: one line before the code ran, one after; lines without the nonce do not count."""
    verdict: dict[str, Any] = {}
    for line in data.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict) and fields.get("nonce") == nonce:
            verdict |= fields
    return verdict


def _judge(exit_code: int | None, verdict: dict[str, Any], limits: Limits) -> tuple[Status, str]:
    if exit_code is None:
        return "wall time", f"still running after {limits.wall_seconds:g} s"
    if exit_code < 0:
        if -exit_code in _OF_SIGNAL:
            return _OF_SIGNAL[-exit_code]
        return "killed", f"ended by {signal.Signals(-exit_code).name}"
    if "status" not in verdict:
        return "exited", f"ended the process with exit code {exit_code} before its end"
    # What the code raised may hold halves of surrogate pairs, which no file takes.
    return verdict["status"], verdict["message"].encode(errors="backslashreplace").decode()
