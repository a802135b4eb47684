"""The workers of one format: processes that each hold an engine, of which one at a time is asked to do something."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

from bench.environment import ROOT

LOAD_SECONDS = 300
ANSWER_SECONDS = 300
NOT_INSTALLED = "not installed"
REST_SECONDS = 0.01  # after each answer: threads that still spin for more work go to sleep


class WorkerError(RuntimeError):
    """An engine that is missing, failed or refused; one line."""


class Worker:
    """A process with one engine in it. Raises WorkerError when the engine cannot be loaded."""

    def __init__(self, engine: str, weight_format: str, model: str | None, threads: int) -> None:
        command = [sys.executable, "-m", "bench.cpu.worker", "--engine", engine, "--format", weight_format]
        command += ["--threads", str(threads), *(["--model", model] if model else [])]
        # Every engine waits for work in its own way: what the caller set for one OpenMP would hold for all.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.name = f"{engine} {weight_format}"
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages
        )
        try:
            self.facts = self._answer(LOAD_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> Any:
        """The worker's answer; WorkerError with its reason when there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._answer(ANSWER_SECONDS)
        time.sleep(REST_SECONDS)
        return answer

    def close(self) -> None:
        self._process.kill()  # it holds nothing that must be saved
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._messages):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _answer(self, seconds: float) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], seconds)[0]:
            raise WorkerError(f"{self.name}: no answer within {seconds} s; is the machine busy?")
        line = stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer["result"]

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        return WorkerError(f"{self.name}: the process ended with code {code}{': ' + lines[-1] if lines else ''}")


class Workers:
    """Workers by (engine, format), started when they are first needed; those that fail are named once in ``notes``."""

    def __init__(self, models: dict[tuple[str, str], str | None], threads: int, notes: list[str]) -> None:
        self.models, self.threads, self.notes = models, threads, notes
        self._running: dict[tuple[str, str], Worker] = {}
        self._failed: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def get(self, engine: str, weight_format: str) -> Worker | None:
        """The worker, or None where the engine cannot be had or has failed."""
        key = (engine, weight_format)
        if key not in self._running and key not in self._failed:
            try:
                self._running[key] = Worker(engine, weight_format, self.models.get(key), self.threads)
            except WorkerError as error:
                self.fail(key, error)
        return self._running.get(key)

    def reason(self, engine: str, weight_format: str) -> str:
        """Why there is no such worker, short: 'not installed', or what it said."""
        said = self._failed[engine, weight_format]
        return NOT_INSTALLED if NOT_INSTALLED in said else said

    def fail(self, key: tuple[str, str], error: WorkerError) -> None:
        """Do without this worker from now on."""
        self._failed[key] = str(error)
        if key in self._running:
            self._running.pop(key).close()
        if str(error) not in self.notes:
            self.notes.append(str(error))

    def close(self) -> None:
        for worker in self._running.values():
            worker.close()
        self._running.clear()
