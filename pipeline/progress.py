"""What a person sees while a run works: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Never, TextIO

import aiohttp
import orjson
from tqdm import tqdm

from pipeline.engine.fleet import Fleet
from pipeline.engine.metrics import Load, read_load, total
from pipeline.records import Totals
from pipeline.store import RunFolder

TERMINAL_INTERVAL_S = 1.0
LINE_INTERVAL_S = 15.0

REPORT = "progress.json"
"""The file in ``journal/`` that holds the last state shown, for ``status``; nothing depends on it."""


class Progress:
    """Shows rows, tokens/s, running and waiting requests, KV use, host-tier hits and time left.

    ``expected`` is the number of outcomes the run ends with, None where the dataset does not say beforehand.
    """

    def __init__(self, folder: RunFolder, expected: int | None, stream: TextIO = sys.stderr) -> None:
        self._folder = folder
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._started = time.monotonic()
        self._rows_before = folder.totals.rows + folder.failures
        self._tokens_before = folder.totals.completion_tokens
        # Without a terminal the bar only keeps the counts.
        self._bar: tqdm[Never] = tqdm(
            total=expected,
            initial=self._rows_before,
            unit="row",
            file=stream,
            disable=not self._on_terminal,
            dynamic_ncols=True,
            smoothing=0.1,
        )

    @property
    def seconds(self) -> float:
        """Time since this session began to generate."""
        return time.monotonic() - self._started

    @property
    def tokens(self) -> int:
        """Tokens generated in this session."""
        return self._folder.totals.completion_tokens - self._tokens_before

    async def show(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Refreshes until cancelled."""
        while True:
            await asyncio.sleep(TERMINAL_INTERVAL_S if self._on_terminal else LINE_INTERVAL_S)
            loads = await asyncio.gather(*(read_load(session, engine.url) for engine in fleet.engines))
            self._refresh(total(load for load in loads if load is not None))

    def close(self) -> None:
        """Shows the final counts."""
        self._refresh(None)
        self._bar.close()

    def _refresh(self, load: Load | None) -> None:
        done = self._folder.totals.rows + self._folder.failures
        state = status_text(self._folder.totals, self._folder.failures, self.tokens / max(self.seconds, 1e-9), load)
        report = {"text": f"{done}{self._of()} rows, {state}", "expected": self._bar.total}
        # A disk that is full stops the run where an outcome cannot be written, not here.
        with contextlib.suppress(OSError):
            (self._folder.path / "journal" / REPORT).write_bytes(orjson.dumps(report))
        if self._on_terminal:
            self._bar.set_postfix_str(state, refresh=False)
            self._bar.update(done - self._bar.n)
            self._bar.refresh()
        else:
            line = f"{done}{self._of()} rows, {self.seconds:.0f} s, {state}{self._left(done)}"
            print(line, file=self._stream, flush=True)

    def _of(self) -> str:
        return f"/{self._bar.total}" if self._bar.total else ""

    def _left(self, done: int) -> str:
        new = done - self._rows_before
        # The first rows to end are the short ones; before a fifth is done they tell nothing about the rest.
        if not self._bar.total or new < 0.2 * (self._bar.total - self._rows_before):
            return ""
        return f", {max(self._bar.total - done, 0) * self.seconds / new:.0f} s left"


def status_text(totals: Totals, failures: int, tokens_per_s: float, load: Load | None) -> str:
    """The state of a run in one line."""
    parts = [f"{tokens_per_s:.0f} tok/s"]
    if load is not None:
        parts.append(f"{load.running} running, {load.waiting} waiting, KV {load.token_usage:.0%}")
    if totals.prompt_tokens:
        parts.append(f"host hits {totals.cached_host_tokens / totals.prompt_tokens:.0%}")
    if failures:
        parts.append(f"{failures} failed")
    return ", ".join(parts)
