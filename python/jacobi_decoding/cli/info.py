"""Show versions, CPU features, the chosen kernels, the ops and how a model would be run."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jacobi_decoding.cli import arguments as shared

PACKAGES = ("jacobi-kernels", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        nargs="?",
        const="",
        metavar="MODEL",
        help="load a model as well (without a name: the default model) and say which path would run it and why",
    )
    shared.add_dtype_argument(parser, packed=True)
    parser.add_argument(
        "--device", type=shared.device, default="cpu", metavar="DEVICE", help="for --model (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    facts: dict[str, Any] = {
        "versions": _versions(),
        "cpu": _cpu(),
        "devices": _devices(),
        "build": _build(),
        "ops": _ops(),
        "default_model": _default_model(),
        "cache": _cache(),
    }
    if args.model is not None:
        facts["model"] = _model(args)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        _print(facts)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _cpu() -> dict[str, Any]:
    import torch

    import jacobi_kernels  # noqa: F401  registers the ops
    from jacobi_kernels import _host

    return {
        "name": _cpu_name(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "features": _host.cpu_features(),
        "kernels": torch.ops.jacobi._cpu_isa(""),
        "kernels_override": os.environ.get("JACOBI_CPU_ISA"),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _devices() -> dict[str, Any]:
    from jacobi_decoding.devices import device_facts

    return device_facts()


def _build() -> dict[str, Any]:
    from jacobi_kernels import _host

    return dict(_host.build_report())


def _ops() -> dict[str, dict[str, Any]]:
    """Schema of every public op, and the devices that have kernels for it."""
    import torch

    from jacobi_kernels import _ops

    return {
        name: {
            "schema": str(getattr(torch.ops.jacobi, name).default._schema),
            "devices": [
                key.lower()
                for key in ("CPU", "CUDA")
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"jacobi::{name}", key)
            ],
        }
        for name in _ops.SCHEMAS
        if not name.startswith("_")
    }


def _default_model() -> str | None:
    from jacobi_decoding.loading import LoadError, default_model_path

    try:
        return str(default_model_path())
    except LoadError:
        return None


def _cache() -> str | None:
    from jacobi_decoding.model_cache import cache_dir

    folder = cache_dir()
    return str(folder) if folder else None


def _model(args: argparse.Namespace) -> dict[str, Any]:
    args.model = args.model or None
    loaded = shared.load(args, need_tokenizer=False, packed=True)
    from jacobi_decoding import JacobiDecoder
    from jacobi_decoding.step_engine import StepEngine

    decoder = JacobiDecoder(loaded.model, loaded.tokenizer)
    config = loaded.model.config.get_text_config()
    weights = decoder.engine.weights() if isinstance(decoder.engine, StepEngine) else None
    return {
        "name": loaded.name,
        "source": loaded.source,
        "type": config.model_type,
        "parameters": loaded.model.num_parameters(),
        "dtype": args.dtype,
        "packed_mb": None if weights is None else round(weights.blob.numel() / 1e6, 1),
        "device": str(decoder.engine.device),
        "backend": decoder.engine.backend,
        "path": decoder.path,
        "path_reason": decoder.path_reason,
        "chat_template": bool(loaded.tokenizer and loaded.tokenizer.chat_template),
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    cpu = facts["cpu"]
    has = [name for name, there in cpu["features"].items() if there]
    override = f" (JACOBI_CPU_ISA={cpu['kernels_override']})" if cpu["kernels_override"] else ""
    devices = facts["devices"]
    gpus = [
        f"{gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['compute_capability']}"
        for gpu in devices["gpus"]
    ]
    rows = {
        "versions": ", ".join(f"{name} {value or 'not installed'}" for name, value in facts["versions"].items()),
        "CPU": f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads used",
        "CPU features": ", ".join(has) or "none of those that the kernels ask for",
        "kernels": f"{cpu['kernels']}{override}",
        "backends": f"cpu: {devices['cpu']}; cuda: {devices['cuda'] or 'none'}",
        "GPUs": "; ".join(gpus) or devices["cuda_problem"],
        "build": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts["build"].items()),
        "default model": facts["default_model"] or "not installed",
        "model copies": facts["cache"] or "none are kept",
    }
    if "model" in facts:
        model = facts["model"]
        size = f"{model['parameters'] / 1e6:.1f}M parameters"
        rows["model"] = f"{model['name']} ({model['type']}, {size}, {model['dtype']}, {model['device']})"
        if model["packed_mb"] is not None:
            rows["weights"] = f"{model['dtype']}, {model['packed_mb']:.0f} MB packed"
        rows["path"] = f"{model['path']}: {model['path_reason']}"
    console = Console(soft_wrap=True, highlight=False)
    for name, value in rows.items():
        console.print(f"[bold]{name:14}[/bold] {escape(value)}")
    console.print("\n[bold]torch.ops.jacobi[/bold]")
    for name, op in facts["ops"].items():
        signature = op["schema"].removeprefix(f"jacobi::{name}")
        console.print(f"  [bold]{name}[/bold]{escape(signature)}  {escape(str(op['devices']))}")
