"""The engines of a run, which of them takes the next request, and which are down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pipeline.engine.launch import EngineProcess
from pipeline.engine.probe import EngineFacts

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine: where it is, what it said of itself, how much it is asked at once. ``process`` is None for an
    engine that somebody else runs; ``down`` says why it takes no requests, None while it does."""

    name: str
    url: str
    facts: EngineFacts
    limit: int
    process: EngineProcess | None = None
    outstanding: int = 0
    down: str | None = None
    went_down: asyncio.Event = field(default_factory=asyncio.Event)


async def _always_alive(engine: Engine) -> bool:
    return True


class Fleet:
    """Hands out engines that are up, the one with the least outstanding first, never more than its limit at a time.

    ``is_alive`` asks an engine whether it serves; it is asked when a connection to the engine breaks.
    """

    def __init__(self, engines: list[Engine], is_alive: Callable[[Engine], Awaitable[bool]] = _always_alive) -> None:
        self.engines = engines
        self.is_alive = is_alive
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

    @property
    def any_up(self) -> bool:
        """Whether at least one engine takes requests."""
        return any(engine.down is None for engine in self.engines)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[Seat]:
        """A place for one answer; whatever engine it is at is left at the end."""
        seat = Seat(self)
        try:
            yield seat
        finally:
            await seat.leave()

    async def lost(self, engine: Engine) -> bool:
        """To be called when a connection to an engine broke: whether the engine is gone, rather than the one
        connection. It gets no more requests until it is back."""
        if engine.down is None and not await self.is_alive(engine):
            await self.mark_down(engine, "it does not answer")
        return engine.down is not None

    async def mark_down(self, engine: Engine, reason: str) -> None:
        """Sends nothing more to an engine. The reason may come in pieces: first that it does not answer, then why."""
        if engine.down != reason:
            log.warning("%s is down: %s", engine.name, reason)
        engine.down = reason
        engine.went_down.set()

    async def mark_up(self, engine: Engine) -> None:
        """Sends requests to an engine again."""
        async with self._changed:
            if engine.down is not None:
                log.warning("%s is back", engine.name)
            engine.down = None
            engine.went_down.clear()
            self._changed.notify_all()

    async def take(self) -> Engine:
        """Counts one more request at the engine that has the least; waits while all are at their limit or down."""
        async with self._changed:
            await self._changed.wait_for(self._free)
            engine = min(self._free(), key=lambda engine: engine.outstanding / engine.limit)
            engine.outstanding += 1
            return engine

    async def give_back(self, engine: Engine) -> None:
        """Counts one request less."""
        async with self._changed:
            engine.outstanding -= 1
            self._changed.notify()

    def _free(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.down is None and engine.outstanding < engine.limit]


class Seat:
    """A place at one engine, kept from one segment of an answer to the next: that engine has the beginning in its
    cache. It is given up when a request fails or the engine is down, and another is taken for the next request."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engine: Engine | None = None

    async def take(self) -> Engine:
        """The engine for the next request."""
        if self._engine is not None and self._engine.down is not None:
            await self.leave()
        if self._engine is None:
            self._engine = await self._fleet.take()
        return self._engine

    async def leave(self) -> None:
        """Gives the place up."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await self._fleet.give_back(engine)
