"""Jacobi decoding of a causal language model: steps that verify many tokens at once, until every row ends."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from jacobi_decoding.batching import check_vocabulary, checked_limits, padded_sequences, stop_lists, unpadded_prompts
from jacobi_decoding.controller import (
    AUTO_BLOCK_SIZE,
    AUTO_BLOCKS,
    AUTO_CANDIDATES,
    Controller,
    StepCost,
    measure_step_cost,
)
from jacobi_decoding.device_engine import DeviceStepEngine, Prefill, launch_counts
from jacobi_decoding.devices import auto_settings, checked_device, runs_triton
from jacobi_decoding.engine import Engine, choose_engine
from jacobi_decoding.flash_prefill import NOTICE, PREFILLS, check_flash_attn, take_in_prompts
from jacobi_decoding.loading import load_model
from jacobi_decoding.profiling import op_profile
from jacobi_decoding.sampling import PerRow, SamplingParams
from jacobi_decoding.stats import DecodeStats, StatsRecorder
from jacobi_decoding.step_engine import StepEngine
from jacobi_kernels.checks import whole_number
from jacobi_kernels.state import MAX_DRAFT_OPTION, DecodeState, StateColumn

MODEL_DEFAULT: Any = object()  # eos_token_id: what the model's generation config says
StopTokens = int | Sequence[int] | Sequence[Sequence[int]] | None
# Called after every step with the state; may end rows early with cut_row.
StepCallback = Callable[[DecodeState], None]


class JacobiDecoder:
    """Decodes one model; keeps its packed weights between calls.

    model: a transformers causal language model (float32 or bfloat16, on the CPU or a CUDA GPU), a PackedModel (step
    path on the CPU), or what ``load_model`` takes: a folder, a .gguf file, a cached hub id. dtype: of the latter.
    path: 'step' (each step is one op; Llama-like models), 'modules' (the model's own modules call our kernels) or
    'auto' (step where the model allows it). ``path`` and ``path_reason`` tell which one runs and why.
    device: 'cpu', 'cuda' or 'cuda:N', to which the model is moved; by default a model stays where it is and a name is
    loaded for the CPU. step_mode: how a GPU's steps are launched, see :func:`jacobi_decoding.devices.wanted_step_mode`.
    Raises LoadError, DeviceError or UnsupportedModelError, one line with the remedy.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        path: Literal["auto", "step", "modules"] = "auto",
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        step_mode: str | None = None,
    ) -> None:
        if isinstance(model, (str, os.PathLike)):
            loaded = load_model(model, dtype, device=device or "cpu")
            model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        elif device is not None:
            model = model.to(checked_device(device))
        self.model, self.tokenizer = model, tokenizer
        self._wanted_path, self._step_mode = path, step_mode
        self._cost: StepCost | None = None
        self._cost_threads = 0
        self.engine: Engine
        self.engine, self.path_reason = choose_engine(model, path, step_mode)

    @property
    def path(self) -> str:
        """'multi_block_step' or 'modules'."""
        return self.engine.name

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | Sequence[int] = 128,
        block_size: int | Literal["auto"] = "auto",
        blocks: int = 2,
        candidates: int = 4,
        pool_from_prompt: bool | Sequence[bool] = True,
        pool_rows: int = 32,
        spawn_ratio: float = 0.85,
        prefill: Literal["exact", "flash-attn"] = "exact",
        do_sample: bool = False,
        temperature: PerRow = 1.0,
        top_k: PerRow | None = None,
        top_p: PerRow | None = None,
        seed: int | Sequence[int] | Tensor | None = None,
        eos_token_id: StopTokens = MODEL_DEFAULT,
        pad_token_id: int | None = None,
        streamer: Any = None,
        step_callback: StepCallback | None = None,
        return_stats: bool = False,
        profile: bool = False,
    ) -> Any:
        """Continue every row of ``input_ids``; the tokens are those of token-by-token decoding with the same kernels.

        input_ids: LongTensor [batch, prompt]. attention_mask: [batch, prompt], 0 on padding (either side); by default
        what transformers assumes. Per row where a sequence is allowed: max_new_tokens, pool_from_prompt, temperature,
        top_k, top_p, seed, and eos_token_id as a list of lists.
        block_size, blocks, candidates: n, most open blocks K, recycled candidates C; they change speed, never tokens.
        block_size=1, blocks=1, candidates=0 decodes token by token; block_size="auto" picks how many guesses to verify
        step by step, from measured step times and what was accepted so far (blocks and candidates are then not used);
        on a GPU it stands for the fixed devices.GPU_SETTINGS, which the statistics name.
        pool_from_prompt: guesses may be copied from the prompt. pool_rows, spawn_ratio: see DecodeState.
        prefill: 'flash-attn' takes prompts in by that package where exactness does not matter (see flash_prefill).
        do_sample: seeded sampling with temperature, top_k, top_p; the same seed gives the same tokens for every block
        setting and batch. seed None: drawn from torch's generator.
        eos_token_id: stop tokens; by default the generation config's; None: none.
        streamer: gets the prompt, then tokens as they become final (transformers' TextStreamer works; one row only).
        step_callback: called with the DecodeState after every step.
        Returns LongTensor [batch, prompt + new], rows padded behind with pad_token_id; with return_stats=True a pair
        with DecodeStats. profile=True adds the share of the time in each op to the statistics.
        Raises ValueError naming the argument.
        """
        self._follow_model()
        take_in = self._prefill(prefill)
        adaptive = isinstance(block_size, str) and block_size == "auto"
        if not adaptive:
            block_size = whole_number("block_size", block_size, 1, MAX_DRAFT_OPTION, others=", or 'auto'")
        blocks = whole_number("blocks", blocks, 1, MAX_DRAFT_OPTION)
        candidates = whole_number("candidates", candidates, 0, MAX_DRAFT_OPTION)
        if adaptive and runs_triton(self.engine.device):
            chosen = auto_settings(self.engine.device)
            block_size, blocks, candidates = chosen.block_size, chosen.blocks, chosen.candidates
            adaptive = False
        elif adaptive:
            block_size, blocks, candidates = AUTO_BLOCK_SIZE, AUTO_BLOCKS, AUTO_CANDIDATES
        prompts = unpadded_prompts(input_ids, attention_mask, self._pad_token(pad_token_id, eos_token_id))
        _check_streamer(streamer, len(prompts))
        state = DecodeState.allocate(
            prompts,
            max_new_tokens=checked_limits(max_new_tokens),
            block_size=int(block_size),
            blocks=blocks,
            candidates=candidates,
            pool_rows=pool_rows,
            pool_from_prompt=pool_from_prompt,
            stop_tokens=stop_lists(self._default_eos() if eos_token_id is MODEL_DEFAULT else eos_token_id),
            spawn_ratio=spawn_ratio,
        )
        check_vocabulary(input_ids, self.engine.vocab_size)
        longest = int(state.state[:, StateColumn.MAX_LEN].max())
        self.engine.check_length(longest)
        self._warn_of_length(longest)
        sampling = SamplingParams.create(
            state.batch,
            self.engine.vocab_size,
            temperature=temperature if do_sample else 0.0,
            top_k=top_k,
            top_p=top_p,
            seed=int(torch.randint(2**62, ())) if seed is None and do_sample else 0 if seed is None else seed,
            device=self.engine.device,
        )
        controller = Controller(self._measured_cost()) if adaptive else None
        stats = DecodeStats(self.engine.backend, self.path, int(block_size), blocks, candidates, adaptive=adaptive)
        self._run(state, sampling, stats, streamer, step_callback, input_ids, profile, controller, take_in)
        sequences = padded_sequences(input_ids, state, self._pad_token(pad_token_id, eos_token_id))
        return (sequences, stats) if return_stats else sequences

    def _run(
        self,
        state: DecodeState,
        sampling: SamplingParams,
        stats: DecodeStats,
        streamer: Any,
        step_callback: StepCallback | None,
        input_ids: Tensor,
        profile: bool,
        controller: Controller | None,
        take_in: Prefill | None,
    ) -> None:
        """Decode until every row is done."""
        if streamer is not None:
            streamer.put(input_ids.cpu())
        try:
            with self.engine.running(), op_profile(stats, profile, self.engine.device):
                if isinstance(self.engine, DeviceStepEngine):
                    each_step = None
                    if streamer is not None or step_callback is not None:
                        each_step = partial(_after_step, streamer=streamer, step_callback=step_callback)
                    self.engine.run(state, sampling, stats, each_step, take_in)
                else:
                    self._run_here(state, sampling, stats, streamer, step_callback, controller)
        finally:
            if streamer is not None:
                streamer.end()

    def _run_here(
        self,
        state: DecodeState,
        sampling: SamplingParams,
        stats: DecodeStats,
        streamer: Any,
        step_callback: StepCallback | None,
        controller: Controller | None,
    ) -> None:
        """The decode loop over a state on the CPU."""
        recorder = StatsRecorder(stats, state)
        cache = self.engine.allocate_cache(state.batch, state.cache_capacity)
        before = launch_counts() if self.engine.backend == "triton" else None
        while state.running:
            if controller is not None:
                controller.trim(state)
            recorder.before()
            self.engine.step(state, cache, sampling)
            if step_callback is not None:
                step_callback(state)
            seconds = recorder.after()
            if controller is not None:
                controller.observe(state, seconds)
            _after_step(state, streamer, None)
        recorder.finish()
        if before is not None:
            stats.launches = dict(launch_counts() - before)

    def _prefill(self, prefill: str) -> Prefill | None:
        """What takes prompts in before the first step; None: the steps do."""
        if prefill not in PREFILLS:
            raise ValueError(f"prefill must be one of {', '.join(PREFILLS)}, got {prefill!r}")
        if prefill == "exact":
            return None
        check_flash_attn(self.model, self.path)
        warnings.warn(NOTICE, stacklevel=4)
        return partial(take_in_prompts, self.model)

    def _measured_cost(self) -> StepCost:
        """Time of a step against its query tokens; measured once per decoder and number of threads."""
        if self._cost is None or self._cost_threads != torch.get_num_threads():
            self._cost, self._cost_threads = measure_step_cost(self.engine), torch.get_num_threads()
        return self._cost

    def _follow_model(self) -> None:
        """Choose again when the model has changed so that the step path would not see it (adapters, hooks)."""
        if isinstance(self.engine, StepEngine) and not self.engine.fits():
            self.engine, self.path_reason = choose_engine(self.model, self._wanted_path, self._step_mode)

    def _warn_of_length(self, length: int) -> None:
        """As transformers does, decode beyond the positions that the model was made for, but say so."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and length > most:
            warnings.warn(
                f"prompt and max_new_tokens come to {length} tokens, more than the model's max_position_embeddings "
                f"{most}; what it writes beyond may be poor",
                stacklevel=4,  # generate, behind torch.no_grad
            )

    def _default_eos(self) -> StopTokens:
        config = getattr(self.model, "generation_config", None) or self.model.config
        return getattr(config, "eos_token_id", None)

    def _pad_token(self, pad_token_id: int | None, eos_token_id: StopTokens) -> int | None:
        """What generate pads with: the argument, the generation config's pad token, else the first stop token."""
        if pad_token_id is not None:
            return whole_number("pad_token_id", pad_token_id)
        config = getattr(self.model, "generation_config", None) or self.model.config
        pad_token_id = getattr(config, "pad_token_id", None)
        if pad_token_id is None:
            stops = stop_lists(self._default_eos() if eos_token_id is MODEL_DEFAULT else eos_token_id)
            flat = [t for row in stops for t in (row if isinstance(row, Sequence) else [row])]
            pad_token_id = flat[0] if flat else None
        return pad_token_id


def _after_step(state: DecodeState, streamer: Any, step_callback: StepCallback | None) -> None:
    if step_callback is not None:
        step_callback(state)
    if streamer is not None and (emitted := state.emitted(0)):
        streamer.put(torch.tensor(emitted))


def _check_streamer(streamer: Any, batch: int) -> None:
    if streamer is None:
        return
    if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
        raise ValueError(f"streamer must have the methods put and end, got {type(streamer).__name__}")
    if batch != 1:
        raise ValueError(f"streamer takes one row, got a batch of {batch}")


class _Attached:
    """The decoder that a model carries; copies and pickles of the model get none."""

    def __init__(self, decoder: JacobiDecoder | None = None) -> None:
        self.decoder = decoder

    def __deepcopy__(self, memo: Any) -> _Attached:
        return _Attached()

    def __reduce__(self) -> tuple[type[_Attached], tuple[()]]:
        return _Attached, ()


def cached_decoder(model: Any) -> JacobiDecoder:
    """The decoder that belongs to ``model``; its packed weights live as long as the model does."""
    attached = model.__dict__.setdefault("_jacobi_decoder", _Attached())
    if attached.decoder is None or attached.decoder.model is not model:
        attached.decoder = JacobiDecoder(model)
    return attached.decoder


def generate(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
    """Drop-in for ``model.generate``: Jacobi decoding of a transformers model that is left as it was found.

    options: those of :meth:`JacobiDecoder.generate`. The packed weights are kept with the model and follow changes of
    its parameters (an optimiser step, for instance).
    """
    return cached_decoder(model).generate(input_ids, attention_mask, **options)
