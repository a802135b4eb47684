"""Shards: what is written is read, resumed and verified; nothing that differs or is damaged is overwritten."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from jacobi_training.shards import (
    MANIFEST,
    ShardError,
    ShardReader,
    ShardWriter,
    load_manifest,
    read_records,
    read_shard,
    shard_name,
)

SETTINGS = {"block_size": 16, "limit": None, "stop_tokens": (1, 2)}


def records(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"index": i, "text": "é\u2028\n"[: i % 4], "ids": list(range(i))} for i in range(first, first + count)]


def writer(folder: Path, **changes: Any) -> ShardWriter:
    options: dict[str, Any] = {"kind": "things", "settings": SETTINGS, "model": "m", "num_shards": 3} | changes
    return ShardWriter(folder, **options)


def fill(folder: Path) -> None:
    made = writer(folder)
    for i in range(3):
        made.write(i, records(4, 4 * i))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_round_trip(tmp_path: Path) -> None:
    fill(tmp_path)
    reader = ShardReader(tmp_path, "things")
    expected = records(12)
    assert len(reader) == 12
    assert list(reader) == expected == list(read_records(tmp_path))
    assert reader[5] == expected[5]
    assert reader[-1] == expected[-1]
    assert reader[3:9:2] == expected[3:9:2]
    with pytest.raises(IndexError):
        reader[12]
    assert reader.where(5) == f"{str(tmp_path / shard_name(1))!r} line 2"
    manifest = load_manifest(tmp_path)
    assert (manifest.complete, manifest.records, manifest.model) == (True, 12, "m")
    assert manifest.settings == {"block_size": 16, "limit": None, "stop_tokens": [1, 2]}
    assert read_shard(tmp_path, manifest.shards[1]) == expected[4:8]
    assert sorted(contents(tmp_path)) == [MANIFEST, *map(shard_name, range(3))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_resumed_in_any_order_gives_the_same_bytes(tmp_path: Path, order: tuple[int, ...]) -> None:
    fill(tmp_path / "whole")
    for i in order:
        begun = writer(tmp_path / "begun")
        assert not begun.finished(i)
        begun.write(i, records(4, 4 * i))
    assert all(writer(tmp_path / "begun").finished(i) for i in range(3))
    assert contents(tmp_path / "begun") == contents(tmp_path / "whole")


def test_what_was_not_listed_is_made_again(tmp_path: Path) -> None:
    """A process that was killed before it listed a shard leaves a whole, half or temporary file."""
    fill(tmp_path / "whole")
    begun = writer(tmp_path / "begun")
    begun.write(0, records(4))
    (tmp_path / "begun" / shard_name(1)).write_bytes(b'{"ind')
    (tmp_path / "begun" / f".{shard_name(2)}.part").write_bytes(b"{}")
    begun = writer(tmp_path / "begun")
    assert [begun.finished(i) for i in range(3)] == [True, False, False]
    for i in (1, 2):
        begun.write(i, records(4, 4 * i))
    assert contents(tmp_path / "begun") == contents(tmp_path / "whole")


def test_a_deleted_shard_is_made_again(tmp_path: Path) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    (tmp_path / shard_name(1)).unlink()
    with pytest.raises(ShardError, match=r"shard-00001\.jsonl.*No such file"):
        ShardReader(tmp_path)
    again = writer(tmp_path)
    assert [again.finished(i) for i in range(3)] == [True, False, True]
    again.write(1, records(4, 4))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("damage", ["byte", "cut", "empty"])
def test_a_damaged_shard_is_refused_and_nothing_overwritten(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    path = tmp_path / shard_name(1)
    data = path.read_bytes()
    path.write_bytes({"byte": data.replace(b"4", b"5", 1), "cut": data[:-9], "empty": b""}[damage])
    before = contents(tmp_path)
    for use in (writer, ShardReader, lambda folder: list(read_records(folder))):
        with pytest.raises(
            ShardError, match=r"shard-00001\.jsonl' is damaged .*; restore it .* or delete it"
        ) as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_a_line_that_is_not_json(tmp_path: Path) -> None:
    import hashlib

    fill(tmp_path)
    path = tmp_path / shard_name(2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"[1]\n", *lines[2:]]))
    data = json.loads((tmp_path / MANIFEST).read_text())
    data["shards"][2]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    reader = ShardReader(tmp_path)
    assert reader[8] == records(12)[8]
    with pytest.raises(ShardError, match=r"shard-00002\.jsonl' is damaged \(line 2 is not a JSON object\)"):
        reader[9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {**SETTINGS, "block_size": 32}}, "begun with --block-size 16, now it is 32; give the same"),
        ({"settings": {**SETTINGS, "limit": 7}}, "begun with --limit null, now it is 7"),
        ({"settings": {"block_size": 16, "limit": None}}, r"begun with --stop-tokens \[1, 2\], now it is null"),
        ({"model": "other"}, "begun with another --model"),
        ({"num_shards": 4}, "begun with 3 shards, now there would be 4"),
        ({"kind": "others"}, "holds things, expected others"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    writer(tmp_path).write(0, records(4))
    before = contents(tmp_path)
    with pytest.raises(ShardError, match=message):
        writer(tmp_path, **change)
    assert contents(tmp_path) == before


def test_folders_that_are_not_ours(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"has no manifest\.json"):
        load_manifest(tmp_path)
    with pytest.raises(ShardError, match=r"has no manifest\.json"):
        load_manifest(tmp_path / "none")
    writer(tmp_path / "begun").write(0, records(4))
    with pytest.raises(ShardError, match=r"not complete \(1 of 3 shards"):
        ShardReader(tmp_path / "begun")
    with pytest.raises(ShardError, match="holds things, expected packed"):
        load_manifest(tmp_path / "begun", "packed")
    for text in ("{", "[]", '{"version": 1}'):
        (tmp_path / "begun" / MANIFEST).write_text(text)
        with pytest.raises(ShardError, match=r"manifest\.json' is damaged"):
            writer(tmp_path / "begun")
    (tmp_path / "begun" / MANIFEST).write_text('{"version": 9}')
    with pytest.raises(ShardError, match="format version 9, expected 1"):
        writer(tmp_path / "begun")
    (tmp_path / "begun" / MANIFEST).unlink()
    with pytest.raises(ShardError, match=r"holds shards but no manifest\.json"):
        writer(tmp_path / "begun")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to"):
        writer(tmp_path / "file")


def test_write_all(tmp_path: Path) -> None:
    """A single process that does not know the count beforehand; begun again it makes what is missing."""
    for _ in range(2):
        manifest = writer(tmp_path / "a", num_shards=None).write_all(iter(records(10)), 4)
        assert (manifest.complete, [s.records for s in manifest.shards]) == (True, [4, 4, 2])
    assert list(read_records(tmp_path / "a")) == records(10)
    assert manifest.report is None

    def stopping() -> Any:
        yield from records(6)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer(tmp_path / "b", num_shards=None).write_all(stopping(), 4)
    with pytest.raises(ShardError, match=r"not complete \(1 shards are there"):
        ShardReader(tmp_path / "b")
    writer(tmp_path / "b", num_shards=None).write_all(records(10), 4)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_manifest_keeps_a_report_of_all_records(tmp_path: Path) -> None:
    seen: list[int] = []

    def counted() -> Any:
        for record in records(5):
            seen.append(record["index"])
            yield record

    manifest = writer(tmp_path, num_shards=None).write_all(counted(), 2, report=lambda: {"by_size": {4: len(seen)}})
    assert manifest.report == load_manifest(tmp_path).report == {"by_size": {"4": 5}}


def _write_every_other(folder: Path, rank: int) -> None:
    own = ShardWriter(folder, "things", {}, num_shards=20)
    for i in range(rank, 20, 2):
        own.write(i, records(2, 2 * i))


def test_processes_list_their_shards_side_by_side(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_every_other, args=(tmp_path, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert list(read_records(tmp_path)) == records(40)
