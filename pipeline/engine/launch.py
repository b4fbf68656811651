"""Starting one engine process, waiting until it serves, and ending it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pipeline.config import Config
from pipeline.engine import guard
from pipeline.engine.command import engine_command
from pipeline.engine.start_failure import explain_start_failure
from pipeline.errors import EngineDown, InputError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineProcess:
    """One engine that we started: its process, its address and its log."""

    name: str
    url: str
    port: int
    log: Path
    process: asyncio.subprocess.Process
    started: float

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self.process.returncode


async def launch(config: Config, name: str, port: int, log_path: Path) -> EngineProcess:
    """Starts an engine; it is not ready yet.

    Raises:
        InputError: what the command needs does not exist.
    """
    command = engine_command(config.engine, config.model, config.sampling, port)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as output:
        output.write(f"# {' '.join(command.argv)}\n".encode())
        output.flush()
        process = await asyncio.create_subprocess_exec(
            command.argv[0],
            guard.__file__,
            str(os.getpid()),
            *command.argv[1:],
            env=command.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A group of its own: a Ctrl-C at the terminal is for the pipeline, which drains first.
            start_new_session=True,
        )
    return EngineProcess(name, f"http://{config.engine.host}:{port}", port, log_path, process, time.monotonic())


async def wait_until_ready(engine: EngineProcess, session: aiohttp.ClientSession, timeout_s: float) -> None:
    """Returns when the engine answers ``/ready``.

    Raises:
        EngineDown: it ended, or took longer than ``timeout_s``; the text is the engine's own reason.
    """
    deadline = engine.started + timeout_s
    while not await answers(engine.url, session):
        if engine.exit_status is not None or time.monotonic() > deadline:
            reason = explain_start_failure(engine.log, engine.exit_status)
            raise EngineDown(f"{engine.name} did not start: {reason}")
        await asyncio.sleep(0.25)
    log.info("%s is ready at %s after %.0f s", engine.name, engine.url, time.monotonic() - engine.started)


async def stop(engine: EngineProcess, timeout_s: float) -> None:
    """Ends the engine and everything it started: SIGTERM first, SIGKILL to its group after ``timeout_s``."""
    if engine.exit_status is None:
        with contextlib.suppress(ProcessLookupError):
            engine.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await engine.process.wait()
    # Children that outlived it, or all of it: the group is ours alone, made by start_new_session.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGKILL)
    await engine.process.wait()


def choose_port(host: str, wanted: int) -> int:
    """``wanted``, or a free port where that is 0.

    Raises:
        InputError: the wanted port is taken.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            raise InputError("engine.port", f"{host}:{wanted} cannot be used: {error.strerror}", "0 for any") from None
        return int(probe.getsockname()[1])


async def answers(url: str, session: aiohttp.ClientSession) -> bool:
    """Whether the engine says that it serves. An older one has no ``/ready``; that it has a model will do there."""
    status = await _status(f"{url}/ready", session)
    if status == 404:
        status = await _status(f"{url}/get_model_info", session)
    return status == 200


async def answers_at_all(url: str, session: aiohttp.ClientSession) -> bool:
    """Whether a server that is no SGLang engine speaks HTTP; it promises nothing that could be asked for instead."""
    return await _status(url, session) is not None


async def _status(url: str, session: aiohttp.ClientSession) -> int | None:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
