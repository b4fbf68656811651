"""The progress of a run folder, whether a process is writing it or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pipeline.config import DatasetConfig
from pipeline.progress import REPORT
from pipeline.prompts.count import expected_prompts
from pipeline.store import failures as failure_file
from pipeline.store import manifest as manifest_file
from pipeline.store.failures import read_failures
from pipeline.store.journal import count_records
from pipeline.store.lock import is_locked
from pipeline.store.manifest import Manifest
from pipeline.store.rows import COMPLETION


@dataclass(frozen=True, slots=True)
class Status:
    """``sealed`` rows are in shards, ``journalled`` ones in the journal; both are safe. ``last_report`` is the state
    line that the run showed last."""

    manifest: Manifest
    live: bool
    sealed: int
    journalled: int
    failures: dict[str, int]
    expected: int | None
    last_report: str | None

    @property
    def state(self) -> str:
        """One word or two."""
        if self.live:
            return "running"
        return "complete" if self.manifest.complete else "stopped (the same run command goes on from here)"


def read_status(folder: Path) -> Status:
    """Looks at a run folder without touching it.

    Raises:
        InputError: it is no run folder.
    """
    live = is_locked(folder)
    manifest, journalled = _counted(folder)
    report = _last_report(folder)
    return Status(
        manifest=manifest,
        live=live,
        sealed=manifest.totals.rows,
        journalled=journalled,
        failures=failure_kinds(folder),
        expected=report.get("expected") or expected_prompts(DatasetConfig(**manifest.content["dataset"])),
        last_report=report.get("text"),
    )


def _counted(folder: Path) -> tuple[Manifest, int]:
    """The manifest, and the rows in journals whose shard it does not list."""
    for _ in range(3):
        manifest = manifest_file.load(folder)
        sealed = {Path(entry.name).stem for entry in manifest.shards}
        journals = [path for path in (folder / "journal").glob("part-*.journal") if path.stem not in sealed]
        rows = sum(count_records(path, COMPLETION) for path in journals)
        if all(path.exists() for path in journals):
            break
        # The run sealed one meanwhile: its rows are in a shard that this manifest does not list yet.
    return manifest, rows


def failure_kinds(folder: Path) -> dict[str, int]:
    """Recorded failures by kind."""
    return dict(Counter(failure.kind for _, failure in read_failures(folder / failure_file.NAME)))


def _last_report(folder: Path) -> dict[str, Any]:
    """What the run showed last; nothing before its first report, or while a report is being written."""
    try:
        found = orjson.loads((folder / "journal" / REPORT).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
