"""The command ``jacobi``. Its subcommands register in the entry-point group ``jacobi.commands``.

A command is a module with a docstring (its first line is the help), ``add_arguments(parser)`` and ``run(args)``, which
returns an exit code or None for 0. It imports what is slow inside ``run``: help and argument errors are instant.

Exit codes: 0 done; 1 a defect of ours; 2 something the user can put right; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import NoReturn

GROUP = "jacobi.commands"


class CommandError(Exception):
    """What the user can put right, in one line that names the remedy."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see `{self.prog} --help`)")
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    # Read when torch is imported, later: threads that wait spin for a few microseconds, then sleep. The default, some
    # milliseconds, costs a time slice per wait as soon as anything else runs on the machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    args = make_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        fail("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CommandError, ValueError, OSError, ImportError, NotImplementedError) as error:
        return _report(error, 2)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not to be imported for its name
            error = CommandError(
                f"out of GPU memory ({error}); take --dtype bfloat16, fewer or smaller blocks, batches"
            )
            return _report(error, 2)
        return _report(error, 1)


def make_parser() -> Parser:
    """The parser with every registered command."""
    parser = Parser(prog="jacobi", description="Exact Jacobi (parallel) decoding of causal language models.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        module = _load(entry)
        description = (module.__doc__ or "").strip()
        command = commands.add_parser(
            entry.name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _load(entry: EntryPoint) -> ModuleType:
    """The command's module; a command that does not import must not take the others with it."""
    try:
        return entry.load()
    except Exception as error:
        reason = f"command {entry.name!r} cannot be loaded ({error}); reinstall the package that provides it"
        stub = ModuleType(entry.value, f"(cannot be loaded: {error})")

        def run(args: argparse.Namespace) -> NoReturn:
            raise CommandError(reason)

        vars(stub).update(add_arguments=lambda parser: None, run=run)
        return stub


def fail(message: str) -> None:
    """One line on stderr."""
    print("jacobi: error:", " ".join(message.split()), file=sys.stderr, flush=True)


def note(message: str) -> None:
    """One line of progress on stderr."""
    print("jacobi:", message, file=sys.stderr, flush=True)


def _report(error: Exception, code: int) -> int:
    if os.environ.get("JACOBI_TRACEBACK"):
        raise error
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    fail(text if code == 2 else f"{type(error).__name__}: {text} (JACOBI_TRACEBACK=1 shows where)")
    return code
