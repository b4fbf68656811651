"""What an export did, as values; the command line prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.export.examples import Reason

IDS_SHOWN = 20

_REASONS: dict[Reason, str] = {
    "no_ids": "the server that answered returned no token ids",
    "empty_answer": "nothing was generated, so nothing could be supervised",
    "too_long": "longer than export.max_length",
}


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of the export; ``bytes`` is its size on disk."""

    path: Path
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Rows and tokens are those of each file; ``longest`` is the longest row in tokens. ``left_out`` maps a reason
    to the ids of its rows. ``complete``: the run was finished, so nothing is missing because it was not yet there.
    ``advice`` tells which option of the trainer takes which file."""

    to: str
    run_dir: Path
    files: tuple[ExportedFile, ...]
    rows: int
    prompt_tokens: int
    supervised_tokens: int
    longest: int
    left_out: Mapping[Reason, tuple[str, ...]]
    complete: bool
    advice: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report for a person: at most :data:`IDS_SHOWN` ids for each reason; the values here have all."""
        lines = [
            f"{self.rows:,} rows of {self.run_dir} for {self.to}: {self.prompt_tokens:,} prompt tokens (mask 0), "
            f"{self.supervised_tokens:,} generated (mask 1), longest row {self.longest:,}"
        ]
        lines += [f"  {file.path}  {file.rows:,} rows, {file.bytes:,} bytes" for file in self.files]
        lines += [
            f"left out, {_REASONS[reason]}: {len(ids):,} ({_listed(ids)})" for reason, ids in self.left_out.items()
        ]
        if not self.complete:
            lines.append("the run is not complete: rows that are not in a sealed shard yet are not exported yet")
        return [*lines, *self.advice]


def _listed(ids: tuple[str, ...]) -> str:
    more = len(ids) - IDS_SHOWN
    return ", ".join(ids[:IDS_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
