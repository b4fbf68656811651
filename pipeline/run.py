"""The run: prompts -> engine -> client -> store.

The invariant that the whole program is built around: every prompt taken from a dataset ends in exactly one durable
outcome, a completion or a recorded failure, never two, never none, whatever is killed and whenever. Here it rests on
three things: the feed hands a prompt out only if the folder has no outcome for it; a worker records the outcome of
each prompt it takes before it takes another; and a worker that is interrupted records nothing, so that the prompt
is handed out again next time.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pipeline import logs
from pipeline.breaker import CircuitBreaker
from pipeline.client.complete import Answered, Completer, to_completion
from pipeline.client.open import open_endpoint
from pipeline.config import Config, content_settings, fingerprint
from pipeline.engine.fleet import Fleet
from pipeline.engine.supervise import open_fleet, supervise
from pipeline.errors import EXIT_OK, EXIT_SOME_FAILED, EXIT_STOPPED, InputError, PipelineError, StoreError, first_error
from pipeline.feed import PromptFeed, Tokenize
from pipeline.progress import Progress
from pipeline.prompts import read_prompts
from pipeline.prompts.count import expected_prompts
from pipeline.prompts.template import PromptTemplate, load_template
from pipeline.records import Failure, Segment, TokenizedPrompt, Totals
from pipeline.stop import Stop
from pipeline.store import Manifest, Mirror, RunFolder, open_run

log = logging.getLogger(__name__)

READ_AHEAD = 64
KEEP_ALIVE_S = 4.0
"""Engines close idle connections after 5 s; ours go first, so that no request meets a connection being closed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. ``session_*`` cover this process only, everything else the folder."""

    folder: Path
    totals: Totals
    failures: int
    shards: int
    session_tokens: int
    session_seconds: float
    stopped: bool

    @property
    def exit_status(self) -> int:
        """The status that the command line ends with."""
        if self.stopped:
            return EXIT_STOPPED
        return EXIT_SOME_FAILED if self.failures else EXIT_OK


async def run(config: Config, config_yaml: str, stop: Stop) -> Summary:
    """Generates what is missing from the run folder, and seals it when nothing is.

    Args:
        config_yaml: the resolved configuration as text, kept in a new folder.

    Raises:
        InputError: configuration, input, folder or engine cannot be used as given; nothing was generated.
        EngineDown: an engine that we started is gone; what was generated is kept.
        StoreError: the folder cannot be written.
    """
    prompts = await asyncio.to_thread(read_prompts, config.dataset)
    check_disk(config)
    open_mirror(config)
    template = await asyncio.to_thread(load_template, config.model) if needs_tokenizer(config) else None
    fresh = new_manifest(config, template)
    wanted = config.run
    folder = open_run(Path(wanted.dir), config.store, fresh, config_yaml, wanted.extend, wanted.retry_failed)
    try:
        with logs.to_file(folder.path / "logs" / "pipeline.log"):
            feed = PromptFeed(prompts, folder.is_done, tokenize_with(template), READ_AHEAD)
            return await fill(config, folder, feed, template, stop)
    finally:
        await asyncio.to_thread(folder.close)


async def fill(
    config: Config, folder: RunFolder, feed: PromptFeed, template: PromptTemplate | None, stop: Stop
) -> Summary:
    """Generates what the open folder lacks; no engine is started where it lacks nothing."""
    if await feed.is_empty():
        await asyncio.to_thread(finish, folder, open_mirror(config))
        return summarize(folder, None, stop)
    folder.manifest.complete = False
    if config.engine.started_here:
        say_starting(config, folder)
    async with (
        open_session() as session,
        open_fleet(config, session, folder.path / "logs") as fleet,
        open_endpoint(config, session, fleet) as (endpoint, capture),
    ):
        folder.manifest.engines = [engine.facts.as_json() for engine in fleet.engines]
        folder.set_capture(capture)
        progress = Progress(folder, expected_prompts(config.dataset))
        try:
            completer = Completer(fleet, endpoint, config.client, config.sampling)
            breaker = CircuitBreaker(config.run.max_failures_in_a_row)
            with stop.draining(feed.stop, config.run.drain_s):
                await generate(config, session, fleet, Desk(feed, completer, folder, template, breaker), progress)
        finally:
            folder.manifest.seconds += progress.seconds
            progress.close()
    if not feed.exhausted:
        folder.save_manifest()
    else:
        await asyncio.to_thread(finish, folder, open_mirror(config))
    return summarize(folder, progress, stop)


async def generate(
    config: Config, session: aiohttp.ClientSession, fleet: Fleet, desk: Desk, progress: Progress
) -> None:
    """Workers answer and record until the feed ends, while the disk, the engines and the bar are looked after."""
    try:
        async with asyncio.TaskGroup() as background:
            tasks = [
                background.create_task(sync_regularly(desk.folder, config.store.sync_interval_s)),
                background.create_task(seal_when_full(desk.folder, open_mirror(config))),
                background.create_task(supervise(config, fleet, session)),
                background.create_task(progress.show(session, fleet)),
            ]
            async with asyncio.TaskGroup() as workers:
                for _ in range(fleet.limit):
                    workers.create_task(desk.work())
            for task in tasks:
                task.cancel()
    except* PipelineError as errors:
        raise first_error(errors) from None
    await asyncio.to_thread(desk.folder.sync)


@dataclass(frozen=True, slots=True)
class Desk:
    """What all workers share: where prompts come from, how they are answered, where outcomes go."""

    feed: PromptFeed
    completer: Completer
    folder: RunFolder
    template: PromptTemplate | None
    breaker: CircuitBreaker

    async def work(self) -> None:
        """One worker: takes a prompt, gets its outcome, records it, takes the next."""
        async for prompt in self.feed:
            answered = prompt if isinstance(prompt, Failure) else await self.answer(prompt)
            await asyncio.to_thread(self.record, answered)
            if isinstance(answered, Failure):
                self.breaker.failed(answered)
            else:
                self.breaker.succeeded()

    async def answer(self, prompt: TokenizedPrompt) -> Answered | Failure:
        """The answer to one prompt, begun where an earlier session was interrupted, each segment kept as it comes."""
        name = prompt.prompt.id

        async def keep(number: int, segment: Segment) -> None:
            await asyncio.to_thread(self.folder.append_segment, name, number, segment)

        begun = await asyncio.to_thread(self.folder.begun, name) if self.folder.has_begun(name) else ()
        return await self.completer.answer(prompt, begun, keep)

    def record(self, answered: Answered | Failure) -> None:
        """Writes an outcome."""
        if isinstance(answered, Failure):
            log.info("failure: %s: %s: %s", answered.id, answered.kind, answered.detail)
            self.folder.append(answered)
        else:
            self.folder.append(to_completion(answered, self.template))


async def sync_regularly(folder: RunFolder, interval_s: float) -> None:
    """Group commit: one fsync for everything written in the interval."""
    while True:
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(folder.sync)


async def seal_when_full(folder: RunFolder, mirror: Mirror | None) -> None:
    """Turns full journals into shards, and copies those to the mirror, while the run goes on."""
    while True:
        await asyncio.sleep(0.2)
        if folder.waiting_to_seal:
            await asyncio.to_thread(folder.seal_full)
            if mirror is not None:
                await asyncio.to_thread(mirror_or_warn, folder, mirror)


def mirror_or_warn(folder: RunFolder, mirror: Mirror) -> None:
    """A mirror that is away must not stop the engine: what is missing there is copied later, at the latest at the
    end, where a failure counts."""
    try:
        folder.mirror_sealed(mirror)
    except StoreError as error:
        log.warning("not mirrored yet: %s", error)


def finish(folder: RunFolder, mirror: Mirror | None) -> None:
    """Seals and mirrors what is left, and marks the run complete.

    Raises:
        StoreError: the disk or the mirror refused; the same command tries again.
    """
    folder.finish()
    if mirror is not None:
        folder.mirror_sealed(mirror)


def tokenize_with(template: PromptTemplate | None) -> Tokenize:
    """What makes ids of a prompt; without a template the server does."""
    return template.encode if template else lambda prompt: TokenizedPrompt(prompt, None)


def say_starting(config: Config, folder: RunFolder) -> None:
    """Loading a model takes from half a minute to half an hour, and nothing else is shown meanwhile."""
    engines = "an engine" if config.engine.replicas == 1 else f"{config.engine.replicas} engines"
    print(f"starting {engines}, logs in {folder.path / 'logs'}", file=sys.stderr, flush=True)


def open_session() -> aiohttp.ClientSession:
    """The HTTP connections of a run: as many as there are requests in flight, each reused."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


def open_mirror(config: Config) -> Mirror | None:
    """Where second copies of shards go, if anywhere."""
    return Mirror(config.store.mirror) if config.store.mirror else None


def needs_tokenizer(config: Config) -> bool:
    """An OpenAI-compatible server renders and tokenises by itself."""
    return config.engine.kind != "openai"


def new_manifest(config: Config, template: PromptTemplate | None) -> Manifest:
    """The manifest that a new folder starts with."""
    return Manifest(
        fingerprint=fingerprint(config),
        content=content_settings(config),
        model=config.model.served_name or config.model.path,
        tokenizer_sha256=template.digest if template else None,
        created_at="",
    )


def check_disk(config: Config) -> None:
    """Refuses to start on a disk with less than ``store.min_free_gb`` free."""
    place = Path(config.run.dir).absolute()
    while not place.exists():
        place = place.parent
    free_gb = shutil.disk_usage(place).free / 1e9
    if free_gb < config.store.min_free_gb:
        raise InputError(
            "run.dir", f"{place} has {free_gb:.2f} GB free", f"store.min_free_gb={config.store.min_free_gb:g} or more"
        )


def summarize(folder: RunFolder, progress: Progress | None, stop: Stop) -> Summary:
    """The run's summary."""
    return Summary(
        folder=folder.path,
        totals=folder.totals,
        failures=folder.failures,
        shards=len(folder.manifest.shards),
        session_tokens=progress.tokens if progress else 0,
        session_seconds=progress.seconds if progress else 0.0,
        stopped=stop.requested and not folder.manifest.complete,
    )
