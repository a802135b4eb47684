"""The end of ``bench/device_check.sh``: one table of its parts and results, and one JSON file.

``python -m bench.gpu.report DIR`` reads what the parts left in DIR. Exit code 1 when a part did not pass.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import measure, ops, steps

FINE = ("passed", "skipped")


def main(argv: Sequence[str] | None = None) -> int:
    (folder,) = (Path(name) for name in (argv if argv is not None else sys.argv[1:]))
    report = collect(folder)
    (folder / "device_check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, module in (("ops", ops), ("steps", steps)):
        if report[name] is not None and report[name]["rows"]:
            module.print_table(measure.Results(None, **report[name]))
    failures = [[test["name"], test["message"]] for test in report["failed_tests"]]
    if failures:
        measure.print_rows("failed tests", ("test", "message"), failures)
    parts = [[name, p["status"], p["seconds"], p["note"]] for name, p in report["parts"].items()]
    measure.print_rows("device check", ("part", "status", "seconds", "note"), parts)
    print(f"\n{folder / 'device_check.json'}")
    return 0 if all(p["status"] in FINE for p in report["parts"].values()) else 1


def collect(folder: Path) -> dict[str, Any]:
    """Everything that is there, whatever is missing or broken."""
    parts = {}
    for file in sorted((folder / "parts").glob("*"), key=lambda f: f.stat().st_mtime):
        status, seconds, note = file.read_text(encoding="utf-8").rstrip("\n").split("\t")
        parts[file.name] = {"status": status, "seconds": seconds, "note": note}
    counts, failed = _tests(folder / "tests.xml")
    results = {name: _json(folder / f"{name}.json") for name in ("ops", "steps")}
    return {"parts": parts, "tests": counts, "failed_tests": failed, **results}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _tests(path: Path) -> tuple[dict[str, int], list[dict[str, str]]]:
    """(counts, failed tests with the first line of their message) of a JUnit file."""
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError):
        return {}, []
    suites = list(root.iter("testsuite"))
    counts = {name: sum(int(s.get(name, 0)) for s in suites) for name in ("tests", "failures", "errors", "skipped")}
    failed = []
    for case in root.iter("testcase"):
        for problem in [*case.iter("failure"), *case.iter("error")]:
            message = (problem.get("message") or "").splitlines() or [""]
            failed.append({"name": f"{case.get('classname')}.{case.get('name')}", "message": message[0][:200]})
    return counts, failed


if __name__ == "__main__":
    sys.exit(main())
