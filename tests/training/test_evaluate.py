"""Evaluation with tiny random models: counts against counts by hand, what is written, and outputs that differ."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_decoding import JacobiDecoder, load_model
from jacobi_decoding.cli import Parser
from jacobi_training import model_runs
from jacobi_training.block_metrics import block_metrics, fast_forwarded, stationary
from jacobi_training.cli import evaluate as command
from jacobi_training.decode_runs import AR, MULTI_BLOCK, Decoded, Run, decode, plain, ratio_interval
from jacobi_training.evaluate import EvaluationConfig, ModelRuns, evaluate, read_records
from jacobi_training.prompt_lookup import LOOKUP_TOKENS, prompt_lookup
from jacobi_training.report import print_report, rows_of
from tests.decoding.helpers import build

WORDS = 64
STOPS = [2, 13, 24, 35, 46, 57]
KEYS = {
    "model", "base", "prompts", "accuracy", "base_accuracy", "tpf", "tpf_multi_block", "base_tpf", "prompt_lookup_tpf",
    "characters_per_token", "ar_identical",
}  # fmt: skip
RECORDS = [
    {"prompt": f"{3 + i} {9 + i} 5", "answer": f"7 {4 + i} 7", "check": {"kind": "number", "value": i}}
    for i in range(5)
]


def make_model(path: Path, seed: int) -> Path:
    """A random Llama with a tokenizer whose 64 words are the numbers of their tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=STOPS,
        bos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and a file of prompts."""
    path = tmp_path_factory.mktemp("evaluate")
    for seed, name in ((7, "trained"), (5, "base")):  # some of their answers stop early
        make_model(path / name, seed)
    (path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_model(folder / "trained")


def quiet(name: str, total: int) -> Any:
    return nullcontext(lambda count: None)


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = Parser()
    command.add_arguments(parser)
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "20"]
    return parser.parse_args(["--model", str(folder / "trained"), *prompts, *more])


# Tokens per forward ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def steps_by_hand(model: Any, ids: list[int], answer: list[int], n: int) -> int:
    """Forwards of plain Jacobi decoding of ``answer``, behind the one over the prompt."""
    text, chain, steps = list(ids), [answer[0]] * n, 0
    emitted = 1
    while emitted < len(answer):
        predictions = model(torch.tensor([text + chain])).logits[0, len(text) :].argmax(-1).tolist()
        right = 1
        while right < n and chain[right] == predictions[right - 1]:
            right += 1
        text += chain[:right]
        rest = predictions[right - 1 :]
        chain = rest + [rest[-1]] * (n - len(rest))
        emitted += right
        steps += 1
    return steps


@pytest.mark.parametrize("n", [4, 8])
def test_steps_against_a_count_by_hand(loaded: Any, n: int) -> None:
    prompts = [[5, 9, 3], [7, 1], [11, 4, 9, 20]]
    decoder = JacobiDecoder(loaded.model)
    one_by_one = decode(decoder, prompts, [30, 20, 25], AR, stops=STOPS)
    assert one_by_one.tokens_per_forward == 1
    run = decode(decoder, prompts, [30, 20, 25], plain(n), stops=STOPS, batch_size=2, order=[2, 0, 1])
    assert run.tokens == one_by_one.tokens
    steps = [steps_by_hand(loaded.model, p, t, n) for p, t in zip(prompts, run.tokens, strict=True)]
    assert [d.decode_steps for d in run.decoded] == steps
    assert run.tokens_per_forward == sum(len(t) - 1 for t in run.tokens) / sum(steps)


def test_batches_change_nothing(loaded: Any) -> None:
    prompts = [[5, 9, 3], [7, 1], [11, 4, 9, 20]]
    decoder = JacobiDecoder(loaded.model)
    done: list[int] = []
    runs = [decode(decoder, prompts, [20] * 3, MULTI_BLOCK, batch_size=b, advance=done.append) for b in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]
    assert done == [1, 1, 1, 2, 1, 3]


def test_tokens_per_forward_of_a_run() -> None:
    run = Run([Decoded([1, 2, 3, 4, 5], 4, 2), Decoded([1], 0, 0), Decoded([1, 2], 1, 1)])
    assert run.tokens_per_forward == 5 / 3
    low, high = run.interval(0) or (0, 0)
    assert 1 <= low <= 5 / 3 <= high <= 2
    assert run.interval(0) == run.interval(0)
    assert Run([Decoded([1], 0, 0)]).tokens_per_forward is None
    assert Run([Decoded([1], 0, 0)]).interval(0) is None


def test_intervals_cover() -> None:
    low, high = ratio_interval([1] * 80 + [0] * 20, [1] * 100, 0) or (0, 0)
    assert low == pytest.approx(0.72, abs=0.02)  # 0.8 -+ 1.96 * sqrt(0.8 * 0.2 / 100)
    assert high == pytest.approx(0.88, abs=0.02)
    assert ratio_interval([1.0] * 9, [1.0] * 9, 0) == (1.0, 1.0)


def test_prompt_lookup_counts_its_forwards(loaded: Any) -> None:
    outcome = prompt_lookup(loaded.model, [5, 9, 3], 12, eos_token_id=None, pad_token_id=0)
    assert len(outcome.tokens) == 12
    assert outcome.forward_tokens[0] >= 3
    assert outcome.decode_forwards == len(outcome.forward_tokens) - 1 <= outcome.decode_tokens == 11
    assert not loaded.model.get_input_embeddings()._forward_hooks


# Inside blocks --------------------------------------------------------------------------------------------------------


def test_tokens_inside_a_block() -> None:
    states = [[1, 9, 9, 9, 9], [1, 2, 9, 4, 9], [1, 2, 3, 4, 5]]
    assert fast_forwarded(states) == 2  # 1, 2, then 5 right at the start: beyond one each, 0 and 2
    assert stationary(states) == 1  # the 4, while the 3 was wrong
    assert stationary([[1, 9, 9, 4], [1, 2, 9, 9], [1, 2, 3, 4]]) == 0  # lost again, then found in its turn
    assert stationary([[1, 9, 3], [1, 2, 3]]) == 0  # a guess that was right is no prediction
    assert stationary([[1, 9, 3, 9], [1, 8, 3, 9], [1, 2, 3, 4]]) == 1
    assert fast_forwarded([[1, 2]]) == stationary([[1, 2]]) == 0


def test_block_metrics() -> None:
    blocks = [{"states": [[1, 9, 9], [1, 2, 9], [1, 2, 3]]}, {"states": [[4, 9, 9], [4, 5, 6]]}]
    metrics = block_metrics([{"answer_ids": [1, 2, 3, 4, 5, 6], "blocks": blocks}])
    # The first block's last forward predicts the 4; the second is done when its last token is predicted: 5 behind 4.
    assert metrics == {
        "blocks": 2,
        "iterations": 2.5,
        "fast_forwarded_tokens": 0.5,
        "stationary_tokens": 0.0,
        "tokens_per_forward": 1.0,
    }
    assert block_metrics([])["iterations"] is None


# The whole ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    models = (load_model(folder / name) for name in ("trained", "base"))
    return evaluate(*models, folder / "prompts.jsonl", EvaluationConfig(max_new_tokens=20, block_prompts=3), quiet)


def test_result(result: dict[str, Any]) -> None:
    assert set(result) >= KEYS
    assert (result["model"], result["base"], result["prompts"]) == ("trained", "base", 5)
    assert set(result["tpf"]) == {"8", "16", "32"}
    assert set(result["base_tpf"]) == {"16"}
    figures = [*result["tpf"].values(), *result["base_tpf"].values(), result["tpf_multi_block"]]
    figures += [result["base_tpf_multi_block"], result["prompt_lookup_tpf"], result["model_prompt_lookup_tpf"]]
    assert all(1 <= figure < 32 for figure in figures)
    assert result["ar_identical"] is True
    assert result["identical"] == {
        "model": {"8": 5, "16": 5, "32": 5, "multi_block": 5},
        "base": {"16": 5, "multi_block": 5},
    }
    assert result["fixed_blocks"]["model"]["identical"] == result["fixed_blocks"]["base"]["identical"] == 3
    assert result["accuracy"] == result["base_accuracy"] == 0
    assert result["settings"]["task"] == "worded"
    assert result["perplexity"] > 1
    assert result["base_perplexity"] > 1
    assert result["perplexity"] != result["base_perplexity"]
    assert set(result["latency"]) == {"1", "16", "multi_block"}
    assert result["latency"]["1"]["positions"] == 1 < result["latency"]["16"]["positions"] <= 16
    for key, (low, high) in result["intervals"]["tpf"].items():
        assert low <= result["tpf"][key] <= high
    assert result["seconds"]["all"] >= result["seconds"]["model: multi-block"] > 0
    for key in ("8", "multi_block"):
        forwards = sum(record["model"]["decode_forwards"][key] for record in result["records"])
        tokens = sum(record["model"]["tokens"] - 1 for record in result["records"])
        assert (result["tpf"] | {"multi_block": result["tpf_multi_block"]})[key] == tokens / forwards
    json.dumps(result, allow_nan=False)


def test_characters(result: dict[str, Any]) -> None:
    texts = [record["model"]["text"] for record in result["records"]]
    stopped = sum(record["model"]["tokens"] < 20 for record in result["records"])
    assert stopped
    assert not any(int(text.split()[-1]) in STOPS for text in texts if text)
    assert result["characters_per_token"] == sum(map(len, texts)) / (result["answer_tokens"] - stopped)
    assert result["characters_per_forward"]["16"] == result["tpf"]["16"] * result["characters_per_token"]


@torch.no_grad()
def test_perplexity(result: dict[str, Any], loaded: Any) -> None:
    losses: list[torch.Tensor] = []
    for record in RECORDS:
        ids, new = (loaded.tokenizer(str(record[key]))["input_ids"] for key in ("prompt", "answer"))
        logits = loaded.model(torch.tensor([[*ids, *new, STOPS[0]]])).logits[0].double().log_softmax(-1)
        losses += [-logits[len(ids) - 1 + i, token] for i, token in enumerate([*new, STOPS[0]])]
    assert result["perplexity"] == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-5)


def test_report(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_report(result)
    out = capsys.readouterr().out
    for text in ("blocks of 16", "2 blocks of 32, 4 candidates", "prompt lookup, k = 10", "accuracy, worded", "5 of 5"):
        assert text in out
    assert "every output as one by one: yes" in out
    rows = {row.name: row for row in rows_of(result)}
    assert rows["blocks of 16"].base == result["base_tpf"]["16"]
    assert rows["blocks of 8"].base is None
    assert rows["prompt lookup, k = 10"].model == result["model_prompt_lookup_tpf"]


def test_other_outputs_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    decode = model_runs.decode

    def tampered(decoder: Any, prompts: Any, limits: Any, options: Any, **more: Any) -> Run:
        run = decode(decoder, prompts, limits, options, **more)
        if options["block_size"] == 16:
            run.decoded[2].tokens[1] = (run.decoded[2].tokens[1] + 1) % WORDS
        return run

    monkeypatch.setattr(model_runs, "decode", tampered)
    out = tmp_path / "out.json"
    assert command.run(arguments(folder, "--json", str(out))) == 1
    result = json.loads(out.read_text())
    assert result["ar_identical"] is False
    assert result["identical"]["model"] == {"8": 5, "16": 4, "32": 5, "multi_block": 5}
    captured = capsys.readouterr()
    assert "every output as one by one: NO" in captured.out
    assert "4 of 5" in captured.out
    assert "outputs differ" in captured.err


def test_answers_that_are_right(folder: Path, loaded: Any, tmp_path: Path) -> None:
    """A GSM8K file whose answer the model gives for one of two prompts."""
    decoder = JacobiDecoder(loaded.model)
    tokens = decode(decoder, [[5, 9], [7, 11]], [8, 8], AR, stops=STOPS).tokens[0]
    number = [token for token in tokens if token not in (0, *STOPS)][-1]
    lines = [{"question": "5 9", "answer": f"#### {number}"}, {"question": "7 11", "answer": "#### 0.5"}]
    path = tmp_path / "grade.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    config = EvaluationConfig(max_new_tokens=8, task="gsm8k", block_sizes=(4,))
    result = evaluate(loaded, None, path, config, quiet)
    assert result["accuracy"] == 0.5
    assert [record["model"]["correct"] for record in result["records"]] == [True, False]
    assert set(result["tpf"]) == {"4"}
    assert result["base"] is result["base_accuracy"] is result["base_tpf"]["16"] is None
    assert result["prompt_lookup_tpf"] == result["model_prompt_lookup_tpf"]


# Command line ---------------------------------------------------------------------------------------------------------


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--base", str(folder / "base"), "--json", str(out), "--limit", "2", "--task", "none", "--seed", "5"]
    options += ["--block-sizes", "8", "16", "--batch-size", "1", "--dtype", "bfloat16"]
    pytest.importorskip("matplotlib")
    assert command.run(arguments(folder, *options, "--plot", str(plot))) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"out.json", "out.png"}
    result = json.loads(out.read_text())
    assert result["prompts"] == 2
    assert result["accuracy"] is None
    assert set(result["tpf"]) == {"8", "16"}
    for key, value in {"dtype": "bfloat16", "max_new_tokens": 20, "batch_size": 1, "seed": 5, "task": None}.items():
        assert result["settings"][key] == value
    captured = capsys.readouterr()
    assert "model: multi-block: 2 in" in captured.err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_max_new_tokens_and_positions(folder: Path, loaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt_ids": [5] * 120}) + "\n" + json.dumps({"prompt_ids": [5, 9]}) + "\n")
    config = EvaluationConfig(max_new_tokens=12, block_sizes=(4,))
    result = evaluate(loaded, None, path, config, quiet)
    assert result["records"][0]["model"]["tokens"] <= 8
    assert result["records"][1]["model"]["tokens"] <= 12
    assert result["ar_identical"]
    path.write_text(json.dumps({"prompt_ids": [5] * 127}) + "\n")
    with pytest.raises(ValueError, match="prompt 1 has 127 tokens"):
        evaluate(loaded, None, path, config, quiet)


def test_lines_end_at_newlines_only(folder: Path, loaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["5 \u2028 9", "5 \x85 7", "3"]
    path.write_text("".join(json.dumps({"prompt": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
    assert [record["prompt"] for record in read_records(path, None)] == texts


def test_answers_end_before_the_last_position(loaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "5 9", "answer": "7 " * 60}) + "\n")
    model = build("GPT2LMHeadModel", "GPT2Config", max_position_embeddings=40)
    gpt2 = replace(loaded, model=model)
    result = evaluate(gpt2, None, path, EvaluationConfig(max_new_tokens=99, block_sizes=(4,)), quiet)
    assert result["ar_identical"]
    assert 2 <= result["answer_tokens"] <= 40 - LOOKUP_TOKENS - 2
    assert result["perplexity"] > 1
    path.write_text(json.dumps({"prompt": "5 9", "answer": ""}) + "\n")
    assert ModelRuns("model", loaded, path, EvaluationConfig(), quiet).perplexity([""]) is not None  # the stop token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "/nonexistent.jsonl"], "does not exist"),
        (["--task", "gsm8k"], "prompt 1 is not of task 'gsm8k'"),
        (["--json", "/nonexistent/out.json"], "does not exist; create it or change --json"),
        (["--plot", "plot.xyz"], "format of plots|needs matplotlib"),
        (["--base", "/nonexistent/model"], "neither a local path|does not exist"),
    ],
)
def test_errors_are_one_line(folder: Path, options: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        command.run(arguments(folder, *options))
    assert len(str(caught.value).splitlines()) == 1
