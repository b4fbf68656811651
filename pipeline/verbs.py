"""What each verb does once its configuration is read: act, print, return the exit status."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pipeline import logs
from pipeline import run as run_stage
from pipeline.audit import audit as audit_folder
from pipeline.audit import report_lines
from pipeline.config import Config
from pipeline.doctor import examine
from pipeline.engine.supervise import open_fleet, supervise
from pipeline.errors import EXIT_BAD_INPUT, EXIT_BROKEN, EXIT_OK, EXIT_STOPPED, InputError
from pipeline.export import export as export_run
from pipeline.prompts.rows import BUNDLED
from pipeline.status import failure_kinds, read_status
from pipeline.stop import Stop
from pipeline.summary import opening_lines, totals_lines

T = TypeVar("T")

_ENGINES = {
    "cpu": "the real SGLang on the CPU",
    "gpu": "SGLang on the GPU",
    "attach": "running SGLang engines",
    "openai": "an OpenAI-compatible server",
}


def run(config: Config, config_yaml: str) -> int:
    """Generates, then shows what came of it."""
    logs.to_terminal()
    say(first_line(config))
    stop = Stop()
    summary = with_signals(run_stage.run(config, config_yaml, stop), stop)
    rate = summary.session_tokens / summary.session_seconds if summary.session_seconds else 0.0
    say("")
    for line in totals_lines(summary.totals, failure_kinds(summary.folder)):
        say(line)
    if summary.session_seconds:
        say(f"speed      {rate:.0f} tok/s over {summary.session_seconds:.0f} s in this session")
    else:
        say("nothing was left to generate: every prompt has its outcome, and no engine was started or asked")
    say(f"shards     {summary.shards} in {summary.folder / 'shards'}")
    if summary.stopped:
        say("stopped on request; the same command goes on from here")
        return EXIT_STOPPED
    for line in opening_lines(summary.folder):
        say(f"open       {line}")
    return summary.exit_status


def serve(config: Config, config_yaml: str) -> int:
    """Keeps engines up until a signal comes.

    Raises:
        InputError: the configured engines are not ours to start.
    """
    if not config.engine.started_here:
        raise InputError("engine", f"engine={config.engine.kind} is somebody else's to start", ("cpu", "gpu"))
    logs.to_terminal()
    stop = Stop()
    return with_signals(_serve(config), stop)


async def _serve(config: Config) -> int:
    log_folder = Path(config.run.dir) / "logs"
    say(f"starting {config.engine.replicas} engine(s), logs in {log_folder}")
    try:
        async with run_stage.open_session() as session, open_fleet(config, session, log_folder) as fleet:
            urls = ",".join(engine.url for engine in fleet.engines)
            say(f"ready: engine=attach engine.urls=[{urls}]")
            await supervise(config, fleet, session)
    except asyncio.CancelledError:
        say("engines stopped")
    return EXIT_STOPPED


def status(config: Config, config_yaml: str) -> int:
    """Shows how far a run is."""
    found = read_status(Path(config.run.dir))
    done = found.sealed + found.journalled + sum(found.failures.values())
    of = f" of {found.expected}" if found.expected else ""
    say(f"state      {found.state}")
    say(
        f"outcomes   {done}{of}: {found.sealed} rows in {len(found.manifest.shards)} shards, "
        f"{found.journalled} in the journal, {sum(found.failures.values())} failures"
    )
    _, failures, *of_shards = totals_lines(found.manifest.totals, found.failures)
    for line in [failures, *of_shards] if found.sealed else [failures]:
        say(line)
    if found.last_report:
        say(f"{'now' if found.live else 'last':<11}{found.last_report}")
    return EXIT_OK


def audit(config: Config, config_yaml: str) -> int:
    """Checks a folder; status 1 where a rule is broken."""
    found = audit_folder(Path(config.run.dir))
    for line in report_lines(found):
        say(line)
    return EXIT_BROKEN if found.problems else EXIT_OK


def export(config: Config, config_yaml: str) -> int:
    """Writes a trainer's files."""
    for line in export_run(config).lines():
        say(line)
    return EXIT_OK


def doctor(config: Config, config_yaml: str) -> int:
    """Looks at this machine; status 2 where something would stop a run."""
    bad = False
    for check in examine(config):
        say(f"{check.mark:<5}{check.what:<14}{check.found}")
        bad |= check.mark == "BAD"
    return EXIT_BAD_INPUT if bad else EXIT_OK


def first_line(config: Config) -> str:
    """What is about to be done, and on what: facts, whatever the profile was and whatever has been changed of it."""
    dataset, engine = config.dataset, config.engine
    rows = f"the first {dataset.limit} rows" if dataset.limit else "all rows"
    bundled = dataset.source == "bundled" and dataset.path in BUNDLED
    source = "of the bundled sample" if bundled else f"of {dataset.path}"
    cache = f", HiCache {'on' if engine.hicache.enabled else 'off'}" if engine.started_here else ""
    words = [
        f"profile={config.profile.name}: {rows} {source} ({dataset.name}), answered by {config.model.name}",
        f"in at most {config.sampling.max_new_tokens} tokens each on {_ENGINES[engine.kind]}{cache},",
        f"into {config.run.dir}.",
    ]
    if engine.kind == "cpu" and bundled:
        words.append("No GPU and no network are needed.")
    if config.model.trust_remote_code:
        words.append("Code from the model's repository will run (model.trust_remote_code).")
    return " ".join(words)


def with_signals(work: Coroutine[Any, Any, T], stop: Stop) -> T:
    """Runs a coroutine that SIGINT and SIGTERM can stop."""

    async def main() -> T:
        task = asyncio.ensure_future(work)
        stop.listen(task)
        return await task

    return asyncio.run(main())


def say(line: str) -> None:
    """One line for the person who ran the command."""
    print(line, flush=True)
