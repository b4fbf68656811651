"""Every prompt ends in exactly one outcome, whatever is killed and whenever."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_faults import (
    ROWS_PER_SHARD,
    KilledSessions,
    PowerCut,
    begin,
    folder_in_memory,
    full_disk,
    never_wait_for_the_disk,
    session,
)
from store_rows import (
    Contents,
    K,
    abandon,
    completion,
    config_of,
    contents,
    failure,
    open_folder,
    outcome_of,
    prompt,
    prompts_of,
    segment_bytes,
    segments_of,
    temporary_files,
    write_dataset,
)

from pipeline.audit import audit
from pipeline.config import DatasetConfig
from pipeline.errors import InputError, StoreError
from pipeline.records import Completion, Failure, Segment, Totals
from pipeline.store import Capture, RunFolder, durable
from pipeline.store import manifest as manifest_file
from pipeline.store.journal import frame
from pipeline.store.lock import FolderLock, is_locked
from pipeline.store.rows import encode_completion, totals_of, unpack_scalars


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    never_wait_for_the_disk(monkeypatch)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    """Five completions and a failure: two full shards, and one that is not."""
    return write_dataset(tmp_path_factory.mktemp("few") / "prompts.jsonl", 6)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    """Seven completions and two failures."""
    return write_dataset(tmp_path_factory.mktemp("dataset") / "prompts.jsonl", 9)


def totals_over(outcomes: list[Completion | Failure]) -> Totals:
    totals = Totals()
    for outcome in outcomes:
        if isinstance(outcome, Completion):
            totals.add(totals_of(unpack_scalars(encode_completion(outcome))))
    return totals


def assert_whole(path: Path, dataset: DatasetConfig) -> None:
    """Every prompt once, the sums right, nothing left over, and the audit of the same mind."""
    outcomes = [outcome_of(asked) for asked in prompts_of(dataset)]
    found = contents(path)
    assert Counter(found.all) == Counter(asked.id for asked in prompts_of(dataset))
    assert sorted(found.failures) == sorted(one.id for one in outcomes if isinstance(one, Failure))
    assert found.journals == []
    assert list((path / "journal").glob("*.journal")) == []
    assert temporary_files(path) == []
    manifest = manifest_file.load(path)
    assert manifest.complete
    assert manifest.totals == totals_over(outcomes)
    assert manifest.failures == len(found.failures)
    assert {entry.name for entry in manifest.shards} == {file.name for file in (path / "shards").iterdir()}
    assert sum(entry.rows for entry in manifest.shards) == manifest.totals.rows
    audited = audit(path)
    assert audited.problems == []
    assert (audited.rows, audited.failures, audited.shards) == (
        len(found.shards),
        len(found.failures),
        len(manifest.shards),
    )


def assert_goes_on(path: Path, dataset: DatasetConfig) -> None:
    """The same command again brings the folder to its end, from whatever is there: nothing is there twice, segments
    follow each other from the first, and nothing of it is done again."""
    before = contents(path) if (path / "manifest.json").exists() else Contents()
    assert len(before.all) == len(set(before.all))
    assert before.segments == {(prompts_of(dataset)[0].id, number) for number in range(len(before.segments))}
    with pytest.MonkeyPatch.context() as patch:
        done, begun = appended(patch)
        session(path, dataset)
    assert sorted(done) == sorted({one.id for one in prompts_of(dataset)} - set(before.all))
    assert not before.segments.intersection(begun)
    assert_whole(path, dataset)


def appended(patch: pytest.MonkeyPatch) -> tuple[list[str], list[tuple[str, int]]]:
    """What is appended to any folder from now on: ids of outcomes, ids and numbers of segments."""
    outcomes: list[str] = []
    segments: list[tuple[str, int]] = []
    append, append_segment = RunFolder.append, RunFolder.append_segment

    def noting(folder: RunFolder, outcome: Completion | Failure) -> None:
        append(folder, outcome)
        outcomes.append(outcome.id if isinstance(outcome, Failure) else outcome.prompt.id)

    def noting_segment(folder: RunFolder, prompt_id: str, number: int, segment: Segment) -> None:
        append_segment(folder, prompt_id, number, segment)
        segments.append((prompt_id, number))

    patch.setattr(RunFolder, "append", noting)
    patch.setattr(RunFolder, "append_segment", noting_segment)
    return outcomes, segments


class NoSpace(Exception):
    """The store said, in one line, that there is no space left."""


@contextmanager
def no_space_said() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        if not re.fullmatch("no space left while .*", str(error)):
            raise
        raise NoSpace from error


# ---- killed at every step


def steps_of_a_session(path: Path, few: DatasetConfig) -> list[str]:
    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "on_step", steps.append)
        session(path, few)
    return steps


@pytest.fixture(scope="module")
def killed() -> Iterator[KilledSessions]:
    sessions = KilledSessions()
    yield sessions
    sessions.close()


def test_the_session_takes_every_step_there_is(tmp_path: Path, few: DatasetConfig) -> None:
    """Or else the sweeps below would pass by a step."""
    source = "".join(file.read_text() for file in Path(durable.__file__).parent.glob("*.py"))
    named = {text.split('"')[1] for text in source.split("reached(")[1:] if text.startswith('"')}
    steps = steps_of_a_session(tmp_path / "run", few)
    elsewhere = {"journal: cut torn tail", "failures: cut torn tail", "mirror: upload", "mirror: rename"}
    assert named - elsewhere <= set(steps)
    assert {"config: write", "config: rename", "manifest: write", "manifest: rename"} <= set(steps)
    assert_whole(tmp_path / "run", few)


def test_killed_at_every_step(tmp_path: Path, few: DatasetConfig, killed: KilledSessions) -> None:
    step = 0
    while not killed.run(path := tmp_path / str(step), few, step):
        assert not is_locked(path)
        assert_goes_on(path, few)
        step += 1
    assert step == len(steps_of_a_session(tmp_path / "whole", few))
    assert_whole(path, few)


def test_killed_again_and_again(tmp_path: Path, few: DatasetConfig, killed: KilledSessions) -> None:
    draw = random.Random(0)
    last = len(steps_of_a_session(tmp_path / "whole", few))
    for sample in range(12):
        path = tmp_path / str(sample)
        kills = 0
        while kills < 6 and not killed.run(path, few, draw.randrange(last)):
            kills += 1
        assert_goes_on(path, few)


# ---- the power goes


@pytest.mark.parametrize("seed", [None, 1], ids=["nothing unsynced is left", "some of it is left"])
def test_a_power_cut_at_every_step(
    tmp_path: Path, few: DatasetConfig, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """What was promised is there, and the rest is generated again."""
    (tmp_path / "disk").mkdir()
    long = prompts_of(few)[0].id
    choose = (lambda possibilities: 0) if seed is None else random.Random(seed).randrange
    promised = Contents()
    cuts: dict[Path, Contents] = {}
    with monkeypatch.context() as patch:
        disk = PowerCut(tmp_path / "disk", patch)

        def synced(folder: RunFolder, done: list[str]) -> None:
            promised.shards = done
            promised.segments = {(long, number) for number in range(len(folder.begun(long)))}

        def cut(step: str) -> None:
            left = tmp_path / f"{len(cuts)} {step}"
            disk.leave(left, choose)
            cuts[left] = replace(promised)

        patch.setattr(durable, "on_step", cut)
        session(tmp_path / "disk" / "run", few, synced)
        patch.setattr(durable, "on_step", None)
        promised.shards = [asked.id for asked in prompts_of(few)]
        cut("the end")
        disk.close()
    seen: list[tuple[dict[str, bytes], Contents]] = []
    for left, kept in cuts.items():
        if ((written(left), kept)) in seen:
            continue
        seen.append((written(left), kept))
        if kept.all:
            found = contents(left / "run")
            assert set(kept.all) <= set(found.all), left
            assert long in found.all or kept.segments <= found.segments, left
        assert_goes_on(left / "run", few)
    assert len(seen) > 12


@pytest.mark.parametrize("rows_per_shard", [1, 3], ids=["in a full journal", "in a journal"])
@pytest.mark.parametrize("promise", [RunFolder.sync, RunFolder.close], ids=["sync", "close"])
def test_what_a_killed_process_left_is_promised_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promise: Callable[[RunFolder], None], rows_per_shard: int
) -> None:
    """It was in memory only, where the next process found it."""
    (tmp_path / "disk").mkdir()
    disk = PowerCut(tmp_path / "disk", monkeypatch)
    folder = open_folder(tmp_path / "disk" / "run", rows_per_shard=3)
    folder.append(completion("a", k=K))
    folder.append(failure("b"))
    abandon(folder)
    folder = open_folder(tmp_path / "disk" / "run", rows_per_shard=rows_per_shard)
    promise(folder)
    disk.leave(tmp_path / "left", lambda possibilities: 0)
    folder.close()
    disk.close()
    assert contents(tmp_path / "left" / "run").all == [prompt("a").id, prompt("b").id]


def test_failures_are_taken_back_wholly_or_not_at_all(
    tmp_path: Path, few: DatasetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    path = tmp_path / "disk" / "run"
    session(path, few)
    cuts: list[Path] = []
    with monkeypatch.context() as patch:
        disk = PowerCut(tmp_path / "disk", patch)

        def cut(step: str) -> None:
            for choose in (lambda possibilities: 0, lambda possibilities: possibilities - 1):
                cuts.append(tmp_path / str(len(cuts)))
                disk.leave(cuts[-1], choose)

        patch.setattr(durable, "on_step", cut)
        folder = open_folder(path, config_of(few), retry_failed=True)
        patch.setattr(durable, "on_step", None)
        disk.close()
    assert folder.failures == 0
    assert not manifest_file.load(path).complete
    folder.close()
    assert len(cuts) >= 8
    for left in (tmp_path / "disk", *cuts):
        assert len(contents(left / "run").failures) in (0, 1)
        assert_goes_on(left / "run", few)


# ---- against a dictionary


PROMPTS = [prompt(str(number)) for number in range(25)]


class AgainstADict(RuleBasedStateMachine):
    """The folder and a dictionary of outcomes, side by side, through crashes and power cuts."""

    names = st.integers(0, 24).map(str)

    @initialize()
    def open(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.memory = folder_in_memory()
        self.base = self.memory.__enter__()
        self.lives = 0
        self.outcomes: dict[str, Completion | Failure] = {}
        self.segments: Counter[str] = Counter()
        self.promised: set[str] = set()
        self.promised_segments: Counter[str] = Counter()
        self._plug_in(self.base / "0")

    def _plug_in(self, disk: Path) -> None:
        disk.mkdir(exist_ok=True)
        self.disk = PowerCut(disk, self.patch)
        self.folder = open_folder(disk / "run", rows_per_shard=ROWS_PER_SHARD)

    def _unplug(self) -> None:
        abandon(self.folder)
        self.disk.close()

    @property
    def run(self) -> Path:
        return self.folder.path

    @rule(name=names, tokens=st.integers(1, 4))
    def append(self, name: str, tokens: int) -> None:
        self._append(completion(name, tokens=tokens, k=K, seed=int(name)))

    @rule(name=names)
    def append_failure(self, name: str) -> None:
        self._append(failure(name))

    def _append(self, outcome: Completion | Failure) -> None:
        asked = outcome.id if isinstance(outcome, Failure) else outcome.prompt.id
        if asked in self.outcomes:
            with pytest.raises(StoreError, match="has an outcome already"):
                self.folder.append(outcome)
        else:
            self.folder.append(outcome)
            self._has(outcome)

    def _has(self, outcome: Completion | Failure) -> None:
        asked = outcome.id if isinstance(outcome, Failure) else outcome.prompt.id
        self.outcomes[asked] = outcome
        del self.segments[asked]

    @rule(name=names)
    def append_segment(self, name: str) -> None:
        asked = prompt(name)
        number = self.segments[asked.id]
        if number == len(segments_of(asked)):
            return
        if asked.id in self.outcomes:
            with pytest.raises(StoreError, match="has its outcome"):
                self.folder.append_segment(asked.id, number, segments_of(asked)[number])
        else:
            with pytest.raises(StoreError, match="does not follow"):
                self.folder.append_segment(asked.id, number + 1, segments_of(asked)[number])
            self.folder.append_segment(asked.id, number, segments_of(asked)[number])
            self.segments[asked.id] += 1

    @rule(name=names, room=st.integers(0, 2500))
    def append_on_a_full_disk(self, name: str, room: int) -> None:
        made = completion(name, k=K)
        if made.prompt.id in self.outcomes:
            return
        with suppress(NoSpace), full_disk(room), no_space_said():
            self.folder.append(made)
        # Where it filled a journal and the next could not be begun, it is written all the same.
        if self.folder.is_done(made.prompt.id):
            self._has(made)

    @rule()
    def sync(self) -> None:
        self.folder.sync()
        self._promise()

    def _promise(self) -> None:
        self.promised = set(self.outcomes)
        self.promised_segments = +self.segments

    @rule()
    def seal_full(self) -> None:
        self.folder.seal_full()
        assert self.folder.waiting_to_seal == 0
        self._on_disk()

    @rule()
    def finish(self) -> None:
        self.folder.finish()
        assert list((self.run / "journal").glob("*.journal")) == []
        assert audit(self.run).problems == []
        self.folder.manifest.complete = False
        self.segments.clear()
        self.promised_segments.clear()

    @rule()
    def close_and_reopen(self) -> None:
        self.folder.close()
        self._promise()
        self.folder = open_folder(self.run, rows_per_shard=ROWS_PER_SHARD)

    @rule(rows_per_shard=st.integers(1, 6))
    def crash(self, rows_per_shard: int) -> None:
        abandon(self.folder)
        self.folder = open_folder(self.run, rows_per_shard=rows_per_shard)
        self._on_disk()

    @precondition(lambda self: self.lives < 3)
    @rule(chance=st.randoms(use_true_random=False))
    def power_cut(self, chance: random.Random) -> None:
        self.lives += 1
        after = self.base / str(self.lives)
        self.disk.leave(after, chance.randrange)
        self._unplug()
        self._plug_in(after)
        for asked in list(self.outcomes):
            if not self.folder.is_done(asked):
                assert asked not in self.promised
                del self.outcomes[asked]
        before, self.segments = self.segments, Counter()
        for asked in (one.id for one in PROMPTS):
            if self.folder.has_begun(asked):
                self.segments[asked] = len(self.folder.begun(asked))
            if asked in before:
                assert self.segments[asked] >= self.promised_segments[asked]
        self._on_disk()

    @invariant()
    def the_same(self) -> None:
        if not hasattr(self, "folder"):
            return
        assert len(self.folder.done) == len(self.outcomes)
        assert all(self.folder.is_done(asked) for asked in self.outcomes)
        assert self.folder.totals == totals_over(list(self.outcomes.values()))
        assert self.folder.failures == sum(isinstance(one, Failure) for one in self.outcomes.values())
        assert all(self.folder.has_begun(asked.id) == bool(self.segments[asked.id]) for asked in PROMPTS)

    def _on_disk(self) -> None:
        """What others see in the files."""
        assert Counter(contents(self.run).all) == Counter(self.outcomes.keys())
        for asked in PROMPTS:
            begun = segments_of(asked)[: self.segments[asked.id]]
            assert segment_bytes(self.folder.begun(asked.id)) == segment_bytes(begun)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                self.folder.finish()
                assert audit(self.run).problems == []
                self._unplug()
            finally:
                self.patch.undo()
                self.memory.__exit__(None, None, None)


def test_a_folder_behaves_like_a_dictionary() -> None:
    run_state_machine_as_test(
        AgainstADict,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---- a full disk


def test_a_disk_that_fills_up_at_any_byte(tmp_path: Path, few: DatasetConfig) -> None:
    """The session ends with one clear line; the same command goes on from there."""
    room = sample = 0
    while True:
        path = tmp_path / str(sample)
        with suppress(NoSpace), full_disk(room), no_space_said():
            session(path, few)
            break
        assert_goes_on(path, few)
        room += 397
        sample += 1
    assert sample > 20
    assert_whole(path, few)


def written(path: Path) -> dict[str, bytes]:
    """What outcomes lie in; the lock and the manifest's clock are left out."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in ("lock", "manifest.json")
    }


@pytest.mark.parametrize("outcome", [completion("new", k=K), failure("new")], ids=["completion", "failure"])
@pytest.mark.parametrize("room", [0, 1, 7, 60])
def test_an_outcome_that_does_not_fit_is_not_there_and_may_be_tried_again(
    tmp_path: Path, outcome: Completion | Failure, room: int
) -> None:
    folder = open_folder(tmp_path / "run")
    for before in (completion("a", k=K), failure("b")):
        folder.append(before)
    lying = written(folder.path)
    with full_disk(room), pytest.raises(StoreError, match="no space left while writing B1/new/t0/s0"):
        folder.append(outcome)
    assert written(folder.path) == lying
    assert not folder.is_done("B1/new/t0/s0")
    assert (folder.totals.rows, folder.failures) == (1, 1)
    folder.append(outcome)
    folder.finish()
    folder.close()
    assert sorted(contents(folder.path).all) == ["B1/a/t0/s0", "B1/b/t0/s0", "B1/new/t0/s0"]
    assert audit(folder.path).problems == []


@pytest.mark.parametrize("room", [0, 3])
def test_a_journal_that_cannot_be_begun_may_be_tried_again(tmp_path: Path, room: int) -> None:
    folder = open_folder(tmp_path / "run")
    for _ in range(2):
        with full_disk(room), pytest.raises(StoreError, match="no space left while writing"):
            folder.append(completion("a", k=K))
    folder.append(completion("a", k=K))
    folder.finish()
    folder.close()
    assert contents(folder.path).all == ["B1/a/t0/s0"]
    assert list((folder.path / "journal").glob("*.journal")) == []
    assert audit(folder.path).problems == []


def test_a_journal_that_cannot_be_synced_when_it_is_full_keeps_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is written by then: a second one of the same prompt must be refused."""
    folder = open_folder(tmp_path / "run", rows_per_shard=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_space)
        with pytest.raises(StoreError, match="no space left"):
            folder.append(completion("a", k=K))
    with pytest.raises(StoreError, match="has an outcome already"):
        folder.append(completion("a", k=K))
    folder.append(completion("b", k=K))
    folder.finish()
    folder.close()
    assert sorted(contents(folder.path).all) == ["B1/a/t0/s0", "B1/b/t0/s0"]
    assert audit(folder.path).problems == []


@pytest.mark.parametrize("room", [0, 4, 8, 30, 500, 700])
def test_a_journal_that_cannot_be_followed_by_another_keeps_its_segments(tmp_path: Path, room: int) -> None:
    folder = open_folder(tmp_path / "run", rows_per_shard=1)
    long, made = prompt("long"), completion("a", k=K)
    begin(folder, long, 2)
    with full_disk(len(frame(encode_completion(made))) + room), pytest.raises(StoreError, match="no space left"):
        folder.append(made)
    assert folder.is_done(made.prompt.id)
    folder.seal_full()
    assert segment_bytes(folder.begun(long.id)) == segment_bytes(segments_of(long)[:2])
    begin(folder, long, 3)
    folder.append(completion("b", k=K))
    folder.seal_full()
    for _ in range(2):
        assert segment_bytes(folder.begun(long.id)) == segment_bytes(segments_of(long))
        abandon(folder)
        folder = open_folder(tmp_path / "run", rows_per_shard=1)
    folder.append(completion(long, k=K))
    folder.finish()
    folder.close()
    assert sorted(contents(folder.path).all) == sorted([made.prompt.id, prompt("b").id, long.id])
    assert list((folder.path / "journal").glob("*.journal")) == []


def no_space(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def test_a_sync_that_failed_is_not_taken_for_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path / "run")
    folder.append(completion("a", k=K))
    synced: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_space)
        with pytest.raises(StoreError, match="no space left while syncing"):
            folder.sync()
        patch.setattr(os, "fdatasync", synced.append)
        folder.sync()
        assert synced
        count = len(synced)
        folder.sync()
        assert len(synced) == count, "nothing new: nothing to sync"
    folder.close()


@pytest.mark.parametrize("blocked", ["shards/.part-00000.parquet.tmp", ".manifest.json.tmp"])
def test_a_shard_that_cannot_be_written_stays_in_its_journal(tmp_path: Path, blocked: str) -> None:
    folder = open_folder(tmp_path / "run", rows_per_shard=2)
    for name in "abc":
        folder.append(completion(name, k=K))
    (folder.path / blocked).symlink_to("/dev/full")
    with pytest.raises(StoreError, match="no space left while"):
        folder.seal_full()
    assert temporary_files(folder.path) == []
    assert folder.waiting_to_seal == 1
    assert folder.manifest.shards == manifest_file.load(folder.path).shards == []
    assert folder.manifest.totals == Totals()
    folder.append(completion("d", k=K))
    folder.seal_full()
    folder.finish()
    folder.close()
    assert sorted(contents(folder.path).all) == [f"B1/{name}/t0/s0" for name in "abcd"]
    assert audit(folder.path).problems == []


def test_a_folder_that_cannot_be_begun_is_begun_later(tmp_path: Path, dataset: DatasetConfig) -> None:
    path = tmp_path / "run"
    for room in range(0, 40, 3):
        with full_disk(room), pytest.raises(StoreError, match="no space left while"):
            open_folder(path, config_of(dataset))
        assert not is_locked(path)
    assert_goes_on(path, dataset)


def test_closing_says_what_the_disk_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path / "run")
    folder.append(completion("a", k=K))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_space)
        with pytest.raises(StoreError, match="no space left while closing"):
            folder.close()
    assert not is_locked(folder.path)
    open_folder(folder.path).close()


# ---- one writer


def test_a_second_writer_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run")
    assert is_locked(folder.path)
    with pytest.raises(InputError, match=rf"another process \(pid {os.getpid()}\)"):
        open_folder(tmp_path / "run")
    folder.close()
    assert not is_locked(folder.path)
    open_folder(tmp_path / "run").close()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    hold = (
        "import sys; from pathlib import Path; from pipeline.store.lock import FolderLock\n"
        f"lock = FolderLock(Path({str(tmp_path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"pid {holder.pid}\)"):
            FolderLock(tmp_path)
        holder.kill()
        holder.wait()
        FolderLock(tmp_path).release()


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    """A descriptor closed twice may be somebody else's by then."""
    folder = open_folder(tmp_path / "run")
    folder.append(completion("a", k=K))
    folder.close()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    folder.close()
    for fd in opened:
        os.close(fd)


def test_no_descriptor_is_left_open(tmp_path: Path, dataset: DatasetConfig) -> None:
    session(tmp_path / "warm-up", dataset)
    before = len(os.listdir("/proc/self/fd"))
    session(tmp_path / "run", dataset)
    with pytest.raises(InputError):
        open_folder(tmp_path / "run", config_of(dataset, temperature=0.5))
    assert len(os.listdir("/proc/self/fd")) == before


def test_eight_threads_append_while_others_seal_and_sync(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run", rows_per_shard=4)
    stop = threading.Event()

    def repeat(action: object) -> None:
        while not stop.wait(0.001):
            action()  # type: ignore[operator]

    def append(worker: int) -> int:
        refused = 0
        for number in range(25):
            name = f"{number % 5}-{worker if number % 3 else 'same'}-{number}"
            try:
                folder.append(failure(name) if number % 5 == 0 else completion(name, k=K))
            except StoreError as error:
                refused += "has an outcome already" in str(error)
        return refused

    others = [threading.Thread(target=repeat, args=[action]) for action in (folder.seal_full, folder.sync)]
    for thread in others:
        thread.start()
    with ThreadPoolExecutor(8) as pool:
        refused = sum(pool.map(append, range(8)))
    stop.set()
    for thread in others:
        thread.join()
    folder.finish()
    folder.close()
    found = contents(folder.path)
    assert refused == 7 * 9
    assert len(found.all) == len(set(found.all)) == 8 * 16 + 9
    assert folder.totals.rows == len(found.shards)
    assert folder.failures == len(found.failures)
    assert audit(folder.path).problems == []


def test_rows_that_come_while_a_folder_is_finished_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path / "run", rows_per_shard=2)
    folder.append(completion("a", k=K))

    def append_late(step: str) -> None:
        if step == "shard: write" and not folder.is_done("B1/late/t0/s0"):
            folder.append(completion("late", k=K))

    monkeypatch.setattr(durable, "on_step", append_late)
    folder.finish()
    folder.close()
    assert contents(folder.path).shards == ["B1/a/t0/s0", "B1/late/t0/s0"]
    assert audit(folder.path).problems == []


def test_what_others_hold_of_the_manifest_is_what_is_saved(tmp_path: Path) -> None:
    """A shard sealed in another thread must not undo what is set meanwhile."""
    folder = open_folder(tmp_path / "run", rows_per_shard=1)
    manifest = folder.manifest
    folder.append(completion("a", k=K))
    folder.seal_full()
    manifest.seconds += 7
    folder.finish()
    folder.close()
    assert manifest_file.load(folder.path).seconds == 7


# ---- one outcome, one folder, one configuration


@pytest.mark.parametrize("second", [completion("a", k=K), failure("a")], ids=["completion", "failure"])
@pytest.mark.parametrize("first", [completion("a", k=K, seed=1), failure("a")], ids=["completion", "failure"])
def test_a_second_outcome_is_refused_wherever_the_first_lies(
    tmp_path: Path, first: Completion | Failure, second: Completion | Failure
) -> None:
    folder = open_folder(tmp_path / "run")
    folder.append(first)
    for again in range(3):
        lying = written(folder.path)
        with pytest.raises(StoreError, match="B1/a/t0/s0 has an outcome already"):
            folder.append(second)
        assert written(folder.path) == lying
        if again == 1:
            folder.finish()
        folder.close()
        folder = open_folder(tmp_path / "run")
    folder.close()


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run")
    folder.close()
    lying = written(folder.path)
    for outcome in (completion("a", k=K), failure("b")):
        with pytest.raises(StoreError, match="is closed"):
            folder.append(outcome)
    folder.sync()
    assert written(folder.path) == lying


def begin_run(path: Path, *arguments: object) -> None:
    """A run with one row."""
    folder = open_folder(path, *arguments)  # type: ignore[arg-type]
    folder.append(completion("a", k=K))
    folder.close()


def test_another_configuration_may_have_a_folder_without_outcomes(tmp_path: Path) -> None:
    open_folder(tmp_path / "run", config_of(temperature=1.0)).close()
    begin_run(tmp_path / "run", config_of(temperature=0.5))
    assert manifest_file.load(tmp_path / "run").content["sampling"]["temperature"] == 0.5
    with pytest.raises(InputError, match=r"sampling\.temperature was 0\.5, is now 1\.0"):
        open_folder(tmp_path / "run", config_of(temperature=1.0))


def test_another_configuration_may_not_have_a_folder_with_a_failure_alone(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run", config_of(temperature=1.0))
    folder.append(failure("a"))
    folder.close()
    with pytest.raises(InputError, match=r"sampling\.temperature was 1\.0, is now 0\.5"):
        open_folder(tmp_path / "run", config_of(temperature=0.5))


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    begin_run(tmp_path / "run", config_of(temperature=1.0))
    with pytest.raises(InputError, match=r"sampling\.temperature was 1\.0, is now 0\.5") as caught:
        open_folder(tmp_path / "run", config_of(temperature=0.5))
    assert caught.value.key == "run.dir"
    assert "extend" not in str(caught.value)
    with pytest.raises(InputError, match=r"sampling\.temperature .*; sampling\.top_p was 1\.0, is now 0\.9"):
        open_folder(tmp_path / "run", config_of(temperature=0.5, top_p=0.9))
    open_folder(tmp_path / "run", config_of(temperature=1.0)).close()


def limited(limit: int | None) -> object:
    return config_of(DatasetConfig(name="elsewhere", path="nobody/nothing", limit=limit))


def test_a_folder_grows_where_it_is_asked_to(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run", limited(2))
    folder.append(completion("a", k=K))
    folder.finish()
    folder.close()
    with pytest.raises(InputError, match=r"dataset\.limit was 2, is now 5 \(.*run\.extend=true\)"):
        open_folder(tmp_path / "run", limited(5))
    folder = open_folder(tmp_path / "run", limited(5), extend=True)
    assert folder.is_done("B1/a/t0/s0")
    assert not manifest_file.load(folder.path).complete
    assert manifest_file.load(folder.path).content["dataset"]["limit"] == 5
    folder.append(completion("b", k=K))
    folder.finish()
    folder.close()
    assert audit(folder.path).problems == []
    assert any("extended" in note for note in audit(folder.path).notes)
    open_folder(tmp_path / "run", limited(5), extend=True).close()
    assert manifest_file.load(folder.path).complete, "nothing new was asked for"
    open_folder(tmp_path / "run", limited(None), extend=True).close()


@pytest.mark.parametrize(("old", "new"), [(5, 2), (None, 5)])
def test_a_folder_does_not_shrink(tmp_path: Path, old: int | None, new: int) -> None:
    begin_run(tmp_path / "run", limited(old))
    for extend in (False, True):
        with pytest.raises(InputError, match=rf"dataset\.limit was {old}, is now {new}$"):
            open_folder(tmp_path / "run", limited(new), extend=extend)


def test_growing_changes_nothing_else(tmp_path: Path) -> None:
    begin_run(tmp_path / "run", limited(2))
    other = limited(5)
    other.sampling.temperature = 0.5  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"sampling\.temperature"):
        open_folder(tmp_path / "run", other, extend=True)
    with pytest.raises(InputError, match="tokenizer has changed"):
        open_folder(tmp_path / "run", limited(5), extend=True, tokenizer="t1")
    assert manifest_file.load(tmp_path / "run").content["dataset"]["limit"] == 2


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    begin_run(tmp_path / "run")
    with pytest.raises(InputError, match="tokenizer has changed"):
        open_folder(tmp_path / "run", tokenizer="t1")


def test_another_capture_is_refused_once_there_are_rows(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run")
    folder.set_capture(Capture(K, "scaled"))
    folder.set_capture(Capture(K, "raw", ("prompt_ids",)))
    folder.append(completion("a", k=K, missing=["prompt_ids"]))
    for other in (Capture(K, "scaled", ("prompt_ids",)), Capture(K, "raw")):
        with pytest.raises(InputError, match="holds rows with raw log-probabilities"):
            folder.set_capture(other)
    folder.close()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("notes")
    with pytest.raises(InputError, match="is a file"):
        open_folder(tmp_path / "run")
    with pytest.raises(StoreError, match="Not a directory"):
        open_folder(tmp_path / "run" / "below")
    assert (tmp_path / "run").read_text() == "notes"


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(InputError, match=r"not a run folder \(it holds thesis\.tex\)"):
        open_folder(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_empty_folder_and_one_with_a_log_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    open_folder(tmp_path / "a").close()
    (tmp_path / "b" / "logs").mkdir(parents=True)
    open_folder(tmp_path / "b").close()


# ---- damage


@pytest.fixture
def sound(tmp_path: Path, dataset: DatasetConfig) -> Path:
    """A folder with two shards, a journal of one row, and two failures."""
    folder = open_folder(tmp_path / "run", config_of(dataset))
    for asked in prompts_of(dataset):
        folder.append(outcome_of(asked))
    folder.seal_full()
    folder.close()
    assert len(contents(folder.path).journals) == 1
    assert len(contents(folder.path).failures) == 2
    return folder.path


def open_again(path: Path, dataset: DatasetConfig) -> RunFolder:
    return open_folder(path, config_of(dataset))


def test_a_missing_shard_is_named(sound: Path, dataset: DatasetConfig) -> None:
    (sound / "shards" / "part-00001.parquet").unlink()
    with pytest.raises(StoreError, match=r"part-00001\.parquet is in the manifest and not on disk"):
        open_again(sound, dataset)
    assert not is_locked(sound)


@pytest.mark.parametrize("damage", ["cut", "grown", "garbled"])
def test_a_damaged_shard_is_named(sound: Path, dataset: DatasetConfig, damage: str) -> None:
    path = sound / "shards" / "part-00001.parquet"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-1], "grown": data + b"\0", "garbled": bytes(len(data))}[damage])
    with pytest.raises(StoreError, match=r"part-00001\.parquet"):
        open_again(sound, dataset)
    assert not is_locked(sound)


def test_a_shard_in_the_place_of_another_is_named(sound: Path, dataset: DatasetConfig) -> None:
    """Of the right size, as it may happen, and with other rows."""
    manifest = json.loads((sound / "manifest.json").read_text())
    manifest["shards"][1]["rows"] += 1
    (sound / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"part-00001\.parquet .* 3 rows.* 4"):
        open_again(sound, dataset)


def test_a_stray_shard_is_named(sound: Path, dataset: DatasetConfig) -> None:
    shutil.copy(sound / "shards" / "part-00001.parquet", sound / "shards" / "part-00009.parquet")
    with pytest.raises(StoreError, match=r"part-00009\.parquet is not in the manifest"):
        open_again(sound, dataset)


@pytest.mark.parametrize("name", ["part-00002 (copy).journal", "part-00002.bak.journal", "part-x.journal"])
def test_a_copy_of_a_journal_is_named_and_not_counted(sound: Path, dataset: DatasetConfig, name: str) -> None:
    shutil.copy(sound / "journal" / "part-00002.journal", sound / "journal" / name)
    with pytest.raises(StoreError, match=r"move it out of the run folder"):
        open_again(sound, dataset)
    assert (sound / "journal" / name).exists()
    (sound / "journal" / name).unlink()
    assert_goes_on(sound, dataset)


def test_a_journal_of_another_kind_is_named(sound: Path, dataset: DatasetConfig) -> None:
    (sound / "journal" / "part-00002.journal").write_bytes(b"something else")
    with pytest.raises(StoreError, match=r"part-00002\.journal is not a journal"):
        open_again(sound, dataset)


@pytest.mark.parametrize("lost", ["manifest", "manifest and shards", "all but failures"])
def test_outcomes_without_a_manifest_are_not_taken_over(sound: Path, dataset: DatasetConfig, lost: str) -> None:
    """Whose they are is not known: another configuration would mix its own with them."""
    (sound / "manifest.json").unlink()
    if lost != "manifest":
        shutil.rmtree(sound / "shards")
    if lost == "all but failures":
        shutil.rmtree(sound / "journal")
    with pytest.raises(StoreError, match=r"manifest\.json"):
        open_again(sound, dataset)
    assert not (sound / "manifest.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema_version": "x"}', "null"])
def test_a_damaged_manifest_is_named(sound: Path, dataset: DatasetConfig, content: str) -> None:
    (sound / "manifest.json").write_text(content)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        open_again(sound, dataset)
    assert not is_locked(sound)


def test_a_later_version_is_refused(sound: Path, dataset: DatasetConfig) -> None:
    manifest = json.loads((sound / "manifest.json").read_text()) | {"schema_version": 2}
    (sound / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="later version"):
        open_again(sound, dataset)


def test_failures_cut_at_every_byte(sound: Path, dataset: DatasetConfig, tmp_path: Path) -> None:
    path = sound / "failures.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in [*range(0, len(whole), 7), len(lines[0]) - 1, len(lines[0]), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        folder = open_again(sound, dataset)
        kept = sum(len(b"".join(lines[: n + 1])) <= cut for n in range(len(lines)))
        assert folder.failures == kept
        assert path.read_bytes() == b"".join(lines[:kept])
        folder.close()
    assert_goes_on(sound, dataset)


@pytest.mark.parametrize(
    "line", [b"\n", b"\0\0\0\0\n", b"null\n", b'{"id": "x"}\n', b"[1]\n", b'{"id": 3}\n', b"\xff\n"]
)
def test_lines_behind_one_that_cannot_be_read_are_asked_again(
    sound: Path, dataset: DatasetConfig, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = sound / "failures.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + lines[1])
    folder = open_again(sound, dataset)
    assert folder.failures == 1
    assert "failures.jsonl" in caplog.text
    folder.close()
    assert path.read_bytes() == lines[0]
    assert_goes_on(sound, dataset)


def test_failures_deleted_by_hand_are_asked_again(sound: Path, dataset: DatasetConfig) -> None:
    session(sound, dataset)
    (sound / "failures.jsonl").unlink()
    assert_goes_on(sound, dataset)


def test_text_that_looks_like_lines_is_one_line(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run")
    detail = "two\nlines\r\n\u2028 and \x85 more \x00"
    folder.append(failure("a\n", detail))
    folder.append(failure("b"))
    folder.close()
    folder = open_folder(tmp_path / "run")
    assert folder.failures == 2
    assert folder.is_done(prompt("a\n").id)
    folder.close()


def test_a_journal_with_a_damaged_record_keeps_what_is_before_it(
    sound: Path, dataset: DatasetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    path = sound / "journal" / "part-00002.journal"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    folder = open_again(sound, dataset)
    assert folder.totals.rows == 6
    folder.close()
    assert "part-00002.journal" in caplog.text
    assert_goes_on(sound, dataset)


@pytest.mark.parametrize("rows_per_shard", [1, 2, 50])
def test_another_shard_size_is_taken_up(sound: Path, dataset: DatasetConfig, rows_per_shard: int) -> None:
    folder = open_folder(sound, config_of(dataset), rows_per_shard)
    folder.seal_full()
    folder.close()
    assert_goes_on(sound, dataset)


def test_temporary_files_of_a_crash_are_cleared_away(sound: Path, dataset: DatasetConfig) -> None:
    for name in ("shards/.part-00002.parquet.tmp", ".manifest.json.tmp", ".config.yaml.tmp", ".failures.jsonl.tmp"):
        (sound / name).write_bytes(b"half a file")
    open_again(sound, dataset).close()
    assert temporary_files(sound) == []


def test_the_answer_to_a_prompt_is_refused_where_its_parts_disagree(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run")
    made = completion("a", k=K)
    broken = replace(made, answer=replace(made.answer, completion_tokens=2))
    with pytest.raises(StoreError, match="completion_tokens is 2"):
        folder.append(broken)
    assert not folder.is_done(made.prompt.id)
    folder.append(made)
    folder.close()
