"""Rows of local files, read as a stream: memory does not grow with the size of a file.

A file that is damaged half-way gives every row before the damage and then one :class:`BrokenRow` for the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import InputError
from pipeline.prompts.json_stream import JsonStream
from pipeline.prompts.raw import BrokenRow, RawRow, Row, kind_of, one_line, short_digest

ACCEPTED = ".jsonl, .ndjson or .json, each also with .gz or .zst, and .parquet"

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BLOCK = 1 << 16
_BATCH_ROWS = 128
_BOM = b"\xef\xbb\xbf"
_NOT_ROWS = frozenset({"dataset_info.json", "dataset_infos.json"})
_UNREADABLE = (OSError, ValueError, NotImplementedError, RecursionError)
"""What Arrow and the JSON reader raise over a damaged file."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of rows. ``name`` is the path to show, ``suffix`` the kind of file, ``codec`` what it is packed with."""

    path: Path
    name: str
    suffix: str
    codec: str | None


def find_files(path: Path) -> list[LocalFile]:
    """The file, or the files of a folder in order of their relative paths, hidden ones left out.

    Raises:
        InputError: naming ``dataset.path``: a suffix that is not read, a folder with nothing to read, or Parquet
            without a readable footer.
    """
    files = _files_of_folder(path) if path.is_dir() else [_local_file(path, path.name)]
    readable = [file for file in files if file is not None]
    if not readable:
        what = "has no file that can be read" if path.is_dir() else "is of a kind that is not read"
        raise InputError("dataset.path", f"{str(path)!r} {what}", ACCEPTED)
    for file in readable:
        _check_footer(file)
    return readable


def is_file_name(path: str) -> bool:
    """Whether the path has a suffix that is read here."""
    return _local_file(Path(path), path) is not None


def read_files(files: list[LocalFile]) -> Iterator[Row]:
    """The rows of all files, one file after the other.

    Raises:
        InputError: where there is one file only and nothing at all of it can be read.
    """
    for file in files:
        yield from _read(file, alone=len(files) == 1)


def _read(file: LocalFile, alone: bool) -> Iterator[Row]:
    given = 0
    try:
        for row in _READERS[file.suffix](file):
            yield row
            given += 1
    except _UNREADABLE as error:
        if alone and not given:
            raise InputError("dataset.path", f"{str(file.path)!r} cannot be read: {one_line(error)}") from error
        problem = f"the rest of the file could not be read: {one_line(error)}"
        yield BrokenRow(f"{file.name} after row {given}", short_digest(f"{file.name}:{given}".encode()), problem)


def _files_of_folder(folder: Path) -> list[LocalFile | None]:
    relative = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = (path for path in relative if not any(part.startswith(".") for part in path.parts))
    names = sorted(path.as_posix() for path in visible if path.name not in _NOT_ROWS)
    return [_local_file(folder / name, name) for name in names]


def _local_file(path: Path, name: str) -> LocalFile | None:
    bare = Path(path.name.lower())
    codec = _CODECS.get(bare.suffix)
    suffix = Path(bare.stem).suffix if codec else bare.suffix
    if suffix not in _READERS or (codec and suffix == ".parquet"):
        return None
    return LocalFile(path, name, suffix, codec)


def _check_footer(file: LocalFile) -> None:
    if file.suffix != ".parquet":
        return
    try:
        pq.ParquetFile(file.path).close()
    except _UNREADABLE as error:
        raise InputError("dataset.path", f"{str(file.path)!r} is not readable Parquet: {one_line(error)}") from error


# JSON, a row a line


def _line_rows(file: LocalFile) -> Iterator[Row]:
    for number, line in enumerate(_lines(_blocks(file)), start=1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.isspace() and text:
            yield _line_row(text, f"{file.name} line {number}")


def _line_row(line: bytes, where: str) -> Row:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BrokenRow(where, short_digest(line), f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start}")
    except (ValueError, RecursionError) as error:
        return BrokenRow(where, short_digest(line), f"not JSON: {one_line(error)}")
    return _object_row(value, line, where)


def _object_row(value: Any, source: bytes, where: str) -> Row:
    if isinstance(value, dict):
        return RawRow(value, where)
    return BrokenRow(where, short_digest(source), f"expected an object, found {kind_of(value)}")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Splits at b"\\n" and nothing else; joins the pieces of a long line once, at its end."""
    pieces: list[bytes] = []
    for block in blocks:
        *whole, rest = block.split(b"\n")
        if whole:
            yield b"".join([*pieces, whole[0]])
            yield from whole[1:]
            pieces = []
        pieces.append(rest)
    if last := b"".join(pieces):
        yield last


# JSON, one list or one object


def _json_rows(file: LocalFile) -> Iterator[Row]:
    for number, (value, text) in enumerate(JsonStream(_blocks(file)).values(), start=1):
        where = f"{file.name} row {number}"
        source = text.encode("utf-8", "surrogateescape")
        if _is_utf8(source):
            yield _object_row(value, source, where)
        else:
            yield BrokenRow(where, short_digest(source), "not UTF-8")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# Parquet


def _parquet_rows(file: LocalFile) -> Iterator[Row]:
    number = 0
    # Buffered, so that a column chunk of a gigabyte is not read whole.
    options = {"buffer_size": _BLOCK, "pre_buffer": False, "page_checksum_verification": True}
    with pq.ParquetFile(file.path, **options) as parquet:
        # One row group at a time: a batch never holds back rows of a sound group behind those of a damaged one.
        for group in range(parquet.num_row_groups):
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False):
                yield from _batch_rows(batch, file.name, number)
                number += batch.num_rows


def _batch_rows(batch: Any, name: str, before: int) -> Iterator[Row]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            yield _single_row(batch.slice(index, 1), f"{name} row {before + index + 1}")
        return
    for index, columns in enumerate(rows):
        yield RawRow(columns, f"{name} row {before + index + 1}")


def _single_row(row: Any, where: str) -> Row:
    try:
        return RawRow(row.to_pylist()[0], where)
    except UnicodeDecodeError:
        return BrokenRow(where, short_digest(row.serialize().to_pybytes()), "text that is not UTF-8")


_READERS: dict[str, Callable[[LocalFile], Iterator[Row]]] = {
    ".jsonl": _line_rows,
    ".ndjson": _line_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


# Bytes


def _blocks(file: LocalFile) -> Iterator[bytes]:
    """The file's bytes, unpacked; raises OSError where they end in damage, after every byte before it."""
    given = 0
    try:
        with pa.input_stream(str(file.path), compression=file.codec) as stream:
            while block := stream.read(_BLOCK):
                yield block
                given += len(block)
    except OSError as error:
        # Arrow forgets what it had unpacked of a read that fails, so that piece is fetched again byte by byte.
        if last := _bytes_until_damage(file, given):
            yield last
        raise error


def _bytes_until_damage(file: LocalFile, start: int) -> bytes:
    found = bytearray()
    with pa.input_stream(str(file.path), compression=file.codec) as stream:
        for _ in range(start // _BLOCK):
            stream.read(_BLOCK)
        try:
            while len(found) < _BLOCK:
                found += stream.read(1)
        except OSError:
            pass
    return bytes(found)
