"""llama.cpp through llama-cpp-python's low-level interface, as a peer: steps, and greedy answers one by one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.environment import ROOT

INSTALL = "CMAKE_ARGS=-DGGML_NATIVE=ON pip install 'jacobi-kernels[llama]'"
try:
    import llama_cpp
except ImportError as error:
    raise ImportError(f"llama-cpp-python is not installed; {INSTALL} compiles it, in some minutes") from error

CAPACITY = 2048  # cached tokens of a context, all contexts of a benchmark included
BATCH = 512
PROBE_TOKENS = 32


@dataclass(frozen=True)
class Decode:
    """llama_decode of tokens behind ``cached`` ones, logits for every one, their maxima not taken."""

    context: Context
    tokens: list[int]
    cached: int

    def restore(self) -> None:
        self.context.truncate(self.cached)

    def step(self) -> None:
        self.context.decode(self.tokens, self.cached, every=True)


class Context:
    """A key and value cache (float16, llama.cpp's default) beside the shared model."""

    def __init__(self, model: Any, flash_attn: bool, threads: int) -> None:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = CAPACITY, BATCH, BATCH
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attn else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self.pointer = llama_cpp.llama_init_from_model(model, options)
        if not self.pointer:
            raise RuntimeError("llama.cpp could not make a context; is there memory for it?")
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.filled = 0

    def decode(self, tokens: list[int], start: int, *, every: bool) -> None:
        """Evaluate ``tokens`` at the positions from ``start`` on; logits for every one, or for the last alone."""
        b = self.batch
        b.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = token, start + i, 1, 0
            b.logits[i] = every or i == len(tokens) - 1
        code = llama_cpp.llama_decode(self.pointer, b)
        if code:
            raise RuntimeError(f"llama_decode ended with code {code}")
        llama_cpp.llama_synchronize(self.pointer)
        self.filled = start + len(tokens)

    def take_in(self, tokens: list[int]) -> None:
        """Decode a prompt from position 0; logits for its last token."""
        self.truncate(0)
        for start in range(0, len(tokens), BATCH):
            self.decode(tokens[start : start + BATCH], start, every=False)

    def truncate(self, length: int) -> None:
        if self.filled > length:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.pointer), 0, length, -1)
            self.filled = length

    def best_token(self) -> int:
        """Greedy choice behind the last token."""
        logits = llama_cpp.llama_get_logits_ith(self.pointer, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def load(model: str, repacks: bool) -> Any:
    """The model of a .gguf file. repacks: into the layouts that llama.cpp has for this CPU, AMX's among them."""
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.use_extra_bufts = repacks
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), options)
    if not loaded:
        raise ValueError(f"llama.cpp cannot load {model}; delete the file, and it is made again")
    return loaded


def survives(model: str) -> bool:
    """Whether a process that repacks the model's weights decodes some tokens without crashing.

    gcc 12 compiles llama.cpp's AMX code into a fault: its _tile_loadconfig reads 64 bytes and declares 8.
    """
    command = [sys.executable, "-m", "bench.cpu.llama_engine", model]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode >= 0


class LlamaEngine:
    def __init__(self, model: str | None, threads: int) -> None:
        if model is None:
            raise ValueError("the model is no .gguf file, and llama.cpp reads no other")
        self.repacks = survives(model)
        self.model = load(model, self.repacks)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.contexts = {on: Context(self.model, on, threads) for on in (True, False)}

    def facts(self) -> dict[str, Any]:
        return {
            "weight_bytes": llama_cpp.llama_model_size(self.model),
            "cache_itemsize": 2,
            "repacks": self.repacks,
            "version": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def stepper(self, context: int, tokens: int, flash_attn: bool | None) -> Decode:
        generator = np.random.default_rng(context + tokens)
        chosen = self.contexts[bool(flash_attn)]
        if chosen.filled != context:
            chosen.take_in(generator.integers(chosen.vocab_size, size=context).tolist())
        return Decode(chosen, generator.integers(chosen.vocab_size, size=tokens).tolist(), context)

    def generate(self, ids: list[int], max_new_tokens: int, method: str) -> dict[str, Any]:
        if len(ids) + max_new_tokens > CAPACITY:
            raise ValueError(f"{len(ids)} + {max_new_tokens} tokens are more than the benchmark's {CAPACITY}")
        context = self.contexts[True]
        context.take_in(ids)
        new = [context.best_token()]
        while len(new) < max_new_tokens and not llama_cpp.llama_vocab_is_eog(self.vocab, new[-1]):
            context.decode(new[-1:], context.filled, every=True)
            new.append(context.best_token())
        return {"ids": new, "tokens": len(new) - 1, "forwards": len(new) - 1}


if __name__ == "__main__":
    Context(load(sys.argv[1], repacks=True), flash_attn=True, threads=1).take_in([1] * PROBE_TOKENS)
