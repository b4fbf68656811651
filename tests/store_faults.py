"""What happens to a run folder, named after what it does: the disk fills up, the power goes, the process is killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_rows import completion, config_of, open_folder, outcome_of, prompts_of, segment_bytes, segments_of

from pipeline.config import DatasetConfig
from pipeline.records import Prompt
from pipeline.store import RunFolder, durable
from pipeline.store.rows import encode_completion, to_table, unpack

ROWS_PER_SHARD = 2


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder for many small files; a disk that others use takes a hundred times as long for them."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="test-") as folder:
        yield Path(folder)


def never_wait_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Syncs take milliseconds and change nothing that a test without a power cut could see."""
    patch.setattr(os, "fsync", lambda fd: None)
    patch.setattr(os, "fdatasync", lambda fd: None)


@contextmanager
def full_disk(after: int = 0) -> Iterator[None]:
    """The disk takes ``after`` more bytes and then no more (of what goes through ``os.write``: all but shards)."""
    real, left = os.write, after

    def write(fd: int, data: bytes) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(fd, data[:left])
        left -= done
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        yield


def session(path: Path, dataset: DatasetConfig, synced: Callable[[RunFolder, list[str]], None] | None = None) -> None:
    """What a run does with a folder: outcomes for whatever has none, syncs and seals on the way, then the end.

    The answer to the first prompt is begun first and finished last, so that its segments move from journal to
    journal. ``synced`` is told of the outcomes that the store has promised to keep.
    """
    folder = open_folder(path, config_of(dataset), ROWS_PER_SHARD)
    try:
        long, *others = prompts_of(dataset)
        begin(folder, long, 2)
        for number, asked in enumerate(others, start=1):
            if not folder.is_done(asked.id):
                folder.append(outcome_of(asked))
            if number % 2:
                folder.sync()
                if synced:
                    synced(folder, [one.id for one in others[:number]])
            if number == 3:
                begin(folder, long, 3)
                folder.seal_full()
        if not folder.is_done(long.id):
            folder.append(outcome_of(long))
        folder.finish()
    finally:
        folder.close()


def begin(folder: RunFolder, asked: Prompt, count: int) -> None:
    """Writes the first ``count`` segments of an answer, those that are not there yet."""
    if not folder.is_done(asked.id):
        begun = folder.begun(asked.id)
        assert segment_bytes(begun) == segment_bytes(segments_of(asked)[: len(begun)])
        for number in range(len(begun), count):
            folder.append_segment(asked.id, number, segments_of(asked)[number])


class PowerCut:
    """Knows what a power cut would leave of a folder: of each file what was synced, of each folder the names that
    were there when it was synced, and of anything since then as much or as little as ``choose`` picks. What lies in
    the folder at first has been there for long.

    ``choose`` gets a number of possibilities and picks one of them; 0 is always "nothing since the last sync".
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._content: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}
        self._open: dict[int, int] = {}
        for path in (root, *root.rglob("*")):
            self._note(path)
        patch.setattr(os, "fsync", self._sync)
        patch.setattr(os, "fdatasync", self._sync)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)

    def leave(self, target: Path, choose: Callable[[int], int]) -> None:
        """Puts what is left at ``target``, which does not exist yet."""
        self._leave_folder(self.root, target, choose)

    def _sync(self, fd: int) -> None:
        self._note(Path(os.readlink(f"/proc/self/fd/{fd}")), fd)

    def _note(self, path: Path, fd: int | None = None) -> None:
        if path.is_dir():
            self._names[path] = self._listing(path)
        else:
            inode = self._hold_path(path) if fd is None else self._hold(fd)
            self._content[inode] = self._read(inode)

    def _listing(self, path: Path) -> dict[str, int]:
        """Names and inodes; each file is held open, so that no inode is used again."""
        return {entry.name: self._hold_path(entry) for entry in path.iterdir()}

    def _hold_path(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        try:
            return self._hold(fd)
        finally:
            os.close(fd)

    def _hold(self, fd: int) -> int:
        inode = os.fstat(fd).st_ino
        if inode not in self._open:
            self._open[inode] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        return inode

    def _read(self, inode: int) -> bytes:
        fd = self._open[inode]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _leave_folder(self, source: Path, target: Path, choose: Callable[[int], int]) -> None:
        target.mkdir()
        synced, now = self._names.get(source, {}), self._listing(source)
        for name in sorted(synced.keys() | now.keys()):
            inode = (synced, now)[choose(2) if synced.get(name) != now.get(name) else 0].get(name)
            if inode is None:
                continue
            if (source / name).is_dir():
                self._leave_folder(source / name, target / name, choose)
            else:
                (target / name).write_bytes(self._leave_content(inode, choose))

    def _leave_content(self, inode: int, choose: Callable[[int], int]) -> bytes:
        synced, now = self._content.get(inode, b""), self._read(inode)
        if synced == now:
            return now
        if not now.startswith(synced):
            return (synced, now)[choose(2)]
        kept = now[: len(synced) + choose(len(now) - len(synced) + 1)]
        # The length of a file may reach the disk before its bytes do: those read as zeros.
        return kept + bytes(choose(2) * (len(now) - len(kept)))


class KilledSessions:
    """Runs sessions in processes of their own and kills them (SIGKILL) at a step of the store's."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
        self._nursery = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, path: Path, dataset: DatasetConfig, step: int) -> bool:
        """Whether the session got to its end before ``step`` (0 is the first)."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps([str(path), dataset.path, step]) + "\n")
        self._nursery.stdin.flush()
        status = int(self._nursery.stdout.readline())
        assert status in (0, -signal.SIGKILL), f"the session ended with status {status}, see its traceback"
        return status == 0

    def close(self) -> None:
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        self._nursery.wait(30)


def nursery() -> None:
    """Forks a session for each line of standard input; a process without threads may fork."""
    # Imported here once, and not in every session when it is first needed, which takes longer than the session.
    import pandas  # noqa: F401
    import pyarrow.dataset  # noqa: F401

    to_table([unpack(encode_completion(completion()))])
    never_wait_for_the_disk(pytest.MonkeyPatch())
    for line in sys.stdin:
        path, dataset, step = json.loads(line)
        pid = os.fork()
        if pid == 0:
            durable.on_step = kill_at(step)
            session(Path(path), DatasetConfig(name="made", path=dataset))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def kill_at(last: int) -> Callable[[str], None]:
    """A hook that ends the process when the step is reached."""
    steps = iter(range(last))

    def step(name: str) -> None:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


if __name__ == "__main__":
    nursery()
