"""A model's own Jacobi trajectories: its greedy answers, decoded block by block, with every state on the way.

A block of n tokens starts from its first token, which the forward before has predicted, and n - 1 guesses. A forward
over the block gives predictions y; the next state is ``[x_0, y_0, ..., y_{n-2}]``, until it no longer changes: that is
what token-by-token decoding writes. Tokens that are final stay in the KV cache and are not evaluated again, so a block
costs about half of n times its iterations. Many prompts run side by side, and the next prompt takes the place of a
finished one; rows do not depend on each other, so neither do records on what runs beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch

from jacobi_decoding.adapter import base_model
from jacobi_decoding.batching import end_row, stop_lists
from jacobi_decoding.engine import choose_engine
from jacobi_decoding.position_limit import position_limit
from jacobi_decoding.sampling import SamplingParams
from jacobi_kernels.checks import whole_number
from jacobi_kernels.state import MAX_TOKEN, DecodeState, StateColumn
from jacobi_training.answers import Answer, Guesser
from jacobi_training.prompts import Prompt, unique_prompts
from jacobi_training.shards import Record, ShardWriter, read_shard, shard_name
from jacobi_training.trajectory_config import TrajectoryConfig

__all__ = [
    "Summary",
    "TrajectoryConfig",
    "generate_trajectories",
    "iterations",
    "model_fingerprint",
    "stop_tokens",
    "write_trajectories",
]

KIND = "trajectories"
PREFILL_ROWS = 64  # most prompt tokens of one sequence in one forward
# Called after every step with (prompts finished, answer tokens so far, prompts in all).
Progress = Callable[[int, int, int], None]


@dataclass
class Summary:
    """What the records of a folder, or of one rank's shards, come to.

    tpf: tokens per decoding forward; as the decoder counts, the token that the prompt's forward gives is apart, so
    token-by-token decoding has 1. iterations_per_block: decoding forwards per block. states: recorded, inits included.
    stops: answers by how they ended. seconds, tokens_per_second: of this run, over the answers that it made.
    """

    prompts: int = 0
    duplicates: int = 0
    tokens: int = 0
    tpf: float = 0.0
    iterations_per_block: float = 0.0
    iterations: int = 0
    blocks: int = 0
    states: int = 0
    stops: dict[str, int] = field(default_factory=lambda: {"eos": 0, "length": 0, "repetition": 0})
    shards_made: int = 0
    shards_kept: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0

    def add(self, record: Record) -> None:
        blocks = record["blocks"]
        self.prompts += 1
        self.tokens += len(record["answer_ids"])
        self.blocks += len(blocks)
        self.states += sum(len(block["states"]) for block in blocks)
        self.iterations += sum(iterations(block["states"], block is blocks[-1]) for block in blocks)
        self.stops[record["stop"]] += 1
        self.tpf = (self.tokens - self.prompts) / self.iterations if self.iterations else 0.0
        self.iterations_per_block = self.iterations / self.blocks


def iterations(states: Sequence[Sequence[int]], last: bool) -> int:
    """Forwards that a block took, from its recorded states.

    Each state is evaluated once; of the answer's last block only until its last token is final, which is when all
    tokens before it were right.
    """
    if not last:
        return len(states)
    fixed = list(states[-1][:-1])
    return next(s for s, state in enumerate(states, 1) if list(state[:-1]) == fixed) if fixed else 0


def generate_trajectories(
    model: Any,
    prompts: Sequence[Prompt],
    config: TrajectoryConfig,
    *,
    tokenizer: Any = None,
    on_step: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """The trajectory record of every prompt, in the order in which answers end; see ``index``.

    model: a transformers causal language model that :class:`jacobi_decoding.JacobiDecoder` takes.
    tokenizer: tells special tokens and, when the model does not, the stop token. on_step: called with the number of new
    answer tokens after every step. A record depends on model, prompt and config alone. Raises ValueError.
    """
    if not prompts:
        return
    engine, _ = choose_engine(model, "auto")
    _check_prompts(prompts, engine.vocab_size)
    longest = max(len(p.ids) for p in prompts)
    engine.check_length(longest + config.max_new_tokens)
    stops = stop_tokens(model, tokenizer, config)
    guesser = Guesser(config, engine.vocab_size, special_tokens(tokenizer, stops), tokenizer)
    batch = _Batch(engine, config, stops, min(config.batch_size, len(prompts)), longest)
    waiting = iter(prompts)
    for b, prompt in enumerate(islice(waiting, batch.size)):
        batch.place(b, Answer(prompt, config, stops, guesser))
    while batch.running:
        finished: list[Record] = []
        with engine.running():  # never while the caller has the turn: the model is wrapped inside
            while batch.running and not finished:
                tokens, ended = batch.step()
                for b in ended:
                    finished.append(batch.answers[b].record())
                    following = next(waiting, None)
                    if following is None:
                        batch.close(b)
                    else:
                        batch.place(b, Answer(following, config, stops, guesser))
                if on_step is not None:
                    on_step(tokens)
        yield from finished


class _Batch:
    """Answers side by side in the rows of one DecodeState, whose chains are the answers' open blocks."""

    def __init__(
        self, engine: Any, config: TrajectoryConfig, stops: Sequence[int], size: int, longest_prompt: int
    ) -> None:
        # The block, not the op, ends an answer by its length: room for a block more keeps the op's chains whole.
        self._new_tokens = config.max_new_tokens + config.block_size
        self._options: dict[str, Any] = {
            "block_size": config.block_size,
            "blocks": 1,
            "candidates": 0,
            "pool_rows": 0,
            "chain_capacity": max(config.block_size, min(PREFILL_ROWS, longest_prompt)),
            "stop_tokens": list(stops),
        }
        self.engine, self.size, self._width = engine, size, config.block_size
        self.state = DecodeState.allocate(
            [[0] * longest_prompt] * size, max_new_tokens=self._new_tokens, **self._options
        )
        self.cache = engine.allocate_cache(size, self.state.cache_capacity)
        self.answers: list[Answer] = []
        self._open = [False] * size

    @property
    def running(self) -> bool:
        return any(self._open)

    def place(self, b: int, answer: Answer) -> None:
        """Start an answer in row ``b``: its first step evaluates the first piece of the prompt."""
        fresh = DecodeState.allocate([answer.prompt.ids], max_new_tokens=self._new_tokens, **self._options)
        state, rows = self.state, self.state.rows_per_sequence
        state.tokens[b * rows : (b + 1) * rows] = fresh.tokens
        state.segments[b, 1] = fresh.segments[0, 1]
        state.cache_seqlens[b] = 0
        state.text[b, : fresh.text.shape[1]] = fresh.text[0]
        state.state[b] = fresh.state[0]
        self._open[b] = True
        if b == len(self.answers):
            self.answers.append(answer)
        self.answers[b] = answer

    def close(self, b: int) -> None:
        """Leave row ``b`` empty."""
        end_row(self.state, b, int(self.state.state[b, StateColumn.TEXT_LEN]))
        self._open[b] = False

    def step(self) -> tuple[int, list[int]]:
        """One forward over all rows: (new answer tokens, rows whose answers ended)."""
        self.engine.step(self.state, self.cache, SamplingParams())
        columns = self.state.state.tolist()
        text = self.state.text.numpy()
        tokens = self.state.tokens.numpy().reshape(self.size, -1)
        segments = self.state.segments.numpy()
        chains = tokens[:, : self._width].tolist()
        new, ended = 0, []
        for b, answer in enumerate(self.answers):
            row = columns[b]
            if not self._open[b] or row[StateColumn.TEXT_LEN] == row[StateColumn.PROMPT_LEN]:
                continue  # empty, or more of the prompt to come
            end = row[StateColumn.TEXT_LEN]
            emitted = text[b, end - row[StateColumn.EMITTED] : end].tolist()
            before = len(answer.ids)
            answer.receive(emitted, row[StateColumn.ACCEPTED], [] if row[StateColumn.DONE] else chains[b])
            new += len(answer.ids) - before
            if answer.stop is not None:
                ended.append(b)
                continue
            chain = answer.chain
            tokens[b, : len(chain)] = chain
            segments[b, 1] = len(chain)
        return new, ended


def write_trajectories(
    model: Any,
    prompts: Sequence[Prompt],
    out_dir: str | os.PathLike[str],
    config: TrajectoryConfig,
    *,
    tokenizer: Any = None,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress | None = None,
) -> Summary:
    """Write the trajectories of all distinct prompts to ``out_dir`` as shards, or finish what was begun there.

    Shard i holds the records of distinct prompts ``i * shard_size`` and on, by index; of ``world_size`` processes each
    makes every world_size-th shard, so the files are the same however many there are and however often one was stopped.
    progress: see :data:`Progress`. Returns the summary of this rank's shards. Raises ValueError (ShardError for a
    folder begun in another way or a damaged shard) and OSError, one line each.
    """
    whole_number("world_size", world_size, 1, MAX_TOKEN)
    whole_number("rank", rank, 0, world_size - 1)
    started = time.perf_counter()
    distinct = unique_prompts(prompts)
    taken = distinct[: config.limit]
    if not taken:
        raise ValueError("prompts must hold at least one prompt")
    # Before the folder is begun with these prompts.
    _check_prompts(taken, model.get_output_embeddings().weight.shape[0])
    position_limit(base_model(model).get_decoder()).check(max(len(p.ids) for p in taken) + config.max_new_tokens)
    shards = [taken[i : i + config.shard_size] for i in range(0, len(taken), config.shard_size)]
    stops = stop_tokens(model, tokenizer, config)
    settings = {k: v for k, v in asdict(config).items() if k != "batch_size"} | {
        "stop_tokens": list(stops),
        # Special tokens are never guessed: they are part of what the prompts' tokenizer decides.
        "prompts": _digest([[p.index, *p.ids] for p in distinct], special_tokens(tokenizer, ())),
    }
    writer = ShardWriter(out_dir, KIND, settings, model=model_fingerprint(model), num_shards=len(shards))
    own = range(rank, len(shards), world_size)
    missing = [i for i in own if not writer.finished(i)]
    summary = Summary(duplicates=len(prompts) - len(distinct), shards_made=len(missing))
    summary.shards_kept = len(own) - len(missing)

    total = sum(len(shards[i]) for i in own)
    done = total - sum(len(shards[i]) for i in missing)
    made = 0

    def on_step(tokens: int) -> None:
        nonlocal made
        made += tokens
        if progress is not None:
            progress(done, made, total)

    shard_of = {p.index: i for i in missing for p in shards[i]}
    held: dict[int, list[Record]] = {i: [] for i in missing}
    todo = [p for i in missing for p in shards[i]]
    for record in generate_trajectories(model, todo, config, tokenizer=tokenizer, on_step=on_step):
        i = shard_of[record["index"]]
        held[i].append(record)
        done += 1
        if len(held[i]) == len(shards[i]):
            writer.write(i, sorted(held.pop(i), key=lambda r: r["index"]))
    summary.seconds = time.perf_counter() - started
    summary.tokens_per_second = made / summary.seconds
    names = {shard_name(i) for i in own}
    for shard in writer.manifest.shards:
        if shard.file in names:
            for record in read_shard(out_dir, shard):
                summary.add(record)
    return summary


def stop_tokens(model: Any, tokenizer: Any, config: TrajectoryConfig) -> tuple[int, ...]:
    """Tokens that end an answer: the config's, else those of the model's generation config, else the tokenizer's."""
    if config.stop_tokens is not None:
        return tuple(config.stop_tokens)
    settings = getattr(model, "generation_config", None) or model.config
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    return tuple(int(t) for t in stop_lists(found))  # type: ignore[arg-type]


def special_tokens(tokenizer: Any, stops: Sequence[int]) -> list[int]:
    """Tokens that no text holds: the tokenizer's special ones and the stop tokens."""
    return sorted({*stops, *(getattr(tokenizer, "all_special_ids", None) or ())})


def model_fingerprint(model: Any) -> str:
    """sha256 over the weights and the config, but for names and versions."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _check_prompts(prompts: Sequence[Prompt], vocab_size: int) -> None:
    for prompt in prompts:
        worst = max(prompt.ids, default=-1)
        if not prompt.ids or min(prompt.ids) < 0 or worst >= vocab_size:
            what = f"token {worst}" if prompt.ids else "no tokens"
            raise ValueError(
                f"prompt {prompt.index} has {what}, expected ids within 0..{vocab_size - 1}; use the model's tokenizer"
            )
