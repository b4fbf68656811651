"""How many prompts a dataset has, where that can be known without reading it through."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.config import DatasetConfig
from pipeline.prompts.files import LocalFile, find_files
from pipeline.prompts.rows import BUNDLED, bundled_dir

_BLOCK = 1 << 20


def is_local(dataset: DatasetConfig) -> bool:
    """Whether the rows lie on this machine, bundled or as files."""
    return _place(dataset) is not None


def expected_prompts(dataset: DatasetConfig) -> int | None:
    """The number of outcomes that a run of the dataset ends with; None where only reading it all would tell.

    For progress and estimates: a blank line counts as a row here.
    """
    if dataset.turns == "all":
        return None
    place = _place(dataset)
    counts = [_rows(file) for file in find_files(place)] if place else [None]
    known = [count for count in counts if count is not None]
    if len(known) == len(counts):
        rows = sum(known)
        return dataset.samples * (min(rows, dataset.limit) if dataset.limit else rows)
    return dataset.samples * dataset.limit if dataset.limit else None


def _place(dataset: DatasetConfig) -> Path | None:
    if dataset.source == "bundled" and dataset.path in BUNDLED:
        return bundled_dir() / BUNDLED[dataset.path]
    path = Path(dataset.path).expanduser()
    return path if dataset.path and os.path.exists(path) else None


def _rows(file: LocalFile) -> int | None:
    if file.suffix == ".parquet":
        return int(pq.read_metadata(file.path).num_rows)
    if file.suffix == ".json" or file.codec:
        return None
    with file.path.open("rb") as stream:
        lines, last = 0, b"\n"
        while block := stream.read(_BLOCK):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")
