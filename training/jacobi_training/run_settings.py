"""The settings that an output folder was begun with: kept in a file, compared by every later run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """A folder that was begun with other settings; one line that names the option and the remedy."""


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

    Raises SettingsError when a setting differs, OSError when the folder cannot be written.
    """
    wanted = json.loads(json.dumps(dict(settings)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json(path, wanted)
            return
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot write to {str(path.parent)!r}: {reason}; make room and give access there") from None
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


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
