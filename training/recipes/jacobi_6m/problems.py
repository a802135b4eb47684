"""Problems by split and seed. `python problems.py --split test --count 200 --out test.jsonl` writes some."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import arithmetic
import sql
from splits import SPLITS

MAKERS = (arithmetic.make_problem, sql.make_problem)


def problems(split: str, count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """``count`` problems, both kinds in turn. Splits share neither seeds nor templates."""
    for index in range(count):
        rng = random.Random(f"{split}/{seed}/{index}")
        yield MAKERS[index % len(MAKERS)](rng, split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = [json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems(args.split, args.count, args.seed)]
    temporary = args.out.with_suffix(".tmp")
    temporary.write_text("".join(lines))
    temporary.rename(args.out)


if __name__ == "__main__":
    main()
