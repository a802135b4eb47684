"""The Hugging Face checkpoint that a run ends with."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging

from jacobi_decoding.adapter import base_model
from jacobi_training.run_settings import write_atomically

CARD, PART = "README.md", ".final.part"
# What a run keeps beside the checkpoint.
SETTINGS, METRICS, FINISHED = "settings.json", "metrics.jsonl", "finished.json"
OWN_FILES = (CARD, SETTINGS, METRICS, FINISHED)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def merged_copy(model: Any, state: dict[str, Any]) -> PreTrainedModel:
    """A new model like ``model`` (a transformers model, or peft's over one), with LoRA adapters merged.

    state: its whole state, since ``model`` itself may hold only a share.
    """
    base = base_model(model)
    made: Any = type(base)(copy.deepcopy(base.config))
    made.generation_config = copy.deepcopy(base.generation_config)
    if model is base:
        made.load_state_dict(state)
        return made
    from peft import get_peft_model

    made = get_peft_model(made, model.active_peft_config)
    made.load_state_dict(state)
    return made.merge_and_unload()


def write_checkpoint(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any, card: str) -> None:
    """Put config, weights, tokenizer (None: none) and model card into ``folder``, each whole; the card comes last."""
    temporary = folder / PART
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with _without_progress_bars():
            model.to(DTYPES[dtype]).save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _move_into_place(temporary, folder, card)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(folder, error) from None


def copy_checkpoint(source: Path, folder: Path, card: str) -> None:
    """Put what :func:`write_checkpoint` wrote to ``source`` into ``folder`` as well, with another model card."""
    temporary = folder / PART
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for path in source.iterdir():
            if path.is_file() and path.name not in OWN_FILES:
                shutil.copyfile(path, temporary / path.name)
        _move_into_place(temporary, folder, card)
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _move_into_place(temporary: Path, folder: Path, card: str) -> None:
    for path in sorted(temporary.iterdir()):
        os.replace(path, folder / path.name)
    temporary.rmdir()
    write_atomically(folder / CARD, card)


def _cannot_write(folder: Path, error: Exception) -> OSError:
    reason = getattr(error, "strerror", None) or error
    return OSError(f"cannot write the model to {str(folder)!r}: {reason}; make room and give access there")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers shows none of its own inside."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
