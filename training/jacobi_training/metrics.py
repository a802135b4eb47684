"""What a run reports: a JSON line per optimizer step, TensorBoard on request, progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jacobi_training.run_settings import write_atomically

SECONDS_BETWEEN_LINES = 15.0


class MetricLog:
    """Appends to ``path`` one JSON object per step, first dropping those of steps at or behind ``step``.

    So a run that resumed has one line for each step. tensorboard: a folder for TensorBoard's events, or None.
    """

    def __init__(self, path: Path, step: int, tensorboard: Path | None = None) -> None:
        kept = [line for line in read_lines(path) if line["step"] <= step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._writer = _tensorboard(tensorboard, step) if tensorboard is not None else None

    def write(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if name != "step":
                    self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file in order; without the last when a killed process left half of it."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "TensorBoard is not installed; run `pip install tensorboard` or leave out --tensorboard"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)


class StepProgress:
    """A progress bar over ``total`` steps on a terminal, otherwise a line now and then; nothing unless ``active``."""

    def __init__(self, title: str, total: int, active: bool = True) -> None:
        self._title, self._total, self._active = title, total, active
        self._last = time.monotonic()
        self._bar: Progress | None = None
        if active and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[values]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(title, total=total, values="")

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, values: dict[str, Any]) -> None:
        """Show the metrics of a step."""
        shown = "  ".join(
            f"{name.replace('_', ' ')} {values[name]:.4g}"
            for name in ("ar_loss", "consistency_loss", "lr", "tokens_per_second")
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=values["step"], values=shown)
        elif self._active and (time.monotonic() - self._last > SECONDS_BETWEEN_LINES or values["step"] == self._total):
            self._last = time.monotonic()
            self.say(f"step {values['step']} of {self._total}  {shown}")

    def say(self, message: str) -> None:
        """One line, above the bar if there is one."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.console.print(f"jacobi: {self._title}: {message}", highlight=False, markup=False)
        else:
            print(f"jacobi: {self._title}: {message}", file=sys.stderr, flush=True)
