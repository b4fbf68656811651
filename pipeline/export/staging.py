"""The writing side: files that appear whole or not at all.

A file is written under a hidden temporary name beside its place, synced, and renamed when every file of the export
is finished; until then an earlier export stays as it was. A killed export leaves temporary files that no trainer's
reader matches (they end in ``.tmp``) and that the next export writes over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import InputError, StoreError


class StagedFile:
    """One file in the making. Its temporary file is locked, so that two exports never write into one."""

    def __init__(self, path: Path) -> None:
        """Raises InputError when another export is writing the same file."""
        self.path = path
        self.rows = 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = os.fdopen(os.open(self._temporary, os.O_WRONLY | os.O_CREAT, 0o644), "wb")
        if not self._locked():
            self._file.close()
            raise InputError("export.dir", f"another export is writing {path}", "another folder, or wait for that one")
        self._file.truncate(0)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between our opening and locking it the file may have got its final name: then it is not ours to cut.
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._temporary))
        except (BlockingIOError, FileNotFoundError):
            return False

    def write_line(self, line: bytes) -> None:
        """Appends one row; ``line`` ends with its newline."""
        self._file.write(line)
        self.rows += 1

    def sync(self) -> None:
        """Puts what was written on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def rename(self) -> None:
        """Gives the file its name, in place of an earlier export's."""
        os.replace(self._temporary, self.path)
        self._file.close()

    def discard(self) -> None:
        """Deletes the file if it has not got its name; does nothing if it has."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            self._temporary.unlink()
        with contextlib.suppress(OSError):  # closing writes the rest, which a full disk refuses
            self._file.close()


class Staging:
    """The files of one export. :func:`staged` gives one out and finishes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[StagedFile] = []

    def open(self, name: str) -> StagedFile:
        """A new file of the export, which will replace one of that name."""
        file = StagedFile(self.folder / name)
        self.files.append(file)
        return file


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Staging]:
    """A folder to write an export into. The files opened in the block get their names, one after the other, when it
    ends without an exception; they are deleted when it ends with one.

    Raises:
        InputError: the folder cannot be made.
        StoreError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("export.dir", f"{folder} cannot be made ({error.strerror})", "a folder to write to") from None
    stage = Staging(folder)
    try:
        yield stage
        for file in stage.files:
            file.sync()
        for file in stage.files:
            file.rename()
        _sync_folder(folder)
    except OSError as error:
        raise StoreError(
            f"the export into {folder} could not be written: {error.strerror or error}; no file there is half-written"
        ) from None
    finally:
        for file in stage.files:
            file.discard()


def _sync_folder(folder: Path) -> None:
    """Makes the new names durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
