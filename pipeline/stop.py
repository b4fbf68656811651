"""Stopping on request: the first SIGINT or SIGTERM drains, the second ends now."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """What was asked of this process. Its methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self.requested = False
        self._drain: Callable[[], None] | None = None
        self._drain_s = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None

    def listen(self, task: asyncio.Task[object]) -> None:
        """Takes the signals of this process from now on; ``task`` is cancelled when it is time to end."""
        self._task = task
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.request)

    def request(self) -> None:
        """One signal."""
        again, self.requested = self.requested, True
        if again or self._drain is None:
            log.warning("stopping now")
            self._end()
            return
        log.warning("stopping: answers in flight have %g s to finish; once more to stop now", self._drain_s)
        self._drain()
        self._deadline = asyncio.get_running_loop().call_later(self._drain_s, self._overdue)

    @contextmanager
    def draining(self, drain: Callable[[], None], drain_s: float) -> Iterator[None]:
        """While this lasts, the first request calls ``drain`` and waits up to ``drain_s`` seconds for the end."""
        self._drain, self._drain_s = drain, drain_s
        try:
            yield
        finally:
            self._drain = None
            if self._deadline is not None:
                self._deadline.cancel()

    def _overdue(self) -> None:
        log.warning("answers still in flight after %g s are given up; their prompts run again next time", self._drain_s)
        self._end()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
