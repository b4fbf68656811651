"""The engines of a command, from start to end: started here and ended here, or attached to and left alone.

Engines of ours that die or hang are started again, with growing pauses and a limit per hour; an attached engine that
stops answering gets no requests until it answers again. A command ends when no engine has been up for too long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from pipeline.config import Config, EngineConfig
from pipeline.engine.fleet import Engine, Fleet
from pipeline.engine.launch import EngineProcess, answers, answers_at_all, choose_port, launch, stop, wait_until_ready
from pipeline.engine.metrics import read_progress
from pipeline.engine.orphans import end_orphans
from pipeline.engine.probe import EngineFacts, check_model, engine_facts
from pipeline.engine.start_failure import describe_exit, last_error
from pipeline.errors import EngineDown, InputError, first_error

log = logging.getLogger(__name__)

POLL_S = 1.0
LONGEST_PAUSE_S = 60.0
_HOUR_S = 3600.0


@asynccontextmanager
async def open_fleet(config: Config, session: aiohttp.ClientSession, logs: Path) -> AsyncIterator[Fleet]:
    """The engines of ``config``, ready and checked; those started here are ended on the way out.

    Raises:
        InputError: an attached engine does not answer, or serves another model.
        EngineDown: an engine that we start does not come up; the text is its own reason.
    """
    if config.engine.kind == "openai":
        servers = [_unknown(url, config.client.concurrency) for url in config.engine.urls]
        yield Fleet(servers, lambda server: answers_at_all(server.url, session))
    elif config.engine.kind == "attach":
        engines = [await _attach(config, session, url) for url in config.engine.urls]
        yield Fleet(engines, lambda engine: answers(engine.url, session))
    else:
        async with _started(config, session, logs) as fleet:
            yield fleet


async def supervise(config: Config, fleet: Fleet, session: aiohttp.ClientSession) -> None:
    """Keeps the engines up; returns never.

    Raises:
        EngineDown: an engine of ours cannot be kept up, or no engine has been up for ``engine.lost_after_s``.
    """
    async with asyncio.TaskGroup() as group:
        for engine in fleet.engines:
            if engine.process is not None:
                group.create_task(_keep_ours(config, fleet, engine, session))
            else:
                group.create_task(_keep_attached(fleet, engine))
        group.create_task(_give_up_when_all_are_lost(config.engine, fleet))


class Restarts:
    """The pause before each restart of one engine: doubling with each in the last hour, and none beyond a limit."""

    def __init__(self, most_per_hour: int, first_pause_s: float) -> None:
        self._most = most_per_hour
        self._first_pause_s = first_pause_s
        self._times: deque[float] = deque()

    def next_pause(self, now: float) -> float | None:
        """Seconds to wait before starting again at ``now`` (a monotonic time); None where the limit is reached."""
        while self._times and now - self._times[0] > _HOUR_S:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        self._times.append(now)
        return min(self._first_pause_s * 2.0 ** (len(self._times) - 1), LONGEST_PAUSE_S)


async def _keep_ours(config: Config, fleet: Fleet, engine: Engine, session: aiohttp.ClientSession) -> None:
    restarts = Restarts(config.engine.restarts_per_hour, config.engine.restart_pause_s)
    while True:
        reason: str | None = await _until_broken(config.engine, engine, session)
        while reason is not None:
            await fleet.mark_down(engine, reason)
            reason = await _restart(config, engine, restarts, reason, session)
        await fleet.mark_up(engine)


async def _restart(
    config: Config, engine: Engine, restarts: Restarts, reason: str, session: aiohttp.ClientSession
) -> str | None:
    """Starts an engine in the place of one that broke; returns why that one broke in its turn, None where it serves."""
    old = engine.process
    assert old is not None
    # It is broken: there is nothing to drain, and what hangs does not hear SIGTERM.
    await stop(old, timeout_s=0.0)
    pause = restarts.next_pause(time.monotonic())
    if pause is None:
        raise EngineDown(
            f"{engine.name} broke more than {config.engine.restarts_per_hour} times within an hour; last: {reason} "
            f"(log: {old.log}); what is recorded is safe, the same command goes on from there"
        )
    log.warning("%s is started again in %.0f s", engine.name, pause)
    await asyncio.sleep(pause)
    engine.process = await launch(config, engine.name, old.port, old.log)
    try:
        await wait_until_ready(engine.process, session, config.engine.start_timeout_s)
        engine.facts = await engine_facts(session, engine.url)
    except EngineDown as error:
        return str(error)
    return None


async def _until_broken(config: EngineConfig, engine: Engine, session: aiohttp.ClientSession) -> str:
    """Waits until an engine of ours ends or hangs; returns which, in words."""
    process = engine.process
    assert process is not None
    ended = asyncio.ensure_future(process.process.wait())
    hung = asyncio.ensure_future(_until_hung(config.stall_s, engine, session))
    try:
        await asyncio.wait((ended, hung), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            return hung.result()
        error = last_error(process.log)
        return describe_exit(ended.result()) + (f"; its last error: {error}" if error else "")
    finally:
        ended.cancel()
        hung.cancel()


async def _until_hung(stall_s: float, engine: Engine, session: aiohttp.ClientSession) -> str:
    """Waits until an engine that has requests of ours has made no token for ``stall_s`` seconds."""
    last: object = None
    since = time.monotonic()
    while True:
        await asyncio.sleep(min(POLL_S, stall_s / 4))
        now = time.monotonic()
        progress = await read_progress(session, engine.url)
        if engine.outstanding == 0 or (progress is not None and progress != last):
            last, since = progress, now
        elif now - since > stall_s:
            return f"it hangs: {engine.outstanding} requests and no token for {stall_s:.0f} s (engine.stall_s)"


async def _keep_attached(fleet: Fleet, engine: Engine) -> None:
    while True:
        await engine.went_down.wait()
        while not await fleet.is_alive(engine):  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(POLL_S)
        await fleet.mark_up(engine)


async def _give_up_when_all_are_lost(config: EngineConfig, fleet: Fleet) -> None:
    since = time.monotonic()
    while True:
        await asyncio.sleep(POLL_S)
        now = time.monotonic()
        restarting = any(engine.process is not None for engine in fleet.engines)
        if fleet.any_up or restarting:
            since = now
        elif now - since > config.lost_after_s:
            reasons = "; ".join(f"{engine.name}: {engine.down}" for engine in fleet.engines)
            raise EngineDown(
                f"no engine has answered for {config.lost_after_s:.0f} s ({reasons}); what is recorded is safe, the "
                "same command goes on from there"
            )


@asynccontextmanager
async def _started(config: Config, session: aiohttp.ClientSession, logs: Path) -> AsyncIterator[Fleet]:
    processes: list[EngineProcess] = []
    engines: list[Engine] = []
    end_orphans()
    try:
        for number in range(config.engine.replicas):
            wanted = config.engine.port + number if config.engine.port else 0
            port = choose_port(config.engine.host, wanted)
            name = f"engine-{number}"
            processes.append(await launch(config, name, port, logs / f"{name}.log"))
        async with asyncio.TaskGroup() as group:
            for process in processes:
                group.create_task(wait_until_ready(process, session, config.engine.start_timeout_s))
        engines = [await _engine(config, session, process) for process in processes]
        yield Fleet(engines, lambda engine: answers(engine.url, session))
    except* (EngineDown, InputError) as errors:
        raise first_error(errors) from None
    finally:
        # A restart puts another process in the place of the first.
        last = [engine.process for engine in engines if engine.process is not None] or processes
        await asyncio.shield(_stop_all(last, config.engine.stop_timeout_s))


async def _stop_all(processes: list[EngineProcess], timeout_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        for process in processes:
            group.create_task(stop(process, timeout_s))


async def _engine(config: Config, session: aiohttp.ClientSession, process: EngineProcess) -> Engine:
    facts = await engine_facts(session, process.url)
    return Engine(process.name, process.url, facts, config.client.concurrency, process)


async def _attach(config: Config, session: aiohttp.ClientSession, address: str) -> Engine:
    url = address.rstrip("/")
    try:
        facts = await engine_facts(session, url)
    except EngineDown as error:
        raise InputError("engine.urls", str(error)) from None
    if config.engine.check_model:
        check_model(facts, config.model)
    return Engine(url, url, facts, config.client.concurrency)


def _unknown(address: str, limit: int) -> Engine:
    url = address.rstrip("/")
    return Engine(url, url, EngineFacts(url, None, None, None, None, None, None, None), limit)
