"""Untrusted code: what it may do, what stops it, and that the outcome names it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from jacobi_training.sandbox import PROTECTIONS, Limits, run_python

SMALL = Limits(cpu_seconds=1, wall_seconds=300, memory_mb=200, file_kb=64)


def test_code_that_ends_has_passed() -> None:
    outcome = run_python("import math, tempfile\nassert math.gcd(12, 18) == 6\nprint('x' * 10**6)", SMALL)
    assert outcome.passed
    assert outcome.message == ""
    assert "rlimits" in outcome.protections
    assert set(outcome.protections) <= set(PROTECTIONS)


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("assert 1 == 2", "failed", "AssertionError"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("def f(:", "failed", "SyntaxError"),
        ("raise ValueError('two\\nlines')", "failed", "ValueError: two lines"),
        ("def f(): f()\nf()", "failed", "RecursionError"),
        ("import sys; sys.exit(0)", "exited", "SystemExit(0)"),
        ("import os; os._exit(0)", "exited", "exit code 0"),
        ("import ctypes; ctypes.string_at(0)", "killed", "SIGSEGV"),
        ("while True: pass", "cpu time", "CPU time"),
        ("a = []\nwhile True: a.append(bytearray(1 << 20))", "memory", "MemoryError"),
        ("with open('big', 'wb') as f: f.write(bytes(10**6))", "file size", "file"),
    ],
)
def test_how_a_run_ends(code: str, status: str, message: str) -> None:
    outcome = run_python(code, SMALL)
    assert outcome.status == status, outcome
    assert message in outcome.message
    assert not outcome.passed
    assert len(outcome.message.splitlines()) == 1


def test_waiting_code_is_ended() -> None:
    start = time.perf_counter()
    outcome = run_python("import time\ntime.sleep(60)", Limits(wall_seconds=0.5))
    assert outcome.status == "wall time"
    assert time.perf_counter() - start < 20


def test_a_stubborn_fork_bomb_ends(tmp_path: Path) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    outcome = run_python(code, SMALL)
    assert outcome.status in ("cpu time", "killed")


def protected(name: str) -> None:
    if name not in run_python("").protections:
        pytest.skip(f"no {name} on this machine")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['ls'])",
        "import threading; threading.Thread(target=print).start()",
        "import os; os.system('true') and 1 / 0",
    ],
)
def test_no_processes(code: str) -> None:
    protected("seccomp")
    outcome = run_python(code, SMALL)
    assert outcome.status == ("failed" if "system" in code else "processes"), outcome


def test_files_outside_its_folder(tmp_path: Path) -> None:
    protected("landlock")
    kept = tmp_path / "kept"
    kept.write_text("before")
    for code in (
        f"open({str(kept)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, 'mine')",
        f"import os; os.mkdir({str(tmp_path / 'folder')!r})",
        "import os; os.execv('/bin/true', ['true'])",
    ):
        outcome = run_python(code, SMALL)
        assert outcome.status in ("forbidden", "failed"), (code, outcome)
        assert "Error" in outcome.message
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "before"


def test_its_folder_is_empty_and_goes_away() -> None:
    outcome = run_python(
        "import os\nassert os.listdir() == []\nopen('a', 'w').write('hi')\nassert open('a').read() == 'hi'\n"
        "os.remove('a')\nopen('b', 'w').write('left')\nopen(os.devnull, 'w').write('x')\nraise ValueError(os.getcwd())",
        SMALL,
    )
    assert outcome.message.startswith("ValueError: /")
    assert not Path(outcome.message.removeprefix("ValueError: ")).exists()


def test_its_folder_goes_away_however_deep_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_python("import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')").passed
    assert not list(tmp_path.iterdir())


def test_messages_can_be_written() -> None:
    assert run_python("raise ValueError('\\ud800')", SMALL).message == "ValueError: \\ud800"


def test_no_network_no_signals_no_new_limits() -> None:
    protected("seccomp")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}))", SMALL)
        assert outcome.status == "forbidden"
    assert run_python("import os; os.kill(os.getppid(), 9)", SMALL).status == "forbidden"
    raised = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))"
    assert run_python(raised, SMALL).status == "failed"


def test_a_verdict_cannot_be_printed() -> None:
    code = 'import os\nfor d in range(1, 9):\n    try: os.write(d, b\'{"status": "passed", "message": ""}\\n\')\n'
    outcome = run_python(code + "    except OSError: pass\nos._exit(0)", SMALL)
    assert outcome.status == "exited"


def test_limits_have_an_effect() -> None:
    code = "a = bytearray(300 << 20)\nopen('f', 'wb').write(bytes(100_000))"
    assert run_python(code, Limits()).passed
    assert run_python(code, Limits(memory_mb=200)).status == "memory"
    assert run_python(code, Limits(file_kb=50)).status == "file size"
