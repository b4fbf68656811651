"""Sealing: a full journal becomes one Parquet shard, which appears whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import StoreError
from pipeline.store.durable import reached, sync_folder
from pipeline.store.journal import read_records
from pipeline.store.manifest import ShardEntry
from pipeline.store.rows import COMPLETION, SCHEMA, Row, record_kind, to_table, unpack

ROW_GROUP_BYTES = 32 * 1024 * 1024
"""Journal bytes that go into one row group: what sealing holds in memory at a time, a few times over."""

_DICTIONARY_COLUMNS = ["dataset", "tools", "finish_reason", "engine", "weight_version", "sampling"]


def shard_name(part: int) -> str:
    """The file name of a shard by its number."""
    return f"part-{part:05d}.parquet"


def seal(
    journal: Path,
    shards: Path,
    part: int,
    metadata: dict[bytes, bytes],
    compression: str,
    compression_level: int,
) -> ShardEntry:
    """Writes a journal's completions as ``shards/part-NNNNN.parquet``, reads the file back, and only then names it.

    A file of that name that is there already is replaced: the journal is what counts until the manifest lists the
    shard. The journal is left for the caller to delete. Where this raises, no temporary file is left, and the disk
    has its space back.

    Raises:
        OSError: the file could not be written.
        StoreError: what was read back is not what was written, or it cannot be written with these settings.
    """
    schema = SCHEMA.with_metadata(metadata)
    name = shard_name(part)
    temporary = shards / f".{name}.tmp"
    options: dict[str, Any] = {"compression": compression, "use_dictionary": _DICTIONARY_COLUMNS}
    if compression in ("zstd", "gzip", "brotli"):
        options["compression_level"] = compression_level
    try:
        reached("shard: write")
        sha256 = _write(temporary, journal, schema, options)
        reached("shard: verify")
        rows = _verify(temporary, journal, schema, sha256)
        entry = ShardEntry(name, rows, temporary.stat().st_size, sha256)
        reached("shard: rename")
        os.replace(temporary, shards / name)
    except pa.ArrowException as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"{name} cannot be written: {error}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    reached("shard: sync folder")
    sync_folder(shards)
    return entry


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_ids(path: Path) -> list[str]:
    """The ids of a shard's rows, in order.

    Raises:
        StoreError: the file is damaged.
    """
    try:
        ids: list[str] = pq.read_table(path, columns=["id"])["id"].to_pylist()
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {str(error).splitlines()[0]}; restore it before going on") from None
    return ids


class _DigestedFile(io.BufferedWriter):
    """A file being written, with the SHA-256 of all that it was given."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def _write(path: Path, journal: Path, schema: pa.Schema, options: dict[str, Any]) -> str:
    """Writes the file and syncs it; returns the SHA-256 (hex) that it must have when it is read."""
    with _DigestedFile(path) as file:
        with pq.ParquetWriter(file, schema, **options) as writer:
            for table in _tables(journal, schema):
                writer.write_table(table, row_group_size=max(table.num_rows, 1))
        file.flush()
        os.fsync(file.fileno())
        return file.sha256.hexdigest()


def _tables(journal: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    for rows in _row_groups(journal):
        yield to_table(rows, schema)


def _row_groups(journal: Path) -> Iterator[list[Row]]:
    rows: list[Row] = []
    size = 0
    for _, payload in read_records(journal):
        if record_kind(payload) != COMPLETION:
            continue
        rows.append(unpack(payload))
        size += len(payload)
        if size >= ROW_GROUP_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _verify(path: Path, journal: Path, schema: pa.Schema, sha256: str) -> int:
    """Compares the file with what was written, and every row group in it with the journal it came from; returns the
    number of rows."""
    if file_digest(path) != sha256:
        raise StoreError(f"{path} reads back differently from what was written; the disk may be failing")
    with pq.ParquetFile(path) as file:
        count = 0
        for count, expected in enumerate(_tables(journal, schema), start=1):
            if count > file.num_row_groups or not file.read_row_group(count - 1).equals(expected):
                raise StoreError(f"{path} reads back differently from what was written; the disk may be failing")
        if count != file.num_row_groups:
            raise StoreError(f"{path} holds {file.num_row_groups} row groups where {count} were written")
        return int(file.metadata.num_rows)
