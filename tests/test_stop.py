"""The first request drains, the second ends; so does the deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.stop import Stop

T = TypeVar("T")

FOREVER = 600.0
PATIENCE = 60.0


def played(scenario: Coroutine[Any, Any, T]) -> T:
    """What a scenario came to; one that never ends is a failure."""
    return asyncio.run(asyncio.wait_for(scenario, PATIENCE))


class Work:
    """A task that a :class:`Stop` may end, and the drain that it may ask for first."""

    def __init__(self, stop: Stop, drain_s: float) -> None:
        self.drains = 0
        self.stop = stop
        self.drain_s = drain_s
        self.entered = asyncio.Event()
        self.drained = asyncio.Event()

    async def run(self) -> str:
        with self.stop.draining(self.drain, self.drain_s):
            self.entered.set()
            await self.drained.wait()
        return "done"

    def drain(self) -> None:
        self.drains += 1


@contextmanager
def listening(stop: Stop, task: asyncio.Task[str]) -> Iterator[None]:
    """The process's signal handlers, given back afterwards: the tests' own process uses them too."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop.listen(task)
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_request_drains_and_work_ends_by_itself() -> None:
    async def scenario() -> None:
        work = Work(stop := Stop(), FOREVER)
        task = asyncio.create_task(work.run())
        with listening(stop, task):
            await work.entered.wait()
            assert not stop.requested
            stop.request()
            await settle()
            assert (stop.requested, work.drains, task.done()) == (True, 1, False)
            work.drained.set()
            assert await task == "done"

    played(scenario())


def test_the_second_request_ends_now() -> None:
    async def scenario() -> None:
        work = Work(stop := Stop(), FOREVER)
        task = asyncio.create_task(work.run())
        with listening(stop, task):
            await work.entered.wait()
            stop.request()
            stop.request()
            await settle()
            assert (task.cancelled(), work.drains) == (True, 1)

    played(scenario())


def test_the_deadline_ends_what_has_not_drained(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> float:
        work = Work(stop := Stop(), 0.05)
        task = asyncio.create_task(work.run())
        with listening(stop, task):
            await work.entered.wait()
            asked = asyncio.get_running_loop().time()
            stop.request()
            with pytest.raises(asyncio.CancelledError):
                await task
            return asyncio.get_running_loop().time() - asked

    with caplog.at_level(logging.WARNING, "pipeline"):
        assert played(scenario()) >= 0.045
    assert "answers in flight have 0.05 s to finish" in caplog.text
    assert "answers still in flight after 0.05 s are given up" in caplog.text


def test_a_deadline_that_was_met_ends_nothing() -> None:
    """What comes after the drain (sealing, the manifest) takes the time it takes."""

    async def scenario() -> str:
        work = Work(stop := Stop(), 0.05)

        async def whole() -> str:
            await work.run()
            await asyncio.sleep(0.15)
            return "sealed"

        task = asyncio.create_task(whole())
        with listening(stop, task):
            await work.entered.wait()
            stop.request()
            work.drained.set()
            return await task

    assert played(scenario()) == "sealed"


@pytest.mark.parametrize("when", ["before", "after"])
def test_where_nothing_can_drain_the_first_request_ends_now(when: str) -> None:
    async def scenario() -> bool:
        work = Work(stop := Stop(), FOREVER)
        work.drained.set()

        async def whole() -> str:
            if when == "after":
                await work.run()
            work.entered.set()
            await asyncio.sleep(FOREVER)
            return "never"

        task = asyncio.create_task(whole())
        with listening(stop, task):
            await work.entered.wait()
            await settle()
            stop.request()
            await settle()
            return task.cancelled() and work.drains == 0

    assert played(scenario())


def test_a_request_before_anything_listens_is_remembered() -> None:
    stop = Stop()
    stop.request()
    assert stop.requested


# Signals, in a process of its own

SCRIPT = """
import asyncio, sys
from pipeline.stop import Stop
from pipeline.verbs import with_signals

stop = Stop()

async def work():
    drained = asyncio.Event()
    with stop.draining(drained.set, float(sys.argv[1])):
        print("ready", flush=True)
        await drained.wait()
        print("draining", flush=True)
        await asyncio.sleep(float(sys.argv[2]))
    return "drained"

try:
    print(with_signals(work(), stop), flush=True)
except asyncio.CancelledError:
    print("ended", flush=True)
"""


class Signalled:
    """A process that takes ``work_s`` to drain and has ``drain_s`` for it."""

    def __init__(self, drain_s: float, work_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(drain_s), str(work_s)],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._watchdog = threading.Timer(PATIENCE, self.process.kill)
        self._watchdog.start()

    def __enter__(self) -> Signalled:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self.process.kill()
        self.process.communicate()

    def says(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)


def test_a_signal_drains() -> None:
    with Signalled(FOREVER, 0.05) as child:
        assert child.says() == "ready"
        child.send(signal.SIGTERM)
        assert [child.says(), child.says()] == ["draining", "drained"]
        assert child.process.wait(30) == 0


def test_another_signal_ends() -> None:
    with Signalled(FOREVER, FOREVER) as child:
        assert child.says() == "ready"
        child.send(signal.SIGINT)
        assert child.says() == "draining"
        child.send(signal.SIGTERM)
        assert child.says() == "ended"
        assert child.process.wait(30) == 0
