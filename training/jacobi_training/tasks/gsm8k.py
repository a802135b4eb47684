"""GSM8K: the number at the end of an answer to a word problem.

A record has "question" and "answer"; the answer ends in a line "#### 72".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jacobi_training.tasks.verdict import Verdict

NAME = "gsm8k"
FIELDS = 'a "question" and an "answer" with "#### number"'

_DIGITS = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
_MARKED = re.compile(rf"####\s*({_DIGITS})")
_BOXED = re.compile(rf"\\boxed\{{\s*({_DIGITS})")
_SAID = re.compile(rf"answer is:?\s*\**\s*({_DIGITS})", re.IGNORECASE)
_ANY = re.compile(rf"(?<![\w.])(?:{_DIGITS})")


def matches(record: Mapping[str, Any]) -> bool:
    answer = record.get("answer")
    return isinstance(record.get("question"), str) and isinstance(answer, str) and bool(_MARKED.search(answer))


def reference(record: Mapping[str, Any]) -> str | None:
    return str(record["answer"])


def check(record: Mapping[str, Any], text: str) -> Verdict:
    """Whether ``text`` gives the number behind the record's "####"."""
    wanted = _value(_MARKED.findall(record["answer"])[-1])
    given = find_number(text)
    if given is None:
        return Verdict(False, "no number")
    return Verdict(given == wanted, "" if given == wanted else f"{given} instead of {wanted}")


def find_number(text: str) -> Decimal | None:
    """The answer in ``text``: the last behind "####", in a box or behind "answer is", or else the last number."""
    for pattern in (_MARKED, _BOXED, _SAID, _ANY):
        if found := pattern.findall(text):
            return _value(found[-1])
    return None


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
