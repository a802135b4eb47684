"""Answers that are right and wrong, for each task."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from jacobi_training.sandbox import Limits
from jacobi_training.tasks import find_task, gsm8k, humaneval, worded

SETUP = """CREATE TABLE staff (name TEXT, age INTEGER, pay REAL);
INSERT INTO staff VALUES ('Ada', 40, 10.5), ('Bob', 30, 20.25), ('Cid', 30, 5.0);"""
ADD = {
    "task_id": "T/0",
    "prompt": 'from math import gcd\n\n\ndef add(a, b):\n    """Sum of a and b."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}


def number(value: float) -> dict[str, Any]:
    return {"prompt": "?", "answer": "", "check": {"kind": "number", "value": value}}


def sql(query: str) -> dict[str, Any]:
    return {"prompt": "?", "answer": "", "check": {"kind": "sql", "setup": SETUP, "query": query}}


@pytest.mark.parametrize(
    ("value", "text", "correct"),
    [
        (19, "4 + 15 = 19. The answer is 19.", True),
        (19, "The answer is 19", True),
        (19, "The answer is 18. No. The answer is 19.", True),
        (19, "The answer is 19. The answer is 18.", False),
        (19, "The answer is 190.", False),
        (19, "It is 19.", False),
        (-3, "The answer is -3.", True),
        (1200, "The answer is 1,200.", True),
        (2.5, "The answer is $2.50.", True),
        (2, "The answer is 2.5.", False),
        (19, "", False),
    ],
)
def test_numbers(value: float, text: str, correct: bool) -> None:
    verdict = worded.check(number(value), text)
    assert verdict.correct is correct
    assert bool(verdict.reason) is not correct


def test_records_that_cannot_be_checked_are_of_no_task() -> None:
    good = number(3)
    assert find_task("auto", [good]) is not None
    for check in (
        {"kind": ["number"], "value": 3},
        {"kind": "number", "value": "3"},
        {"kind": "number", "value": True},
        {"kind": "number"},
        {"kind": "sql", "setup": 5, "query": "SELECT 1"},
        {"kind": "sql", "setup": ""},
        {},
        3,
    ):
        assert find_task("auto", [good, {**good, "check": check}]) is None
        with pytest.raises(ValueError, match="prompt 2 is not of task 'worded'"):
            find_task("worded", [good, {**good, "check": check}])


GOLD = "SELECT name FROM staff WHERE age = 30"


@pytest.mark.parametrize(
    ("query", "text", "correct"),
    [
        (GOLD, "We need names.\nSQL: SELECT name FROM staff WHERE age = 30;", True),
        (GOLD, "SQL: select s.name from staff s where s.age < 35 ORDER BY name DESC;", True),
        (GOLD, "SQL: SELECT name FROM staff;", False),
        (GOLD, "SQL: SELECT name, age FROM staff WHERE age = 30;", False),
        (GOLD, "SQL: SELECT name FROM staff WHERE age = 30 UNION ALL SELECT 'Bob';", False),  # one row more
        (GOLD, "SQL: SELECT nme FROM staff;", False),
        (GOLD, "SQL: SELEC name FROM staff;", False),
        (GOLD, "SQL: SELECT name FROM staff WHERE age = 30; DROP TABLE staff;", False),
        (GOLD, "SQL: SELECT 1;\nSQL: SELECT name FROM staff WHERE age = 30;", True),
        (GOLD, "SELECT name FROM staff WHERE age = 30;", False),
        (GOLD, "SQL:", False),
        (GOLD + " ORDER BY name", "SQL: SELECT name FROM staff WHERE age = 30 ORDER BY name ASC;", True),
        (GOLD + " ORDER BY name", "SQL: SELECT name FROM staff WHERE age = 30 ORDER BY name DESC;", False),
        ("SELECT SUM(pay) FROM staff", "SQL: SELECT 35.75;", True),
        ("SELECT AVG(pay) FROM staff", "SQL: SELECT SUM(pay) / 3.0 FROM staff;", True),
        ("SELECT COUNT(*) FROM staff", "SQL: SELECT 3.0;", True),
        ("SELECT COUNT(*) FROM staff", "SQL: SELECT '3';", False),
    ],
)
def test_queries(query: str, text: str, correct: bool) -> None:
    verdict = worded.check(sql(query), text)
    assert verdict.correct is correct, verdict
    assert bool(verdict.reason) is not correct


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT SUM(x) FROM c", "too many steps"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c", "too many rows"),
        ("SELECT LENGTH(RANDOMBLOB(1000000000))", "too big"),
        ("ATTACH DATABASE 'made.db' AS d", "not authorized"),
        ("DELETE FROM staff", "not authorized"),
        ("PRAGMA table_info(staff)", "not authorized"),
        ("CREATE TABLE t (a)", "not authorized"),
    ],
)
def test_queries_that_are_stopped(query: str, reason: str) -> None:
    verdict = worded.check(sql(GOLD), f"SQL: {query};")
    assert not verdict.correct
    assert reason in verdict.reason


def test_a_wrong_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="own query"):
        worded.check(sql("SELECT nme FROM staff"), "SQL: SELECT 1;")


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a limit 3", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 2)", False),
        ("SELECT RANK() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM t WHERE b = 'order by'", False),
        ("SELECT (SELECT (1)) FROM t ORDER BY (a)", True),
    ],
)
def test_where_order_matters(query: str, ordered: bool) -> None:
    assert worded.orders_rows(query) is ordered


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So 70 + 2 = 72.\n#### 72", "72"),
        ("#### 1\nno:\n#### $1,072.50 of 3", "1072.50"),
        ("so \\boxed{72} of 5", "72"),
        ("**The answer is: 72** dollars, 3 more", "72"),
        ("He pays 3 times $24, so 72.", "72"),
        ("It is -5", "-5"),
        ("none", None),
    ],
)
def test_the_number_of_an_answer(text: str, found: str | None) -> None:
    assert gsm8k.find_number(text) == (None if found is None else Decimal(found))


def test_gsm8k() -> None:
    record = {"question": "How many?", "answer": "<<48/2=24>>24\n#### 1,072"}
    assert gsm8k.check(record, "1000 + 72 = 1072\n#### 1072").correct
    assert gsm8k.check(record, "It makes $1,072.00").correct
    wrong = gsm8k.check(record, "#### 72")
    assert (wrong.correct, wrong.reason) == (False, "72 instead of 1072")
    assert gsm8k.check(record, "I cannot say").reason == "no number"


@pytest.mark.parametrize(
    "text",
    [
        "    return a + b\n",
        "\n    return a + b\n\ndef other(:\n",
        "return a + b",
        "    return a + b\nprint(undefined)\n",
        "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.",
        "```python\nimport operator\n\ndef add(a, b):\n    gcd(2, 4)\n    return operator.add(a, b)\n",
        "```\n    return a + b\n```",
        "def add(a, b):\n    return a + b\n",
    ],
)
def test_functions_that_pass(text: str) -> None:
    assert humaneval.check(ADD, text).correct


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("    return a - b\n", "failed: AssertionError"),
        ("    pass\n", "failed: AssertionError"),
        ("", "failed"),
        ("    return a +\n", "failed: SyntaxError"),
        ("    while True: pass\n", "cpu time"),
        ("    import os; os._exit(0)\n", "exited"),
        ("I would add a and b.", "failed: SyntaxError"),
    ],
)
def test_functions_that_fail(text: str, reason: str) -> None:
    verdict = humaneval.check(ADD, text, Limits(cpu_seconds=1, wall_seconds=300))
    assert not verdict.correct
    assert verdict.reason.startswith(reason)


def test_tasks_are_found_by_their_fields() -> None:
    grade = {"question": "?", "answer": "#### 3"}
    for name, record in (("worded", number(3)), ("worded", sql(GOLD)), ("gsm8k", grade), ("humaneval", ADD)):
        task = find_task("auto", [record, record])
        assert task is not None
        assert name == task.NAME
        assert find_task(name, [record]) is task
    assert find_task("auto", [grade, ADD]) is None
    assert find_task("auto", [{"prompt": "?"}]) is None
    assert find_task("none", [grade]) is None
    with pytest.raises(ValueError, match="prompt 2 is not of task 'gsm8k', which needs"):
        find_task("gsm8k", [grade, {"question": "?", "answer": "3"}])
    with pytest.raises(ValueError, match="task must be one of"):
        find_task("sums", [grade])
    assert not worded.matches({"check": {"kind": "sql", "setup": ""}})
    assert not worded.matches({"check": {"kind": "essay", "value": 1}})
