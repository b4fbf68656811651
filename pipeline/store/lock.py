"""One writer per run folder, held by a lock that the kernel releases when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from pipeline.errors import InputError

NAME = "lock"


class FolderLock:
    """An advisory lock on ``journal/lock``; the file holds the process id of its last holder."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError when another process holds it."""
        path = folder / "journal" / NAME
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._acquired():
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise InputError("run.dir", f"{folder} is being written by another process (pid {holder})")
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            os.close(self._fd)
            raise

    def _acquired(self) -> bool:
        # A `status` that looks at the lock holds it for an instant; that must not turn a writer away.
        for pause in (0.05, 0.1, 0.2, 0.0):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(pause)
        return False

    def release(self) -> None:
        """Lets the next writer in."""
        os.close(self._fd)


def is_locked(folder: Path) -> bool:
    """Whether a process is writing the run folder now."""
    try:
        fd = os.open(folder / "journal" / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
