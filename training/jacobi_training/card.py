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
    return "\n".join(
        [
            *_opening(name, learned),
            "## Data\n",
            f"{packed.records} packed samples, made with\n",
            _table(("setting", "value"), sorted(packed.settings.items())),
            "## Training\n",
            _totals(metrics),
            _table(("setting", "value"), asdict(config).items()),
            "## Losses\n",
            _curve(metrics),
        ]
    )


def run_card(name: str, prompts: int, settings: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of the card of a run of all stages.

    name: of the model that the run began with. prompts: how many it was given. settings: of all stages. rounds: what
    each came to, its metrics included.
    """
    columns = {
        "block size": "block_size",
        "prompts": "prompts",
        "answer tokens": "tokens",
        "tokens per forward before": "tokens_per_forward",
        "iterations per block before": "iterations_per_block",
        "packed samples": "samples",
        "steps": "steps",
    }
    rows = [[round_[key] for key in columns.values()] for round_ in rounds]
    parts = [
        *_opening(name, "its own block trajectories"),
        "## Data\n",
        f"{prompts} prompts; each round trains the model of the round before on the trajectories of that model.\n",
        _table(list(columns), rows),
        "## Settings\n",
        _table(("setting", "value"), sorted(settings.items())),
    ]
    for i, round_ in enumerate(rounds, 1):
        parts += [f"## Losses of round {i}\n", _totals(round_["metrics"]), _curve(round_["metrics"])]
    return "\n".join(parts)


def _opening(name: str, learned: str) -> list[str]:
    return [
        _HEADER,
        f"# {name}, trained for parallel decoding\n",
        f"`{name}` trained on {learned}, so that it predicts correct tokens behind wrong ones. Its greedy output is "
        "that of token-by-token decoding, whatever the block size:\n",
        "    jacobi generate --model . --prompt TEXT\n",
    ]


def _totals(metrics: Sequence[Mapping[str, Any]]) -> str:
    rows, ar, consistency = (sum(m[name] for m in metrics) for name in ("rows", "ar_rows", "consistency_rows"))
    return (
        f"{len(metrics)} optimizer steps, {rows} rows (tokens in all versions), {ar} with an AR term, {consistency} "
        "with a consistency term.\n"
    )


def _curve(metrics: Sequence[Mapping[str, Any]]) -> str:
    """A table of at most CURVE_ROWS rows, each the mean of a run of steps."""
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
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
