"""One completion as bytes, and many of them as Arrow columns, without a Python object per token.

A record is ``kind u8 | meta length u32 | meta (JSON) | arrays``: the meta holds every scalar column of the schema
and the length of each array, the arrays follow as raw little-endian values in the order of :data:`ARRAYS`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from pipeline.errors import StoreError
from pipeline.records import Answer, Completion, Segment, Totals

SCHEMA_VERSION = 1

_MESSAGE = pa.struct(
    [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")]
)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("dataset", pa.string()),
        ("source_id", pa.string()),
        ("turn", pa.int32()),
        ("sample", pa.int32()),
        ("messages", pa.list_(_MESSAGE)),
        ("tools", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("output_logprobs", pa.list_(pa.float32())),
        ("topk_ids", pa.list_(pa.list_(pa.int32()))),
        ("topk_logprobs", pa.list_(pa.list_(pa.float32()))),
        ("tail_logprob", pa.list_(pa.float32())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("cached_device_tokens", pa.int32()),
        ("cached_host_tokens", pa.int32()),
        ("retractions", pa.int32()),
        ("segments", pa.int32()),
        ("attempts", pa.int32()),
        ("latency_s", pa.float32()),
        ("queue_s", pa.float32()),
        ("engine", pa.string()),
        ("weight_version", pa.string()),
        ("sampling", pa.string()),
        ("created_at", pa.timestamp("us", tz="UTC")),
    ]
)

ARRAYS: dict[str, npt.DTypeLike] = {
    "prompt_ids": np.dtype("<i4"),
    "output_ids": np.dtype("<i4"),
    "output_logprobs": np.dtype("<f4"),
    "topk_ids": np.dtype("<i4"),
    "topk_logprobs": np.dtype("<f4"),
    "tail_logprob": np.dtype("<f4"),
}
_NESTED = ("topk_ids", "topk_logprobs")
_PREFIX = struct.Struct("<cI")
_SEGMENT_SCALARS = (
    *("finish_reason", "prompt_tokens", "completion_tokens", "cached_device_tokens", "cached_host_tokens"),
    *("retractions", "queue_s", "weight_version"),
)

COMPLETION = b"C"
SEGMENT = b"S"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a shard: its scalar columns by name, and its arrays by name, flat, None where null.

    ``topk_*`` have ``completion_tokens * k`` values.
    """

    scalars: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any] | None]

    @property
    def id(self) -> str:
        return str(self.scalars["id"])


def encode_completion(completion: Completion) -> bytes:
    """The journal record of a completion.

    Raises:
        StoreError: an array has not one entry per generated token; as a row it would shift those behind it.
    """
    answer = completion.answer
    arrays: dict[str, npt.NDArray[Any] | None] = {
        "prompt_ids": completion.prompt_ids,
        "output_ids": answer.output_ids,
        "output_logprobs": answer.output_logprobs,
        "topk_ids": answer.topk_ids,
        "topk_logprobs": answer.topk_logprobs,
        "tail_logprob": answer.tail_logprob,
    }
    for name, array in arrays.items():
        if name != "prompt_ids" and array is not None and len(array) != answer.completion_tokens:
            raise StoreError(
                f"{completion.prompt.id}: {name} has {len(array)} entries, completion_tokens is "
                f"{answer.completion_tokens}; it was not written"
            )
    return pack(COMPLETION, _scalars(completion), arrays)


def encode_segment(prompt_id: str, number: int, segment: Segment) -> bytes:
    """The journal record of a segment that is not its answer's last; ``number`` counts from 0."""
    answer = segment.answer
    scalars = {
        "id": prompt_id,
        "number": number,
        "attempts": segment.attempts,
        "latency_s": segment.latency_s,
        "engine": segment.engine,
        **{name: getattr(answer, name) for name in _SEGMENT_SCALARS},
    }
    arrays = {name: getattr(answer, name) for name in ARRAYS}
    return pack(SEGMENT, scalars, arrays)


def decode_segment(payload: bytes) -> Segment:
    """The inverse of :func:`encode_segment`."""
    row = unpack(payload)
    fields: dict[str, Any] = {name: row.scalars[name] for name in _SEGMENT_SCALARS}
    for name, array in row.arrays.items():
        if array is not None and name in _NESTED:
            array = array.reshape(fields["completion_tokens"], -1)
        fields[name] = array
    answer = Answer(**fields)
    return Segment(answer, row.scalars["attempts"], row.scalars["latency_s"], row.scalars["engine"])


def pack(kind: bytes, scalars: dict[str, Any], arrays: dict[str, npt.NDArray[Any] | None]) -> bytes:
    """Scalars and named arrays as one record; the names are those of :data:`ARRAYS`."""
    lengths = {name: None if (array := arrays[name]) is None else int(array.size) for name in ARRAYS}
    meta = orjson.dumps({"row": scalars, "lengths": lengths})
    blobs = [
        np.ascontiguousarray(array, dtype=dtype).tobytes()
        for name, dtype in ARRAYS.items()
        if (array := arrays[name]) is not None
    ]
    return b"".join([_PREFIX.pack(kind, len(meta)), meta, *blobs])


def unpack(payload: bytes) -> Row:
    """The inverse of :func:`pack`; the arrays are views of ``payload``."""
    _, meta_length = _PREFIX.unpack_from(payload)
    position = _PREFIX.size + meta_length
    meta = orjson.loads(payload[_PREFIX.size : position])
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    for name, dtype in ARRAYS.items():
        length = meta["lengths"][name]
        arrays[name] = None if length is None else np.frombuffer(payload, dtype, length, position)
        position += 4 * (length or 0)
    return Row(meta["row"], arrays)


def unpack_scalars(payload: bytes) -> dict[str, Any]:
    """Only the scalar columns of a record."""
    _, meta_length = _PREFIX.unpack_from(payload)
    row: dict[str, Any] = orjson.loads(payload[_PREFIX.size : _PREFIX.size + meta_length])["row"]
    return row


def record_kind(payload: bytes) -> bytes:
    """What a record holds, for example :data:`COMPLETION`."""
    return payload[:1]


def totals_of(scalars: dict[str, Any]) -> Totals:
    """The counts that one row adds to a run."""
    reason = scalars["finish_reason"]
    return Totals(
        rows=1,
        prompt_tokens=scalars["prompt_tokens"],
        completion_tokens=scalars["completion_tokens"],
        cached_device_tokens=scalars["cached_device_tokens"] or 0,
        cached_host_tokens=scalars["cached_host_tokens"] or 0,
        truncated=int(reason == "length"),
        retractions=scalars["retractions"] or 0,
        finish_reasons={reason: 1},
    )


def to_table(rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows as an Arrow table. Token arrays go from buffer to buffer."""
    columns = []
    for column in schema:
        if column.name in ARRAYS:
            columns.append(_token_column(column.name, column.type, rows))
        else:
            columns.append(pa.array([row.scalars[column.name] for row in rows], column.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _token_column(name: str, kind: pa.DataType, rows: Sequence[Row]) -> pa.Array:
    arrays = [row.arrays[name] for row in rows]
    values = _concatenate(arrays, ARRAYS[name])
    missing = pa.array([array is None for array in arrays], pa.bool_())
    if name not in _NESTED:
        return pa.ListArray.from_arrays(_offsets(array_sizes(arrays)), values, type=kind, mask=missing)
    sizes = array_sizes(arrays)
    counts = [int(row.scalars["completion_tokens"]) for row in rows]
    tokens = [0 if array is None else count for array, count in zip(arrays, counts, strict=True)]
    widths = [size // max(count, 1) for size, count in zip(sizes, tokens, strict=True)]
    per_position = np.repeat(np.array(widths, np.int64), np.array(tokens, np.int64))
    inner = pa.ListArray.from_arrays(_offsets(per_position), values, type=kind.value_type)
    return pa.ListArray.from_arrays(_offsets(tokens), inner, type=kind, mask=missing)


def array_sizes(arrays: Iterable[npt.NDArray[Any] | None]) -> list[int]:
    """Number of values of each array, 0 for None."""
    return [0 if array is None else int(array.size) for array in arrays]


def _concatenate(arrays: Iterable[npt.NDArray[Any] | None], dtype: npt.DTypeLike) -> pa.Array:
    present = [array for array in arrays if array is not None]
    return pa.array(np.concatenate(present) if present else np.empty(0, dtype))


def _offsets(lengths: Iterable[int] | npt.NDArray[Any]) -> pa.Array:
    counts = np.fromiter(lengths, np.int64) if not isinstance(lengths, np.ndarray) else lengths.astype(np.int64)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError("more than 2^31 values in one column of a row group; lower store.rows_per_shard")
    return pa.array(ends.astype(np.int32))


def _scalars(completion: Completion) -> dict[str, Any]:
    prompt, answer = completion.prompt, completion.answer
    return {
        "id": prompt.id,
        "dataset": prompt.dataset,
        "source_id": prompt.source_id,
        "turn": prompt.turn,
        "sample": prompt.sample,
        "messages": [asdict(message) for message in (*prompt.messages, completion.reply)],
        "tools": prompt.tools,
        "text": completion.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "cached_device_tokens": answer.cached_device_tokens,
        "cached_host_tokens": answer.cached_host_tokens,
        "retractions": answer.retractions,
        "segments": completion.segments,
        "attempts": completion.attempts,
        "latency_s": completion.latency_s,
        "queue_s": answer.queue_s,
        "engine": completion.engine,
        "weight_version": answer.weight_version,
        "sampling": completion.sampling,
        "created_at": completion.created_us,
    }
