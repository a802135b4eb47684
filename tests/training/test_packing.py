"""Packing: genuine trajectories of a toy model, every option, the report, cut answers, resuming, damaged records."""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_decoding.cli import CommandError
from jacobi_kernels.reference import row_paths
from jacobi_training import packing
from jacobi_training.batches import make_batch
from jacobi_training.cli import pack as command
from jacobi_training.layout import context_windows
from jacobi_training.noise import Target, noise_ratio
from jacobi_training.packing import PackConfig, PackReport, pack_sample, packed_samples, write_packed
from jacobi_training.prompts import Prompt
from jacobi_training.shards import ShardReader, ShardWriter, read_records
from jacobi_training.trajectories import write_trajectories
from jacobi_training.trajectory_config import TrajectoryConfig
from tests.decoding.helpers import build

EOS = 0


def predict(tokens: list[int]) -> int:
    """A toy model: the next of 12 tokens from the last two."""
    return (5 * tokens[-1] + 3 * tokens[-2] + 1) % 12 if len(tokens) > 1 else 1


def trajectory(index: int, length: int, block_size: int) -> dict[str, Any]:
    """Jacobi trajectory of an answer of ``length`` tokens, its last block cut to what is left."""
    rng = random.Random(index)
    prompt = [rng.randrange(1, 12) for _ in range(3)]
    answer: list[int] = []
    while len(answer) < length:
        answer.append(predict(prompt + answer))
    blocks = []
    for place in range(0, length, block_size):
        clean, before = answer[place : place + block_size], prompt + answer[:place]
        state = [clean[0], *(rng.randrange(20, 30) for _ in clean[1:])]
        states = [state]
        while states[-1] != clean:
            guesses = [predict(before + states[-1][: i + 1]) for i in range(len(clean) - 1)]
            states.append([clean[0], *guesses])
        blocks.append({"states": states})
    return {
        "index": index,
        "prompt_ids": prompt,
        "answer_ids": answer,
        "block_size": block_size,
        "stop": "length",
        "blocks": blocks,
    }


RECORDS = [trajectory(index, 20 + 3 * index, 8) for index in range(8)]  # 3 to 6 blocks
EOS_RECORD = {**trajectory(50, 10, 8), "stop": "eos"}


def folder(path: Path, records: list[dict[str, Any]], shard_size: int = 3) -> Path:
    ShardWriter(path, "trajectories", {"block_size": records[0]["block_size"] if records else 0}).write_all(
        records, shard_size
    )
    return path


def packed(records: list[dict[str, Any]] | None = None, **options: Any) -> list[dict[str, Any]]:
    return list(packed_samples({8: RECORDS if records is None else records}, PackConfig(**options), PackReport()))


def ratios(samples: list[dict[str, Any]]) -> list[float]:
    return [block["ratio"] for sample in samples for block in sample["blocks"]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_samples_are_states_of_their_trajectories() -> None:
    samples = packed(epochs=2)
    for sample in samples:
        record = RECORDS[sample["index"]]
        assert sample["prompt_ids"] == record["prompt_ids"]
        assert sample["answer_ids"] == record["answer_ids"]
        assert [len(block["noisy"]) for block in sample["blocks"]] == [
            len(block["states"][-1]) for block in record["blocks"]
        ]
        for block, states in zip(sample["blocks"], record["blocks"], strict=True):
            assert block["noisy"] in states["states"]
            assert block["ratio"] == noise_ratio(block["noisy"], states["states"][-1])
            assert block["teacher"] is None
    make_batch(samples)
    # Every record once in each epoch, each time in another order.
    order = [sample["index"] for sample in samples]
    assert sorted(order[:8]) == sorted(order[8:]) == list(range(8))
    assert order[:8] != order[8:]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "global"},
        {"mode": "local"},
        {"mode": "local", "schedule": "linear"},
        {"schedule": "random"},
        {"schedule": "reverse"},
        {"schedule": "cyclic"},
        {"context": "all"},
        {"context": "clean"},
        {"window": 2},
        {"min_ratio": 0.5},
        {"max_ratio": 0.5},
        {"ceiling": "rising"},
        {"ceiling": "falling"},
        {"epochs": 2},
        {"max_length": 40},
        {"seed": 1},
    ],
    ids=str,
)
def test_every_option_changes_what_is_packed(options: dict[str, Any]) -> None:
    assert packed(**options) != packed()
    assert packed(**options) == packed(**options)


@pytest.mark.parametrize("option", [{"ceiling_low": 0.5}, {"ceiling_share": 1.0}], ids=str)
@pytest.mark.parametrize("ceiling", ["rising", "falling"])
def test_the_ceiling_has_options(ceiling: str, option: dict[str, float]) -> None:
    assert ratios(packed(ceiling=ceiling, **option)) != ratios(packed(ceiling=ceiling))


def test_what_the_options_do() -> None:
    # The first block of a window wants the least noise, the last the most.
    by_place: list[list[float]] = [[], [], []]
    for sample in packed(window=3):
        for j, block in enumerate(sample["blocks"]):
            by_place[(j + sample["phase"]) % 3].append(block["ratio"])
    assert max(by_place[0]) == 0
    assert mean(by_place[0]) < mean(by_place[1]) < mean(by_place[2]) == 1
    for forth, back in zip(packed(window=3), packed(schedule="reverse", window=3), strict=True):
        assert [b["target"] for b in back["blocks"]] == [1 - b["target"] for b in forth["blocks"]]
    assert {b["target"] for b in packed(window=2, min_ratio=0.25, max_ratio=0.75)[0]["blocks"]} == {0.25, 0.75}
    assert mean(ratios(packed(min_ratio=0.5))) > mean(ratios(packed())) > mean(ratios(packed(max_ratio=0.5)))
    assert {s["context"] for s in packed(context="all")} == {"all"}
    assert {s["window"] for s in packed(window=3)} == {3}


@pytest.mark.parametrize("schedule", ["linear", "reverse", "cyclic"])
def test_answers_of_one_block_reach_all_levels_over_the_epochs(schedule: str) -> None:
    records = [trajectory(index, 8, 8) for index in range(6)]
    report = PackReport()
    samples = list(packed_samples({8: records}, PackConfig(schedule=schedule, epochs=4), report))
    assert report.consistency_rows > 0
    for index, record in enumerate(records):
        states = record["blocks"][0]["states"]
        taken = [s["blocks"][0] for s in samples if s["index"] == index]
        if schedule == "cyclic":
            places = {len(states) - 1 - states.index(block["noisy"]) for block in taken}
            assert places == set(range(1, min(len(states), 5)))
        else:
            assert sorted(block["target"] for block in taken) == pytest.approx([0, 1 / 3, 2 / 3, 1])
            assert all(states[end] in [block["noisy"] for block in taken] for end in (0, -1))
    if schedule != "cyclic":
        assert report.histogram.reached[10] >= report.histogram.wanted[10] == len(records)


def test_windows_of_states_and_of_the_context_start_together() -> None:
    for sample in packed(window=3, epochs=3):
        starts = {first // 8 for first, _ in context_windows(sample)}
        assert starts == {0} | {j for j, block in enumerate(sample["blocks"]) if block["target"] == 0}


@pytest.mark.parametrize(("ceiling", "sign"), [("rising", 1), ("falling", -1), ("constant", 0)])
def test_the_ceiling_follows_the_run(ceiling: str, sign: int) -> None:
    samples = packed([RECORDS[4]] * 8, ceiling=ceiling, ceiling_share=1.0, ceiling_low=0.0)
    means = [mean(sorted(block["target"] for block in sample["blocks"])) for sample in samples]
    steps = [b - a for a, b in pairwise(means)]
    assert all((step > 0) - (step < 0) == sign for step in steps)
    if sign:
        assert min(means) == 0  # the ceiling's low end is reached


def test_global_takes_any_state_and_the_fixed_point_teaches() -> None:
    samples = packed([RECORDS[7]] * 30, mode="global")
    states = RECORDS[7]["blocks"][0]["states"]
    assert {states.index(sample["blocks"][0]["noisy"]) for sample in samples} == set(range(len(states) - 1))
    assert {block["teacher"] for sample in samples for block in sample["blocks"]} == {None}
    assert {block["target"] for sample in samples for block in sample["blocks"]} == {None}
    with pytest.raises(ValueError, match="mode global takes random states, not by schedule 'linear'"):
        PackConfig(mode="global", schedule="linear")


@pytest.mark.parametrize("schedule", [None, "linear", "reverse"])
def test_local_is_taught_by_the_next_state(schedule: str | None) -> None:
    for sample in packed(mode="local", schedule=schedule):
        for block, recorded in zip(sample["blocks"], RECORDS[sample["index"]]["blocks"], strict=True):
            states = recorded["states"]
            place = states.index(block["noisy"])
            assert block["teacher"] == states[min(place + 1, len(states) - 1)]


def test_pack_sample_is_pure() -> None:
    record = copy.deepcopy(RECORDS[2])
    config = PackConfig(mode="global")
    targets = [Target(0, 1)] * 3
    first = pack_sample(record, targets, config, random.Random(3))
    assert first == pack_sample(record, targets, config, random.Random(3))
    assert record == RECORDS[2]
    assert len(first["answer_ids"]) == 24  # three blocks of four


def test_the_histogram_reaches_the_noisiest_state(tmp_path: Path) -> None:
    report = write_packed([folder(tmp_path / "t", RECORDS)], tmp_path / "p", PackConfig(window=3))
    samples = ShardReader(tmp_path / "p", "packed")
    blocks = [b for sample in samples for b in sample["blocks"] if len(b["noisy"]) > 1]
    histogram = report.histogram
    assert sum(histogram.wanted) == sum(histogram.reached) == len(blocks)
    assert histogram.reached[10] == sum(b["ratio"] == 1 for b in blocks) >= 8
    assert histogram.wanted[10] == sum(b["target"] == 1 for b in blocks) == histogram.reached[10]
    assert histogram.wanted[0] == sum(b["target"] == 0 for b in blocks)
    inits = [b["states"][0] for record in RECORDS for b in record["blocks"]]
    assert all(b["noisy"] in inits for b in blocks if b["ratio"] == 1)
    written = json.loads((tmp_path / "p" / "manifest.json").read_text())["report"]
    assert written["histogram"] == {"wanted": histogram.wanted, "reached": histogram.reached}
    assert written["samples"] == report.samples == 8
    batch = make_batch(samples[:])
    assert (report.rows, report.ar_rows) == (batch.rows, batch.num_ar_rows)
    assert report.consistency_rows == batch.num_consistency_rows


@pytest.mark.parametrize("tenths", range(11))
def test_bins_begin_at_tenths(tenths: int) -> None:
    histogram = packing.Histogram()
    histogram.add({"blocks": [{"noisy": [1, 2], "ratio": tenths / 10, "target": tenths * 0.1}]})
    assert histogram.reached == histogram.wanted == [int(i == tenths) for i in range(11)]


@pytest.mark.parametrize(("mode", "width"), [("progressive", 2), ("local", 3)])
def test_long_answers_are_cut_at_a_block(mode: str, width: int) -> None:
    long = trajectory(9, 22, 8)
    for max_length, kept in ((3 + 22 * width, 22), (3 + 22 * width - 1, 16), (3 + 16 * width, 16), (3 + 8 * width, 8)):
        report = PackReport()
        (sample,) = packed_samples({8: [long]}, PackConfig(mode=mode, max_length=max_length), report)
        assert sample["answer_ids"] == long["answer_ids"][:kept]
        assert make_batch([sample]).rows == report.rows <= max_length
        assert report.cut == (kept < 22)
    assert packed([long, RECORDS[0]], max_length=3 + 22 * 2)[0]["block_size"] == 8


def test_samples_that_do_not_fit_are_counted() -> None:
    report = PackReport()
    records = [trajectory(1, 9, 8), {**trajectory(2, 9, 8), "prompt_ids": [1] * 30}, trajectory(3, 0, 8)]
    samples = list(packed_samples({8: records}, PackConfig(max_length=21), report))
    assert [sample["index"] for sample in samples] == [1]
    assert (report.samples, report.too_long, report.empty, report.cut) == (1, 1, 1, 0)
    with pytest.raises(ValueError, match="nothing to pack: of 2 samples 1 need more than 21 rows and 1 have an empty"):
        packed(records[1:], max_length=21)


def test_no_folder_is_begun_with_nothing_to_pack(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", RECORDS)
    with pytest.raises(ValueError, match="nothing to pack"):
        write_packed([source], tmp_path / "out", PackConfig(max_length=1))
    assert not (tmp_path / "out").exists()


def test_answers_that_end_inside_a_block_or_have_one_token() -> None:
    for record, sizes in ((EOS_RECORD, [8, 2]), (trajectory(4, 1, 8), [1]), (trajectory(5, 9, 8), [8, 1])):
        for options in ({}, {"mode": "local"}, {"mode": "global"}, {"schedule": "cyclic"}):
            (sample,) = packed([record], window=1, **options)
            assert [len(block["noisy"]) for block in sample["blocks"]] == sizes
            assert sample["answer_ids"] == record["answer_ids"]
            batch = make_batch([sample])
            assert batch.num_ar_rows == len(record["answer_ids"])
            # Nothing is taught about what follows the answer.
            assert batch.targets[3 + len(record["answer_ids"]) - 1] == -1
            assert int(batch.hard_targets.max()) < 12


def test_block_sizes_are_a_curriculum(tmp_path: Path) -> None:
    large = folder(tmp_path / "16", [trajectory(i, 30, 16) for i in range(3)])
    small = folder(tmp_path / "8a", RECORDS[:4])
    more = folder(tmp_path / "8b", RECORDS[4:])
    report = write_packed([large, small, more], tmp_path / "p", PackConfig(epochs=2, seed=4))
    samples = ShardReader(tmp_path / "p", "packed")
    assert [sample["block_size"] for sample in samples] == [8] * 16 + [16] * 6
    assert report.by_block_size == {8: 16, 16: 6}
    assert sorted(sample["index"] for sample in samples[:8]) == list(range(8))


def test_an_interrupted_run_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHARD_SIZE", 3)
    source = folder(tmp_path / "t", RECORDS)
    write_packed([source], tmp_path / "whole", PackConfig(epochs=2))

    def stop(behind: int, total: int) -> None:
        assert total == 16
        if behind == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_packed([source], tmp_path / "p", PackConfig(epochs=2), progress=stop)
    begun = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").glob("shard-*")}
    assert len(begun) == 3
    write_packed([source], tmp_path / "p", PackConfig(epochs=2))
    assert {name: (tmp_path / "p" / name).stat().st_mtime_ns for name in begun} == begun
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "p").iterdir())
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "p" / name).read_bytes() for name in files)
    with pytest.raises(ValueError, match="was begun with --seed 0, now it is 1"):
        write_packed([source], tmp_path / "p", PackConfig(epochs=2, seed=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("blocks"), "blocks is missing"),
        (lambda r: r["blocks"].pop(), "an answer of 32 ids has 4 blocks of 8, got 3"),
        (lambda r: r["blocks"][1].update(states=[]), r"blocks\[1\].states must end in the answer's ids"),
        (lambda r: r["blocks"][1]["states"].pop(), r"blocks\[1\].states must end in the answer's ids"),
        (lambda r: r["blocks"][1]["states"][0].pop(), r"blocks\[1\].states\[0\] must hold 8 ids"),
        (lambda r: r["blocks"][0]["states"][0].__setitem__(0, 99), r"blocks\[0\].states\[0\] must .* begin with"),
        (lambda r: r["answer_ids"].__setitem__(2, "x"), r"answer_ids\[2\] must be a token id, got 'x'"),
        (lambda r: r.update(prompt_ids=[]), "prompt_ids must hold at least one id"),
        (lambda r: r.update(block_size=0), "block_size must be at least 1, got 0"),
        (lambda r: r.update(trajectory(4, 32, 16)), "block_size is 16, but 8 at the start of the folder"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, change: Any, message: str) -> None:
    records = copy.deepcopy(RECORDS)
    change(records[4])  # the second of the second shard
    source = folder(tmp_path / "t", records)
    with pytest.raises(ValueError, match=rf"shard-00001.jsonl' line 2 is not a trajectory: .*{message}") as caught:
        write_packed([source], tmp_path / "p", PackConfig())
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_named_and_nothing_written(tmp_path: Path) -> None:
    source = folder(tmp_path / "t", RECORDS)
    shard = source / "shard-00001.jsonl"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"shard-00001.jsonl' is damaged"):
        write_packed([source], tmp_path / "p", PackConfig())
    assert not (tmp_path / "p").exists()


def run_command(*args: str | Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args([str(arg) for arg in args]))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source = folder(tmp_path / "t", [*RECORDS, trajectory(20, 0, 8)])
    options = ("--window", "3", "--epochs", "2", "--max-length", "60", "--json", tmp_path / "j", "--plot")
    run_command("--trajectories", source, "--out", tmp_path / "p", *options, tmp_path / "h.png")
    out, err = capsys.readouterr()
    data = json.loads((tmp_path / "j").read_text())
    row = next(line for line in out.splitlines() if " 1.0 " in line)
    assert [row.split()[i] for i in (3, 5)] == [str(data["histogram"][name][10]) for name in ("wanted", "reached")]
    assert "16 samples" in err
    assert f"{data['cut']} answers were cut" in err
    assert "2 samples were left out: their answer is empty" in err
    assert data["cut"] > 0
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((tmp_path / "p" / "manifest.json").read_text())["settings"]
    assert (settings["window"], settings["epochs"], settings["max_length"]) == (3, 2, 60)


def test_every_setting_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    command.add_pack_arguments(parser)
    assert command.config_from_args(parser.parse_args([])) == PackConfig()
    values = "--mode local --schedule cyclic --context all --window 2 --min-ratio 0.1 --max-ratio 0.9 --ceiling rising"
    more = "--ceiling-low 0.3 --ceiling-share 0.2 --epochs 3 --max-length 99 --seed 7"
    config = command.config_from_args(parser.parse_args(f"{values} {more}".split()))
    assert config == PackConfig("local", "cyclic", "all", 2, 0.1, 0.9, "rising", 0.3, 0.2, 3, 99, 7)
    few = argparse.ArgumentParser()
    command.add_pack_arguments(few, without=("seed", "epochs"))
    few.add_argument("--seed", type=int, default=5)
    assert command.config_from_args(few.parse_args([])) == PackConfig(seed=5)


def test_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "t", RECORDS)
    with pytest.raises(CommandError, match=r"--plot must end in \.png"):
        run_command("--trajectories", source, "--out", tmp_path / "p", "--plot", tmp_path / "h.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(CommandError, match="pip install matplotlib"):
        run_command("--trajectories", source, "--out", tmp_path / "p", "--plot", tmp_path / "h.png")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        run_command("--trajectories", tmp_path, "--out", tmp_path / "p")
    with pytest.raises(CommandError, match="does not exist"):
        run_command("--trajectories", source, "--out", tmp_path / "p", "--json", tmp_path / "no" / "j")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("mode", ["progressive", "local"])
def test_rows_predict_what_the_model_predicted_in_the_trajectory(tmp_path: Path, mode: str) -> None:
    """A model's own trajectories, packed: its prediction on the path of every row is the token that decoding saw."""
    model = build("LlamaForCausalLM", "LlamaConfig", seed=0, num_hidden_layers=2)
    prompts = [Prompt(i, (7 * i + 3, 5, 9 + i)) for i in range(3)]
    write_trajectories(model, prompts, tmp_path / "t", TrajectoryConfig(block_size=6, max_new_tokens=15))
    trajectories = {record["index"]: record for record in read_records(tmp_path / "t")}
    report = write_packed([tmp_path / "t"], tmp_path / "p", PackConfig(mode=mode, context="clean", window=2))
    assert report.samples == 3
    for sample in read_records(tmp_path / "p"):
        batch, states = make_batch([sample]), [b["states"] for b in trajectories[sample["index"]]["blocks"]]
        (paths,) = row_paths(batch.segments, batch.cu_segments)
        with torch.inference_mode():
            predicted = {
                row: int(model(batch.tokens[path].unsqueeze(0)).logits[0, -1].argmax()) for row, path in paths.items()
            }
        answer, prompt = len(sample["answer_ids"]), len(sample["prompt_ids"])
        for row in range(prompt - 1, prompt + answer - 1):
            assert predicted[row] == batch.targets[row]
        for j, block in enumerate(sample["blocks"]):
            following = states[j][min(states[j].index(block["noisy"]) + 1, len(states[j]) - 1)]
            for i, token in enumerate(following[1:]):
                row = prompt + answer + j * sample["block_size"] + i
                assert predicted[row] == token
                if mode == "progressive" and batch.teachers[row] >= 0:
                    assert predicted[int(batch.teachers[row])] == batch.hard_targets[row]
