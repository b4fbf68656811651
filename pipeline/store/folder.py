"""A run on disk: the one place that decides whether a prompt has its outcome yet.

The rule that everything else leans on: an id is in the sealed shards, in a journal, or in ``failures.jsonl``, and
never in two of them. It holds at every instant because

* an outcome is appended to exactly one file, after the set of finished ids was asked;
* a journal's rows count until the manifest lists the shard made from it, and the shard's rows from then on;
* the manifest is replaced in one step, and only the journal it made obsolete is deleted after that.

A segment of an unfinished answer is no outcome. Its records stay in the current journal, and are copied into the next
one when that takes its place, until the answer's outcome is there.

Starting again therefore needs no repair beyond: cut torn tails, delete temporary files, delete the journal of a
shard that the manifest lists, seal the journals that are full.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.config import StoreConfig
from pipeline.digests import DigestSet
from pipeline.errors import InputError, StoreError
from pipeline.records import Completion, Failure, Outcome, Segment, Totals
from pipeline.store import failures as failure_file
from pipeline.store import manifest as manifest_file
from pipeline.store.durable import explain, explained, reached, sync_folder
from pipeline.store.failures import FailureLog, read_failures
from pipeline.store.journal import MAGIC, JournalWriter, read_records
from pipeline.store.lock import FolderLock
from pipeline.store.manifest import Capture, Manifest, ShardEntry
from pipeline.store.mirror import Mirror
from pipeline.store.rows import (
    COMPLETION,
    SEGMENT,
    decode_segment,
    encode_completion,
    encode_segment,
    record_kind,
    totals_of,
    unpack_scalars,
)
from pipeline.store.shards import read_ids, seal, shard_name

log = logging.getLogger(__name__)

OWN_NAMES = {"journal", "shards", "logs", "config.yaml", "failures.jsonl", "export", "report.html"}


@dataclass(slots=True)
class _Part:
    """A journal that is not a shard yet: its number, its rows, and where its last valid record ends."""

    number: int
    path: Path
    totals: Totals
    valid_end: int = 0


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where a segment's record lies: ``length`` bytes of payload in the journal at ``path``, from ``start``."""

    path: Path
    start: int
    length: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.length)


class RunFolder:
    """The run folder, open for writing. Its methods may be called from any thread.

    ``totals`` and ``failures`` count what has been written, in this session and before it.
    """

    def __init__(self, folder: Path, settings: StoreConfig, manifest: Manifest, lock: FolderLock) -> None:
        self.path = folder
        self.settings = settings
        self.manifest = manifest
        self.done = DigestSet()
        self.totals = Totals()
        self.failures = 0
        self._folder_lock = lock
        self._state = threading.RLock()
        self._sealing = threading.Lock()
        self._mirroring = threading.Lock()
        self._full: list[_Part] = []
        self._current: _Part | None = None
        self._segments: dict[str, list[_Extent]] = {}
        self._writer: JournalWriter | None = None
        # What a crash left is there to be read, and perhaps not on the disk yet.
        self._dirty = True
        self._closed = False
        self._recover()

    # -- asking ------------------------------------------------------------------------------------------------

    def is_done(self, prompt_id: str) -> bool:
        """Whether the prompt has its outcome, a completion or a recorded failure."""
        with self._state:
            return prompt_id in self.done

    def has_begun(self, prompt_id: str) -> bool:
        """Whether there are segments of an unfinished answer."""
        return prompt_id in self._segments

    def begun(self, prompt_id: str) -> list[Segment]:
        """The segments of an unfinished answer, in order."""
        with self._state:
            return [decode_segment(extent.read()) for extent in self._segments.get(prompt_id, [])]

    @property
    def waiting_to_seal(self) -> int:
        """Full journals that are not shards yet."""
        return len(self._full)

    # -- writing -----------------------------------------------------------------------------------------------

    def append(self, outcome: Outcome) -> None:
        """Writes an outcome. It survives the end of this process at once, and a power cut after :meth:`sync`.

        Raises:
            StoreError: the disk refused it (nothing was written), the prompt has an outcome already, or the next
                journal cannot be begun (:meth:`is_done` says that this outcome was written).
        """
        payload = encode_completion(outcome) if isinstance(outcome, Completion) else b""
        with self._state:
            prompt_id = outcome.id if isinstance(outcome, Failure) else outcome.prompt.id
            if self._closed:
                raise StoreError(f"the run folder is closed; {prompt_id} was not written")
            if prompt_id in self.done:
                raise StoreError(f"prompt {prompt_id} has an outcome already; the second was not written")
            with explained(f"writing {prompt_id}"):
                if isinstance(outcome, Failure):
                    self._failure_log.append(outcome)
                else:
                    self._open_writer().append(payload)
            # It is written: whatever goes wrong from here on, a second one would be one too many.
            self.done.add(prompt_id)
            self._segments.pop(prompt_id, None)
            self._dirty = True
            if isinstance(outcome, Failure):
                self.failures += 1
            else:
                self._count_row(payload)

    def append_segment(self, prompt_id: str, number: int, segment: Segment) -> None:
        """Writes one segment of an unfinished answer, so that another session can go on behind it.

        Raises:
            StoreError: the disk refused it, or it does not follow the segments that are there.
        """
        payload = encode_segment(prompt_id, number, segment)
        with self._state:
            if self._closed:
                raise StoreError(f"the run folder is closed; segment {number} of {prompt_id} was not written")
            if prompt_id in self.done:
                raise StoreError(f"prompt {prompt_id} has its outcome; segment {number} of it was not written")
            there = len(self._segments.get(prompt_id, []))
            if number != there:
                raise StoreError(f"segment {number} of {prompt_id} does not follow the {there} that are there")
            with explained(f"writing a segment of {prompt_id}"):
                extent = self._append_segment(payload)
            self._segments.setdefault(prompt_id, []).append(extent)
            self._dirty = True

    def sync(self) -> None:
        """Makes everything appended so far durable.

        Raises:
            StoreError: the disk refused it; what was appended is not durable yet.
        """
        files: list[int] = []
        try:
            with self._state:
                if not self._dirty or self._closed:
                    return
                self._dirty = False
                # Duplicates, so that appends go on (and a part may be closed) while the disk is busy.
                files.append(self._failure_log.duplicate_fd())
                if self._writer:
                    files.append(self._writer.duplicate_fd())
            reached("journal: sync")
            for fd in files:
                os.fdatasync(fd)
        except OSError as error:
            self._dirty = True
            raise explain(error, "syncing the journal") from error
        finally:
            for fd in files:
                os.close(fd)

    def seal_full(self) -> list[ShardEntry]:
        """Turns every full journal into a shard; the slow part runs without holding up :meth:`append`."""
        sealed = []
        with self._sealing:
            while self._full:
                sealed.append(self._seal(self._full[0]))
        return sealed

    def mirror_sealed(self, mirror: Mirror) -> int:
        """Copies every sealed shard that has no confirmed copy yet; returns how many were copied.

        Raises:
            StoreError: a copy failed; those before it are confirmed.
        """
        with self._mirroring:
            copied = 0
            for entry in [entry for entry in self.manifest.shards if not entry.mirrored]:
                mirror.put(self.path / "shards" / entry.name, entry)
                with self._state:
                    at = self.manifest.shards.index(entry)
                    self.manifest.shards[at] = replace(entry, mirrored=True)
                    self.save_manifest()
                copied += 1
            return copied

    def finish(self) -> None:
        """Seals what is left and marks the run complete."""
        while self._has_unsealed_rows():
            with self._state, explained("closing the last journal"):
                if self._current and self._current.totals.rows:
                    self._rotate()
            self.seal_full()
        with self._state:
            with explained("deleting the empty journal"):
                self._drop_empty_journal()
            self.manifest.complete = True
            self.save_manifest()

    def close(self) -> None:
        """Makes everything durable and lets the next writer in."""
        with self._sealing, self._state:
            if self._closed:
                return
            self._closed = True
            try:
                with explained("closing the run folder"):
                    self._failure_log.close()
                    if self._writer:
                        self._writer.close()
                        self._writer = None
            finally:
                self._folder_lock.release()

    def save_manifest(self) -> None:
        """Writes the manifest with the counts of now."""
        with self._state:
            self.manifest.failures = self.failures
            self.manifest.updated_at = now()
            with explained("writing the manifest"):
                manifest_file.save(self.manifest, self.path)

    def set_capture(self, capture: Capture) -> None:
        """Records what the distributions of this run are.

        Raises:
            InputError: rows of another kind are in the folder already.
        """
        known = self.manifest.capture
        if known is not None and known != capture and self.totals.rows:
            raise InputError(
                "run.dir",
                f"{self.path} holds rows with {known.logprobs} log-probabilities (missing: {list(known.missing)}), "
                f"this engine gives {capture.logprobs} ones (missing: {list(capture.missing)})",
            )
        self.manifest.capture = capture
        self.save_manifest()

    # -- parts -------------------------------------------------------------------------------------------------

    def _append_segment(self, payload: bytes) -> _Extent:
        writer = self._open_writer()
        writer.append(payload)
        return _Extent(writer.path, writer.end - len(payload), len(payload))

    def _count_row(self, payload: bytes) -> None:
        assert self._current is not None
        counts = totals_of(unpack_scalars(payload))
        self._current.totals.add(counts)
        self.totals.add(counts)
        if self._current.totals.rows >= self.settings.rows_per_shard:
            with explained("beginning the next journal"):
                self._rotate()

    def _has_unsealed_rows(self) -> bool:
        with self._state:
            return bool(self._full or (self._current and self._current.totals.rows))

    def _open_writer(self) -> JournalWriter:
        if self._writer is None:
            self._start_part()
            self._carry_segments_over()
        assert self._writer is not None
        return self._writer

    def _carry_segments_over(self) -> None:
        """Copies the segments of unfinished answers out of the journals that are about to become shards."""
        assert self._current is not None
        assert self._writer is not None
        for prompt_id, extents in self._segments.items():
            if any(extent.path != self._current.path for extent in extents):
                self._segments[prompt_id] = [self._append_segment(extent.read()) for extent in extents]
        if self._segments:
            self._writer.sync()

    def _start_part(self) -> None:
        path = self.path / "journal" / f"part-{self._next_number:05d}.journal"
        self._writer = JournalWriter(path)
        self._current = _Part(self._next_number, path, Totals())
        self._next_number += 1

    def _rotate(self) -> None:
        """Leaves the current journal to be sealed. Where this raises, it stays the current one."""
        part, writer, segments = self._current, self._writer, self._segments.copy()
        assert part is not None
        assert writer is not None
        writer.sync()
        self._current, self._writer = None, None
        try:
            if self._segments:
                # At once: the journal that is left may be sealed and deleted from now on.
                self._open_writer()
        except OSError:
            try:
                self._drop_empty_journal()
            finally:
                self._current, self._writer, self._segments = part, writer, segments
            raise
        self._full.append(part)
        writer.close()

    def _seal(self, part: _Part) -> ShardEntry:
        with explained(f"sealing {shard_name(part.number)}"):
            entry = seal(
                part.path,
                self.path / "shards",
                part.number,
                self.manifest.metadata(),
                self.settings.compression,
                self.settings.compression_level,
            )
        if entry.rows != part.totals.rows:
            raise StoreError(f"{entry.name} has {entry.rows} rows, its journal had {part.totals.rows}")
        with self._state:
            # In place, because others hold the manifest and set what is theirs in it meanwhile.
            shards, totals = self.manifest.shards, self.manifest.totals
            self.manifest.shards, self.manifest.totals = [*shards, entry], Totals()
            self.manifest.totals.add(totals)
            self.manifest.totals.add(part.totals)
            try:
                self.save_manifest()
            except StoreError:
                self.manifest.shards, self.manifest.totals = shards, totals
                raise
            self._full.remove(part)
        reached("journal: delete")
        with explained(f"deleting {part.path}"):
            part.path.unlink()
            sync_folder(part.path.parent)
        return entry

    def _drop_empty_journal(self) -> None:
        if self._writer and self._current:
            self._writer.close()
            self._current.path.unlink()
            self._current, self._writer = None, None
            self._segments.clear()

    # -- recovery ----------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        replaced = [self.path / f".{name}.tmp" for name in (manifest_file.NAME, failure_file.NAME, "config.yaml")]
        for leftover in (*replaced, *(self.path / "shards").glob(".*.tmp")):
            leftover.unlink(missing_ok=True)
        listed = {entry.name for entry in self.manifest.shards}
        self._check_shards(listed)
        for entry in self.manifest.shards:
            path = self.path / "shards" / entry.name
            ids = read_ids(path)
            if len(ids) != entry.rows:
                raise StoreError(f"{path} has {len(ids)} rows, the manifest says {entry.rows}")
            self.done.update(ids)
        self.totals.add(self.manifest.totals)
        parts = list(self._live_parts(listed))
        self._check_strays(listed, parts)
        self._next_number = 1 + max([*(_number(name) for name in listed), *(part.number for part in parts)], default=-1)
        for part in parts:
            if part is parts[-1] and part.totals.rows < self.settings.rows_per_shard:
                self._current, self._writer = part, JournalWriter(part.path, part.valid_end)
            elif part.totals.rows:
                JournalWriter(part.path, part.valid_end).close()
                self._full.append(part)
            else:
                part.path.unlink()
        self._recover_failures()
        self.done.update(self._journal_ids)
        del self._journal_ids
        self._segments = {name: extents for name, extents in self._segments.items() if name not in self.done}
        if self._segments:
            self._open_writer()
            self._carry_segments_over()

    def _live_parts(self, listed: set[str]) -> Iterator[_Part]:
        """The journals whose rows count, in order; one whose shard is listed is deleted, its rows are in the shard."""
        self._journal_ids: list[str] = []
        for path in sorted((self.path / "journal").glob("part-*.journal")):
            number = _number(path.name)
            if path.name != f"part-{number:05d}.journal":
                raise StoreError(f"{path} is no journal of this run, perhaps a copy; move it out of the run folder")
            if shard_name(number) in listed:
                path.unlink()
                continue
            part = _Part(number, path, Totals())
            for part.valid_end, payload in read_records(path):
                scalars = unpack_scalars(payload)
                if record_kind(payload) == COMPLETION:
                    part.totals.add(totals_of(scalars))
                    self._journal_ids.append(scalars["id"])
                elif record_kind(payload) == SEGMENT:
                    extent = _Extent(path, part.valid_end - len(payload), len(payload))
                    self._found_segment(scalars["id"], scalars["number"], extent)
            torn = path.stat().st_size - max(part.valid_end, len(MAGIC))
            if torn > 0:
                log.warning("%s: %d bytes behind the last whole record are cut; their prompts run again", path, torn)
            self.totals.add(part.totals)
            yield part

    def _found_segment(self, prompt_id: str, number: int, extent: _Extent) -> None:
        """A record met later is a copy that takes the place of the first."""
        extents = self._segments.setdefault(prompt_id, [])
        if number < len(extents):
            extents[number] = extent
        elif number == len(extents):
            extents.append(extent)

    def _recover_failures(self) -> None:
        path = self.path / failure_file.NAME
        end = 0
        ids = []
        for end, failure in read_failures(path):  # noqa: B007
            ids.append(failure.id)
        self.failures = len(ids)
        self.done.update(ids)
        self._failure_log = FailureLog(path, end)

    def _check_shards(self, listed: set[str]) -> None:
        for entry in self.manifest.shards:
            path = self.path / "shards" / entry.name
            if not path.is_file():
                raise StoreError(f"{path} is in the manifest and not on disk; restore it before going on")
            if path.stat().st_size != entry.bytes:
                raise StoreError(f"{path} has {path.stat().st_size} bytes, the manifest says {entry.bytes}")

    def _check_strays(self, listed: set[str], parts: list[_Part]) -> None:
        explained = listed | {shard_name(part.number) for part in parts}
        for path in (self.path / "shards").glob("*.parquet"):
            if path.name not in explained:
                raise StoreError(f"{path} is not in the manifest and has no journal; move it out of the run folder")


def _number(name: str) -> int:
    digits = name.removeprefix("part-").split(".")[0]
    return int(digits) if digits.isdecimal() else -1


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
