"""Peak memory of a process that loads the model, packed, and generates a few tokens; beside one that imports torch.

python -m bench.cpu.memory torch|float32|bfloat16|int8|int4 [--model MODEL]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from bench.environment import ROOT

ALLOWANCE_MB = 150  # over torch and the packed weights
NEW_TOKENS = 8


def measure_memory(model: str | None, formats: list[str], notes: list[str]) -> list[dict[str, Any]]:
    """One row per format; what fails is named in ``notes``."""
    bare, rows = None, []
    for name in ["torch", *formats]:
        command = [sys.executable, "-m", "bench.cpu.memory", name, *(["--model", model] if model else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            notes.append(f"memory, {name}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
            continue
        found = json.loads(done.stdout)
        if name == "torch":
            bare = found["peak_mb"]
        elif bare is not None:
            over = found["peak_mb"] - bare
            limit = found["weights_mb"] + ALLOWANCE_MB
            rows.append({"format": name, **found, "over_torch_mb": over, "target_mb": limit})
    return rows


def peak_mb() -> float:
    """Of this process: getrusage would tell that of the process that started it, if that was larger."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format")
    parser.add_argument("--model")
    args = parser.parse_args()
    import torch

    weights = 0.0
    if args.format != "torch":
        from jacobi_decoding import JacobiDecoder, load_model

        loaded = load_model(args.model, args.format, packed=True)
        decoder = JacobiDecoder(loaded.model, loaded.tokenizer)
        # Not block_size='auto', which would measure steps first, with caches that a short answer does not need.
        decoder.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=NEW_TOKENS, block_size=4)
        weights = loaded.model.weights.blob.numel() / 1e6
    print(json.dumps({"peak_mb": peak_mb(), "weights_mb": weights}))


if __name__ == "__main__":
    main()
