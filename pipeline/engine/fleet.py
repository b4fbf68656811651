"""The engines of a run, and which of them takes the next request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipeline.engine.launch import EngineProcess
from pipeline.engine.probe import EngineFacts


@dataclass(slots=True)
class Engine:
    """One engine: where it is, what it said of itself, how much it is asked at once. ``process`` is None for an
    engine that somebody else runs."""

    name: str
    url: str
    facts: EngineFacts
    limit: int
    process: EngineProcess | None = None
    outstanding: int = 0


class Fleet:
    """Hands out engines, the one with the least outstanding first, never more than its limit at a time."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self._changed = asyncio.Condition()

    @property
    def limit(self) -> int:
        """Requests in flight over all engines, at most."""
        return sum(engine.limit for engine in self.engines)

    @property
    def max_input_tokens(self) -> int | None:
        """The longest prompt that every engine takes, in tokens; None where none of them says."""
        known = [engine.facts.max_input_tokens for engine in self.engines]
        return min((value for value in known if value is not None), default=None)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Engine]:
        """An engine for one request; waits while all are at their limit."""
        engine = await self._take()
        try:
            yield engine
        finally:
            async with self._changed:
                engine.outstanding -= 1
                self._changed.notify()

    async def _take(self) -> Engine:
        async with self._changed:
            await self._changed.wait_for(self._free)
            engine = min(self._free(), key=lambda engine: engine.outstanding / engine.limit)
            engine.outstanding += 1
            return engine

    def _free(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.outstanding < engine.limit]
