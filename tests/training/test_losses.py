"""What the losses are worth: weights, kinds, and counts that do not depend on how a batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_training.batches import make_batch
from jacobi_training.distributed import Ranks
from jacobi_training.feed import Feed, ar_batch
from jacobi_training.losses import Objective
from jacobi_training.model import TrainingModel
from jacobi_training.shards import ShardReader
from tests.training.fit_helpers import samples, tiny, write_samples


@pytest.fixture(autouse=True)
def one_thread(torch_threads: Any) -> None:
    torch_threads(1)


@torch.no_grad()
def sums(objective: Objective, records: list[Any]) -> torch.Tensor:
    return TrainingModel(tiny(), objective)(make_batch(records))


def test_a_term_of_weight_zero_is_not_computed() -> None:
    records = samples(2)
    both = sums(Objective(), records)
    assert (both > 0).all()
    assert torch.equal(sums(Objective(0, 1), records), both * torch.tensor([0.0, 1.0]))
    assert torch.equal(sums(Objective(1, 0), records), both * torch.tensor([1.0, 0.0]))
    assert torch.equal(sums(Objective(1, 0, "hard"), records), both * torch.tensor([1.0, 0.0]))


def test_kind_and_temperature_have_an_effect() -> None:
    records = samples(2)
    found = [float(sums(o, records)[1]) for o in (Objective(), Objective(consistency="hard"), Objective(temperature=2))]
    assert len(set(found)) == 3


def test_total_divides_by_the_rows_of_the_whole_step() -> None:
    total = Objective(0.5, 2.0).total(torch.tensor([6.0, 8.0]), 3, 4)
    assert float(total) == 0.5 * 6 / 3 + 2.0 * 8 / 4
    assert float(Objective().total(torch.tensor([6.0, 0.0]), 3, 0)) == 2.0


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("max_rows", [1, 60, 10_000])
def test_the_loss_of_a_step_does_not_depend_on_how_it_is_cut(world: int, max_rows: int, tmp_path: Path) -> None:
    records = samples(5, seed=1)
    reader = ShardReader(write_samples(tmp_path, records))
    model = TrainingModel(tiny(), Objective(0.3, 1.1))
    whole = make_batch(records)
    want = model.objective.total(model(whole), whole.num_ar_rows, whole.num_consistency_rows)
    steps = [Feed(reader, 5, 5, max_rows, Ranks(rank, world), False).step(0) for rank in range(world)]
    assert len({len(step.micro_batches) for step in steps}) == 1
    got = torch.zeros(())
    for step in steps:
        assert step.counts == steps[0].counts
        assert step.counts.ar == whole.num_ar_rows
        assert step.counts.consistency == whole.num_consistency_rows
        assert step.counts.rows == whole.rows
        for batch, counts in step.batches():
            got = got + counts * model.objective.total(model(batch), step.counts.ar, step.counts.consistency)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_feed_goes_through_the_file_in_order_and_over_again(tmp_path: Path) -> None:
    reader = ShardReader(write_samples(tmp_path, samples(5)))

    def taken(feed: Feed) -> list[list[int]]:
        return [[s["index"] for m in feed.step(i).micro_batches for s in m] for i in range(feed.steps)]

    assert taken(Feed(reader, 2, 8, 10**6, Ranks(), False)) == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert taken(Feed(reader, 2, 5, 1, Ranks(), False)) == [[0, 1], [2, 3], [4]]
    assert taken(Feed(reader, 4, 5, 10**6, Ranks(1, 2), False)) == [[1, 3], []]


def test_without_consistency_the_noisy_blocks_are_left_out(tmp_path: Path) -> None:
    records = samples(3)
    whole, plain = make_batch(records), ar_batch(records)
    step = Feed(ShardReader(write_samples(tmp_path, records)), 3, 3, 10**6, Ranks(), True).step(0)
    assert step.counts.rows == plain.rows < whole.rows
    assert step.counts.ar == plain.num_ar_rows == whole.num_ar_rows
    assert step.counts.consistency == plain.num_consistency_rows == 0
    model = TrainingModel(tiny(), Objective(1, 0))
    torch.testing.assert_close(model(plain), model(whole), rtol=1e-6, atol=0)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    records = samples(5)
    del records[4]["blocks"][0]  # the second of the second shard
    feed = Feed(ShardReader(write_samples(tmp_path, records)), 5, 5, 100, Ranks(), False)
    with pytest.raises(ValueError, match=r"shard-00001.jsonl' line 2 is not a packed sample: an answer of .* ids has"):
        feed.step(0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"ar_weight": -1.0}, "must not be negative"),
        ({"ar_weight": 0.0, "consistency_weight": 0.0}, "one must be above 0"),
        ({"consistency": "both"}, "consistency must be soft or hard, got 'both'"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"consistency": "hard", "temperature": 2.0}, "no meaning for hard consistency"),
    ],
)
def test_refusals(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Objective(**arguments)
