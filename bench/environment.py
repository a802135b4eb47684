"""Where a figure was measured: processor, kernels, threads, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, Any]:
    """Facts of this process and machine, for JSON."""
    import torch

    import jacobi_kernels  # noqa: F401  registers the ops

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": torch.ops.jacobi._cpu_isa(""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "commit": _commit(),
    }


def environment_line(facts: dict[str, Any] | None = None) -> str:
    """The same in one line."""
    e = facts or environment()
    return (
        f"{e['cpu']}, {e['threads']} of {e['cores']} cores, kernels {e['kernels']}, torch {e['torch']}, "
        f"transformers {e['transformers']}, commit {e['commit']}"
    )


def cache_bytes() -> int:
    """Size of the last-level cache; 32 MiB where the system does not tell."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1], 2**30))
    return max(sizes, default=32 * 2**20)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Short hash of the checked-out commit, with + when tracked files differ from it."""
    try:
        short = _git("rev-parse", "--short", "HEAD")
        return short + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
