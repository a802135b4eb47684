"""Trajectories: states against the plain model, ends of answers, independence of batch, ranks and interruptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_decoding import JacobiDecoder, cli
from jacobi_decoding.errors import UnsupportedModelError
from jacobi_training.cli import trajectories as command
from jacobi_training.prompts import Prompt
from jacobi_training.shards import MANIFEST, ShardError, ShardReader, read_records, shard_name
from jacobi_training.trajectories import (
    Summary,
    TrajectoryConfig,
    generate_trajectories,
    iterations,
    model_fingerprint,
    write_trajectories,
)
from tests.decoding.helpers import VOCAB, build, family
from tests.decoding.helpers import prompts as token_prompts

CONFIG = TrajectoryConfig(block_size=6, max_new_tokens=27, repeats=0, batch_size=3, shard_size=3)
PROMPTS = [Prompt(2 * i, tuple(ids)) for i, ids in enumerate(token_prompts(7, length=25))]


@pytest.fixture(scope="module")
def llama() -> Any:
    return family("llama")


@pytest.fixture(scope="module")
def records(llama: Any) -> list[dict[str, Any]]:
    return generate(llama, CONFIG)


def generate(model: Any, config: TrajectoryConfig, prompts: Sequence[Prompt] = PROMPTS) -> list[dict[str, Any]]:
    return sorted(generate_trajectories(model, prompts, config), key=lambda record: record["index"])


def one_by_one(model: Any, prompt: Sequence[int], config: TrajectoryConfig, stops: Sequence[int] = ()) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = JacobiDecoder(model).generate(
        ids,
        torch.ones_like(ids),
        max_new_tokens=config.max_new_tokens,
        block_size=1,
        blocks=1,
        candidates=0,
        eos_token_id=list(stops) or None,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def check_states(model: Any, record: dict[str, Any]) -> None:
    """Every state's successor by a plain forward of the model over prompt, final blocks and state."""
    n, answer = record["block_size"], record["answer_ids"]
    known = list(record["prompt_ids"])
    for j, block in enumerate(record["blocks"]):
        states = block["states"]
        assert states[-1] == answer[j * n : j * n + len(states[-1])]
        assert j == len(record["blocks"]) - 1 or len(states[0]) == n
        for s, state in enumerate(states):
            predictions = model(input_ids=torch.tensor([known + state]), use_cache=False).logits[0].argmax(-1).tolist()
            assert predictions[len(known) - 1] == state[0], "the first token is final"
            following = [state[0], *predictions[len(known) : -1]]
            if s + 1 < len(states):
                assert states[s + 1] == following != state
            else:
                assert following == state
        known += states[-1]
    assert known == [*record["prompt_ids"], *answer]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])  # the last one runs through its modules
def test_states_follow_the_jacobi_rule(name: str) -> None:
    model = family(name)
    for record in generate(model, CONFIG):
        check_states(model, record)
        assert record["answer_ids"] == one_by_one(model, record["prompt_ids"], CONFIG)
        assert record["stop"] == "length"
        assert [len(block["states"][0]) for block in record["blocks"]] == [6, 6, 6, 6, 3]


def test_bfloat16_gives_the_tokens_of_decoding_one_by_one() -> None:
    model = family("llama", torch.bfloat16)
    for record in generate(model, CONFIG):
        assert record["answer_ids"] == one_by_one(model, record["prompt_ids"], CONFIG)
        assert record["answer_ids"] == [token for block in record["blocks"] for token in block["states"][-1]]


def test_the_first_state_is_the_init(llama: Any, records: list[dict[str, Any]]) -> None:
    """The noisiest state is kept, and later states have not been written over it."""
    for init in ("prompt", "last"):
        for record in generate(llama, replace(CONFIG, init=init)):
            for j, block in enumerate(record["blocks"]):
                first, *guesses = block["states"][0]
                assert first == record["answer_ids"][6 * j]
                assert set(guesses) <= (set(record["prompt_ids"]) if init == "prompt" else {first})
    changed = [block["states"][0] != block["states"][-1] for record in records for block in record["blocks"]]
    assert sum(changed) > 0.9 * len(changed)


def test_inits(llama: Any) -> None:
    """Each has an effect on the first states and none on the answers; mixed blocks use all three."""
    found = {init: generate(llama, replace(CONFIG, init=init)) for init in ("vocabulary", "prompt", "last", "mixed")}
    firsts = {i: [[b["states"][0] for b in r["blocks"]] for r in found[i]] for i in found}
    for a in found:
        assert [r["answer_ids"] for r in found[a]] == [r["answer_ids"] for r in found["last"]]
        assert all(firsts[a] != firsts[b] for b in found if b != a)
    prompt_tokens = {t for p in PROMPTS for t in p.ids}
    assert {t for r in firsts["vocabulary"] for b in r for t in b[1:]} - prompt_tokens
    kinds = {"last" if len(set(b)) == 1 else "other" for r in firsts["mixed"] for b in r}
    assert kinds == {"last", "other"}


def test_vocabulary_guesses_leave_out_special_tokens(llama: Any) -> None:
    class Tokenizer:
        all_special_ids = range(40, 300)
        eos_token_id = 299

        def __len__(self) -> int:
            return VOCAB - 2  # the last rows of the embedding are padding

    config = replace(CONFIG, init="vocabulary", stop_tokens=(5,))
    found = generate_trajectories(llama, PROMPTS, config, tokenizer=Tokenizer())
    guesses = {t for r in found for b in r["blocks"] for t in b["states"][0][1:]}
    assert guesses <= {*range(5), *range(6, 40), *range(300, VOCAB - 2)}
    assert len(guesses) > 25


def test_the_seed_and_the_index_choose_the_guesses(llama: Any, records: list[dict[str, Any]]) -> None:
    assert generate(llama, CONFIG) == records
    assert generate(llama, replace(CONFIG, seed=1)) != records
    moved = generate(llama, CONFIG, [replace(p, index=p.index + 1) for p in PROMPTS])
    assert [r["answer_ids"] for r in moved] == [r["answer_ids"] for r in records]
    assert [r["blocks"] for r in moved] != [r["blocks"] for r in records]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_records_do_not_depend_on_the_batch(name: str) -> None:
    model = family(name)
    alone = [record for prompt in PROMPTS for record in generate(model, CONFIG, [prompt])]
    assert alone == generate(model, CONFIG)
    assert alone == generate(model, replace(CONFIG, batch_size=64), PROMPTS[::-1])


def test_long_prompts_and_other_block_sizes(llama: Any) -> None:
    """Prompts of several pieces, answers shorter than a block, blocks of two tokens."""
    prompts = [Prompt(0, tuple(i % VOCAB for i in range(150))), Prompt(1, (3,))]
    for block_size, new_tokens in ((2, 5), (16, 3), (16, 16), (16, 17), (4, 1)):
        config = replace(CONFIG, block_size=block_size, max_new_tokens=new_tokens)
        for record in generate(llama, config, prompts):
            check_states(llama, record)
            assert record["answer_ids"] == one_by_one(llama, record["prompt_ids"], config)


def test_a_stop_token_ends_the_answer_anywhere_in_a_block(llama: Any, records: list[dict[str, Any]]) -> None:
    prompt, answer = PROMPTS[0], records[0]["answer_ids"]
    places = {}
    for token in answer:
        end = answer.index(token) + 1
        (record,) = generate(llama, replace(CONFIG, stop_tokens=(token, VOCAB - 1)), [prompt])
        assert (record["answer_ids"], record["stop"]) == (answer[:end], "eos")
        check_states(llama, record)
        assert {len(state) for state in record["blocks"][-1]["states"]} == {(end - 1) % 6 + 1}
        places[(end - 1) % 6] = record
    assert set(places) == set(range(6))


def test_stop_tokens_are_the_models_by_default(records: list[dict[str, Any]]) -> None:
    model = family("llama")
    token = records[0]["answer_ids"][8]
    model.generation_config.eos_token_id = [token]
    assert generate(model, CONFIG)[0]["answer_ids"][-1] == token
    assert generate(model, replace(CONFIG, stop_tokens=()))[0]["stop"] == "length"
    model.generation_config.eos_token_id = None
    tokenizer = type("Tokenizer", (), {"eos_token_id": token, "all_special_ids": (), "__len__": lambda self: VOCAB})()
    (record,) = generate_trajectories(model, PROMPTS[:1], CONFIG, tokenizer=tokenizer)
    assert record["stop"] == "eos"


def test_repetition_ends_the_answer(llama: Any) -> None:
    config = replace(CONFIG, max_new_tokens=120)
    ends = {}
    for repeats in (2, 3):
        for record in generate(llama, replace(config, repeats=repeats)):
            answer = record["answer_ids"]
            grams = [tuple(answer[i : i + 10]) for i in range(len(answer) - 9)]
            assert max(map(grams[:-1].count, grams[:-1])) < repeats
            assert (grams.count(grams[-1]) == repeats) == (record["stop"] == "repetition")
            if record["stop"] == "repetition":
                check_states(llama, record)
                ends.setdefault(record["index"], []).append(len(answer))
    assert any(len(e) == 2 and e[0] < e[1] for e in ends.values())
    assert {r["stop"] for r in generate(llama, config)} == {"length"}


def test_the_model_is_left_as_it_was_between_records() -> None:
    """A consumer may use the model, with gradients, while it holds the iterator."""
    model = family("gemma2")
    modules = list(map(id, model.modules()))
    for _ in generate_trajectories(model, PROMPTS[:4], CONFIG):
        assert torch.is_grad_enabled()
        assert list(map(id, model.modules())) == modules
        model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
        model.zero_grad()


def test_iterations_are_those_of_the_decoder(llama: Any, records: list[dict[str, Any]]) -> None:
    assert iterations([[1, 2, 3], [1, 4, 3], [1, 4, 5]], last=False) == 3
    assert iterations([[1, 2, 3], [1, 4, 3], [1, 4, 5]], last=True) == 2
    assert iterations([[1, 4, 5]], last=True) == 1
    assert iterations([[1]], last=True) == 0
    for record in records:
        steps = 0

        def count(tokens: int) -> None:
            nonlocal steps
            steps += 1

        prompt = Prompt(record["index"], tuple(record["prompt_ids"]))
        list(generate_trajectories(llama, [prompt], CONFIG, on_step=count))
        blocks = record["blocks"]
        assert sum(iterations(b["states"], b is blocks[-1]) for b in blocks) == steps - 1  # less the prompt's


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


@pytest.fixture(scope="module")
def whole(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_trajectories(llama, PROMPTS, folder, CONFIG)
    return folder


def test_written_records(llama: Any, whole: Path, records: list[dict[str, Any]]) -> None:
    assert list(read_records(whole, "trajectories")) == records
    manifest = ShardReader(whole).manifest
    assert [shard.records for shard in manifest.shards] == [3, 3, 1]
    assert manifest.model == model_fingerprint(llama) != model_fingerprint(family("llama", seed=1))


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_an_interrupted_run_goes_on(llama: Any, whole: Path, tmp_path: Path, shards: int) -> None:
    def interrupt(finished: int, tokens: int, total: int) -> None:
        if (tmp_path / shard_name(shards - 1)).exists() or shards == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trajectories(llama, PROMPTS, tmp_path, replace(CONFIG, batch_size=1), progress=interrupt)
    assert len([name for name in contents(tmp_path) if name != MANIFEST]) == shards
    summary = write_trajectories(llama, PROMPTS, tmp_path, CONFIG)
    assert (summary.shards_kept, summary.shards_made, summary.prompts) == (shards, 3 - shards, 7)
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("world", [2, 5])
def test_ranks_write_the_same_files(llama: Any, whole: Path, tmp_path: Path, world: int) -> None:
    total = 0
    for rank in reversed(range(world)):
        summary = write_trajectories(llama, PROMPTS, tmp_path, CONFIG, rank=rank, world_size=world)
        total += summary.prompts
    assert total == 7
    assert contents(tmp_path) == contents(whole)
    with pytest.raises(ValueError, match="rank must be"):
        write_trajectories(llama, PROMPTS, tmp_path, CONFIG, rank=2, world_size=2)


def test_a_damaged_shard_stops_the_run(llama: Any, whole: Path, tmp_path: Path) -> None:
    for name, data in contents(whole).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / shard_name(2)).unlink()
    (tmp_path / shard_name(0)).write_bytes(b"{}\n")
    before = contents(tmp_path)
    with pytest.raises(ShardError, match=r"shard-00000\.jsonl' is damaged"):
        write_trajectories(llama, PROMPTS, tmp_path, CONFIG)
    assert contents(tmp_path) == before
    (tmp_path / shard_name(0)).unlink()
    write_trajectories(llama, PROMPTS, tmp_path, CONFIG)
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"block_size": 8}, "block-size"),
        ({"max_new_tokens": 28}, "max-new-tokens"),
        ({"init": "last"}, "init"),
        ({"seed": 1}, "seed"),
        ({"limit": 6}, "limit"),
        ({"repeats": 2}, "repeats"),
        ({"stop_tokens": (3,)}, "stop-tokens"),
        ({"shard_size": 4}, "shard-size"),
    ],
)
def test_a_folder_keeps_its_settings(llama: Any, whole: Path, change: dict[str, Any], option: str) -> None:
    before = contents(whole)
    with pytest.raises(ShardError, match=f"begun with --{option} "):
        write_trajectories(llama, PROMPTS, whole, replace(CONFIG, **change))
    assert contents(whole) == before


def test_a_folder_keeps_its_prompts_and_model(llama: Any, whole: Path) -> None:
    with pytest.raises(ShardError, match="begun with --prompts "):
        write_trajectories(llama, PROMPTS[1:], whole, CONFIG)
    with pytest.raises(ShardError, match="begun with another --model"):
        write_trajectories(family("llama", seed=1), PROMPTS, whole, CONFIG)
    summary = write_trajectories(llama, PROMPTS, whole, replace(CONFIG, batch_size=1))
    assert (summary.shards_made, summary.shards_kept) == (0, 3)


def test_duplicates_and_limit(llama: Any, tmp_path: Path) -> None:
    prompts = [PROMPTS[0], Prompt(1, PROMPTS[0].ids), *PROMPTS[1:]]
    seen = []
    summary = write_trajectories(
        llama, prompts, tmp_path, replace(CONFIG, limit=3), progress=lambda *values: seen.append(values)
    )
    assert [r["index"] for r in read_records(tmp_path)] == [0, 2, 4]
    assert (summary.prompts, summary.duplicates) == (3, 1)
    assert seen[-1][1:] == (81, 3)


def test_summary(records: list[dict[str, Any]]) -> None:
    summary = Summary()
    for record in records:
        summary.add(record)
    assert (summary.prompts, summary.tokens, summary.blocks) == (7, 7 * 27, 7 * 5)
    assert summary.states == sum(len(b["states"]) for r in records for b in r["blocks"])
    assert summary.tpf == (7 * 26) / summary.iterations
    assert summary.iterations_per_block == summary.iterations / 35
    assert 1.0 <= summary.tpf < 1.5
    assert summary.stops == {"eos": 0, "length": 7, "repetition": 0}


def test_what_is_refused(llama: Any, tmp_path: Path) -> None:
    for change, message in (
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"init": "zeros"}, "init must be one of"),
        ({"repeats": 1}, "repeats must be 0"),
        ({"limit": 0}, "limit must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(CONFIG, **change)
    with pytest.raises(ValueError, match=f"prompt 4 has token {VOCAB}, expected ids within"):
        write_trajectories(llama, [Prompt(4, (1, VOCAB))], tmp_path / "a", CONFIG)
    with pytest.raises(ValueError, match="at least one prompt"):
        write_trajectories(llama, [], tmp_path / "b", CONFIG)
    with pytest.raises(UnsupportedModelError, match="keep prompt and new tokens within"):
        write_trajectories(build("GPT2LMHeadModel", "GPT2Config"), [Prompt(0, (1,) * 2000)], tmp_path / "c", CONFIG)
    assert not list(tmp_path.iterdir())  # no folder is begun with prompts that cannot be used


@pytest.fixture
def jacobi(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on a model folder without a tokenizer; returns the exit code."""
    llama.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"prompt_ids": p.ids}) for p in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))

    def parser() -> cli.Parser:
        made = cli.Parser(prog="jacobi train trajectories")
        command.add_arguments(made)
        made.set_defaults(run=command.run)
        return made

    monkeypatch.setattr(cli, "make_parser", parser)
    settings = ["--block-size", "6", "--max-new-tokens", "27", "--repeats", "0", "--shard-size", "3"]
    where = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.jsonl")]
    return lambda *options: cli.main([*where, *settings, *options])


def test_command(jacobi: Any, llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [replace(p, index=i) for i, p in enumerate(PROMPTS)]
    write_trajectories(llama, prompts, tmp_path / "expected", CONFIG)
    assert jacobi("--out", str(tmp_path / "out"), "--json", str(tmp_path / "summary.json")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["prompts"], summary["tokens"], summary["shards_made"]) == (7, 189, 3)
    printed = capsys.readouterr()
    assert "7 prompts, 189 tokens, " in printed.err
    assert printed.out == ""
    assert jacobi("--out", str(tmp_path / "out"), "--init", "last") == 2
    assert "was begun with --init" in capsys.readouterr().err


def test_command_takes_ranks_from_the_environment(
    jacobi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    out = tmp_path / "out"
    assert jacobi("--out", str(out), "--json", str(tmp_path / "summary.json")) == 0
    assert sorted(contents(out)) == [MANIFEST, shard_name(1)]
    assert not (tmp_path / "summary.json").exists()  # rank 0's
    assert jacobi("--out", str(out), "--rank", "0") == 0
    assert len(ShardReader(out)) == 7


def test_command_without_a_tokenizer(jacobi: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.jsonl").write_text('{"prompt": "Hello"}\n')
    assert jacobi("--out", str(tmp_path / "out"), "--prompts", str(tmp_path / "text.jsonl")) == 2
    assert "needs a tokenizer and the model has none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
