"""Tasks whose answers can be checked: each a module that finds out whether a model's text solves a prompt's record.

A record is one line of a .jsonl file. ``find_task`` chooses by the fields that the records have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from jacobi_training.tasks import gsm8k, humaneval, worded
from jacobi_training.tasks.verdict import Verdict

Record = Mapping[str, Any]


class Task(Protocol):
    """What a task's module offers.

    NAME: as the command line names it. FIELDS: what a record needs, in words. matches: whether a record is of this
    task. check: whether the text that a model wrote is right. reference: the right text, where the record has it.
    """

    NAME: str
    FIELDS: str

    def matches(self, record: Record, /) -> bool: ...
    def check(self, record: Record, text: str, /) -> Verdict: ...
    def reference(self, record: Record, /) -> str | None: ...


TASKS: dict[str, Task] = {module.NAME: cast("Task", module) for module in (worded, gsm8k, humaneval)}


def find_task(name: str, records: Sequence[Record]) -> Task | None:
    """The task ``name``; with 'auto' the one that all ``records`` are of, or None; with 'none' None.

    Raises ValueError for another name, and for a record that lacks what the named task needs.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((task for task in TASKS.values() if all(map(task.matches, records))), None)
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(['auto', *TASKS, 'none'])}, got {name!r}")
    task = TASKS[name]
    for number, record in enumerate(records, 1):
        if not task.matches(record):
            raise ValueError(f"prompt {number} is not of task {name!r}, which needs {task.FIELDS}; use another --task")
    return task


__all__ = ["TASKS", "Record", "Task", "Verdict", "find_task"]
