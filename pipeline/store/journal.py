"""An append-only file of checked records: where an outcome lives between its arrival and its shard.

Layout: an 8-byte magic, then records of ``length u32 | crc32 u32 | payload``, little-endian. The checksum covers
the length too, so a tail of zeros (what a power cut may leave) is no record. Reading stops at the first record that
is incomplete or does not match its checksum; opening for writing cuts the file there. What is cut was never
reported as done, so it is generated again, not lost.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import StoreError
from pipeline.store.durable import reached, sync_folder, write_all

MAGIC = b"EAGLE3J1"
_HEAD = struct.Struct("<II")


def frame(payload: bytes) -> bytes:
    """One record as it lies in the file."""
    length = struct.pack("<I", len(payload))
    return length + struct.pack("<I", _checksum(length, payload)) + payload


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields ``(end offset, payload)`` of each valid record from the start; ends at the first that is not.

    Raises:
        StoreError: the file is a journal of another kind (its first 8 bytes are whole and wrong).
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if len(magic) < len(MAGIC):
            return
        if magic != MAGIC:
            if _only_zeros(magic, file):  # a power cut came before the magic was on the disk, so no record is
                return
            raise StoreError(f"{path} is not a journal that this version wrote")
        end = len(MAGIC)
        size = os.fstat(file.fileno()).st_size
        while (head := file.read(_HEAD.size)) and len(head) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            if length > size - end - _HEAD.size:
                return
            payload = file.read(length)
            if _checksum(head[:4], payload) != crc:
                return
            end += _HEAD.size + length
            yield end, payload


def count_records(path: Path, kind: bytes) -> int:
    """How many records begin with ``kind``, from the frames alone: quick, and fit for a file being written.

    0 where there is no file: a journal is deleted as soon as its rows are in a shard.
    """
    found = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    with file:
        size = os.fstat(file.fileno()).st_size
        end = len(MAGIC)
        while end + _HEAD.size < size:
            file.seek(end)
            length, _ = _HEAD.unpack(file.read(_HEAD.size))
            end += _HEAD.size + length
            if end <= size and file.read(min(length, len(kind))) == kind:
                found += 1
    return found


class JournalWriter:
    """Appends records to one journal file. Not safe for use from several threads at once.

    ``valid_end`` is the offset behind the last valid record of an existing file, as :func:`read_records` found it;
    what lies behind it is cut. 0 starts the file anew; where that fails, there is no file.
    """

    def __init__(self, path: Path, valid_end: int = 0) -> None:
        self.path = path
        self.end = valid_end
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if valid_end < len(MAGIC):
                self._restart()
            elif os.fstat(self._fd).st_size > valid_end:
                reached("journal: cut torn tail")
                os.ftruncate(self._fd, valid_end)
                os.fsync(self._fd)
            os.lseek(self._fd, self.end, os.SEEK_SET)
        except OSError:
            os.close(self._fd)
            if valid_end < len(MAGIC):
                path.unlink(missing_ok=True)
            raise

    def append(self, payload: bytes) -> None:
        """Writes one record. It outlives this process at once, and a power cut after the next :meth:`sync`.

        Raises:
            OSError: the record was not written; the file is as it was before.
        """
        data = frame(payload)
        reached("journal: append")
        try:
            write_all(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, self.end)
            os.lseek(self._fd, self.end, os.SEEK_SET)
            raise
        self.end += len(data)

    def sync(self) -> None:
        """Makes every record appended so far durable."""
        reached("journal: sync")
        os.fdatasync(self._fd)

    def duplicate_fd(self) -> int:
        """A second descriptor of the file, for a sync that must not hold up appends; the caller closes it."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Syncs and closes."""
        self.sync()
        os.close(self._fd)

    def _restart(self) -> None:
        os.ftruncate(self._fd, 0)
        write_all(self._fd, MAGIC)
        os.fsync(self._fd)
        sync_folder(self.path.parent)
        self.end = len(MAGIC)


def _only_zeros(start: bytes, rest: BinaryIO) -> bool:
    return not any(start) and not any(any(block) for block in iter(lambda: rest.read(1 << 16), b""))


def _checksum(length: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(length))
