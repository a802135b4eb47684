"""Tokenizer and base model from scratch: next-token training on the answers of generated problems.

    python pretrain.py --out base

A byte-level BPE and a Llama of 6 million parameters; Muon for the matrices of the layers, AdamW for the rest. Steps
see new problems, which follow from the seed and the step, so a run that is killed and started again gives the same
model; so does one that is started with more --stop-after.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

import torch
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from arithmetic import make_drill
from problems import problems

VOCABULARY = 4096
END = "<|end|>"
# Words keep the space before them; digits stand alone, so that the model adds digit by digit.
PIECES = r" ?\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"
POOL = 64  # batches that are drawn together, so that problems of similar length share a batch


def make_tokenizer(samples: int = 60_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``VOCABULARY`` entries, from training problems."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{p['prompt']}{p['answer']}" for p in problems("train", samples))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def make_model(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class Batch(NamedTuple):
    tokens: torch.Tensor  # [B, L] int64, padded on the right
    rows: torch.Tensor  # [A] places in the flattened [B, L] whose next token is to be learnt
    targets: torch.Tensor  # [A]


class Sample(NamedTuple):
    ids: list[int]
    learnt: list[int]  # places of the tokens that are to be learnt


def make_batch(samples: list[Sample], pad: int) -> Batch:
    width = -(-max(len(sample.ids) for sample in samples) // 8) * 8
    tokens = torch.full((len(samples), width), pad)
    rows, targets = [], []
    for b, sample in enumerate(samples):
        tokens[b, : len(sample.ids)] = torch.tensor(sample.ids)
        rows += [b * width + place - 1 for place in sample.learnt]
        targets += [sample.ids[place] for place in sample.learnt]
    return Batch(tokens, torch.tensor(rows), torch.tensor(targets))


def problem_samples(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> list[Sample]:
    """Problems of which the answers are learnt, the end included; shortest first."""
    drawn = list(problems("train", count, seed))
    prompts = tokenizer([p["prompt"] for p in drawn])["input_ids"]
    answers = tokenizer([p["answer"] + END for p in drawn])["input_ids"]
    pairs = zip(prompts, answers, strict=True)
    return sorted((Sample(p + a, [*range(len(p), len(p + a))]) for p, a in pairs), key=lambda s: len(s.ids))


def drill_samples(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> list[Sample]:
    """Rows of ten calculations of which the results are learnt."""
    rng = random.Random(f"drills/{seed}")
    texts = [part for _ in range(10 * count) for part in make_drill(rng)]
    pieces = tokenizer(texts)["input_ids"]
    samples = []
    for row in range(count):
        sample = Sample([], [])
        for index, ids in enumerate(pieces[20 * row : 20 * (row + 1)]):
            if index % 2:
                sample.learnt.extend(range(len(sample.ids), len(sample.ids) + len(ids)))
            sample.ids.extend(ids)
        samples.append(sample)
    return samples


def batches(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, first: int) -> Iterator[Batch]:
    """The batches of the steps from ``first`` on, without end."""
    for pool in count(first // POOL):
        seed = args.seed * 1_000_000 + pool
        samples = problem_samples(tokenizer, POOL * args.batch_size, seed)
        groups = [samples[i : i + args.batch_size] for i in range(0, len(samples), args.batch_size)]
        random.Random(f"{args.seed}/{pool}").shuffle(groups)
        drills = drill_samples(tokenizer, POOL * args.drills, seed)
        for place, group in enumerate(groups):
            step = pool * POOL + place
            if step >= args.drills_from:
                group = group + drills[place * args.drills : (place + 1) * args.drills]
            if step >= first:
                yield make_batch(group, tokenizer.pad_token_id)


class Trainer:
    def __init__(self, model: LlamaForCausalLM, args: argparse.Namespace) -> None:
        self.model, self.args, self.step = model, args, 0
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        self.optimizers.append(
            torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        )
        self.body = torch.compile(model.model, dynamic=True) if args.compile else model.model

    def rate(self) -> float:
        """Warm-up, then a constant rate, then linearly to zero over the last part."""
        left = (self.args.steps - self.step) / (self.args.cooldown * self.args.steps)
        return self.args.lr * min(1.0, (self.step + 1) / self.args.warmup, left)

    def train(self, batch: Batch) -> float:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(batch.tokens, use_cache=False)[0]
            logits = hidden.flatten(0, 1)[batch.rows] @ self.model.lm_head.weight.T
        loss = cross_entropy(logits.float(), batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch-size", type=int, default=48, help="problems per step")
    parser.add_argument("--drills", type=int, default=12, help="rows of plain calculations per step")
    parser.add_argument("--drills-from", type=int, default=1000, help="step from which there are such rows")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--cooldown", type=float, default=0.35, help="share of the steps over which the rate falls")
    parser.add_argument("--stop-after", type=int, help="stop at this step; the same command goes on from there")
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do without torch.compile")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    work = args.out.with_name(args.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokenizer.json").exists():
        make_tokenizer().save_pretrained(work)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work)
    trainer = Trainer(make_model(len(tokenizer)), args)
    saved = work / "state.pt"
    if saved.exists():
        trainer.load(saved)
    stop = min(args.stop_after or args.steps, args.steps)
    started, tokens, total = time.monotonic(), 0, 0.0
    with Progress() as progress, (work / "metrics.jsonl").open("a") as metrics:
        task = progress.add_task("training", total=args.steps, completed=trainer.step)
        for batch in batches(tokenizer, args, trainer.step):
            if trainer.step >= stop:
                break
            total += trainer.train(batch)
            tokens += batch.tokens.numel()
            progress.update(task, completed=trainer.step)
            if trainer.step % 20 == 0:
                record = {"step": trainer.step, "loss": total / 20, "lr": trainer.rate(),
                          "seconds": time.monotonic() - started, "tokens": tokens}  # fmt: skip
                metrics.write(json.dumps(record) + "\n")
                metrics.flush()
                total = 0.0
            if trainer.step % args.save_every == 0:
                trainer.save(saved)
    trainer.save(saved)
    if trainer.step >= args.steps:
        temporary = work / "model"
        trainer.model.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        rmtree(args.out, ignore_errors=True)
        temporary.rename(args.out)


if __name__ == "__main__":
    main()
