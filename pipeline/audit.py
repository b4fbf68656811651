"""Re-reads a run folder and checks every rule that it promises to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import DatasetConfig
from pipeline.digests import DigestSet
from pipeline.errors import PipelineError
from pipeline.prompts import read_prompts
from pipeline.prompts.count import is_local
from pipeline.records import Totals
from pipeline.store import failures as failure_file
from pipeline.store import manifest as manifest_file
from pipeline.store.failures import read_failures
from pipeline.store.journal import read_records
from pipeline.store.lock import is_locked
from pipeline.store.manifest import Capture, Manifest, ShardEntry
from pipeline.store.rows import ARRAYS, COMPLETION, SCHEMA, Row, record_kind, to_table, totals_of, unpack
from pipeline.store.shards import file_digest

SUM_TOLERANCE = 1e-3
ENTRY_TOLERANCE = 1e-5
_DISTRIBUTION = ("topk_ids", "topk_logprobs", "tail_logprob")
_MOST_SHOWN = 20
_COUNTED = ["finish_reason", "prompt_tokens", "completion_tokens", "cached_device_tokens", "cached_host_tokens"]


@dataclass(slots=True)
class Audit:
    """What was looked at and what was found; ``problems`` is empty for a sound folder, ``notes`` says what could
    not be checked."""

    rows: int = 0
    positions: int = 0
    shards: int = 0
    failures: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def audit(folder: Path) -> Audit:
    """Checks a folder: shards against the manifest, rows against the schema's rules, ids against each other, and
    the outcomes against the dataset where that can be read here.

    Raises:
        InputError: it is no run folder.
    """
    found = Audit()
    if is_locked(folder):
        found.notes.append("a process is writing this run: what it moves meanwhile may look broken here")
    manifest = manifest_file.load(folder)
    ids = DigestSet()
    totals = Totals()
    for entry in manifest.shards:
        found.shards += 1
        try:
            _audit_shard(folder / "shards" / entry.name, entry, manifest, ids, totals, found)
        except Exception as error:  # a damaged file may break its reading anywhere
            found.problems.append(f"{entry.name}: cannot be read: {error}")
    if totals != manifest.totals:
        found.problems.append(f"manifest.json: totals are {manifest.totals}, the shards hold {totals}")
    _audit_names(folder, manifest, found)
    _audit_journals(folder, manifest, ids, found)
    _audit_failures(folder, manifest, ids, found)
    _audit_coverage(manifest, ids, found)
    return found


def _audit_shard(
    path: Path, entry: ShardEntry, manifest: Manifest, ids: DigestSet, totals: Totals, found: Audit
) -> None:
    if file_digest(path) != entry.sha256:
        found.problems.append(f"{entry.name}: its SHA-256 is not the one in the manifest")
    with pq.ParquetFile(path) as file:
        if not file.schema_arrow.remove_metadata().equals(SCHEMA):
            found.problems.append(f"{entry.name}: its columns are not those of schema version 1")
            return
        facts = orjson.loads((file.schema_arrow.metadata or {}).get(b"eagle3", b"{}"))
        if facts.get("fingerprint") not in (manifest.fingerprint, None) or "fingerprint" not in facts:
            found.notes.append(f"{entry.name}: made before the run was extended, or by another run (fingerprint)")
        if file.metadata.num_rows != entry.rows:
            found.problems.append(f"{entry.name}: {file.metadata.num_rows} rows, the manifest says {entry.rows}")
        for group in range(file.num_row_groups):
            _audit_table(entry.name, file.read_row_group(group), manifest, ids, totals, found)


def _audit_table(where: str, table: pa.Table, manifest: Manifest, ids: DigestSet, totals: Totals, found: Audit) -> None:
    for row in table.select([*_COUNTED, "retractions"]).to_pylist():
        totals.add(totals_of(row))
    names = table["id"].to_pylist()
    for name in names:
        if not ids.add(name):
            found.problems.append(f"{where}: {name} is there twice")
    for index, name in enumerate(names):
        found.rows += 1
        found.positions += table["completion_tokens"][index].as_py()
        problems = row_problems(table.slice(index, 1), manifest.capture)
        found.problems += [f"{where}: {name}: {problem}" for problem in problems]


def row_problems(row: pa.Table, capture: Capture | None) -> Iterator[str]:
    """The rules that a one-row table breaks, in words. ``capture`` is what the run keeps of the distributions."""
    count = row["completion_tokens"][0].as_py()
    if row["finish_reason"][0].as_py() not in ("stop", "length"):
        yield f"finish_reason is {row['finish_reason'][0].as_py()!r}"
    if not row["messages"][0].as_py():
        yield "it has no messages"
    if capture is not None:
        yield from _null_problems(row, capture)
    prompt_ids, output_ids = _values(row, "prompt_ids"), _values(row, "output_ids")
    if prompt_ids is not None and len(prompt_ids) != row["prompt_tokens"][0].as_py():
        yield f"{len(prompt_ids)} prompt ids, prompt_tokens is {row['prompt_tokens'][0].as_py()}"
    for name in ("output_ids", "output_logprobs", "tail_logprob"):
        values = _values(row, name)
        if values is not None and len(values) != count:
            yield f"{name} has {len(values)} entries, completion_tokens is {count}"
            return
    logprobs = _values(row, "output_logprobs")
    if logprobs is not None and not (np.isfinite(logprobs).all() and (logprobs <= SUM_TOLERANCE).all()):
        yield "output_logprobs holds a value that is no log-probability"
    if count and capture is not None:
        yield from _distribution_problems(row, count, capture.top_k, output_ids, logprobs)


def _null_problems(row: pa.Table, capture: Capture) -> Iterator[str]:
    """A column is there in every row of a run, or in none."""
    lacking = {*capture.missing, *(_DISTRIBUTION if capture.top_k == 0 else ())}
    for name in ARRAYS:
        is_null = row[name].null_count > 0
        if is_null and name not in lacking:
            yield f"{name} is null, the run has it"
        elif not is_null and name in lacking:
            yield f"{name} is there, the run lacks it"


def _distribution_problems(row: pa.Table, count: int, k: int, output_ids: Any, logprobs: Any) -> Iterator[str]:
    ids, values, tail = _matrix(row, "topk_ids"), _matrix(row, "topk_logprobs"), _values(row, "tail_logprob")
    if ids is None or values is None or tail is None:
        return
    if ids.shape != (count, k) or values.shape != (count, k):
        yield f"topk_ids is {ids.shape} and topk_logprobs {values.shape}, expected {(count, k)}"
        return
    if (values[:, 1:] > values[:, :-1]).any():
        yield "topk_logprobs is not in descending order"
    sums = np.exp(values.astype(np.float64)).sum(axis=1) + np.exp(tail.astype(np.float64))
    if (worst := np.abs(sums - 1.0).max()) > SUM_TOLERANCE or np.isnan(worst):
        yield f"top-k and tail sum to 1 only within {worst:.2e}"
    if output_ids is None or logprobs is None:
        return
    position, entry = np.nonzero(ids == output_ids[:, None])
    if len(position) and (gap := np.abs(values[position, entry] - logprobs[position]).max()) > ENTRY_TOLERANCE:
        yield f"a sampled token's log-probability differs from its top-k entry by {gap:.2e}"


def _values(row: pa.Table, name: str) -> Any:
    scalar = row[name].chunk(0)
    return None if scalar.null_count else scalar.flatten().to_numpy(zero_copy_only=False)


def _matrix(row: pa.Table, name: str) -> Any:
    """[positions, entries], or None where null; [positions, -1] where positions differ in width."""
    column = row[name].chunk(0)
    if column.null_count:
        return None
    inner = column.flatten()
    widths = np.diff(inner.offsets.to_numpy())
    flat = inner.flatten().to_numpy(zero_copy_only=False)
    if len(widths) and (widths == widths[0]).all():
        return flat.reshape(len(widths), int(widths[0]))
    return np.empty((len(widths), 0))


def _audit_names(folder: Path, manifest: Manifest, found: Audit) -> None:
    listed = {entry.name for entry in manifest.shards}
    journals = {f"{path.stem}.parquet" for path in (folder / "journal").glob("part-*.journal")}
    for path in sorted((folder / "shards").glob("*.parquet")):
        if path.name not in listed | journals:
            found.problems.append(f"shards/{path.name} is not in the manifest")


def _audit_journals(folder: Path, manifest: Manifest, ids: DigestSet, found: Audit) -> None:
    listed = {Path(entry.name).stem for entry in manifest.shards}
    waiting = 0
    for path in sorted((folder / "journal").glob("part-*.journal")):
        if path.stem in listed:
            continue
        try:
            for row in _completions(path):
                waiting += 1
                found.rows += 1
                found.positions += row.scalars["completion_tokens"]
                if not ids.add(row.id):
                    found.problems.append(f"{path.name}: {row.id} is there twice")
                problems = row_problems(to_table([row]), manifest.capture)
                found.problems += [f"{path.name}: {row.id}: {text}" for text in problems]
        except (OSError, PipelineError) as error:
            found.problems.append(f"{path.name}: cannot be read: {error}")
    if waiting and manifest.complete:
        found.problems.append(f"the run is marked complete, and {waiting} rows are still in the journal")


def _completions(path: Path) -> Iterator[Row]:
    for _, payload in read_records(path):
        if record_kind(payload) == COMPLETION:
            yield unpack(payload)


def _audit_failures(folder: Path, manifest: Manifest, ids: DigestSet, found: Audit) -> None:
    path = folder / failure_file.NAME
    end = 0
    for end, failure in read_failures(path):  # noqa: B007
        found.failures += 1
        if not ids.add(failure.id):
            found.problems.append(f"failures.jsonl: {failure.id} has another outcome too")
    if path.exists() and path.stat().st_size != end:
        found.problems.append(f"failures.jsonl: what follows byte {end} cannot be read")
    if manifest.complete and found.failures != manifest.failures:
        found.problems.append(f"failures.jsonl has {found.failures} lines, the manifest says {manifest.failures}")


def _audit_coverage(manifest: Manifest, ids: DigestSet, found: Audit) -> None:
    """Every prompt of the dataset has its outcome, and every outcome its prompt."""
    dataset = DatasetConfig(**manifest.content["dataset"])
    if not manifest.complete:
        found.notes.append("the run is not complete: whether every prompt has its outcome is not known yet")
        return
    if not is_local(dataset):
        found.notes.append("the dataset is on a hub: its prompts were not compared with the outcomes")
        return
    known = 0
    try:
        for prompt in read_prompts(dataset):
            if prompt.id in ids:
                known += 1
            else:
                found.problems.append(f"{prompt.id} has no outcome")
    except PipelineError as error:
        found.notes.append(f"the dataset cannot be read here, its prompts were not compared: {error}")
        return
    if known < len(ids):
        found.problems.append(f"{len(ids) - known} outcomes belong to no prompt of the dataset")


def report_lines(found: Audit) -> list[str]:
    """The audit as lines for a terminal."""
    lines = [
        f"read {found.shards} shards, {found.rows} rows, {found.positions} positions, {found.failures} failures",
        *(f"note: {note}" for note in dict.fromkeys(found.notes)),
        *(f"BROKEN {problem}" for problem in found.problems[:_MOST_SHOWN]),
    ]
    if len(found.problems) > _MOST_SHOWN:
        lines.append(f"... and {len(found.problems) - _MOST_SHOWN} more")
    lines.append("the run is sound" if not found.problems else f"{len(found.problems)} rules are broken")
    return lines
