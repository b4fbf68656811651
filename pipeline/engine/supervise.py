"""The engines of a command, from start to end: started here and ended here, or attached to and left alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from pipeline.config import Config
from pipeline.engine.fleet import Engine, Fleet
from pipeline.engine.launch import EngineProcess, choose_port, launch, stop, wait_until_ready
from pipeline.engine.probe import EngineFacts, check_model, engine_facts
from pipeline.engine.start_failure import describe_exit, last_error
from pipeline.errors import EngineDown, InputError, first_error

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_fleet(config: Config, session: aiohttp.ClientSession, logs: Path) -> AsyncIterator[Fleet]:
    """The engines of ``config``, ready and checked; those started here are ended on the way out.

    Raises:
        InputError: an attached engine does not answer, or serves another model.
        EngineDown: an engine that we start does not come up; the text is its own reason.
    """
    if config.engine.kind == "openai":
        yield Fleet([_unknown(url, config.client.concurrency) for url in config.engine.urls])
    elif config.engine.kind == "attach":
        yield Fleet([await _attach(config, session, url) for url in config.engine.urls])
    else:
        async with _started(config, session, logs) as fleet:
            yield fleet


async def watch(fleet: Fleet) -> None:
    """Returns never; raises when an engine of ours ends.

    Raises:
        EngineDown: with how it ended and the last error of its log.
    """
    async with asyncio.TaskGroup() as group:
        for engine in fleet.engines:
            if engine.process is not None:
                group.create_task(_watch(engine.process))
        await asyncio.Event().wait()


async def _watch(engine: EngineProcess) -> None:
    status = await engine.process.wait()
    reason = last_error(engine.log)
    raise EngineDown(
        f"{engine.name} is gone: {describe_exit(status)}"
        + (f"; its last error: {reason}" if reason else "")
        + f" (log: {engine.log}); run the same command again to go on"
    )


@asynccontextmanager
async def _started(config: Config, session: aiohttp.ClientSession, logs: Path) -> AsyncIterator[Fleet]:
    processes: list[EngineProcess] = []
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
        yield Fleet(engines)
    except* (EngineDown, InputError) as errors:
        raise first_error(errors) from None
    finally:
        await asyncio.shield(_stop_all(processes, config.engine.stop_timeout_s))


async def _stop_all(processes: list[EngineProcess], timeout_s: float) -> None:
    await asyncio.gather(*(stop(process, timeout_s) for process in processes))


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
