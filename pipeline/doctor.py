"""Is this machine ready for what the configuration asks: interpreter, SGLang and its flags, model, RAM, disk, data."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp

from pipeline.config import Config
from pipeline.engine.command import engine_command, interpreter, local_model
from pipeline.engine.flags import FlagReport, ask_parser
from pipeline.engine.probe import check_model, engine_facts
from pipeline.errors import InputError, PipelineError
from pipeline.prompts import read_prompts
from pipeline.prompts.template import load_template
from pipeline.records import Failure

DEVICES = Path("/dev")

Mark = Literal["ok", "warn", "BAD"]

HICACHE_RESERVE_GB = 10 * 2**30 / 1e9
"""Host memory that SGLang leaves alone when it sizes the host pool."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at, and what to do where it is not as it should be."""

    mark: Mark
    what: str
    found: str


def examine(config: Config) -> Iterator[Check]:
    """Every check that the configuration calls for, in order."""
    yield _python()
    if config.engine.started_here:
        if config.engine.kind == "gpu":
            yield _gpus(config)
        yield from _sglang(config)
        yield _memory(config)
    else:
        yield from _attached(config)
    yield _model(config)
    yield _disk(config)
    yield _dataset(config)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("ok" if sys.version_info >= (3, 11) else "BAD", "python", version)


def _sglang(config: Config) -> Iterator[Check]:
    try:
        python = interpreter(config.engine)
    except PipelineError as error:
        yield Check("BAD", "engine.python", str(error))
        return
    try:
        command = engine_command(config.engine, config.model, config.sampling, 30000)
    except PipelineError as error:
        yield Check("BAD", "engine", str(error))
        return
    report = ask_parser(python, command)
    if report.version is None:
        yield Check("BAD", "sglang", f"{python} has none: {report.problem}")
        return
    yield Check("ok", "sglang", f"{report.version} in {python}")
    yield from _flags(report)


def _flags(report: FlagReport) -> Iterator[Check]:
    for unknown in report.unknown:
        near = f"; did you mean {unknown.nearest}?" if unknown.nearest else ""
        yield Check("BAD", "flag", f"SGLang {report.version} knows no {unknown.flag}{near}")
    for outdated in report.outdated:
        instead = f"is deprecated; use {outdated.instead}" if outdated.instead else "is read and ignored"
        yield Check("warn", "flag", f"{outdated.flag} {instead}")
    if report.problem:
        yield Check("BAD", "flags", report.problem)
    elif not report.unknown:
        yield Check("ok", "flags", "SGLang's own parser takes every one")


def _memory(config: Config) -> Check:
    try:
        available = _available_memory_gb()
    except OSError as error:
        return Check("warn", "memory", f"how much is available cannot be read: {error}")
    cache = config.engine.hicache
    if not cache.enabled:
        return Check("warn", "memory", f"{available:.0f} GB available; HiCache is off")
    if cache.size_gb is None:
        return Check("ok", "memory", f"{available:.0f} GB available; the host pool is sized by ratio at start")
    ranks = config.engine.tp_size * config.engine.replicas
    wanted, budget = cache.size_gb * ranks, available - HICACHE_RESERVE_GB
    text = f"host pool {wanted} GB over {ranks} ranks, {available:.0f} GB available"
    if wanted <= budget:
        return Check("ok", "memory", text)
    fitting = int(budget / ranks)
    advice = f"engine.hicache.size_gb={fitting}" if fitting >= 1 else "only engine.hicache.enabled=false"
    reserve = f"of which SGLang keeps {HICACHE_RESERVE_GB:.0f} GB free"
    return Check("BAD", "memory", f"{text}, {reserve}; {advice} would fit")


def _gpus(config: Config) -> Check:
    """Counts the device files of the NVIDIA driver, which a container has for the GPUs that it may use."""
    found = len(list(DEVICES.glob("nvidia[0-9]*")))
    needed = config.engine.tp_size * config.engine.replicas
    return Check("ok" if found >= needed else "BAD", "gpu", f"{found} NVIDIA GPUs here, {needed} needed")


def _attached(config: Config) -> Iterator[Check]:
    for url in config.engine.urls:
        try:
            yield Check("ok", "engine", asyncio.run(_describe(config, url.rstrip("/"))))
        except PipelineError as error:
            yield Check("BAD", "engine", str(error))


async def _describe(config: Config, url: str) -> str:
    async with aiohttp.ClientSession() as session:
        if config.engine.kind == "openai":
            return await _openai_models(config, session, url)
        facts = await engine_facts(session, url)
    if config.engine.check_model:
        check_model(facts, config.model)
    return f"{url}: SGLang {facts.version}, {facts.model_path}, {facts.kv_pool_tokens} KV tokens"


async def _openai_models(config: Config, session: aiohttp.ClientSession, url: str) -> str:
    address = f"{url.removesuffix('/v1')}/v1/models"
    key = os.environ.get(config.engine.api_key_env, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with session.get(address, headers=headers, timeout=aiohttp.ClientTimeout(total=60)) as response:
            status = response.status
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise InputError("engine.urls", f"{url} does not answer: {str(error) or type(error).__name__}") from None
    if status in (401, 403):
        raise InputError("engine.api_key_env", f"{address} refuses the key in {config.engine.api_key_env}")
    if status != 200:
        raise InputError("engine.urls", f"{address} answers HTTP {status}")
    return f"{address} answers"


def _model(config: Config) -> Check:
    if config.engine.kind == "openai":
        return Check("ok", "model", f"{config.model.served_name or config.model.path}, rendered by the server")
    try:
        path = local_model(config.model)
        template = load_template(config.model)
    except PipelineError as error:
        return Check("BAD", "model", str(error))
    return Check("ok", "model", f"{path}: tokenizer of {template.vocab_size} ids, chat template found")


def _disk(config: Config) -> Check:
    place = Path(config.run.dir).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return Check("BAD", "disk", f"run.dir: {place} is no folder")
    if not os.access(place, os.W_OK):
        return Check("BAD", "disk", f"run.dir: {place} cannot be written")
    free_gb = shutil.disk_usage(place).free / 1e9
    enough = free_gb >= config.store.min_free_gb
    needed = "" if enough else f"; store.min_free_gb asks for {config.store.min_free_gb:g}"
    return Check("ok" if enough else "BAD", "disk", f"{free_gb:.1f} GB free for {config.run.dir}{needed}")


def _dataset(config: Config) -> Check:
    try:
        first = next(read_prompts(config.dataset), None)
    except PipelineError as error:
        return Check("BAD", "dataset", str(error))
    if first is None:
        return Check("BAD", "dataset", f"{config.dataset.path} has no rows")
    if isinstance(first, Failure):
        return Check("warn", "dataset", f"its first row makes no prompt: {first.detail}")
    return Check("ok", "dataset", f"{config.dataset.name} ({config.dataset.path}), first row {first.id}")


def _available_memory_gb() -> float:
    """Memory that can be had without swapping, in 1e9 bytes (Linux: MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise OSError("/proc/meminfo has no MemAvailable line")
