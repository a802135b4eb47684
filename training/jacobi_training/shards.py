"""Folders of JSON-lines shards: what the stages of training hand to one another.

``manifest.json`` says what the folder holds and what made it; it lists the finished shards, ``shard-00000.jsonl`` and
so on, one record a line, each with its number of records and its sha256. A shard is written under a temporary name,
renamed, then listed: what is listed is whole. Whoever writes again with the same settings keeps what is listed and
makes the rest, so an interrupted job leaves the same bytes as one that ran through. Several processes may write
different shards of one folder at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

MANIFEST = "manifest.json"
VERSION = 1  # of the folder's format

Record = dict[str, Any]


class ShardError(ValueError):
    """A folder or shard that cannot be used; one line that names the file and the remedy."""


@dataclass(frozen=True)
class Shard:
    """One listed shard: file name, number of records, sha256 of its bytes in hex."""

    file: str
    records: int
    sha256: str


@dataclass
class Manifest:
    """kind: what the records are. settings: what made them. model: fingerprint of the model that took part, or None.

    num_shards: shards of the finished folder; None while the writer does not know. shards: the finished ones, by name.
    report: what the writer counted, or None.
    """

    kind: str
    settings: dict[str, Any]
    model: str | None = None
    num_shards: int | None = None
    shards: list[Shard] = field(default_factory=list)
    report: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self.num_shards == len(self.shards)

    @property
    def records(self) -> int:
        """Records of all listed shards."""
        return sum(shard.records for shard in self.shards)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.jsonl"


def load_manifest(folder: str | os.PathLike[str], kind: str | None = None) -> Manifest:
    """The manifest of ``folder``; ShardError when there is none, it is damaged, or it is not of ``kind``."""
    path = Path(folder) / MANIFEST
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise ShardError(
                f"{str(path)!r} has format version {data['version']}, expected {VERSION}; make the folder again"
            )
        shards = [Shard(str(s["file"]), int(s["records"]), str(s["sha256"])) for s in data["shards"]]
        known = (dict(data["settings"]), data["model"], data["num_shards"])
        manifest = Manifest(data["kind"], *known, shards, data.get("report"))
    except (FileNotFoundError, NotADirectoryError):
        raise ShardError(
            f"{str(folder)!r} has no {MANIFEST}; name a folder of shards that `jacobi train` wrote"
        ) from None
    except OSError as error:
        raise ShardError(f"cannot read {str(path)!r}: {error.strerror}; give access to it") from None
    except ShardError:
        raise
    except (ValueError, KeyError, TypeError):
        raise ShardError(f"{str(path)!r} is damaged; restore it, or delete the folder and make it again") from None
    if kind is not None and manifest.kind != kind:
        raise ShardError(f"{str(folder)!r} holds {manifest.kind}, expected {kind}; name another folder")
    return manifest


class ShardWriter:
    """Writes the shards of one folder, new or begun.

    folder: made when it does not exist. kind, settings, model, num_shards: as in :class:`Manifest`; settings hold what
    JSON can. A folder that was begun must have been begun with the same ones: ShardError names the option that differs.
    Listed shards are read and verified; ShardError names one that is damaged, and nothing is written then. A listed
    shard whose file is gone is made again.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        kind: str,
        settings: Mapping[str, Any],
        *,
        model: str | None = None,
        num_shards: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        wanted = Manifest(kind, json.loads(json.dumps(dict(settings))), model, num_shards)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if (self.folder / MANIFEST).exists():
                    found = load_manifest(self.folder, kind)
                    _refuse_difference(self.folder, found, wanted)
                else:
                    found = wanted
                    if any(self.folder.glob("shard-*.jsonl")):
                        raise ShardError(f"{str(self.folder)!r} holds shards but no {MANIFEST}; name an empty folder")
                    self._save(found)
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        self.manifest = found
        self._finished = {s.file for s in found.shards if (self.folder / s.file).exists()}
        for shard in found.shards:
            if shard.file in self._finished:
                _read_shard(self.folder, shard)

    def finished(self, index: int) -> bool:
        """Whether shard ``index`` is there; it need not be written again."""
        return shard_name(index) in self._finished

    def write(self, index: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write shard ``index`` whole and list it."""
        lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records]
        data = "".join(line + "\n" for line in lines).encode()
        shard = Shard(shard_name(index), len(lines), hashlib.sha256(data).hexdigest())
        try:
            with self._locked():  # other processes list their shards as well, or write the same one
                _write_atomically(self.folder / shard.file, data)
                self.manifest = load_manifest(self.folder)
                others = [s for s in self.manifest.shards if s.file != shard.file]
                self.manifest.shards = sorted([*others, shard], key=lambda s: s.file)
                self._save(self.manifest)
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        self._finished.add(shard.file)

    def write_all(
        self,
        records: Iterable[Mapping[str, Any]],
        shard_size: int,
        *,
        report: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Manifest:
        """Write all records of a folder in order, ``shard_size`` to a shard, and complete it; for a single process.

        Shards that are there already are kept: the records must be a function of the settings alone. ``report`` is
        called behind the last record, and the manifest keeps what it returns.
        """
        index, held = 0, list[Mapping[str, Any]]()
        for record in records:
            held.append(record)
            if len(held) == shard_size:
                self._write_missing(index, held)
                index, held = index + 1, []
        if held:
            self._write_missing(index, held)
            index += 1
        with self._locked():
            self.manifest = load_manifest(self.folder)
            self.manifest.num_shards = index
            self.manifest.report = None if report is None else json.loads(json.dumps(dict(report())))
            self._save(self.manifest)
        return self.manifest

    def _write_missing(self, index: int, records: Iterable[Mapping[str, Any]]) -> None:
        if not self.finished(index):
            self.write(index, records)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the folder itself is what is locked, so no file is left behind."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _save(self, manifest: Manifest) -> None:
        data = {"version": VERSION, **asdict(manifest)}
        _write_atomically(self.folder / MANIFEST, (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode())


class ShardReader(Sequence[Record]):
    """The records of a complete folder in order, each read from its file when it is asked for.

    Every shard is verified at the start; only line offsets stay in memory. ShardError for a damaged shard, a folder
    that is not complete, or another kind.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = load_manifest(folder, kind)
        if not self.manifest.complete:
            of = "" if self.manifest.num_shards is None else f" of {self.manifest.num_shards}"
            raise ShardError(
                f"{str(folder)!r} is not complete ({len(self.manifest.shards)}{of} shards are there); "
                "run the command that writes it again, it will go on"
            )
        self._lines: list[tuple[Path, int, int]] = []  # file, offset, line number
        for shard in self.manifest.shards:
            offset = 0
            path = self.folder / shard.file
            for number, line in enumerate(_read_shard(self.folder, shard).splitlines(keepends=True), 1):
                self._lines.append((path, offset, number))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        path, offset, number = self._lines[index]
        with path.open("rb") as file:
            file.seek(offset)
            return _parse(path, number, file.readline())

    def where(self, index: int) -> str:
        """Shard and line of a record, for messages."""
        path, _, number = self._lines[index]
        return f"{str(path)!r} line {number}"


def read_records(folder: str | os.PathLike[str], kind: str | None = None) -> Iterator[Record]:
    """All records of a complete folder in order; errors as those of :class:`ShardReader`, before the first record."""
    return iter(ShardReader(folder, kind))


def read_shard(folder: str | os.PathLike[str], shard: Shard) -> list[Record]:
    """The records of one listed shard, verified."""
    path = Path(folder) / shard.file
    lines = _read_shard(Path(folder), shard).splitlines()
    return [_parse(path, number, line) for number, line in enumerate(lines, 1)]


def _read_shard(folder: Path, shard: Shard) -> bytes:
    path = folder / shard.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShardError(
            f"cannot read {str(path)!r}: {error.strerror}; restore it, or run the command that made it again"
        ) from None
    if hashlib.sha256(data).hexdigest() != shard.sha256 or data.count(b"\n") != shard.records:
        raise _damaged(path, f"it differs from what {MANIFEST} lists")
    return data


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise _damaged(path, f"line {number} is not a JSON object")
    return record


def _damaged(path: Path, why: str) -> ShardError:
    return ShardError(
        f"{str(path)!r} is damaged ({why}); restore it from a copy, or delete it and run the command that made it again"
    )


def _refuse_difference(folder: Path, found: Manifest, wanted: Manifest) -> None:
    """Raise ShardError, naming the option, when the folder was begun in another way."""
    for name in sorted({*found.settings, *wanted.settings}):
        before, now = found.settings.get(name), wanted.settings.get(name)
        if before != now:
            option = "--" + name.replace("_", "-")
            raise ShardError(
                f"{str(folder)!r} was begun with {option} {_short(before)}, now it is {_short(now)}; "
                f"give the same {option} or name another folder"
            )
    if found.model != wanted.model:
        raise ShardError(
            f"{str(folder)!r} was begun with another --model (its weights or config differ); "
            "give the same model or name another folder"
        )
    if wanted.num_shards is not None and found.num_shards != wanted.num_shards:
        raise ShardError(
            f"{str(folder)!r} was begun with {found.num_shards} shards, now there would be {wanted.num_shards}; "
            "name another folder"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _write_atomically(path: Path, data: bytes) -> None:
    # A fixed temporary name: what a killed process left is overwritten by the next one.
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _cannot_write(folder: Path, error: OSError) -> OSError:
    return OSError(f"cannot write to {str(folder)!r}: {error.strerror or error}; make room and give access there")
