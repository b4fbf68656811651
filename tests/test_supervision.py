"""Real engines that die and hang in the middle of a run, and engines that never start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.audit import audit
from pipeline.cli import main
from pipeline.engine.supervise import Restarts
from pipeline.status import read_status


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A run of the tiny model on an engine of its own, long enough to be disturbed."""
    return [
        *("run", "dataset=B2", "model=tiny", "engine=cpu", f"run.dir={tmp_path / 'run'}", "dataset.limit=40"),
        *("sampling.max_new_tokens=300", "sampling.segment_tokens=32", "client.concurrency=8"),
        *("engine.max_total_tokens=8000", "engine.restart_pause_s=0.1", "engine.stall_s=12", "store.rows_per_shard=8"),
    ]


@pytest.fixture
def running(words: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run, as a process of its own, with some rows done."""
    with (tmp_path / "out").open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "pipeline", *words], stdout=output, stderr=output)
    try:
        wait_for(lambda: rows_in(tmp_path / "run") >= 5, process)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.engine
def test_an_engine_that_is_killed_and_then_hangs_is_started_again_and_the_run_finishes(
    running: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    log = tmp_path / "run" / "logs" / "pipeline.log"
    os.kill(scheduler_of(engine_of(running.pid)), signal.SIGKILL)
    wait_for(lambda: log.read_text().count("engine-0 is back") == 1, running)
    done = rows_in(tmp_path / "run")
    wait_for(lambda: rows_in(tmp_path / "run") > done, running)
    os.kill(scheduler_of(engine_of(running.pid)), signal.SIGSTOP)
    assert running.wait(240) == 0, (tmp_path / "out").read_text()
    assert_sound(tmp_path / "run", 40)
    assert "engine-0 is down: it was killed" in log.read_text()
    assert "engine-0 is down: it hangs" in log.read_text()
    assert log.read_text().count("engine-0 is back") == 2


@pytest.mark.engine
def test_no_process_of_an_engine_outlives_a_killed_run(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    family = descendants(running.pid)
    assert any("sglang" in command_of(pid) for pid in family)
    running.kill()
    running.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(is_alive(pid) for pid in family):
        time.sleep(0.1)
    assert [command_of(pid) for pid in family if is_alive(pid)] == []


@pytest.mark.engine
def test_a_first_signal_drains_and_the_same_command_goes_on(
    running: subprocess.Popen[bytes], words: list[str], tmp_path: Path
) -> None:
    family = descendants(running.pid)
    running.send_signal(signal.SIGTERM)
    assert running.wait(120) == 130
    assert [command_of(pid) for pid in family if is_alive(pid)] == []
    partial = read_status(tmp_path / "run")
    assert not partial.live
    assert 5 <= partial.sealed + partial.journalled < 40
    assert main(words) == 0
    assert_sound(tmp_path / "run", 40)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("engine.args=[--no-such-flag]", "--no-such-flag"),
        ("engine.hicache.size_gb=4000", "engine.hicache.size_gb"),
    ],
)
def test_a_failed_start_shows_the_engines_own_reason(
    override: str, reason: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, override]) in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert reason in error


def test_a_taken_port_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*words, f"engine.port={port}"]) == 2
    assert f"engine.port: 127.0.0.1:{port}" in capsys.readouterr().err


def test_pauses_between_restarts_double_up_to_a_limit_per_hour() -> None:
    restarts = Restarts(most_per_hour=3, first_pause_s=2.0)
    assert [restarts.next_pause(now) for now in (0.0, 10.0, 20.0, 30.0)] == [2.0, 4.0, 8.0, None]
    assert restarts.next_pause(3601.0) == 8.0  # the first is more than an hour ago
    assert restarts.next_pause(3602.0) is None


def assert_sound(folder: Path, rows: int) -> None:
    found = audit(folder)
    assert found.problems == []
    assert (found.rows, found.failures) == (rows, 0)


def rows_in(folder: Path) -> int:
    if not (folder / "manifest.json").exists():
        return 0
    found = read_status(folder)
    return found.sealed + found.journalled


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    children = [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return [found for child in children for found in (child, *descendants(child))]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def engine_of(pid: int) -> int:
    return next(child for child in descendants(pid) if "sglang.launch_server" in command_of(child))


def scheduler_of(engine: int) -> int:
    return next(child for child in descendants(engine) if "scheduler" in command_of(child))


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
