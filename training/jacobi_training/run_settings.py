"""The settings that an output folder was begun with: kept in a file, compared by every later run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """A folder that is not this run's; one line that says why and names the remedy."""


def write_atomically(path: Path, text: str) -> None:
    """Write beside the place under a temporary name and rename; what a killed process left is overwritten."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, data: Any) -> None:
    """:func:`write_atomically` for JSON."""
    write_atomically(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")


def claim(path: Path, settings: Mapping[str, Any]) -> None:
    """Write ``settings`` (what JSON can hold) to ``path``, or compare them with those that are there.

    Raises SettingsError when a setting differs or the folder holds files of something else, OSError when it cannot be
    written.
    """
    wanted = json.loads(json.dumps(dict(settings)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _refuse_others(path)
            write_json(path, wanted)
            return
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path.parent, error) from None
    try:
        found = dict(json.loads(text))
    except (ValueError, TypeError):
        raise SettingsError(f"{str(path)!r} is damaged; name another folder, or delete this one") from None
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            option = "--" + name.replace("_", "-")
            raise SettingsError(
                f"{str(path.parent)!r} was begun with {option} {_short(found.get(name))}, now it is "
                f"{_short(wanted.get(name))}; give the same {option} or name another folder"
            )


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from running in ``folder``, which is made when it does not exist; a kill ends it too.

    Raises SettingsError when another process is at work there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"another process is writing to {str(folder)!r}; wait for it, or name another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _refuse_others(path: Path) -> None:
    """A run writes files of common names (README.md, config.json), so it begins in a folder without any."""
    other = min((p.name for p in path.parent.iterdir() if not p.name.startswith(".")), default=None)
    if other is not None:
        raise SettingsError(
            f"{str(path.parent)!r} holds {other!r} but no {path.name}, so it is not of this run; name a new folder"
        )


def _cannot_write(folder: Path, error: OSError) -> OSError:
    return OSError(f"cannot write to {str(folder)!r}: {error.strerror or error}; make room and give access there")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
