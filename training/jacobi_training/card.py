"""The model card of a trained checkpoint: data, settings, and how the losses fell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jacobi_training.shards import Manifest

if TYPE_CHECKING:
    from jacobi_training.fit import FitConfig

CURVE_ROWS = 10
_HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- jacobi-decoding
- consistency-training
---
"""


def fit_card(name: str, packed: Manifest, config: FitConfig, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of the card.

    name: of the model that training began with. packed: manifest of the samples. metrics: lines of metrics.jsonl.
    """
    learned = "its own block trajectories" if config.consistency_weight else "its own answers, without noisy blocks"
    parts = [
        _HEADER,
        f"# {name}, trained for parallel decoding\n",
        f"`{name}` trained on {learned}, so that it predicts correct tokens behind wrong ones. Its greedy output is "
        "that of token-by-token decoding, whatever the block size:\n",
        "    jacobi generate --model . --prompt TEXT\n",
        "## Data\n",
        f"{packed.records} packed samples, made with\n",
        _table(("setting", "value"), sorted(packed.settings.items())),
        "## Training\n",
        f"{len(metrics)} optimizer steps, {sum(m['rows'] for m in metrics)} rows (tokens in all versions), "
        f"{sum(m['ar_rows'] for m in metrics)} with an AR term, "
        f"{sum(m['consistency_rows'] for m in metrics)} with a consistency term.\n",
        _table(("setting", "value"), asdict(config).items()),
        "## Losses\n",
        "Means over equal parts of the run.\n",
        _curve(metrics),
    ]
    return "\n".join(parts)


def _curve(metrics: Sequence[Mapping[str, Any]]) -> str:
    """A table of CURVE_ROWS rows, each the mean of a run of steps."""
    parts = min(CURVE_ROWS, len(metrics))
    rows = []
    for i in range(parts):
        some = metrics[i * len(metrics) // parts : (i + 1) * len(metrics) // parts]
        means = [sum(m[name] for m in some) / len(some) for name in ("ar_loss", "consistency_loss", "lr")]
        rows.append((f"{some[0]['step']} to {some[-1]['step']}", *(f"{mean:.4g}" for mean in means)))
    return _table(("steps", "AR loss", "consistency loss", "learning rate"), rows)


def _table(header: Sequence[str], rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(_cell(value) for value in line) + " |\n" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
