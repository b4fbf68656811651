"""File operations that survive a power cut: what is here is the whole vocabulary the store writes with.

Every step that changes what a later start would find is announced through :func:`reached` just before it happens,
so that a test can end the process exactly there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import StoreError

on_step: Callable[[str], None] | None = None
"""Called with the name of each step about to be taken; tests set it, nothing else does."""


def reached(step: str) -> None:
    """Announces the step about to be taken."""
    if on_step is not None:
        on_step(step)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of ``data``; ``os.write`` alone may stop short."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable (new, renamed and deleted files)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, step: str) -> None:
    """Puts ``data`` at ``path`` so that a reader sees the old content or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        reached(f"{step}: write")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        reached(f"{step}: rename")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns an operating-system error into the store's account of it."""
    try:
        yield
    except OSError as error:
        raise explain(error, doing) from error


def explain(error: OSError, doing: str) -> StoreError:
    """The store's one-line account of an operating-system error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"no space left while {doing}; everything reported as done is safe: free some space and run the same "
            "command again"
        )
    return StoreError(f"{doing} failed: {error.strerror or error} ({error.filename or 'no file name'})")
