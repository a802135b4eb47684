"""The shipped task: word problems that end in a number, and questions that end in an SQL query.

A record has "check": {"kind": "number", "value": 19}, or {"kind": "sql", "setup": statements that make and fill the
tables, "query": a right query}. An answer to the first ends "The answer is 19."; one to the second has a line
"SQL: SELECT ...;". A query is right when it gives the rows of the right one, in its order where that one orders them.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jacobi_training.tasks.verdict import Verdict

NAME = "worded"
FIELDS = 'a "prompt" and a "check" of kind "number" or "sql"'

MAX_STEPS = 2_000_000  # virtual machine instructions of one query
MAX_ROWS = 10_000
MAX_VALUE_BYTES = 1 << 20
_NUMBER = re.compile(r"[Tt]he answer is:?\s*\$?(-?\d[\d,]*(?:\.\d+)?)")
_SQL = re.compile(r"^[ \t]*SQL:[ \t]*(\S.*)", re.MULTILINE)
_STEPS_PER_CALL = 1000
# What a query may do; all else (writing, attaching files, pragmas, loading extensions) is denied.
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


class QueryError(ValueError):
    """A query that gives no rows to compare: wrong, forbidden or endless."""


def matches(record: Mapping[str, Any]) -> bool:
    check = record.get("check")
    if not isinstance(check, dict):
        return False
    if check.get("kind") == "number":
        value = check.get("value")
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return check.get("kind") == "sql" and all(isinstance(check.get(name), str) for name in ("setup", "query"))


def reference(record: Mapping[str, Any]) -> str | None:
    answer = record.get("answer")
    return answer if isinstance(answer, str) else None


def check(record: Mapping[str, Any], text: str) -> Verdict:
    """Raises ValueError when the record's own query or tables are wrong."""
    wanted = record["check"]
    if wanted["kind"] == "number":
        return check_number(wanted["value"], text)
    return check_sql(wanted["setup"], wanted["query"], text)


def check_number(value: float, text: str) -> Verdict:
    """Whether the last "The answer is N" of ``text`` names ``value``."""
    found = _NUMBER.findall(text)
    if not found:
        return Verdict(False, "no 'The answer is'")
    given = float(found[-1].replace(",", ""))
    same = math.isclose(given, value, rel_tol=1e-9)
    return Verdict(same, "" if same else f"{found[-1]} instead of {value}")


def check_sql(setup: str, query: str, text: str) -> Verdict:
    """Whether the last line "SQL: ..." of ``text`` gives the rows that ``query`` gives on the tables of ``setup``."""
    try:
        expected = run_query(setup, query)
    except (QueryError, sqlite3.Error) as error:
        raise ValueError(f"the record's own query {query!r} fails ({error}); correct its check") from None
    found = _SQL.findall(text)
    if not found:
        return Verdict(False, "no line 'SQL: ...'")
    try:
        rows = run_query(setup, found[-1])
    except QueryError as error:
        return Verdict(False, str(error))
    same = rows == expected if orders_rows(query) else Counter(rows) == Counter(expected)
    return Verdict(same, "" if same else f"{len(rows)} rows that differ from the {len(expected)} expected")


def run_query(setup: str, query: str) -> list[tuple[Any, ...]]:
    """Rows of one SELECT on a fresh database in memory; floats are rounded to 9 significant digits.

    Raises QueryError for a query that fails, does more than select, or takes too many steps or rows.
    """
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(setup)
        steps = 0

        def tick() -> int:
            nonlocal steps
            steps += _STEPS_PER_CALL
            return steps > MAX_STEPS  # true ends the query

        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(tick, _STEPS_PER_CALL)
        try:
            rows = connection.execute(query).fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            reason = "too many steps" if steps > MAX_STEPS else " ".join(str(error).split())[:200]
            raise QueryError(reason) from None
        if len(rows) > MAX_ROWS:
            raise QueryError("too many rows")
        return [tuple(float(f"{v:.9g}") if isinstance(v, float) else v for v in row) for row in rows]
    finally:
        connection.close()


def orders_rows(query: str) -> bool:
    """Whether ``query`` has an ORDER BY of its own, outside parentheses and quotes."""
    plain = re.sub(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]", "x", query)
    while (shorter := re.sub(r"\([^()]*\)", "x", plain)) != plain:
        plain = shorter
    return re.search(r"\border\s+by\b", plain, re.IGNORECASE) is not None
