"""Where a model runs, by which kernels, and how a decoding step is launched there.

On a CPU: C++ kernels; with JACOBI_BACKEND=triton and TRITON_INTERPRET=1 Triton's, in its interpreter, for tests
(float32 only, slow). On cuda and cuda:N: Triton's, or one cooperative CUDA launch per step.
"""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from jacobi_decoding.errors import UnsupportedModelError

STEP_MODES = ("graph", "launches", "cooperative", "auto")


class DeviceError(ValueError):
    """A device that cannot be used; one line that says what is missing and how to get it."""


@dataclass(frozen=True)
class BlockSettings:
    """Block size n, most open blocks K and candidates C."""

    block_size: int
    blocks: int
    candidates: int


# What block_size="auto" means where a step's time hardly depends on its rows, so that nothing is gained by choosing
# step by step: data-centre GPUs are bound by the bytes of the weights up to some hundred rows.
GPU_SETTINGS = BlockSettings(64, 2, 4)
# In the interpreter a row costs milliseconds.
INTERPRETER_SETTINGS = BlockSettings(4, 1, 1)


def checked_device(device: str | torch.device) -> torch.device:
    """``device`` ('cpu', 'cuda', 'cuda:N') as torch has it, 'cuda' with its index; DeviceError when it cannot run."""
    text = str(device)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise DeviceError(f"device {text!r} is not supported; use cpu, cuda or cuda:N")
    if text == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise DeviceError(
            f"device {text!r}: torch {torch.__version__} is a CPU build; install a CUDA build of it, such as "
            "`pip install torch --index-url https://download.pytorch.org/whl/cu130`"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device {text!r}: no GPU or no driver for CUDA {torch.version.cuda}; see what nvidia-smi says"
        )
    if importlib.util.find_spec("triton") is None:
        raise DeviceError(f"device {text!r}: Triton is not installed; run `pip install triton==3.6.0`")
    found = torch.device(text)
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device {text!r}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device("cuda", index)


def model_device(model: Any) -> torch.device:
    """The one device of a model's parameters; UnsupportedModelError when they have several, or one without kernels."""
    devices = {p.device for p in model.parameters()}
    name = type(model).__name__
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise UnsupportedModelError(name, f"its weights must be on one device, found {found}", "move it with .to(...)")
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(name, f"there are no kernels for {device}", "move it to cpu or cuda")
    return device


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one, where kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def interpreted() -> bool:
    """Whether CPU tensors go through Triton's interpreter."""
    return os.environ.get("JACOBI_BACKEND") == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device) -> bool:
    """Whether a decoding step on ``device`` is made of Triton kernels (or of the CUDA step that stands in for them)."""
    return device.type == "cuda" or interpreted()


def auto_settings(device: torch.device) -> BlockSettings:
    """The fixed settings that ``block_size='auto'`` stands for where no controller runs."""
    return GPU_SETTINGS if device.type == "cuda" else INTERPRETER_SETTINGS


def wanted_step_mode(given: str | None = None) -> str:
    """One of STEP_MODES: ``given``, else the environment's JACOBI_STEP, else graph; DeviceError for another word.

    graph: the launches of a step are captured once and replayed; launches: one by one; cooperative: one launch of the
    CUDA program. auto: whichever of graph and cooperative takes less time in a short measurement, once per decoder.
    The two programs round differently, so auto is no default: what one process decodes must not hang on a clock.
    """
    mode = given or os.environ.get("JACOBI_STEP") or "graph"
    if mode not in STEP_MODES:
        raise DeviceError(f"JACOBI_STEP must be one of {', '.join(STEP_MODES)}, got {mode!r}")
    return mode


def device_facts() -> dict[str, Any]:
    """What `jacobi info` shows: the GPUs, or why there are none, and the backends of both devices."""
    facts: dict[str, Any] = {
        "cpu": "triton (interpreter)" if interpreted() else "cpu",
        "cuda": None,
        "cuda_problem": None,
        "cuda_version": torch.version.cuda,
        "gpus": [],
    }
    try:
        checked_device("cuda")
    except DeviceError as error:
        facts["cuda_problem"] = str(error)
        return facts
    facts["cuda"] = "triton"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts["gpus"].append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return facts
