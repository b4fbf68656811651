"""What is left of engines whose run was killed is ended, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline.engine.orphans import OWNER, end_orphans, this_process

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]


@pytest.fixture
def sleeping() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes that bear a mark of the given owners: a dead one, this one, a namesake of this one, none."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    owners = {"dead": f"{dead.pid}:123", "ours": this_process(), "namesake": f"{os.getpid()}:1", "nobody": None}
    started = {
        name: subprocess.Popen(SLEEP, env=os.environ | ({OWNER: owner} if owner else {}), stdout=subprocess.PIPE)
        for name, owner in owners.items()
    }
    for process in started.values():
        assert process.stdout is not None
        process.stdout.readline()
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_only_processes_of_dead_owners_are_ended(sleeping: dict[str, subprocess.Popen[bytes]]) -> None:
    assert set(end_orphans()) == {sleeping["dead"].pid, sleeping["namesake"].pid}
    assert sleeping["dead"].wait(5) == sleeping["namesake"].wait(5) == -9
    assert sleeping["ours"].poll() is None
    assert sleeping["nobody"].poll() is None
