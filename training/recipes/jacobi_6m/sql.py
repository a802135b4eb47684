"""Questions about a table whose columns vary, answered by a plan in words and one SQL query.

A query selects columns or an aggregate, under up to two conditions, grouped, ordered and limited. The check runs it and
the reference query on a small table that holds the values that the question names.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import words
from splits import choose

AGGREGATES = {
    "AVG": ("average", "mean", "typical"),
    "SUM": ("sum", "overall", "combined"),
    "MAX": ("highest", "largest", "greatest"),
    "MIN": ("lowest", "smallest", "least"),
}
PLAN_OF = {"AVG": "average", "SUM": "sum", "MAX": "maximum", "MIN": "minimum"}
COMPARISONS = (
    (">", "above {v}"), (">", "greater than {v}"), (">", "beyond {v}"), (">", "over {v}"),
    ("<", "below {v}"), ("<", "less than {v}"), ("<", "smaller than {v}"), ("<", "under {v}"),
    (">=", "at least {v}"), (">=", "no lower than {v}"), (">=", "{v} or more"),
    ("<=", "at most {v}"), ("<=", "no higher than {v}"), ("<=", "{v} or less"),
)  # fmt: skip
COMPARE_PLAN = {">": "exceeds", "<": "stays under", ">=": "is at least", "<=": "is at most"}

LIST = (
    "Show the {cols} of all {table}{where}{order}.",
    "List the {cols} of the {table}{where}{order}.",
    "For {table}{where}, give the {cols}{order}.",
    "What are the {cols} of the {table}{where}{order}?",
    "I need the {cols} of every entry in {table}{where}{order}.",
    "Return the {cols} for {table}{where}{order}.",
)
COUNT = (
    "How many {table} are there{where}?",
    "Count the {table}{where}.",
    "What is the number of {table}{where}?",
    "Tell me how many {table} we have{where}.",
    "Give the count of {table}{where}.",
)
AGGREGATE = (
    "What is the {agg} {col} of the {table}{where}?",
    "Find the {agg} {col} of all {table}{where}.",
    "Compute the {agg} {col} for {table}{where}.",
    "For {table}{where}, what is the {agg} {col}?",
    "Tell me the {agg} {col} over the {table}{where}.",
)
GROUP = (
    "For each {group}, what is the {agg} {col} of the {table}{where}{having}?",
    "Show the {agg} {col} of the {table} per {group}{where}{having}.",
    "Group the {table} by {group} and give the {agg} {col}{where}{having}.",
    "Per {group}, find the {agg} {col} of {table}{where}{having}.",
)
GROUP_COUNT = (
    "For each {group}, how many {table} are there{where}{having}?",
    "Count the {table} per {group}{where}{having}.",
    "Group the {table} by {group} and count them{where}{having}.",
    "Per {group}, give the number of {table}{where}{having}.",
)
DISTINCT = (
    "Which different values of {group} occur in {table}{where}?",
    "List every {group} of the {table} once{where}.",
    "What distinct values does {group} have in {table}{where}?",
    "Name each {group} found among the {table}{where}, without repeats.",
)
TEXT_IS = (" whose {c} is {v}", " with {v} as {c}", " where the {c} equals {v}", " having the {c} {v}")
NUMBER_IS = (" with {c} {compare}", " whose {c} is {compare}", " where the {c} is {compare}", " having {c} {compare}")
UPWARD = (", sorted by {c}", ", ordered by rising {c}", ", lowest {c} first")
DOWNWARD = (", sorted by {c} from high to low", ", ordered by falling {c}", ", highest {c} first")
LIMIT = (", only the first {n}", ", limited to {n} rows", ", but no more than {n}")
HAVING = (
    ", only where there are more than {n}",
    ", for groups with over {n} rows",
    ", keeping those that have more than {n}",
)


class Query:
    """A question, its plan and its query, over one table."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split
        self.table = ""
        self.texts = rng.sample(list(words.TEXT_COLUMNS), rng.randint(1, 3))
        self.numbers = rng.sample(list(words.NUMBER_COLUMNS), rng.randint(1, 3))
        self.columns = ["id", *rng.sample(self.texts + self.numbers, len(self.texts) + len(self.numbers))]
        self.used: dict[str, list[object]] = {}  # values that the conditions name
        self.question, self.plan, self.query = "", [], ""

    def one(self, *parts: Sequence[Any]) -> tuple[Any, ...]:
        return choose(self.rng, self.split, *parts)

    def where(self) -> tuple[str, str]:
        """Conditions in the question's words and in SQL; adds its step to the plan."""
        count = self.rng.choice((0, 1, 1, 2))
        chosen = self.rng.sample(self.texts + self.numbers, min(count, len(self.texts + self.numbers)))
        told, steps, tests = [], [], []
        for c in chosen:
            if c in self.texts:
                pattern, c, v = self.one(TEXT_IS, [c], words.TEXT_COLUMNS[c])
                told.append(pattern.format(c=c, v=v))
                steps.append(f"the {c} is {v}")
                tests.append(f"{c} = '{v}'")
                self.used.setdefault(c, []).append(v)
            else:
                low, high = words.NUMBER_COLUMNS[c]
                pattern, (sign, compare) = self.one(NUMBER_IS, COMPARISONS)
                value = self.rng.randint(low, high)
                told.append(pattern.format(c=c, compare=compare.format(v=value)))
                steps.append(f"the {c} {COMPARE_PLAN[sign]} {value}")
                tests.append(f"{c} {sign} {value}")
                self.used.setdefault(c, []).append(value)
        if not chosen:
            self.plan.append("No rows are left out.")
            return "", ""
        joiner = self.rng.choice(("and", "and", "or")) if len(chosen) == 2 else "and"
        self.plan.append(f"Keep a row if {f' {joiner} '.join(steps)}.")
        return f" {joiner}".join(told), " WHERE " + f" {joiner.upper()} ".join(tests)

    def order(self) -> tuple[str, str]:
        if self.rng.random() < 0.4:
            self.plan.append("Any order will do.")
            return "", ""
        down = self.rng.random() < 0.5
        column = self.rng.choice(self.numbers)
        pattern = self.rng.choice(DOWNWARD if down else UPWARD)
        told, sql = pattern.format(c=column), f" ORDER BY {column}{' DESC' if down else ''}"
        step = f"Sort the {column} {'downwards' if down else 'upwards'}"
        if self.rng.random() < 0.5:
            limit, n = self.one(LIMIT, range(1, 10))
            told, sql = told + limit.format(n=n), sql + f" LIMIT {n}"
            step += f" and cut after {n}"
        self.plan.append(step + ".")
        return told, sql

    def having(self) -> tuple[str, str]:
        if self.rng.random() < 0.6:
            return "", ""
        pattern, n = self.one(HAVING, range(1, 6))
        self.plan.append(f"Drop groups of {n} or less.")
        return pattern.format(n=n), f" HAVING COUNT(*) > {n}"

    def list_rows(self) -> None:
        columns = self.rng.sample(self.columns, self.rng.randint(1, min(3, len(self.columns))))
        self.plan.append(f"The result shows {', '.join(columns)}.")
        where, test = self.where()
        order, sort = self.order()
        pattern, self.table = self.one(LIST, words.TABLES)
        spoken = columns[0] if len(columns) == 1 else ", ".join(columns[:-1]) + " and " + columns[-1]
        self.question = pattern.format(cols=spoken, table=self.table, where=where, order=order)
        self.query = f"SELECT {', '.join(columns)} FROM {self.table}{test}{sort}"

    def count(self) -> None:
        self.plan.append("The result is a number of rows.")
        where, test = self.where()
        pattern, self.table = self.one(COUNT, words.TABLES)
        self.question = pattern.format(table=self.table, where=where)
        self.query = f"SELECT COUNT(*) FROM {self.table}{test}"

    def aggregate(self) -> None:
        name, column = self.rng.choice(list(AGGREGATES)), self.rng.choice(self.numbers)
        self.plan.append(f"The result is the {PLAN_OF[name]} of {column}.")
        where, test = self.where()
        pattern, word, self.table = self.one(AGGREGATE, AGGREGATES[name], words.TABLES)
        self.question = pattern.format(agg=word, col=column, table=self.table, where=where)
        self.query = f"SELECT {name}({column}) FROM {self.table}{test}"

    def group(self) -> None:
        group = self.rng.choice(self.texts)
        counted = self.rng.random() < 0.4
        name, column = self.rng.choice(list(AGGREGATES)), self.rng.choice(self.numbers)
        wanted = "number of rows" if counted else f"{PLAN_OF[name]} of {column}"
        self.plan.append(f"Every {group} gets the {wanted}.")
        where, test = self.where()
        having, kept = self.having()
        pattern, word, self.table = self.one(GROUP_COUNT if counted else GROUP, AGGREGATES[name], words.TABLES)
        self.question = pattern.format(group=group, agg=word, col=column, table=self.table, where=where, having=having)
        value = "COUNT(*)" if counted else f"{name}({column})"
        self.query = f"SELECT {group}, {value} FROM {self.table}{test} GROUP BY {group}{kept}"

    def distinct(self) -> None:
        group = self.rng.choice(self.texts)
        self.plan.append(f"Collect each {group} a single time.")
        where, test = self.where()
        pattern, self.table = self.one(DISTINCT, words.TABLES)
        self.question = pattern.format(group=group, table=self.table, where=where)
        self.query = f"SELECT DISTINCT {group} FROM {self.table}{test}"

    def setup(self) -> str:
        """SQL that creates the table with 24 rows, the named values among them."""
        types = ", ".join(f"{c} {'TEXT' if c in self.texts else 'INTEGER'}" for c in self.columns)
        rows = []
        for index in range(1, 25):
            row: list[object] = []
            for c in self.columns:
                used = self.used.get(c)
                if c == "id":
                    row.append(index)
                elif c in self.texts:
                    named = used is not None and self.rng.random() < 0.4
                    row.append(f"'{self.rng.choice(used if named and used else words.TEXT_COLUMNS[c][:5])}'")
                else:
                    row.append(self.rng.choice(used) if used and self.rng.random() < 0.2
                               else self.rng.randint(*words.NUMBER_COLUMNS[c]))  # fmt: skip
            rows.append(f"({', '.join(map(str, row))})")
        return f"CREATE TABLE {self.table} ({types}); INSERT INTO {self.table} VALUES {', '.join(rows)};"


def make_problem(rng: random.Random, split: str) -> dict[str, object]:
    """One problem: prompt, answer, and what is needed to check a query by running it."""
    query = Query(rng, split)
    rng.choice(
        (query.list_rows, query.list_rows, query.count, query.aggregate, query.group, query.group, query.distinct)
    )()
    return {
        "prompt": f"Table {query.table} has {', '.join(query.columns)}. {query.question}\nSolution:",
        "answer": f" {' '.join(query.plan)}\nSQL: {query.query};",
        "task": "sql",
        "check": {"kind": "sql", "setup": query.setup(), "query": query.query},
    }
