"""Engine processes whose owner is gone, found by a mark that every process of an engine inherits, and ended.

The kernel ends an engine with its owner (``guard``), and SGLang's processes end with each other once they are up; one
that is killed while it starts can leave some behind, holding memory and a port.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

log = logging.getLogger(__name__)

OWNER = "EAGLE3_DATA_ENGINE_OWNER"
"""The environment variable that names the owner: its process id and when that process started (clock ticks since the
machine did), so that a later process of the same id is not taken for it."""


def this_process() -> str:
    """The mark of engines that this process starts."""
    return f"{os.getpid()}:{_started(os.getpid())}"


def end_orphans() -> list[int]:
    """Ends every process that carries the mark of an owner that is no longer there; returns their ids."""
    found = [pid for pid in _processes() if (owner := _owner(pid)) is not None and not _lives(owner)]
    for pid in found:
        log.warning("process %d is left over from an engine whose run was killed; it is ended", pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _owner(pid: int) -> str | None:
    """The mark of a process; None where it has none, is gone, or belongs to somebody else."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == OWNER.encode():
            return value.decode(errors="replace")
    return None


def _lives(owner: str) -> bool:
    pid, _, started = owner.partition(":")
    return pid.isdecimal() and _started(int(pid)) == started


def _started(pid: int) -> str | None:
    """Field 22 of ``/proc/PID/stat``; the second field, the name, may hold spaces and brackets."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
