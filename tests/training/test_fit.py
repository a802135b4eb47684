"""Training runs: every option has an effect, and a run that was interrupted ends in the same bits."""

from __future__ import annotations

import argparse
import builtins
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from jacobi_decoding.loading import LoadError
from jacobi_training import checkpoints
from jacobi_training.cli import fit as command
from jacobi_training.fit import FitResult, fit
from jacobi_training.fit_config import FitConfig
from jacobi_training.run_settings import SettingsError, only_writer, write_json
from jacobi_training.shards import ShardError
from jacobi_training.trajectories import model_fingerprint
from tests.decoding.helpers import VOCAB
from tests.training.fit_helpers import lines, same_weights, samples, save_model, tiny, weights, write_samples

BASE = FitConfig(steps=4, batch_size=2, lr=3e-3, checkpoint_every=1)


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    torch_threads(1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A saved model and a folder of packed samples."""
    folder = tmp_path_factory.mktemp("fit")
    return save_model(tiny(), folder / "model"), write_samples(folder / "packed", samples(6))


@pytest.fixture(scope="module")
def plain(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of BASE."""
    torch.set_num_threads(1)
    return fit(*inputs, tmp_path_factory.mktemp("plain"), BASE, quiet=True).out


class Killed(BaseException):
    pass


def fit_until(
    step: int, inputs: tuple[Path, Path], out: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends, like a killed one, when it would save the checkpoint of ``step``."""
    save = checkpoints.save

    def dying(folder: Path, at: int, *rest: Any) -> None:
        if at == step:
            raise Killed
        save(folder, at, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "save", dying)
        with pytest.raises(Killed):
            fit(*inputs, out, config, quiet=True)


def test_the_loss_falls_and_the_result_loads(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    result = fit(*inputs, tmp_path / "out", replace(BASE, steps=30, batch_size=6), quiet=True)
    losses = [line["loss"] for line in result.metrics]
    assert losses[-1] < 0.7 * losses[0]
    assert [line["step"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == list(range(1, 31))
    for line in result.metrics:
        assert line["loss"] == pytest.approx(line["ar_loss"] + line["consistency_loss"])
        assert line["rows"] > line["ar_rows"] > line["consistency_rows"] > 0
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
    model = AutoModelForCausalLM.from_pretrained(result.out)
    assert model.config.dtype == torch.float32
    assert not torch.equal(model.lm_head.weight, tiny().lm_head.weight)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    card = (result.out / "README.md").read_text()
    for text in ("6 packed samples", "| made | by hand |", "| batch_size | 6 |", "30 optimizer steps", "| 28 to 30 |"):
        assert text in card
    assert "/" + "tmp" not in card


@pytest.mark.parametrize(
    "option",
    [
        {"steps": 3},
        {"steps": None, "epochs": 0.5},
        {"batch_size": 3},
        {"lr": 1e-3},
        {"lr_schedule": "constant"},
        {"warmup": 0.5},
        {"min_lr": 0.5},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"weight_decay": 0.3},
        {"clip": 0.1},
        {"ar_weight": 0.2},
        {"ar_weight": 0.0},
        {"consistency_weight": 0.2},
        {"consistency_weight": 0.0},
        {"consistency": "hard"},
        {"temperature": 2.0},
        {"precision": "bfloat16"},
        {"lora_rank": 2},
        {"max_rows": 1},
    ],
    ids=str,
)
def test_every_option_has_an_effect(
    option: dict[str, Any], inputs: tuple[Path, Path], plain: Path, tmp_path: Path
) -> None:
    out = fit(*inputs, tmp_path / "out", replace(BASE, **option), quiet=True).out
    assert not same_weights(out, plain)
    if option == {"max_rows": 1}:  # another order of sums, nothing else
        for name, tensor in weights(plain).items():
            torch.testing.assert_close(weights(out)[name], tensor, rtol=0, atol=2e-5)


@pytest.mark.parametrize("option", [{"lora_alpha": 3.0}, {"lora_modules": ("q_proj",)}, {"seed": 1}], ids=str)
def test_every_option_of_lora_has_an_effect(option: dict[str, Any], inputs: tuple[Path, Path], tmp_path: Path) -> None:
    config = replace(BASE, lora_rank=2, lr=1e-2)
    one = fit(*inputs, tmp_path / "one", config, quiet=True).out
    other = fit(*inputs, tmp_path / "other", replace(config, **option), quiet=True).out
    assert not same_weights(one, other)


def test_lora_is_merged_and_leaves_the_rest_alone(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    config = replace(BASE, lora_rank=2, lora_modules=("q_proj",), lr=1e-2)
    out = fit(*inputs, tmp_path / "out", config, quiet=True).out
    before, after = weights(inputs[0]), weights(out)
    assert before.keys() == after.keys()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("q_proj.weight" in name for name in moved)
    for name in moved:
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-4) == 2


def test_save_dtype(inputs: tuple[Path, Path], plain: Path, tmp_path: Path) -> None:
    out = fit(*inputs, tmp_path / "out", replace(BASE, save_dtype="bfloat16"), quiet=True).out
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(out)[name], tensor.bfloat16())


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, {"checkpoint_every": 3}], ids=str)
def test_how_a_run_is_carried_out_changes_no_bit(
    option: dict[str, Any], inputs: tuple[Path, Path], plain: Path, tmp_path: Path
) -> None:
    assert same_weights(fit(*inputs, tmp_path / "out", replace(BASE, **option), quiet=True).out, plain)


def test_samples_without_noise_are_mentioned(
    inputs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = samples(2)
    for record in records:
        answer = record["answer_ids"]
        for i, block in enumerate(record["blocks"]):
            block["noisy"] = answer[4 * i : 4 * i + 4]
    packed = write_samples(tmp_path / "packed", records)
    fit(inputs[0], packed, tmp_path / "out", replace(BASE, steps=1))
    assert "no row had a consistency term" in capsys.readouterr().err
    fit(inputs[0], packed, tmp_path / "ar", replace(BASE, steps=1, consistency_weight=0.0))
    fit(*inputs, tmp_path / "noisy", replace(BASE, steps=1))
    assert "no row had" not in capsys.readouterr().err


def test_a_model_object_is_trained_in_place(inputs: tuple[Path, Path], plain: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs[0])
    result = fit(model, inputs[1], tmp_path / "out", BASE, quiet=True)
    assert same_weights(result.out, plain)
    ids = torch.arange(7)[None]
    trained = AutoModelForCausalLM.from_pretrained(result.out)
    assert torch.equal(model.eval()(ids).logits, trained(ids).logits)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_killed_run_resumes_bit_for_bit(
    step: int, inputs: tuple[Path, Path], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_until(step, inputs, tmp_path, BASE, monkeypatch)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    result = fit(*inputs, tmp_path, BASE, quiet=True)
    assert same_weights(result.out, plain)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [m["loss"] for m in result.metrics] == [m["loss"] for m in lines(plain / "metrics.jsonl")]


def test_a_lora_run_resumes_bit_for_bit(
    inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(BASE, lora_rank=2, precision="bfloat16")
    want = fit(*inputs, tmp_path / "whole", config, quiet=True).out
    fit_until(3, inputs, tmp_path / "killed", config, monkeypatch)
    assert same_weights(fit(*inputs, tmp_path / "killed", config, quiet=True).out, want)


def test_two_checkpoints_are_kept_and_a_finished_run_does_nothing(inputs: tuple[Path, Path], plain: Path) -> None:
    assert sorted(p.name for p in (plain / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    before = {p: p.stat().st_mtime_ns for p in plain.rglob("*")}
    result = fit(*inputs, plain, BASE, quiet=True)
    assert {p: p.stat().st_mtime_ns for p in plain.rglob("*")} == before
    assert len(result.metrics) == 4


@pytest.fixture
def unfinished(inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was killed with checkpoints of steps 2 and 3."""
    fit_until(4, inputs, tmp_path / "out", BASE, monkeypatch)
    return tmp_path / "out"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "json"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str, inputs: tuple[Path, Path], plain: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = unfinished / "checkpoints" / "step-00000003" / "state.pt"
    data = bytearray(state.read_bytes())
    if damage == "truncated":
        state.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif damage == "gone":
        state.unlink()
    else:
        state.with_name("checkpoint.json").write_text("{")
    result = fit(*inputs, unfinished, BASE)
    message = capsys.readouterr().err.splitlines()[0]
    assert "step-00000003' is damaged; going back to the one before" in message
    assert same_weights(result.out, plain)


def test_damaged_checkpoints_alone_are_an_error(inputs: tuple[Path, Path], unfinished: Path) -> None:
    for state in unfinished.rglob("state.pt"):
        state.write_bytes(b"")
    with pytest.raises(checkpoints.CheckpointError, match=r"no checkpoint in .* is whole; delete") as error:
        fit(*inputs, unfinished, BASE, quiet=True)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_model_is_refused(inputs: tuple[Path, Path], unfinished: Path) -> None:
    other, settings = tiny(hidden_size=64), json.loads((unfinished / "settings.json").read_text())
    write_json(unfinished / "settings.json", settings | {"model": model_fingerprint(other)})
    with pytest.raises(checkpoints.CheckpointError, match="is of another model; delete"):
        fit(other, inputs[1], unfinished, BASE, quiet=True)


def test_other_settings_are_refused(inputs: tuple[Path, Path], unfinished: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"was begun with --lr 0.003, now it is 0.001; give the same --lr or"):
        fit(*inputs, unfinished, replace(BASE, lr=1e-3), quiet=True)
    with pytest.raises(SettingsError, match="begun with --model"):
        fit(tiny(seed=1), inputs[1], unfinished, BASE, quiet=True)
    other = write_samples(tmp_path / "other", samples(6, seed=5))
    with pytest.raises(SettingsError, match="begun with --packed"):
        fit(inputs[0], other, unfinished, BASE, quiet=True)
    fit(*inputs, unfinished, replace(BASE, max_rows=100, checkpoint_every=2), quiet=True)


def test_bad_inputs(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        fit(tmp_path / "none", inputs[1], tmp_path / "out", BASE, quiet=True)
    with pytest.raises(ShardError, match=r"has no manifest\.json"):
        fit(inputs[0], tmp_path / "none", tmp_path / "out", BASE, quiet=True)
    damaged = tmp_path / "damaged"
    shutil.copytree(inputs[1], damaged)
    with (damaged / "shard-00001.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ShardError, match=r"shard-00001\.jsonl' is damaged"):
        fit(inputs[0], damaged, tmp_path / "out", BASE, quiet=True)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SettingsError, match=r"holds 'README\.md' but no settings\.json, .*name a new folder"):
        fit(*inputs, tmp_path, BASE, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    before = {path: path.read_bytes() for path in inputs[0].iterdir()}
    with pytest.raises(SettingsError, match="name a new folder"):
        fit(*inputs, inputs[0], BASE, quiet=True)
    assert {path: path.read_bytes() for path in inputs[0].iterdir()} == before


def test_one_process_at_a_time(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    with only_writer(tmp_path / "out"), pytest.raises(SettingsError, match="another process is writing to"):
        fit(*inputs, tmp_path / "out", BASE, quiet=True)
    assert not list((tmp_path / "out").iterdir())
    fit(*inputs, tmp_path / "out", BASE, quiet=True)


def test_samples_of_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    made = samples(2)
    made[1]["answer_ids"][0] = made[1]["blocks"][0]["noisy"][0] = VOCAB
    packed = write_samples(tmp_path / "packed", made)
    with pytest.raises(ValueError, match=f"token {VOCAB}, the model's ids end at {VOCAB - 1}; pack"):
        fit(tiny(), packed, tmp_path / "out", BASE, quiet=True)


def test_a_full_disk_is_an_error_in_one_line(inputs: tuple[Path, Path], plain: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (inputs[0] / "model.safetensors").stat().st_size
    for limit, message in (
        (size, "cannot write checkpoints to .*; make room"),
        (size // 2, "cannot write the model to"),
    ):
        out = tmp_path / str(limit)
        if limit < size:  # its checkpoints are there
            shutil.copytree(plain, out)
            (out / "finished.json").unlink()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(OSError, match=message) as error:
                fit(*inputs, out, BASE, quiet=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "\n" not in str(error.value)
        fit(*inputs, out, BASE, quiet=True)
        assert same_weights(out, plain)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"lora_modules": ("q_proj",)}, "lora_modules have no effect without adapters; give a lora_rank"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"lr": -1.0}, "lr must be at least 0, got -1"),
        ({"warmup": 1.5}, "warmup must be at least 0 and at most 1, got 1.5"),
        ({"lr_schedule": "step"}, "lr_schedule must be cosine or constant, got 'step'"),
        ({"precision": "int8"}, "precision must be float32 or bfloat16"),
        ({"parallel": "tp"}, "parallel must be ddp or fsdp2"),
        ({"lr": float("nan")}, "lr must be"),
    ],
    ids=str,
)
def test_settings_are_checked(option: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(BASE, **option)


def test_learning_rate() -> None:
    config = FitConfig(lr=1.0, warmup=0.2, min_lr=0.1)
    rates = [config.learning_rate(i, 10) for i in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.1 < rates[-1] < 0.2
    constant = replace(config, lr_schedule="constant")
    assert [constant.learning_rate(i, 10) for i in range(10)] == [0.5] + [1.0] * 9


def test_tensorboard_is_optional(inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without_tensorboard(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", without_tensorboard)
        with pytest.raises(ImportError, match="pip install tensorboard"):
            fit(*inputs, tmp_path / "without", replace(BASE, tensorboard=True), quiet=True)
    pytest.importorskip("tensorboard")
    fit(*inputs, tmp_path / "with", replace(BASE, tensorboard=True), quiet=True)
    assert list((tmp_path / "with" / "tensorboard").glob("events*"))


def test_the_command_has_an_option_for_every_setting(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    required = ["--model", str(inputs[0]), "--packed", str(inputs[1]), "--out", str(tmp_path / "out")]
    assert command.config_from_args(parser.parse_args(required)) == FitConfig()
    given = {
        "steps": 3, "epochs": 2.0, "batch_size": 2, "max_rows": 99, "lr": 0.5, "lr_schedule": "constant",
        "warmup": 0.5, "min_lr": 0.25, "beta1": 0.5, "beta2": 0.5, "weight_decay": 0.5, "clip": 2.0,
        "ar_weight": 0.5, "consistency_weight": 0.5, "consistency": "hard", "temperature": 1.0,
        "precision": "bfloat16", "lora_rank": 3, "lora_alpha": 4.0, "save_dtype": "bfloat16", "parallel": "fsdp2",
        "checkpoint_every": 7, "seed": 9,
    }  # fmt: skip
    options = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    options += ["--lora-modules", "q_proj", "v_proj", "--gradient-checkpointing", "--compile", "--tensorboard"]
    assert command.config_from_args(parser.parse_args([*required, *options])) == FitConfig(
        **given, lora_modules=("q_proj", "v_proj"), gradient_checkpointing=True, compile=True, tensorboard=True
    )


def test_the_command_trains(inputs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = ["--model", inputs[0], "--packed", inputs[1], "--out", tmp_path / "out", "--steps", 2]
    command.run(parser.parse_args([*map(str, arguments), "--batch-size", "3", "--threads", "1"]))
    assert "2 steps, AR loss" in capsys.readouterr().err.splitlines()[-1]
    assert isinstance(fit(*inputs, tmp_path / "out", FitConfig(steps=2, batch_size=3), quiet=True), FitResult)
    (tmp_path / "out" / "metrics.jsonl").unlink()
    command.run(parser.parse_args([*map(str, arguments), "--batch-size", "3"]))
    assert "2 steps; the model is in" in capsys.readouterr().err.splitlines()[-1]
