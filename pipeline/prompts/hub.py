"""Rows of a dataset on the Hugging Face hub, streamed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.config import DatasetConfig
from pipeline.errors import InputError
from pipeline.prompts.raw import RawRow, one_line

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def looks_like_hub_id(path: str) -> bool:
    """Whether a path has the form ``name`` or ``owner/name``."""
    return _HUB_ID.fullmatch(path) is not None


def hub_rows(dataset: DatasetConfig) -> Iterator[RawRow]:
    """Opens the split at once and gives its rows as they arrive.

    Raises:
        InputError: naming ``dataset.path``, ``dataset.subset`` or ``dataset.split``; also later, where the hub
            stops answering half-way: the same command goes on from there.
    """
    splits = _open(dataset)
    if dataset.split not in splits:
        raise InputError("dataset.split", f"{dataset.split!r} is unknown", splits)
    return _stream(splits[dataset.split], dataset.path)


def _stream(rows: Any, path: str) -> Iterator[RawRow]:
    number = 0
    try:
        for columns in rows:
            number += 1
            yield RawRow(columns, f"{path} row {number}")
    except Exception as error:  # whatever the file format and the network raise, it ends the stream
        raise InputError("dataset.path", f"{path!r} stopped after row {number}: {one_line(error)}") from error


def _open(dataset: DatasetConfig) -> Any:
    """The splits by name, none of them read yet. All of them, so that a wrong name can be met with the right ones."""
    import datasets  # takes seconds, and only the hub needs it

    datasets.disable_progress_bars()
    try:
        with quiet("huggingface_hub", "datasets"):
            return datasets.load_dataset(dataset.path, dataset.subset, streaming=True)
    except ValueError as error:
        key = "dataset.subset" if _about_subset(error) else "dataset.path"
        raise InputError(key, f"{dataset.path!r}: {one_line(error)}") from error
    except Exception as error:  # connection, permission, missing repository, unknown file format
        raise InputError("dataset.path", f"{dataset.path!r} cannot be opened: {one_line(error)}") from error


def _about_subset(error: ValueError) -> bool:
    return "BuilderConfig" in str(error) or "Config name is missing" in str(error)


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Holds back warnings of libraries whose errors are reported anyway (such as one line for each retry)."""
    before = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
