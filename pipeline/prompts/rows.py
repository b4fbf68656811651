"""Where the rows of a dataset come from.

In this order: a bundled sample, where ``dataset.source=bundled`` and the path is the hub id of one; a local file or
folder, where the path exists; the hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pipeline
from pipeline.config import DatasetConfig
from pipeline.errors import InputError
from pipeline.prompts.files import ACCEPTED, find_files, is_file_name, read_files
from pipeline.prompts.hub import hub_rows, looks_like_hub_id
from pipeline.prompts.raw import BrokenRow, RawRow, Row

__all__ = ["BUNDLED", "BrokenRow", "RawRow", "Row", "bundled_dir", "read_rows"]

BUNDLED = {
    "glaiveai/glaive-function-calling-v2": "glaive_function_calling_v2.jsonl",
    "glaiveai/glaive-code-assistant-v3": "glaive_code_assistant_v3.jsonl",
    "nvidia/OpenCodeInstruct": "opencodeinstruct.jsonl",
}
"""Sample rows that come with the program: hub id -> file."""


def bundled_dir() -> Path:
    """The folder of the bundled rows: inside the package where it is installed, beside it in a checkout."""
    package = Path(pipeline.__file__).parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent / "data"


def read_rows(dataset: DatasetConfig) -> Iterator[Row]:
    """The dataset's rows in order, as a stream.

    The source is opened, and the first row read, before this returns, so that whatever is wrong with the
    configuration is known at once.

    Raises:
        InputError: naming ``dataset.path``, ``dataset.source``, ``dataset.split`` or ``dataset.subset``.
    """
    rows = _open(dataset)
    first = next(rows, None)
    if first is None:
        raise InputError("dataset.path", f"{dataset.path!r} holds no rows")
    return chain((first,), rows)


def _open(dataset: DatasetConfig) -> Iterator[Row]:
    if not dataset.path.strip():
        raise InputError("dataset.path", "it is empty", f"a hub id, a file ({ACCEPTED}), or a folder of such files")
    if dataset.source == "bundled" and dataset.path in BUNDLED:
        return _bundled(dataset)
    path = Path(dataset.path).expanduser()
    if os.path.exists(path):
        return _local(dataset, path)
    if dataset.source == "bundled":
        raise InputError(
            "dataset.path",
            f"{dataset.path!r} is neither bundled nor a local file or folder",
            f"a local file or folder, or with dataset.source=bundled one of {', '.join(BUNDLED)}",
        )
    if not looks_like_hub_id(dataset.path) or is_file_name(dataset.path):
        raise InputError("dataset.path", f"{dataset.path!r} does not exist", "a local file or folder, or a hub id")
    return hub_rows(dataset)


def _bundled(dataset: DatasetConfig) -> Iterator[Row]:
    """A subset is not looked at: it is the hub's, and the sample is one file."""
    path = bundled_dir() / BUNDLED[dataset.path]
    if not path.is_file():
        raise InputError("dataset.source", f"the bundled file {str(path)!r} is missing from this installation", "hub")
    _only_split(dataset)
    return read_files(find_files(path))


def _local(dataset: DatasetConfig, path: Path) -> Iterator[Row]:
    _only_split(dataset)
    if dataset.subset is not None:
        raise InputError("dataset.subset", f"{dataset.subset!r} is unknown: local files have no subsets", "null")
    return read_files(find_files(path))


def _only_split(dataset: DatasetConfig) -> None:
    if dataset.split != "train":
        raise InputError("dataset.split", f"{dataset.split!r} is unknown: files have one split", "train")
