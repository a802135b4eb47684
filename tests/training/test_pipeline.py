"""All stages in one run, killed wherever it may be, and what the result is good for."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from jacobi_decoding.cli import CommandError, main
from jacobi_training.fit_config import FitConfig
from jacobi_training.pack_config import PackConfig
from jacobi_training.pipeline import PipelineConfig, add_pipeline_arguments, run, run_from_args
from jacobi_training.run_settings import SettingsError, only_writer
from jacobi_training.shards import load_manifest
from jacobi_training.trajectory_config import TrajectoryConfig
from tests.conftest import ROOT
from tests.decoding.helpers import VOCAB, build
from tests.training.fit_helpers import lines, same_weights, tiny

CONFIG = PipelineConfig(
    block_sizes=(4, 8),
    trajectories=TrajectoryConfig(max_new_tokens=12, shard_size=2),
    pack=PackConfig(window=2),
    fit=FitConfig(steps=7, batch_size=2, lr=1e-3, checkpoint_every=1),
)


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    torch_threads(1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A saved model with a tokenizer, and text prompts for it."""
    folder = tmp_path_factory.mktemp("pipeline")
    tiny().save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "model")
    texts = [" ".join(f"w{(7 * i + j * j) % VOCAB}" for j in range(3 + i)) for i in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return folder / "model", folder / "prompts.jsonl"


@pytest.fixture(scope="module")
def finished(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return run(*inputs, tmp_path_factory.mktemp("finished"), CONFIG, quiet=True)


def test_rounds(finished: Path) -> None:
    for index, (size, steps) in enumerate(((4, 3), (8, 4)), 1):
        folder = finished / f"round-{index}-block-{size}"
        manifest = load_manifest(folder / "trajectories", "trajectories")
        assert manifest.settings["block_size"] == size
        # Five prompts, two samples a step: so often that no sample is trained on twice.
        assert load_manifest(folder / "packed", "packed").records == 5 * -(-steps * 2 // 5)
        assert len(lines(folder / "fit" / "metrics.jsonl")) == steps
    first, second = (load_manifest(p, "trajectories").model for p in sorted(finished.glob("round-*/trajectories")))
    assert first != second
    assert same_weights(finished, finished / "round-2-block-8" / "fit")
    assert not same_weights(finished, finished / "round-1-block-4" / "fit")


def test_the_result_is_a_checkpoint_with_a_card(
    finished: Path, inputs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    AutoModelForCausalLM.from_pretrained(finished)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    assert tokenizer("w5 w9")["input_ids"] == [5, 9]
    card = (finished / "README.md").read_text()
    for text in ("# model, trained", "5 prompts", "| 4 | 5 |", "| 8 | 5 |", "| lr | 0.001 |", "## Losses of round 2"):
        assert text in card
    assert main(["generate", "--model", str(finished), "--prompt", "w5 w9", "--max-new-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.split()) == 4


def test_a_finished_run_does_nothing(finished: Path, inputs: tuple[Path, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    run(*inputs, finished, CONFIG, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_other_settings_are_refused(finished: Path, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    for config, option in (
        (replace(CONFIG, block_sizes=(4,)), "block-sizes"),
        (replace(CONFIG, trajectories=replace(CONFIG.trajectories, max_new_tokens=9)), "max-new-tokens"),
        (replace(CONFIG, pack=replace(CONFIG.pack, context="all")), "context"),
        (replace(CONFIG, pack_enough=False), "epochs"),
        (replace(CONFIG, fit=replace(CONFIG.fit, lr=0.5)), "lr"),
        (replace(CONFIG, fit=replace(CONFIG.fit, seed=3)), "seed"),
    ):
        with pytest.raises(SettingsError, match=rf"was begun with --{option} .*give the same --{option}") as error:
            run(*inputs, finished, config, quiet=True)
        assert "\n" not in str(error.value)
    other = tmp_path / "prompts.jsonl"
    other.write_text('{"prompt": "w1"}\n')
    with pytest.raises(SettingsError, match="--prompts"):
        run(inputs[0], other, finished, CONFIG, quiet=True)
    run(*inputs, finished, replace(CONFIG, fit=replace(CONFIG.fit, checkpoint_every=5)), quiet=True)


def test_a_damaged_round_is_named(finished: Path, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "finished.json").unlink()
    (out / "round-1-block-4" / "round.json").write_text("{")
    with pytest.raises(ValueError, match=r"round-1-block-4/round\.json' is damaged; delete it and run"):
        run(*inputs, out, CONFIG, quiet=True)
    (out / "round-1-block-4" / "round.json").unlink()
    run(*inputs, out, CONFIG, quiet=True)
    assert (out / "README.md").read_text() == (finished / "README.md").read_text()


def test_a_model_is_not_overwritten_and_one_process_runs_at_a_time(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="name a new folder"):
        run(*inputs, inputs[0], CONFIG, quiet=True)
    with only_writer(tmp_path / "out"), pytest.raises(SettingsError, match="another process is writing to"):
        run(*inputs, tmp_path / "out", CONFIG, quiet=True)


def options(inputs: tuple[Path, Path], out: Path) -> list[str]:
    """CONFIG on the command line, but for the size of shards."""
    given = ["--model", inputs[0], "--prompts", inputs[1], "--out", out, "--block-sizes", 4, 8, "--max-new-tokens", 12]
    given += ["--window", 2, "--steps", 7, "--batch-size", 2, "--lr", 1e-3, "--checkpoint-every", 1, "--threads", 1]
    return [str(text) for text in given]


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_pipeline_arguments(made)
    return made


def test_the_command(
    parser: argparse.ArgumentParser, finished: Path, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    run_from_args(parser.parse_args(options(inputs, tmp_path / "out")))
    assert same_weights(tmp_path / "out", finished)


def test_default_settings_teach_answers_of_one_block(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    sizes = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "vocab_size": len(letters)}
    model = build("LlamaForCausalLM", "LlamaConfig", **sizes, max_position_embeddings=1024)
    model.save_pretrained(tmp_path / "model")
    text = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    text.pre_tokenizer, text.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=text).save_pretrained(tmp_path / "model")
    given = ["--model", tmp_path / "model", "--prompts", ROOT / "tests/data/prompts.jsonl", "--out", tmp_path / "out"]
    command = ["train", *map(str, given), "--max-new-tokens", "16", "--threads", "1"]
    assert main(command) == 0
    for folder in (tmp_path / "out").glob("round-*"):
        assert sum(line["consistency_rows"] for line in lines(folder / "fit" / "metrics.jsonl")) > 0
        assert load_manifest(folder / "packed").report["histogram"]["reached"][10] > 0  # type: ignore[index]


def test_errors_of_the_command(parser: argparse.ArgumentParser, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--model is missing"):
        run_from_args(parser.parse_args([]))
    with pytest.raises(ValueError, match="steps must be at least 1 for each of 2 rounds, got 1"):
        run_from_args(parser.parse_args([*options(inputs, tmp_path / "out"), "--steps", "1"]))


CODE = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "python"), str(ROOT / "training")]!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.training import test_pipeline
from jacobi_training.pipeline import run
run(*map(Path, sys.argv[1:]), test_pipeline.CONFIG, quiet=True)
"""


def start(inputs: tuple[Path, Path], out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CODE, *map(str, inputs), str(out)], stderr=subprocess.DEVNULL)


def kill_when(process: subprocess.Popen[bytes], ready: Callable[[], bool], delay: float) -> None:
    """SIGKILL the process some seconds after something is there, if it still runs then."""
    until = time.monotonic() + 300
    while process.poll() is None and not ready() and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_anywhere_the_same_command_gives_the_same_bits(
    finished: Path, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    out, rng = tmp_path / "out", random.Random(5)
    for pattern in (
        "round-1-*/trajectories/shard-00000.jsonl",
        "round-1-*/packed/*",
        "round-1-*/fit/checkpoints/*2",
        "round-2-*/trajectories/*1.jsonl",
        "round-2-*/fit/checkpoints/.*3.part",
        "round-2-*/fit/.final.part",
    ):
        kill_when(start(inputs, out), lambda pattern=pattern: any(out.glob(pattern)), rng.choice((0.0, 0.02, 0.1)))
    assert start(inputs, out).wait(timeout=900) == 0
    assert same_weights(out, finished)
    for name in os.listdir(finished):
        if name.startswith("round-"):
            losses = [[m["loss"] for m in lines(folder / name / "fit" / "metrics.jsonl")] for folder in (out, finished)]
            assert losses[0] == losses[1]
