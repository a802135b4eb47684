"""The problems that the shipped model is made from, and what its base learns from them."""

from __future__ import annotations

import argparse
import json
import random
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import arithmetic
import pretrain
import problems as recipe
import splits
import sql
from jacobi_decoding.loading import SHIPPED

RECIPE = Path(__file__).parents[2] / "training" / "recipes" / "jacobi_6m"


def test_templates_are_in_one_split_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[tuple[object, ...]]] = {split: set() for split in splits.SPLITS}
    choose = splits.choose

    def recorded(rng: random.Random, split: str, *parts: tuple[object, ...]) -> tuple[object, ...]:
        template = choose(rng, split, *parts)
        seen[split].add(template)
        return template

    monkeypatch.setattr(arithmetic, "choose", recorded)
    monkeypatch.setattr(sql, "choose", recorded)
    for split in splits.SPLITS:
        list(recipe.problems(split, 400))
    assert all(len(templates) > 100 for templates in seen.values())
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert not seen[one] & seen[other]


@pytest.mark.parametrize("split", splits.SPLITS)
def test_every_step_of_a_solution_is_right(split: str) -> None:
    calculations = 0
    for problem in recipe.problems(split, 400):
        if problem["task"] != "arithmetic":
            continue
        answer, value = problem["answer"], problem["check"]["value"]
        for a, sign, b, c in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", answer):
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign]
            assert int(c) == expected, problem
            calculations += 1
        assert answer.endswith(f" The answer is {value}.")
        # The last result is the answer.
        assert int(re.findall(r"= (\d+)", answer)[-1]) == value
    assert calculations > 400


@pytest.mark.parametrize("split", splits.SPLITS)
def test_queries_run_and_mostly_find_something(split: str) -> None:
    found = total = 0
    for problem in recipe.problems(split, 200):
        if problem["task"] != "sql":
            continue
        check = problem["check"]
        assert problem["answer"].endswith(f"\nSQL: {check['query']};")
        with sqlite3.connect(":memory:") as connection:
            connection.executescript(check["setup"])
            found += bool(connection.execute(check["query"]).fetchall())
        total += 1
    assert total == 100
    assert found > 90


def test_problems_follow_from_split_and_seed() -> None:
    def drawn(split: str, seed: int) -> list[str]:
        return [json.dumps(problem) for problem in recipe.problems(split, 20, seed)]

    assert drawn("train", 1) == drawn("train", 1)
    assert not set(drawn("train", 1)) & set(drawn("train", 2))
    assert not set(drawn("train", 1)) & set(drawn("test", 1))


def test_drills_are_right() -> None:
    rng = random.Random(0)
    for _ in range(500):
        task, result = arithmetic.make_drill(rng)
        a, sign, b = re.fullmatch(r" (\d+) ([-+*/]) (\d+) =", task).groups()
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign] == int(
            result.removesuffix(".")
        )


def test_shipped_prompts_are_the_recipe_s(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    command = [sys.executable, RECIPE / "problems.py", "--split", "test", "--count", "200", "--out", file]
    subprocess.run(command, check=True)
    assert file.read_bytes() == (SHIPPED / "test.jsonl").read_bytes()


def test_shipped_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "forced")
    assert len(tokenizer) >= 4096
    answers = [problem["answer"] for problem in recipe.problems("test", 200)]
    ids = tokenizer(answers)["input_ids"]
    assert sum(map(len, answers)) / sum(map(len, ids)) >= 3  # characters per token
    assert [tokenizer.decode(answer) for answer in ids] == answers


def test_batches_learn_answers_and_results() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "base")
    args = argparse.Namespace(seed=3, batch_size=4, drills=2, drills_from=1)
    stream = pretrain.batches(tokenizer, args, 0)
    first, second = next(stream), next(stream)
    assert first.tokens.shape[0] == 4  # drills join later
    assert second.tokens.shape[0] == 6
    for batch in (first, second):
        assert (batch.tokens.flatten()[batch.rows + 1] == batch.targets).all()
    answers = {p["answer"] + pretrain.END for p in recipe.problems("train", 4 * pretrain.POOL, 3_000_000)}
    rows = first.rows // first.tokens.shape[1]
    for row in range(4):
        assert tokenizer.decode(first.targets[rows == row]) in answers
    drill = tokenizer.decode(second.targets[second.rows // second.tokens.shape[1] == 5])
    assert re.fullmatch(r"( \d+\.){10}", drill)
    # A run that goes on from a step sees what it would have seen.
    again = next(pretrain.batches(tokenizer, args, 1))
    assert (again.tokens == second.tokens).all()
