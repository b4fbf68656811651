"""The reading side: rows of a run's sealed shards, one record batch in memory at a time.

Only the columns that trainers' text formats are made from are read; the distributions, most of a shard's bytes,
stay on disk. Rows come in the order of the manifest's shards, so that two exports of one folder are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import InputError, StoreError
from pipeline.records import Ids, Message

BATCH_ROWS = 128
"""Rows decoded at a time; at 8,000 tokens a row, some 4 MB of ids."""

_ID_LIST = pa.list_(pa.int32())
_IDS = ("prompt_ids", "output_ids")
_SCALARS = (
    "id",
    "dataset",
    "source_id",
    "turn",
    "sample",
    "messages",
    "tools",
    "text",
    "finish_reason",
    "completion_tokens",
    "engine",
    "sampling",
)


@dataclass(frozen=True, slots=True)
class Row:
    """What an exporter may use of one shard row; the names and meanings are those of the shard schema.

    ``prompt_ids`` int32 [p] and ``output_ids`` int32 [n], None where the engine gave no ids. ``messages`` ends with
    the answer. ``tools`` and ``sampling`` are JSON text.
    """

    id: str
    dataset: str
    source_id: str
    turn: int
    sample: int
    messages: tuple[Message, ...]
    tools: str | None
    text: str | None
    finish_reason: str
    completion_tokens: int
    engine: str | None
    sampling: str | None
    prompt_ids: Ids | None
    output_ids: Ids | None


@dataclass(frozen=True, slots=True)
class Shard:
    """One sealed shard, as the manifest lists it."""

    path: Path
    rows: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder as its manifest describes it: sealed shards only. ``complete``: no more will come."""

    shards: tuple[Shard, ...]
    complete: bool


def open_run(folder: Path) -> Run:
    """Reads the manifest of a finished or running folder; it is replaced whole, so one read is one state.

    Raises:
        InputError: there is no run, or none that this version can read, or nothing is sealed yet.
        StoreError: the manifest is damaged.
    """
    path = folder / "manifest.json"
    try:
        manifest = orjson.loads(path.read_bytes())
        version = manifest.get("schema_version", 1)
        shards = tuple(Shard(folder / "shards" / entry["name"], int(entry["rows"])) for entry in manifest["shards"])
        run = Run(shards, bool(manifest["complete"]))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("run.dir", f"{folder} holds no run (no manifest.json in it)", "the folder of a run") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{path} is not a run's manifest ({type(error).__name__}: {error})") from None
    if version != 1:
        raise InputError("run.dir", f"{folder} has shard schema {version}, which this version cannot read", "1")
    if not any(shard.rows for shard in run.shards):
        raise InputError(
            "run.dir",
            f"{folder} has no finished rows"
            + ("" if run.complete else " yet: they appear when a shard is sealed (every store.rows_per_shard rows)"),
            "a run with at least one row",
        )
    return run


def read_rows(run: Run) -> Iterator[Row]:
    """Every row of the sealed shards, in order.

    Raises:
        StoreError: a shard is missing, unreadable, or not what the manifest says; the text names it.
    """
    for shard in run.shards:
        yield from _shard_rows(shard)


def _shard_rows(shard: Shard) -> Iterator[Row]:
    for batch in _batches(shard):
        columns = [batch.column(name).to_pylist() for name in _SCALARS]
        arrays = [_id_arrays(shard, batch.column(name)) for name in _IDS]
        for values in zip(*columns, *arrays, strict=True):
            named = dict(zip(_SCALARS + _IDS, values, strict=True))
            named["messages"] = tuple(Message(**message) for message in named["messages"] or ())
            yield Row(**named)


def _batches(shard: Shard) -> Iterator[Any]:
    """The shard's record batches with the columns above, after its length has been compared with the manifest."""
    try:
        with pq.ParquetFile(shard.path) as file:
            if file.metadata.num_rows != shard.rows:
                raise _damaged(shard, f"holds {file.metadata.num_rows} rows where the manifest says {shard.rows}")
            missing = [name for name in _SCALARS + _IDS if name not in file.schema_arrow.names]
            if missing:
                raise _damaged(shard, f"lacks the columns {', '.join(missing)}")
            yield from file.iter_batches(BATCH_ROWS, columns=list(_SCALARS + _IDS))
    except FileNotFoundError:
        raise _damaged(shard, "is missing, though the manifest lists it") from None
    except (OSError, pa.ArrowException) as error:
        raise _damaged(shard, f"cannot be read: {str(error).splitlines()[0]}") from None


def _id_arrays(shard: Shard, column: Any) -> list[Ids | None]:
    """A list<int32> column as one int32 array a row (a view of the batch), None where the row is null."""
    try:
        column = column.cast(_ID_LIST)
    except pa.ArrowException:
        raise _damaged(shard, f"has token ids that are no int32 (their type is {column.type})") from None
    if column.values.null_count:
        raise _damaged(shard, "has a null among its token ids")
    values = column.values.to_numpy()
    offsets = column.offsets.to_numpy()
    present = column.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if ok else None for i, ok in enumerate(present)]


def _damaged(shard: Shard, problem: str) -> StoreError:
    return StoreError(f"{shard.path} {problem} (`audit run.dir={shard.path.parent.parent}` checks the whole run)")
