"""All that an evaluation measures on one model: its runs over the prompts, and what they come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jacobi_decoding import JacobiDecoder
from jacobi_decoding.adapter import base_model
from jacobi_decoding.loading import LoadedModel
from jacobi_decoding.position_limit import position_limit
from jacobi_training.block_metrics import block_metrics
from jacobi_training.decode_runs import Decoded, Interval, Run, decode, ratio_interval
from jacobi_training.prompt_lookup import LOOKUP_TOKENS, prompt_lookup
from jacobi_training.prompts import Prompt, read_prompts
from jacobi_training.tasks import Record, Task, Verdict
from jacobi_training.trajectories import TrajectoryConfig, generate_trajectories, stop_tokens

FIXED_BLOCK_SIZE = 16  # of the metrics inside blocks
# Opens a part of the work that has so many units; gives the function that counts units done.
Parts = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class EvaluationConfig:
    """How to evaluate. task: 'auto', a name of jacobi_training.tasks.TASKS, or 'none'.

    limit: take the first prompts only. block_sizes: of plain Jacobi decoding. max_new_tokens: of an answer.
    batch_size: prompts decoded side by side; it changes speed only. block_prompts, latency_prompts: how many prompts
    the measurements inside blocks and of latency take. raw: no chat template. seed: of intervals and guesses.
    """

    task: str = "auto"
    limit: int | None = None
    block_sizes: tuple[int, ...] = (8, 16, 32)
    max_new_tokens: int = 256
    batch_size: int = 8
    block_prompts: int = 32
    latency_prompts: int = 4
    raw: bool = False
    seed: int = 0


class ModelRuns:
    """One of the models with its prompts as token ids, and what its runs gave."""

    def __init__(self, name: str, loaded: LoadedModel, path: Path, config: EvaluationConfig, parts: Parts) -> None:
        self.name, self.loaded, self.config, self.parts = name, loaded, config, parts
        self.tokenizer: Any = loaded.tokenizer
        if self.tokenizer is None:
            raise ValueError(
                f"{loaded.source!r} has no usable tokenizer ({loaded.tokenizer_problem}); "
                "save the model's tokenizer into the same folder"
            )
        self.decoder = JacobiDecoder(loaded.model, loaded.tokenizer)
        template = bool(self.tokenizer.chat_template) and not config.raw
        self.prompts = read_prompts(path, self.tokenizer, chat_template=template)[: config.limit]
        self.ids = [list(p.ids) for p in self.prompts]
        self.positions = self._positions()
        self.limits = [self._room(p) for p in self.prompts]
        self.stops = stop_tokens(loaded.model, self.tokenizer, TrajectoryConfig())
        self.runs: dict[str, Run] = {}
        self.lookup: Run | None = None
        self.blocks: dict[str, Any] | None = None
        self.verdicts: list[Verdict] | None = None

    def _positions(self) -> int | None:
        """Most tokens of prompt and answer: positions that the model was made for."""
        most = getattr(self.loaded.model.config.get_text_config(), "max_position_embeddings", None)
        fixed = position_limit(base_model(self.loaded.model).get_decoder()).tokens
        # Prompt lookup evaluates guesses behind an answer's end, which need a position too.
        return most if fixed is None else fixed - LOOKUP_TOKENS

    def _room(self, prompt: Prompt) -> int:
        """Most new tokens: as asked for, and no more positions than there are."""
        most = self.positions
        room = self.config.max_new_tokens if most is None else min(self.config.max_new_tokens, most - len(prompt.ids))
        if room < 2:
            raise ValueError(
                f"prompt {prompt.index + 1} has {len(prompt.ids)} tokens, which leaves no room for an answer within "
                f"the {most} positions of {self.loaded.name}; shorten it"
            )
        return room

    @property
    def ar(self) -> Run:
        return self.runs["ar"]

    @property
    def answers(self) -> list[list[int]]:
        """Tokens of the answers, stop tokens apart."""
        return [row[:-1] if row[-1] in self.stops else row for row in self.ar.tokens]

    @property
    def texts(self) -> list[str]:
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in self.answers]

    def decode(self, key: str, label: str, options: dict[str, Any]) -> None:
        """Make the run ``key`` over all prompts; token by token first, for its lengths."""
        lengths = list(map(len, self.ar.tokens if "ar" in self.runs else self.ids))
        with self.parts(f"{self.name}: {label}", len(self.ids)) as advance:
            self.runs[key] = decode(
                self.decoder,
                self.ids,
                self.limits,
                options,
                stops=self.stops,
                batch_size=self.config.batch_size,
                order=sorted(range(len(self.ids)), key=lengths.__getitem__),
                advance=advance,
            )

    def look_up(self) -> None:
        """Prompt lookup over all prompts, one at a time."""
        options: dict[str, Any] = {"pad_token_id": 0} | ({"eos_token_id": list(self.stops)} if self.stops else {})
        found = []
        with self.parts(f"{self.name}: prompt lookup", len(self.ids)) as advance:
            for ids, limit in zip(self.ids, self.limits, strict=True):
                outcome = prompt_lookup(self.loaded.model, ids, limit, **options)
                found.append(Decoded(outcome.tokens, outcome.decode_tokens, outcome.decode_forwards))
                advance(1)
        self.lookup = Run(found)

    def measure_blocks(self) -> None:
        """Metrics inside fixed blocks on the first prompts; their answers count as one more run."""
        chosen = [replace(p, index=i) for i, p in enumerate(self.prompts[: self.config.block_prompts])]
        config = TrajectoryConfig(
            block_size=FIXED_BLOCK_SIZE,
            max_new_tokens=min(self.limits[: len(chosen)]),
            init="prompt",
            repeats=0,
            seed=self.config.seed,
            stop_tokens=self.stops,
            batch_size=self.config.batch_size,
        )
        records = []
        with self.parts(f"{self.name}: fixed blocks of {FIXED_BLOCK_SIZE}", len(chosen)) as advance:
            for record in generate_trajectories(self.loaded.model, chosen, config, tokenizer=self.tokenizer):
                records.append(record)
                advance(1)
        same = sum(r["answer_ids"] == self.ar.tokens[r["index"]][: config.max_new_tokens] for r in records)
        self.blocks = {
            "block_size": FIXED_BLOCK_SIZE,
            "prompts": len(records),
            "identical": same,
            **block_metrics(records),
        }

    def judge(self, task: Task, records: Sequence[Record]) -> None:
        with self.parts(f"{self.name}: checking answers", len(records)) as advance:
            self.verdicts = []
            for record, text in zip(records, self.texts, strict=True):
                self.verdicts.append(task.check(record, text))
                advance(1)

    @torch.no_grad()
    def perplexity(self, answers: Sequence[str]) -> float | None:
        """exp of the mean negative log-likelihood of the answers' tokens, the stop token included.

        Tokens beyond the model's positions are left out; None when there are none at all.
        """
        total, count = 0.0, 0
        with self.parts(f"{self.name}: perplexity", len(answers)) as advance:
            for ids, answer in zip(self.ids, answers, strict=True):
                new = [*self.tokenizer(answer, add_special_tokens=False)["input_ids"], *self.stops[:1]]
                new = new if self.positions is None else new[: self.positions - len(ids)]
                device = self.loaded.model.device
                logits = self.loaded.model(torch.tensor([ids + new], device=device)).logits[0, len(ids) - 1 : -1]
                targets = torch.tensor(new, device=device)
                total += float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
                count += len(new)
                advance(1)
        return math.exp(total / count) if count else None

    def latency(self, settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
        """Median milliseconds of a decode step, one prompt at a time, and the query tokens that it evaluates."""
        chosen = range(min(self.config.latency_prompts, len(self.ids)))
        result: dict[str, dict[str, float | None]] = {}
        with self.parts(f"{self.name}: latency", len(chosen) * len(settings)) as advance:
            for key, options in settings.items():
                seconds: list[float] = []
                positions = tokens = 0
                for i in chosen:
                    _, stats = self.decoder.generate(
                        torch.tensor([self.ids[i]]),
                        max_new_tokens=self.limits[i],
                        eos_token_id=list(self.stops),
                        pad_token_id=0,
                        return_stats=True,
                        **options,
                    )
                    seconds += stats.step_seconds
                    positions += stats.positions - len(self.ids[i])
                    tokens += stats.decode_tokens
                    advance(1)
                result[key] = {
                    "milliseconds": 1e3 * statistics.median(seconds) if seconds else None,
                    "positions": positions / len(seconds) if seconds else None,
                    "tokens_per_second": tokens / sum(seconds) if seconds else None,
                }
        return result

    def identical(self) -> dict[str, int]:
        """Prompts of each Jacobi run whose tokens equal those of AR."""
        return {
            key: sum(a == b for a, b in zip(run.tokens, self.ar.tokens, strict=True))
            for key, run in self.runs.items()
            if key != "ar"
        }

    @property
    def all_identical(self) -> bool:
        blocks = self.blocks is None or self.blocks["identical"] == self.blocks["prompts"]
        return blocks and all(count == len(self.ids) for count in self.identical().values())

    @property
    def accuracy(self) -> float | None:
        return None if self.verdicts is None else statistics.fmean(v.correct for v in self.verdicts)

    def accuracy_interval(self) -> Interval | None:
        if self.verdicts is None:
            return None
        return ratio_interval([v.correct for v in self.verdicts], [1.0] * len(self.verdicts), self.config.seed)

    def characters_per_token(self) -> float | None:
        """Of the answers, stop tokens apart."""
        tokens = sum(map(len, self.answers))
        return sum(map(len, self.texts)) / tokens if tokens else None
