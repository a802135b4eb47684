"""What runs a decoding step, and the choice between the two ways."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from jacobi_decoding.devices import DeviceError, interpreted, model_device, runs_triton
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_decoding.packed_loading import check_packed_device
from jacobi_decoding.packed_model import PackedModel
from jacobi_decoding.sampling import SamplingParams
from jacobi_decoding.step_config import step_class
from jacobi_kernels.state import DecodeState, StateColumn

CHECK_TOKENS = 8
INTERPRETER_CHECK_TOKENS = 2  # a step takes seconds there


class Engine(Protocol):
    """Steps one model over a DecodeState."""

    name: str

    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_length(self) -> int | None: ...
    def check_length(self, length: int) -> None: ...
    def allocate_cache(self, batch: int, capacity: int) -> Any: ...
    def running(self) -> AbstractContextManager[None]: ...
    def step(self, state: DecodeState, cache: Any, sampling: SamplingParams) -> None: ...


def choose_engine(model: Any, path: str, step_mode: str | None = None) -> tuple[Engine, str]:
    """The engine for ``path`` ('auto', 'step' or 'modules') on the model's device, and the reason in words.

    model: a transformers causal language model, or a PackedModel, which knows the step path on the CPU only.
    step_mode: of a DeviceStepEngine. UnsupportedModelError when the wanted path, or with 'auto' neither, can run the
    model; ValueError for another path.
    """
    if path not in ("auto", "step", "modules"):
        raise ValueError(f"path must be 'auto', 'step' or 'modules', got {path!r}")
    from jacobi_decoding.step_engine import StepEngine

    if isinstance(model, PackedModel):
        check_packed_device(model.format, model.device)
        if path == "modules":
            remedy = "leave out path='modules', or load the model with packed=False"
            raise UnsupportedModelError("packed weights", "there are no modules to run", remedy)
        packed = StepEngine(model)
        check_packed_engine(packed)
        return packed, _step_reason(path, step_class(model.config))
    # Not before: they import transformers' modelling code, which packed weights do without.
    from jacobi_decoding.device_engine import DeviceStepEngine
    from jacobi_decoding.module_engine import ModuleEngine

    device = model_device(model)
    triton = runs_triton(device)
    if interpreted() and device.type == "cpu" and any(p.dtype != torch.float32 for p in model.parameters()):
        raise DeviceError("JACOBI_BACKEND=triton: the interpreter computes float32 only; load the model in float32")
    if path == "modules":
        return ModuleEngine(model), "asked for"
    try:
        engine = DeviceStepEngine(model, step_mode) if triton else StepEngine(model)
        check_step_engine(engine)
    except UnsupportedModelError as error:
        if path == "step":
            raise
        return ModuleEngine(model), f"{error.what}: {error.why}"
    return engine, _step_reason(path, type(model).__name__)


def _step_reason(path: str, model_class: str) -> str:
    name = model_class.removesuffix("ForCausalLM")
    return "asked for" if path == "step" else f"{name} models run as one op per step"


@torch.no_grad()
def check_step_engine(engine: Any) -> None:
    """Decode a few tokens by the step op and compare with the model's own forward over them.

    A token may differ from the model's best only where its logit is within rounding of the best one. Raises
    UnsupportedModelError otherwise.
    """
    model = engine.model
    new = INTERPRETER_CHECK_TOKENS if interpreted() else CHECK_TOKENS
    prompt = [(7 * i + 3) % engine.vocab_size for i in range(CHECK_TOKENS)]
    state = DecodeState.allocate([prompt], max_new_tokens=new, block_size=4, blocks=1, candidates=0)
    with engine.running():
        cache = engine.allocate_cache(1, state.cache_capacity)
        while state.running:
            engine.step(state, cache, SamplingParams())
    text = state.text[:, : int(state.state[0, StateColumn.TEXT_LEN])].long().to(engine.device)
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=text).logits[0, CHECK_TOKENS - 1 : -1].float()
    finally:
        model.train(was_training)
    chosen = logits.gather(1, text[0, CHECK_TOKENS:, None])[:, 0]
    spread = logits.max(dim=1).values - logits.mean(dim=1)
    tolerance = (1e-3 if next(model.parameters()).dtype == torch.float32 else 0.15) * spread
    missed = (logits.max(dim=1).values - chosen - tolerance).max()
    if not missed <= 0:
        raise UnsupportedModelError(
            f"{type(model).__name__} on the step path",
            "its tokens differ from those of the model's own forward in the self-check",
            "use path='modules'",
        )


def check_packed_engine(engine: Any) -> None:
    """Decode a few tokens in blocks of 8 and one by one, and compare tokens, keys and values bit for bit.

    There is no forward of the model's own to compare with. Raises UnsupportedModelError where they differ.
    """
    prompt = [(7 * i + 3) % engine.vocab_size for i in range(CHECK_TOKENS)]
    runs = []
    for block_size, chain in ((CHECK_TOKENS, None), (1, 1)):
        state = DecodeState.allocate(
            [prompt], max_new_tokens=CHECK_TOKENS, block_size=block_size, blocks=1, candidates=0, chain_capacity=chain
        )
        with engine.running():
            cache = engine.allocate_cache(1, state.cache_capacity)
            while state.running:
                engine.step(state, cache, SamplingParams())
        known = 2 * CHECK_TOKENS - 1  # the last token is emitted, not evaluated
        runs.append((torch.tensor(state.generated(0)), cache.k_cache[:, 0, :known], cache.v_cache[:, 0, :known]))
    if not all(torch.equal(at_once, one_by_one) for at_once, one_by_one in zip(*runs, strict=True)):
        raise UnsupportedModelError(
            "packed weights",
            f"{CHECK_TOKENS} tokens evaluated at once differ from those evaluated one by one in the self-check",
            "load the model with packed=False",
        )
