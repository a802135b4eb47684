"""Dequantised copies of small GGUF models.

Reading a GGUF through transformers takes about 18 s for 135M parameters, most of it the parse of the vocabulary in
Python; the same weights as a float32 safetensors folder load in under a second. The copy holds the same bits, so it
changes time, never output.

The folder is $JACOBI_CACHE_DIR, else $XDG_CACHE_HOME/jacobi, else ~/.cache/jacobi. JACOBI_CACHE_DIR=off: no copies.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A float32 copy is up to eight times its source: worth it for small models only.
MAX_GGUF_BYTES = 512 << 20
FORMAT = 1  # counts up when older copies must not be used


def cache_dir() -> Path | None:
    """Where copies are kept, or None when they are turned off."""
    chosen = os.environ.get("JACOBI_CACHE_DIR")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jacobi"


def cached_gguf(
    path: Path,
    read: Callable[[], tuple[Any, Any]],
    check: Callable[[], None],
    progress: Callable[[str], None] | None = None,
) -> Path | None:
    """Folder with a float32 copy of the GGUF file, made by ``read() -> (model, tokenizer)`` when it is not there yet.

    None when no copy is kept: turned off, too large, or the folder cannot be written. Errors of ``read`` pass through,
    as do those of ``check``, which runs before the progress line of a slow read.
    """
    root = cache_dir()
    scratch = None if root is None or path.stat().st_size > MAX_GGUF_BYTES else _new_folder(root)
    if root is None or scratch is None:
        check()
        _say(progress, f"reading {path.name} (takes some seconds)")
        return None
    folder = root / f"{path.stem}-{_content_key(path)}"
    try:
        if not (folder / "config.json").is_file():
            check()
            _say(progress, f"reading {path.name} for the first time; a copy in {root} makes the next start faster")
            model, tokenizer = read()
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            os.replace(scratch, folder)
    except OSError:  # no space left, or another process has finished the same copy first
        return folder if (folder / "config.json").is_file() else None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _new_folder(root: Path) -> Path | None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".part-*"):  # by processes that were killed; a copy takes a minute, not a day
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=".part-", dir=root))
    except OSError:
        return None


def _content_key(path: Path) -> str:
    """Names the content and what turned it into tensors."""
    import transformers

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{digest} {transformers.__version__} {FORMAT}".encode()).hexdigest()[:16]


def _say(progress: Callable[[str], None] | None, line: str) -> None:
    if progress is not None:
        progress(line)
