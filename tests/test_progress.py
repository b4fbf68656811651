"""What a person sees of a run: while it works, and of its folder at any time."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from store_faults import never_wait_for_the_disk
from store_rows import abandon, completion, config_of, failure, open_folder

from pipeline import progress as progress_module
from pipeline import status as status_module
from pipeline import verbs
from pipeline.config import Config
from pipeline.engine.fleet import Engine, Fleet
from pipeline.engine.metrics import Load, parse_loads, read_load, total
from pipeline.engine.probe import EngineFacts
from pipeline.errors import InputError
from pipeline.logs import to_file, to_terminal
from pipeline.progress import REPORT, Progress, status_text
from pipeline.records import Totals
from pipeline.status import read_status
from pipeline.store import RunFolder
from pipeline.summary import opening_lines, totals_lines

ROOT = Path(__file__).parent.parent
LOAD = Load(running=3, waiting=2, retracted=0, used_tokens=10, pool_tokens=100, token_usage=0.107, tokens_per_s=50.0)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    never_wait_for_the_disk(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = open_folder(tmp_path / "run")
    yield made
    made.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def engines(*urls: str) -> Fleet:
    return Fleet([Engine(url, url, EngineFacts(url, *[None] * 7), 1) for url in urls])


def show_for(progress: Progress, fleet: Fleet, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            shown = asyncio.create_task(progress.show(session, fleet))
            await asyncio.sleep(seconds / 2)
            meanwhile()
            await asyncio.sleep(seconds / 2)
            shown.cancel()
            with pytest.raises(asyncio.CancelledError):
                await shown

    asyncio.run(scenario())


# The line


@pytest.mark.parametrize(
    ("totals", "failures", "load", "text"),
    [
        (Totals(), 0, None, "12 tok/s"),
        (Totals(), 2, None, "12 tok/s, 2 failed"),
        (Totals(prompt_tokens=200, cached_host_tokens=30), 0, None, "12 tok/s, host hits 15%"),
        (Totals(), 0, LOAD, "12 tok/s, 3 running, 2 waiting, KV 11%"),
        (
            Totals(prompt_tokens=8, cached_host_tokens=8),
            1,
            LOAD,
            "12 tok/s, 3 running, 2 waiting, KV 11%, host hits 100%, 1 failed",
        ),
    ],
)
def test_status_text(totals: Totals, failures: int, load: Load | None, text: str) -> None:
    assert status_text(totals, failures, 12.3, load) == text


def test_without_a_terminal_it_is_quiet_and_then_a_line_now_and_then(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    progress = Progress(folder, 4, stream)
    assert stream.getvalue() == ""
    show_for(progress, engines("http://a"), 0.02)
    assert stream.getvalue() == "", "the first line comes after the interval"

    async def read(session: aiohttp.ClientSession, url: str) -> Load | None:
        return LOAD if url == "http://a" else None

    monkeypatch.setattr(progress_module, "LINE_INTERVAL_S", 0.05)
    monkeypatch.setattr(progress_module, "read_load", read)
    show_for(progress, engines("http://a", "http://gone"), 0.4, lambda: folder.append(completion("0", tokens=3)))
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2
    assert "\r" not in stream.getvalue()
    assert re.fullmatch(r"0/4 rows, 0 s, 0 tok/s, 3 running, 2 waiting, KV 11%", lines[0])
    assert re.fullmatch(
        r"1/4 rows, [01] s, \d+ tok/s, 3 running, 2 waiting, KV 11%, host hits 20%, \d+ s left", lines[-1]
    )


def test_the_last_line_has_the_final_counts(folder: RunFolder) -> None:
    folder.append(completion("before", tokens=3))
    stream = io.StringIO()
    progress = Progress(folder, 3, stream)
    folder.append(completion("0", tokens=5))
    folder.append(failure("1"))
    progress.close()
    (line,) = stream.getvalue().splitlines()
    assert re.fullmatch(r"3/3 rows, 0 s, \d+ tok/s, host hits 20%, 1 failed, 0 s left", line)
    assert progress.tokens == 5, "what was generated before this session is not counted"
    assert 0.0 <= progress.seconds < 60.0


def test_more_rows_than_expected_leave_no_time_below_zero(folder: RunFolder) -> None:
    stream = io.StringIO()
    progress = Progress(folder, 1, stream)
    for number in range(3):
        folder.append(completion(str(number)))
    progress.close()
    assert stream.getvalue().endswith(", 0 s left\n")


def test_where_the_number_of_rows_is_not_known_no_end_is_promised(folder: RunFolder) -> None:
    stream = io.StringIO()
    progress = Progress(folder, None, stream)
    folder.append(completion("0"))
    progress.close()
    assert re.fullmatch(r"1 rows, 0 s, \d+ tok/s, host hits 20%\n", stream.getvalue())


def test_on_a_terminal_it_is_a_bar(folder: RunFolder) -> None:
    stream = Terminal()
    progress = Progress(folder, 4, stream)
    folder.append(completion("0"))
    folder.append(failure("1"))
    progress.close()
    last = stream.getvalue().rstrip().split("\r")[-1]
    assert " 2/4 [" in last
    assert "1 failed" in last
    assert "row" in last


def test_the_report_for_status(folder: RunFolder) -> None:
    progress = Progress(folder, 4, io.StringIO())
    folder.append(failure("0"))
    progress.close()
    report = orjson.loads((folder.path / "journal" / REPORT).read_bytes())
    assert report == {"text": "1/4 rows, 0 tok/s, 1 failed", "expected": 4}


def test_a_report_that_cannot_be_written_stops_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    stream = io.StringIO()
    Progress(folder, 4, stream).close()
    assert stream.getvalue().startswith("0/4 rows")


# Loads


def test_loads_of_all_ranks_and_engines_are_one() -> None:
    def rank(running: int, usage: float, **more: Any) -> dict[str, Any]:
        counts = {"num_waiting_reqs": 1, "num_used_tokens": 10, "max_total_num_tokens": 100, "gen_throughput": 2.5}
        return {"num_running_reqs": running, "token_usage": usage, **counts, **more}

    load = parse_loads({"loads": [rank(1, 0.5, queues={"retracted": 4}), rank(2, 0.25, queues=None)]})
    assert load == Load(3, 2, 4, 20, 200, 0.5, 5.0)
    assert total(iter([load, load])) == Load(6, 4, 8, 40, 400, 0.5, 10.0)
    assert total([]) is None


@pytest.mark.parametrize("reply", [b"no json", b"null", b"[]", b"{}", b'{"loads":[1]}', b'{"loads":[{}]}', 500, None])
def test_an_engine_that_does_not_tell_its_load_is_passed_over(reply: bytes | int | None) -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        if isinstance(reply, int):
            return web.Response(status=reply)
        return web.Response(body=reply, content_type="application/json")

    async def scenario() -> Load | None:
        app = web.Application()
        app.router.add_get("/v1/loads", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        if reply is None:
            await runner.cleanup()
        async with aiohttp.ClientSession() as session:
            found = await read_load(session, f"http://127.0.0.1:{port}")
        await runner.cleanup()
        return found

    assert asyncio.run(scenario()) is None


# The state of a folder


@contextmanager
def locked_elsewhere(folder: Path) -> Iterator[None]:
    """Another process holds the folder's lock, as the process of a run does."""
    script = "import sys; from pathlib import Path; from pipeline.store.lock import FolderLock\n"
    script += "lock = FolderLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout
        assert child.stdout.readline() == "locked\n"
        yield
    finally:
        child.communicate("")


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    config = Config()
    config.run.dir = str(folder)
    assert verbs.status(config, "") == 0
    return capsys.readouterr().out.splitlines()


def test_a_folder_that_was_never_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^run\.dir: .* holds no run \(no manifest\.json in it\)"):
        read_status(tmp_path)
    with pytest.raises(InputError, match=r"^run\.dir: "):
        read_status(tmp_path / "nowhere")


def test_a_run_that_has_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    abandon(open_folder(tmp_path))
    assert shown(tmp_path, capsys) == [
        "state      stopped (the same run command goes on from here)",
        "outcomes   0: 0 rows in 0 shards, 0 in the journal, 0 failures",
        "failures   0",
    ]


def test_a_run_that_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(tmp_path, rows_per_shard=3)
    progress = Progress(folder, 9, io.StringIO())
    for number in range(5):
        folder.append(completion(str(number), tokens=2))
    folder.append(failure("f"))
    folder.seal_full()
    progress.close()
    abandon(folder)
    found = read_status(tmp_path)
    assert (found.live, found.sealed, found.journalled, found.failures) == (False, 3, 2, {"timeout": 1})
    assert (found.expected, found.state) == (9, "stopped (the same run command goes on from here)")
    lines = shown(tmp_path, capsys)
    assert lines[1] == "outcomes   6 of 9: 3 rows in 1 shards, 2 in the journal, 1 failures"
    assert lines[2] == "failures   1 (1 timeout), listed in failures.jsonl"
    assert lines[3] == "tokens     6 generated, 2 a row"
    assert lines[-1].startswith("last       6/9 rows, ")


def test_a_run_that_is_going_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(tmp_path)
    folder.append(completion("0"))
    Progress(folder, 9, io.StringIO()).close()
    abandon(folder)
    with locked_elsewhere(tmp_path):
        assert read_status(tmp_path).live
        lines = shown(tmp_path, capsys)
    assert lines[0] == "state      running"
    assert lines[1].startswith("outcomes   1 of 9: 0 rows in 0 shards, 1 in the journal")
    assert lines[-1].startswith("now        1/9 rows, ")
    assert not read_status(tmp_path).live


def test_a_run_that_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(tmp_path, rows_per_shard=3)
    for number in range(4):
        folder.append(completion(str(number)))
    folder.finish()
    folder.close()
    found = read_status(tmp_path)
    assert (found.live, found.sealed, found.journalled, found.state) == (False, 4, 0, "complete")
    lines = shown(tmp_path, capsys)
    assert lines[:2] == [
        "state      complete",
        "outcomes   4: 4 rows in 2 shards, 0 in the journal, 0 failures",
    ]


def test_looking_changes_nothing(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.append(completion("0"))
    abandon(folder)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    read_status(tmp_path)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before


def test_a_journal_that_is_sealed_while_it_is_counted_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path, rows_per_shard=3)
    for number in range(3):
        folder.append(completion(str(number)))
    real = status_module.count_records

    def sealed_first(path: Path, kind: bytes) -> int:
        folder.seal_full()
        return real(path, kind)

    monkeypatch.setattr(status_module, "count_records", sealed_first)
    found = read_status(tmp_path)
    assert (found.sealed, found.journalled) == (3, 0)
    folder.close()


@pytest.mark.parametrize("report", [b"", b'{"text', b"[1]", b"\xff", None])
def test_a_report_that_cannot_be_read_is_no_report(report: bytes | None, tmp_path: Path) -> None:
    abandon(open_folder(tmp_path))
    place = tmp_path / "journal" / REPORT
    if report is None:
        place.mkdir()
    else:
        place.write_bytes(report)
    found = read_status(tmp_path)
    assert (found.expected, found.last_report) == (None, None)


def test_a_folder_without_its_journal_is_read(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.append(completion("0"))
    folder.finish()
    folder.close()
    shutil.rmtree(tmp_path / "journal")
    found = read_status(tmp_path)
    assert (found.sealed, found.state) == (1, "complete")


# Results in words


def test_totals_in_words() -> None:
    totals = Totals(4, 100, 40, 30, 50, truncated=1, retractions=2)
    assert totals_lines(totals, {"timeout": 1, "aborted": 2}) == [
        "rows       4",
        "failures   3 (2 aborted, 1 timeout), listed in failures.jsonl",
        "tokens     40 generated, 10 a row",
        "truncated  25% of rows reached sampling.max_new_tokens",
        "prompts    100 tokens: 20% computed, 30% from the device tier, 50% from the host tier (HiCache)",
        "retracted  2 times: the KV pool was full, work was done twice",
    ]
    assert totals_lines(Totals(), {})[:3] == ["rows       0", "failures   0", "tokens     0 generated, 0 a row"]


def test_the_lines_that_open_the_shards_are_python(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, config_of())
    folder.append(completion("0"))
    folder.finish()
    folder.close()
    import pandas

    frame_line, dataset_line = opening_lines(tmp_path)
    assert len(eval(frame_line, {"pandas": pandas})) == 1
    assert dataset_line == f'datasets.load_dataset("parquet", data_dir="{tmp_path / "shards"}")["train"]'


# Messages


@pytest.fixture
def our_logger() -> Iterator[logging.Logger]:
    """The package's logger as it is before anything was set up."""
    logger = logging.getLogger("pipeline")
    before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield logger
    logger.handlers[:] = before[0]
    logger.setLevel(before[1])
    logger.propagate = before[2]


def test_everything_goes_to_the_file_and_warnings_to_the_terminal(
    tmp_path: Path, our_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    to_terminal()
    to_terminal()
    log = logging.getLogger("pipeline.somewhere")
    with to_file(tmp_path / "pipeline.log"):
        log.info("a %s", "detail")
        log.warning("careful")
    log.info("after the end")
    assert capsys.readouterr().err == "warning: careful\n"
    lines = (tmp_path / "pipeline.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO pipeline.somewhere: a detail",
        "WARNING pipeline.somewhere: careful",
    ]


def test_the_file_needs_no_terminal(tmp_path: Path, our_logger: logging.Logger) -> None:
    with to_file(tmp_path / "pipeline.log"):
        logging.getLogger("pipeline.somewhere").info("a detail")
    assert (tmp_path / "pipeline.log").read_text().endswith(" INFO pipeline.somewhere: a detail\n")
