"""HumanEval: Python functions that must pass their tests (pass@1), run in the sandbox.

A record has "task_id", "prompt" (imports, signature and docstring), "test" (a function ``check``) and "entry_point".
A model may continue the prompt, or write the whole function, in a fenced block or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jacobi_training.sandbox import Limits, run_python
from jacobi_training.tasks.verdict import Verdict

NAME = "humaneval"
FIELDS = '"task_id", "prompt", "test" and "entry_point"'

_FENCED = re.compile(r"```[ \t]*(?:python|py|Python)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
# Where text that continues a function leaves it: anything at the left margin.
_BEYOND = re.compile(r"^(?=\S)", re.MULTILINE)


def matches(record: Mapping[str, Any]) -> bool:
    return all(isinstance(record.get(name), str) for name in ("task_id", "prompt", "test", "entry_point"))


def reference(record: Mapping[str, Any]) -> str | None:
    solution = record.get("canonical_solution")
    return solution if isinstance(solution, str) else None


def check(record: Mapping[str, Any], text: str, limits: Limits | None = None) -> Verdict:
    """Whether the function that ``text`` writes or completes passes the record's tests within ``limits``."""
    outcome = run_python(program(record, text), limits)
    return Verdict(outcome.passed, "" if outcome.passed else f"{outcome.status}: {outcome.message}".rstrip(": "))


def program(record: Mapping[str, Any], text: str) -> str:
    """The code to run: the prompt's imports and the function, then its tests."""
    fenced = _FENCED.findall(text)
    defined = re.compile(rf"^(?:async )?def {re.escape(record['entry_point'])}\b", re.MULTILINE)
    written = next((block for block in fenced if defined.search(block)), fenced[0] if fenced else text)
    if defined.search(written):
        # The whole function: the prompt in front gives its imports and helpers, and is overridden.
        function = f"{record['prompt']}\n    pass\n\n{written}"
    else:
        function = record["prompt"] + _body(written)
    return f"{function}\n\n{record['test']}\n\ncheck({record['entry_point']})\n"


def _body(written: str) -> str:
    """The lines that continue the function; where the first is not indented, all are taken to be its body."""
    lines = written.lstrip("\n")
    if lines and not lines[0].isspace():
        return "".join(f"    {line}\n" for line in lines.splitlines())
    return _BEYOND.split(lines, maxsplit=1)[0]
