"""Where messages go: everything to the run folder's ``pipeline.log``, warnings to the terminal as well."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm


class _AboveTheBar(logging.Handler):
    """Prints to stderr through tqdm, so that a message and the bar do not overwrite each other."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def to_terminal() -> None:
    """Warnings and errors of ours are shown; other packages' chatter is not."""
    logger = logging.getLogger("pipeline")
    if not logger.handlers:
        handler = _AboveTheBar(logging.WARNING)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


@contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Everything from INFO up goes to ``path`` too, with times, until the end."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("pipeline")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
