"""The command line as such: help, registration of commands, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from jacobi_decoding import cli
from tests.cli.conftest import Result, run_process


def test_help_names_the_commands(jacobi: Callable[..., Result]) -> None:
    result = jacobi("--help")
    assert result.code == 0
    for name in ("demo", "generate", "info", "pack"):
        assert f"\n    {name} " in result.out


@pytest.mark.parametrize("name", ["demo", "generate", "info", "pack"])
def test_help_of_a_command(jacobi_here: Callable[..., Result], name: str) -> None:
    result = jacobi_here(name, "--help")
    assert result.code == 0
    assert "--dtype {float32,bfloat16" in result.out


def test_help_says_how_the_prompt_is_used(jacobi_here: Callable[..., Result]) -> None:
    text = jacobi_here("generate", "--help").out
    assert "chat template" in text
    assert "--raw" in text


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys\n"
        "from jacobi_decoding.cli import make_parser\n"
        "make_parser().format_help()\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert run_process(sys.executable, "-c", code).out == "[]\n"


def _register(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], Any]) -> None:
    """A command ``probe`` that calls ``run``."""
    module = ModuleType("probe_command", "Probe.")
    vars(module).update(add_arguments=lambda parser: parser.add_argument("--word"), run=run)
    monkeypatch.setitem(sys.modules, "probe_command", module)
    entries = [
        EntryPoint("probe", "probe_command", cli.GROUP),
        EntryPoint("broken", "no_such_module_at_all", cli.GROUP),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)


def test_other_distributions_register_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    _register(monkeypatch, lambda args: seen.append(args.word))
    assert cli.main(["probe", "--word", "x"]) == 0
    assert seen == ["x"]


def test_broken_command_leaves_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _register(monkeypatch, lambda args: 0)
    assert cli.main(["broken"]) == 2
    assert "no_such_module_at_all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("first line\nsecond line"), 2, "first line"),
        (cli.CommandError("do this instead"), 2, "do this instead"),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    def run(args: Any) -> None:
        raise error

    _register(monkeypatch, run)
    assert cli.main(["probe"]) == code
    err = capsys.readouterr().err
    assert err.startswith("jacobi: error: ")
    assert err.count("\n") == 1
    assert words in err
    assert "second" not in err


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> None:
        raise ZeroDivisionError

    _register(monkeypatch, run)
    monkeypatch.setenv("JACOBI_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])
