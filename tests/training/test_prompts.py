"""Prompts from .jsonl files and data set folders: every field, and errors that name the line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jacobi_training.prompts import Prompt, PromptError, read_prompts, unique_prompts

WORDS = ["<unk>", "<s>", "user:", "bot:", "one", "two", "three"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template=TEMPLATE)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_every_field(tmp_path: Path, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "one two", "answer": "three"},
        {"question": "two"},
        "",
        {"prompt_ids": [6, 5], "prompt": "one"},
        {"messages": chat},
        {"messages": [*chat, {"role": "user", "content": "three"}], "prompt": "one"},
    )
    assert read_prompts(path, tokenizer) == [
        Prompt(0, (4, 5)),
        Prompt(1, (5,)),
        Prompt(2, (6, 5)),
        Prompt(3, (2, 4, 3)),  # the model writes its own answer
        Prompt(4, (2, 4, WORDS.index("<unk>"), 5, 2, 6, 3)),
    ]


def test_the_chat_template_is_for_text_too(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt_ids": [5]})
    assert [p.ids for p in read_prompts(path, tokenizer)] == [(4,), (5,)]
    assert [p.ids for p in read_prompts(path, tokenizer, chat_template=True)] == [(2, 4, 3), (5,)]


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path / "p.jsonl", {"prompt_ids": [3]})) == [Prompt(0, (3,))]
    with pytest.raises(PromptError, match=r"line 1: 'prompt' needs a tokenizer and the model has none; .*prompt_ids"):
        read_prompts(write(tmp_path / "q.jsonl", {"prompt": "one"}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "not valid JSON"),
        ('{"prompt": ' + "[" * 100000, "not valid JSON"),
        ('{"prompt": "one \\ud800"}', "'prompt' has half of a surrogate pair"),
        ("[1]", "expected a JSON object"),
        ({"text": "one"}, "no prompt; a record needs 'prompt_ids', 'messages', 'prompt' or 'question'"),
        ({"prompt": 3}, "'prompt' must be text, got 3"),
        ({"prompt": ""}, "'prompt' has no tokens"),
        ({"prompt_ids": []}, "'prompt_ids' has no tokens"),
        ({"prompt_ids": "one"}, "must be a list of token ids"),
        ({"prompt_ids": [1, -1]}, "must be a list of token ids"),
        ({"prompt_ids": [1, True]}, "must be a list of token ids"),
        ({"messages": "one"}, "must be a list of"),
        ({"messages": [{"role": "user"}]}, "must be a list of"),
        ({"messages": [{"role": "assistant", "content": "one"}]}, "nothing to answer"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, tokenizer: Any, line: Any, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "one"}, "", line)
    with pytest.raises(PromptError, match=r"p\.jsonl' line 3: ") as caught:
        read_prompts(path, tokenizer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(PromptError, match="holds no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl", ""), tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(PromptError, match="line 1: not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl", tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        read_prompts(write(tmp_path / "p.jsonl", {"prompt": "one"}), tokenizer, chat_template=True)
    tokenizer.chat_template = "{{ raise_exception('roles must\nalternate') }}"
    with pytest.raises(PromptError, match=r"refuses these messages .*roles must alternate"):
        read_prompts(tmp_path / "p.jsonl", tokenizer, chat_template=True)


def test_a_data_set_folder(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match=r"neither a \.jsonl file nor a data set"):
        read_prompts(tmp_path, tokenizer)
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptError, match="pip install datasets"):
        read_prompts(tmp_path, tokenizer)

    package = ModuleType("datasets")
    rows = [{"messages": [{"role": "user", "content": "one"}], "prompt": None}, {"messages": None, "prompt": "two"}]
    package.load_from_disk = lambda path: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert [p.ids for p in read_prompts(tmp_path, tokenizer)] == [(2, 4, 3), (5,)]
    package.load_from_disk = lambda path: {"train": rows[1:]}  # type: ignore[attr-defined]
    assert read_prompts(tmp_path, tokenizer) == [Prompt(0, (5,))]
    package.load_from_disk = lambda path: {"a": rows, "b": rows}  # type: ignore[attr-defined]
    with pytest.raises(PromptError, match="splits a, b"):
        read_prompts(tmp_path, tokenizer)
    rows[0]["messages"] = [{"role": "user"}]
    package.load_from_disk = lambda path: rows  # type: ignore[attr-defined]
    with pytest.raises(PromptError, match="row 0: 'messages' must be"):
        read_prompts(tmp_path, tokenizer)


def test_duplicates_keep_the_first() -> None:
    prompts = [Prompt(0, (1,)), Prompt(1, (2,)), Prompt(2, (1,)), Prompt(5, (2, 1))]
    assert unique_prompts(prompts) == [prompts[0], prompts[1], prompts[3]]
