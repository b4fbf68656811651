"""Trainer-ready files from a run: ``export`` picks a trainer's module, feeds it the run, and reports.

A run is read once, a record batch at a time; what a trainer's module sees are :class:`Example` values, so that ids
and masks are the same whatever the format. An export is a function of the sealed shards and the ``export.*`` keys:
made again from the same folder, it has the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from pipeline.config import Config
from pipeline.errors import InputError
from pipeline.export import specforge, speculators
from pipeline.export.examples import Example, Selection
from pipeline.export.report import ExportedFile, ExportReport
from pipeline.export.shards import open_run, read_rows
from pipeline.export.staging import Staging, staged

__all__ = ["EXPORTERS", "ExportReport", "ExportedFile", "Exporter", "export"]


class Exporter(Protocol):
    """What a trainer's module has."""

    def write(self, examples: Iterable[Example], stage: Staging) -> None:
        """Writes the examples, which come in order and once, into files that ``stage`` opens."""

    def advice(self, folder: Path, longest: int) -> tuple[str, ...]:
        """Lines for the user: the options of the trainer that take the files; ``longest`` is in tokens."""


EXPORTERS: Mapping[str, Exporter] = {"specforge": specforge, "speculators": speculators}
"""By the name that ``to=`` takes."""


def export(config: Config) -> ExportReport:
    """Writes ``config.run.dir`` for the trainer ``config.export.to``, finished or not, sealed shards only.

    The files go to ``config.export.dir``, or to ``export/<to>`` in the run folder, and replace those of an earlier
    export.

    Raises:
        InputError: the trainer is not known, or the folder holds nothing that could be exported.
        StoreError: a shard cannot be read, or a file cannot be written; an earlier export is as it was.
    """
    name, max_length = config.export.to, config.export.max_length
    if name not in EXPORTERS:
        raise InputError("to", f"{name!r} is no trainer that an export is made for", sorted(EXPORTERS))
    if not config.run.dir:
        raise InputError("run.dir", "not given", "the folder of a run")
    if max_length is not None and max_length < 1:
        raise InputError("export.max_length", f"{max_length} is too small", "1 or more")
    run_dir = Path(config.run.dir)
    run = open_run(run_dir)
    folder = Path(config.export.dir) if config.export.dir else run_dir / "export" / name
    selection = Selection(max_length)
    with staged(folder) as stage:
        EXPORTERS[name].write(selection.examples(read_rows(run)), stage)
        if not selection.rows:
            raise _nothing_left(run_dir, name, selection)
    return ExportReport(
        to=name,
        run_dir=run_dir,
        files=tuple(ExportedFile(file.path, file.rows, file.path.stat().st_size) for file in stage.files),
        rows=selection.rows,
        prompt_tokens=selection.prompt_tokens,
        supervised_tokens=selection.supervised_tokens,
        longest=selection.longest,
        left_out={reason: tuple(ids) for reason, ids in selection.left_out.items()},
        complete=run.complete,
        advice=EXPORTERS[name].advice(folder.absolute(), selection.longest),
    )


def _nothing_left(run_dir: Path, name: str, selection: Selection) -> InputError:
    """Why no row could be exported, and what would do. Raised before an earlier export is replaced by nothing."""
    counts = {reason: len(ids) for reason, ids in selection.left_out.items()}
    if counts.get("too_long"):
        return InputError(
            "export.max_length",
            f"{selection.max_length} leaves no row of {run_dir}; the shortest has {selection.shortest_too_long} tokens",
            f"{selection.shortest_too_long} or more",
        )
    if counts.get("no_ids"):
        return InputError(
            "run.dir",
            f"the rows of {run_dir} have no token ids: the server that answered returned none (engine=openai), and "
            f"{name} is given exact ids, never text tokenised a second time",
            "a run made by SGLang's own interface: engine=cpu, gpu or attach",
        )
    return InputError("run.dir", f"every answer in {run_dir} is empty", "a run with at least one generated token")
