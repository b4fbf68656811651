"""``failures.jsonl``: one line for each prompt that ended without a completion."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import orjson

from pipeline.records import Failure
from pipeline.store.durable import reached, sync_folder, write_all

log = logging.getLogger(__name__)

NAME = "failures.jsonl"


def read_failures(path: Path) -> Iterator[tuple[int, Failure]]:
    """Yields ``(end offset, failure)`` of each whole line; ends at the first that is torn or cannot be read.

    The prompt of a line that is not read has no outcome, so a run answers it again.
    """
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                failure = Failure(**orjson.loads(line))
            except (orjson.JSONDecodeError, TypeError):
                return
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield end, failure


class FailureLog:
    """Appends failures; ``valid_end`` is where the last whole line ends, and what lies behind it is cut."""

    def __init__(self, path: Path, valid_end: int) -> None:
        self.end = valid_end
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        torn = os.fstat(self._fd).st_size - valid_end
        if torn > 0:
            log.warning("%s: %d bytes behind the last whole line are cut; their prompts run again", path, torn)
            reached("failures: cut torn tail")
            os.ftruncate(self._fd, valid_end)
            os.fsync(self._fd)
        sync_folder(path.parent)
        os.lseek(self._fd, valid_end, os.SEEK_SET)

    def append(self, failure: Failure) -> None:
        """Writes one line; durable after the next :meth:`sync`.

        Raises:
            OSError: the line was not written; the file is as it was before.
        """
        line = orjson.dumps(asdict(failure), option=orjson.OPT_APPEND_NEWLINE)
        reached("failures: append")
        try:
            write_all(self._fd, line)
        except OSError:
            os.ftruncate(self._fd, self.end)
            os.lseek(self._fd, self.end, os.SEEK_SET)
            raise
        self.end += len(line)

    def duplicate_fd(self) -> int:
        """A second descriptor of the file, for a sync that must not hold up appends; the caller closes it."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Makes every line durable and closes."""
        reached("failures: sync")
        os.fdatasync(self._fd)
        os.close(self._fd)
