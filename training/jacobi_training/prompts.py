"""Prompts as token ids, from a .jsonl file or a chat data set on disk.

A record gives its prompt as ``prompt_ids`` (token ids), ``messages`` (a conversation, through the tokenizer's chat
template), ``prompt`` or ``question`` (text); the first of these that it has counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jacobi_decoding.cli.arguments import chat_ids

FIELDS = ("prompt_ids", "messages", "prompt", "question")
_DATASET_FILES = ("dataset_info.json", "dataset_dict.json", "state.json")


class PromptError(ValueError):
    """Prompts that cannot be read; one line that names file, line and remedy."""


@dataclass(frozen=True)
class Prompt:
    """index: place of the record in its file or data set, from 0. ids: token ids, at least one."""

    index: int
    ids: tuple[int, ...]


def read_prompts(path: str | os.PathLike[str], tokenizer: Any = None, *, chat_template: bool = False) -> list[Prompt]:
    """All prompts of ``path``: a .jsonl file, or a folder that ``datasets.Dataset.save_to_disk`` wrote.

    tokenizer: a transformers tokenizer; without one only ``prompt_ids`` can be read. chat_template: text becomes the
    user's message in the chat template; as it stands otherwise. Blank lines are skipped. Raises PromptError.
    """
    encoder = _Encoder(tokenizer, chat_template)
    found = []
    for index, (where, record) in enumerate(_records(Path(path))):
        found.append(Prompt(index, encoder.encode(where, record)))
    if not found:
        raise PromptError(f"{str(path)!r} holds no prompts; give it at least one record with {_fields()}")
    return found


def unique_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts without those whose token ids occurred before."""
    seen: set[tuple[int, ...]] = set()
    return [p for p in prompts if not (p.ids in seen or seen.add(p.ids))]  # type: ignore[func-returns-value]


class _Encoder:
    """Records to token ids; ``where`` is the record's place, for errors."""

    def __init__(self, tokenizer: Any, chat_template: bool) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template

    def encode(self, where: str, record: Mapping[str, Any]) -> tuple[int, ...]:
        name = next((f for f in FIELDS if record.get(f) is not None), None)
        if name is None:
            raise PromptError(f"{where}: no prompt; a record needs {_fields()}")
        value = record[name]
        if name == "prompt_ids":
            ids = value
            whole = isinstance(ids, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
            if not whole or isinstance(ids, (str, bytes)) or any(not 0 <= i < 2**31 for i in ids):
                raise PromptError(f"{where}: 'prompt_ids' must be a list of token ids, got {_short(value)}")
        elif self.tokenizer is None:
            raise PromptError(
                f"{where}: {name!r} needs a tokenizer and the model has none; "
                "save it into the model's folder, or give 'prompt_ids'"
            )
        elif name == "messages":
            ids = self._chat(where, _messages(where, value))
        elif not isinstance(value, str):
            raise PromptError(f"{where}: {name!r} must be text, got {_short(value)}")
        elif any("\ud800" <= c <= "\udfff" for c in value):
            raise PromptError(f"{where}: {name!r} has half of a surrogate pair, which is no character; remove it")
        elif self.chat_template:
            ids = self._chat(where, [{"role": "user", "content": value}])
        else:
            ids = self.tokenizer(value)["input_ids"]
        if not ids:
            raise PromptError(f"{where}: {name!r} has no tokens; give it some text or remove the record")
        return tuple(ids)

    def _chat(self, where: str, messages: list[dict[str, str]]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError(
                f"{where}: the tokenizer has no chat template; give plain text in 'prompt' without --chat-template"
            )
        try:
            return chat_ids(self.tokenizer, messages)
        except Exception as error:  # a template is a program; what it raises is its author's choice
            reason = " ".join(str(error).split())
            raise PromptError(f"{where}: the chat template refuses these messages ({reason}); correct them") from None


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    """The conversation up to where the model answers: answers at its end are dropped, the model writes its own."""
    good = isinstance(value, Sequence) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    if not good:
        raise PromptError(f"{where}: 'messages' must be a list of {{role, content}} objects, got {_short(value)}")
    messages = [{"role": m["role"], "content": m["content"]} for m in value]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise PromptError(f"{where}: 'messages' has nothing to answer; give it a message of the user")
    return messages


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place in words, record) of every record."""
    if path.is_dir():
        yield from _dataset(path)
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{str(path)!r} line {number}", _parse(path, number, line)
    except OSError as error:
        raise PromptError(f"cannot read {str(path)!r}: {error.strerror}; check --prompts") from None


def _parse(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    where = f"{str(path)!r} line {number}"
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        raise PromptError(f"{where}: not UTF-8 text; convert the file first") from None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not valid JSON ({error}); one object a line is expected") from None
    if not isinstance(record, dict):
        raise PromptError(f"{where}: expected a JSON object, got {_short(record)}")
    return record


def _dataset(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not any((path / name).exists() for name in _DATASET_FILES):
        raise PromptError(f"{str(path)!r} is neither a .jsonl file nor a data set that save_to_disk() wrote; name one")
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found]
    except ImportError:
        raise PromptError(
            f"{str(path)!r} is a data set folder, which needs the package datasets: `pip install datasets`, "
            "or save the records as .jsonl"
        ) from None
    try:
        data = load_from_disk(str(path))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise PromptError(f"cannot read the data set {str(path)!r}: {reason}; save it to disk again") from None
    if isinstance(data, Mapping):  # several splits
        if "train" not in data:
            raise PromptError(f"{str(path)!r} has the splits {', '.join(data)}; name the folder of one of them")
        data = data["train"]
    for row, record in enumerate(data):
        yield f"{str(path)!r} row {row}", record


def _fields() -> str:
    return ", ".join(repr(name) for name in FIELDS[:-1]) + f" or {FIELDS[-1]!r}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
