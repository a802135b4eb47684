"""README's example runs as it stands."""

from __future__ import annotations

import re
import sys

import pytest

from tests.cli.conftest import ROOT, run_process


@pytest.mark.smollm2
def test_example_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 1
    assert examples[0].count("\n") <= 10
    result = run_process(sys.executable, "-c", examples[0])
    assert result.code == 0, result.err
    tokens, forwards = map(int, re.search(r"(\d+) tokens in (\d+) forwards", result.out).groups())  # type: ignore[union-attr]
    assert 0 < forwards < tokens <= 64


def test_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
