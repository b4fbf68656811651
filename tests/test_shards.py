"""Shards: every reader agrees on what is in them, and one that went wrong never gets its name."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_faults import folder_in_memory, never_wait_for_the_disk
from store_rows import ARRAY_COLUMNS, CONTRACT, TOOLS, UNICODE, answer, completion, prompt, row_of

from pipeline.errors import StoreError
from pipeline.records import Completion, Message
from pipeline.store import durable, shards
from pipeline.store.journal import JournalWriter
from pipeline.store.manifest import ShardEntry
from pipeline.store.rows import encode_completion
from pipeline.store.shards import file_digest, read_ids, seal

METADATA = {b"eagle3": orjson.dumps({"schema_version": 1, "k": 4, "logprobs": "raw", "model": "tiny"})}


def varied() -> list[Completion]:
    """Unicode, tools, nulls of each kind, differing k and lengths, infinities."""
    spoken = Message("assistant", None, "thinking", '[{"id": "c1"}]', None, None)
    chat = replace(answer(2, missing=ARRAY_COLUMNS), cached_device_tokens=None, cached_host_tokens=None)
    return [
        completion("plain", seed=1),
        completion(prompt("unicode", messages=(Message("user", UNICODE),), tools=TOOLS), text=UNICODE, seed=2),
        completion("no-arrays", missing=ARRAY_COLUMNS, answer=replace(chat, retractions=None, queue_s=None)),
        completion("wide", tokens=9, k=20, seed=3),
        completion("no-entries", k=0, seed=4),
        completion("calls", reply=spoken, answer=answer(4, seed=5, finish_reason="length", weight_version=None)),
        completion("cut", tokens=1, k=1, seed=6, created_us=1),
    ]


def write_journal(path: Path, rows: list[Completion], others: bytes | None = None) -> Path:
    writer = JournalWriter(path)
    for row in rows:
        if others is not None:
            writer.append(others)
        writer.append(encode_completion(row))
    writer.close()
    return path


def seal_rows(folder: Path, rows: list[Completion], part: int = 0, compression: str = "zstd") -> ShardEntry:
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    journal = write_journal(folder / f"part-{part:05d}.journal", rows)
    return seal(journal, folder / "shards", part, METADATA, compression, 3)


def plain(value: Any) -> Any:
    """Nested values of any reader as Python's own."""
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, datetime):
        moment = value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
        return datetime.fromtimestamp(0, UTC) + (moment - datetime.fromtimestamp(0, UTC))
    return None if isinstance(value, float) and np.isnan(value) else value


def by_pyarrow(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder).to_pylist()
    return rows


def by_datasets(folder: Path) -> list[dict[str, Any]]:
    import datasets

    loaded = datasets.load_dataset("parquet", data_dir=str(folder), cache_dir=str(folder.parent / "cache"))
    return list(loaded["train"])


def by_duckdb(folder: Path) -> list[dict[str, Any]]:
    import duckdb

    with duckdb.connect() as connection:
        found = connection.sql(f"SELECT * FROM '{folder}/*.parquet'").to_arrow_table()
    assert found.column_names == CONTRACT.names
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def by_polars(folder: Path) -> list[dict[str, Any]]:
    import polars

    frame = polars.read_parquet(folder / "*.parquet")
    assert frame.schema["topk_logprobs"] == polars.List(polars.List(polars.Float32))
    return frame.to_dicts()


def by_pandas(folder: Path) -> list[dict[str, Any]]:
    import pandas

    return pandas.read_parquet(folder).to_dict("records")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    never_wait_for_the_disk(monkeypatch)


@pytest.fixture(scope="module")
def sealed() -> Iterator[Path]:
    """A folder of two shards, the varied rows in two halves."""
    with folder_in_memory() as folder:
        seal_rows(folder, varied()[:3], 0)
        seal_rows(folder, varied()[3:], 1)
        yield folder / "shards"


@pytest.mark.parametrize("read", [by_pyarrow, by_datasets, by_duckdb, by_polars, by_pandas])
def test_every_reader_sees_the_rows(sealed: Path, read: Callable[[Path], list[dict[str, Any]]]) -> None:
    found = plain(read(sealed))
    for row, expected in zip(found, plain([row_of(one) for one in varied()]), strict=True):
        assert row == expected


def test_the_file_says_what_it_holds(sealed: Path) -> None:
    with pq.ParquetFile(sealed / "part-00000.parquet") as file:
        assert file.schema_arrow.remove_metadata().equals(CONTRACT)
        assert orjson.loads(file.schema_arrow.metadata[b"eagle3"])["k"] == 4
        assert orjson.loads(file.metadata.metadata[b"eagle3"])["k"] == 4


def test_the_entry_describes_the_file(tmp_path: Path) -> None:
    entry = seal_rows(tmp_path, varied(), 7)
    data = (tmp_path / "shards" / "part-00007.parquet").read_bytes()
    assert entry == ShardEntry("part-00007.parquet", len(varied()), len(data), hashlib.sha256(data).hexdigest())
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["part-00007.parquet"]
    assert read_ids(tmp_path / "shards" / entry.name) == [one.prompt.id for one in varied()]


def test_records_of_other_kinds_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    journal = write_journal(tmp_path / "part-00000.journal", varied(), others=b"P something else")
    assert seal(journal, tmp_path / "shards", 0, METADATA, "zstd", 3).rows == len(varied())
    assert by_pyarrow(tmp_path / "shards") == [row_of(one) for one in varied()]


def test_rows_go_into_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROW_GROUP_BYTES", 2 * len(encode_completion(varied()[0])))
    entry = seal_rows(tmp_path, varied() * 3)
    with pq.ParquetFile(tmp_path / "shards" / entry.name) as file:
        assert file.num_row_groups >= 5
        assert file.read().to_pylist() == [row_of(one) for one in varied() * 3]


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none", "gzip"])
def test_compressions(tmp_path: Path, compression: str) -> None:
    seal_rows(tmp_path, varied(), compression=compression)
    assert by_pyarrow(tmp_path / "shards") == [row_of(one) for one in varied()]


def test_a_compression_that_is_not_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"part-00000\.parquet cannot be written: .*best"):
        seal_rows(tmp_path, varied(), compression="best")
    assert list((tmp_path / "shards").iterdir()) == []


def test_the_same_journal_gives_the_same_file(tmp_path: Path) -> None:
    entries = [seal_rows(tmp_path / name, varied()) for name in ("a", "b")]
    assert entries[0] == entries[1]


def test_a_shard_of_that_name_is_replaced(tmp_path: Path) -> None:
    seal_rows(tmp_path, varied()[:2])
    entry = seal_rows(tmp_path, varied())
    path = tmp_path / "shards" / entry.name
    assert by_pyarrow(path) == [row_of(one) for one in varied()]
    assert file_digest(path) == entry.sha256


def test_no_changed_byte_gets_past_the_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics and metadata among them, which say nothing about the rows and mislead a reader all the same."""
    size = seal_rows(tmp_path, varied()).bytes
    (tmp_path / "shards" / "part-00000.parquet").unlink()
    for position in [*range(0, size, size // 60), *range(size - 1, size - 40, -1)]:
        monkeypatch.setattr(durable, "on_step", lambda step, at=position: flip_when_verifying(tmp_path, step, at))
        with pytest.raises(StoreError, match="reads back differently"):
            seal_rows(tmp_path, varied())
        assert list((tmp_path / "shards").iterdir()) == []
    monkeypatch.setattr(durable, "on_step", None)
    assert seal_rows(tmp_path, varied()).bytes == size


def flip_when_verifying(folder: Path, step: str, position: int) -> None:
    if step == "shard: verify":
        path = folder / "shards" / ".part-00000.parquet.tmp"
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)


def test_rows_that_are_encoded_wrongly_do_not_get_past_the_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is what was written, and what was written is not what the journal holds."""
    real = pq.ParquetWriter.write_table
    monkeypatch.setattr(pq.ParquetWriter, "write_table", lambda self, table, **more: real(self, table.slice(1), **more))
    with pytest.raises(StoreError, match="reads back differently"):
        seal_rows(tmp_path, varied())
    assert list((tmp_path / "shards").iterdir()) == []


def test_a_full_disk_leaves_nothing_behind_and_the_shard_before_it_alone(tmp_path: Path) -> None:
    seal_rows(tmp_path, varied()[:2])
    before = (tmp_path / "shards" / "part-00000.parquet").read_bytes()
    (tmp_path / "shards" / ".part-00000.parquet.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        seal_rows(tmp_path, varied())
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "shards") == ["part-00000.parquet"]
    assert (tmp_path / "shards" / "part-00000.parquet").read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"not a parquet file at all"])
def test_a_shard_that_cannot_be_read_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "part-00003.parquet"
    path.write_bytes(damage)
    with pytest.raises(StoreError, match=r"part-00003\.parquet"):
        read_ids(path)


def test_arrow_types_are_those_that_readers_were_promised(sealed: Path) -> None:
    assert pa.types.is_timestamp(pq.read_schema(sealed / "part-00000.parquet").field("created_at").type)
    assert str(pq.read_schema(sealed / "part-00000.parquet").field("created_at").type) == "timestamp[us, tz=UTC]"
