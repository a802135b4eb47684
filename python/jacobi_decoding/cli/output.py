"""Files that commands write, and warnings as lines on stderr."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jacobi_decoding.cli import CommandError, note


def check_writable(path: Path, option: str) -> None:
    """Raise CommandError, before the work starts, when the file that ``option`` names cannot be written."""
    folder = path.absolute().parent
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise CommandError(f"{str(path)!r} is {kind}; name a file with {option}")
        if not folder.is_dir():
            raise CommandError(f"folder {str(folder)!r} does not exist; create it or change {option}")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise cannot_write(path, error, option) from None


def write_json_atomically(path: Path, data: Any, option: str = "--json") -> None:
    """Written beside its place and renamed, so that a reader never sees half a file; a failure leaves nothing."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.absolute().parent, prefix=".jacobi-", delete=False
        ) as file:
            temporary = Path(file.name)
            json.dump(data, file, ensure_ascii=False, indent=1)
            file.write("\n")
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error, option) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def cannot_write(path: Path, error: Exception, option: str) -> CommandError:
    reason = getattr(error, "strerror", None) or error
    return CommandError(f"cannot write {str(path)!r}: {reason}; make room and give access there, or change {option}")


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Every warning is one line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(f"note: {' '.join(str(message).split())}")
        yield
