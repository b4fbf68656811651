"""Whole runs, through the command line, against engines that misbehave: full recovery or a recorded failure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from doubles import (
    BREAKS_AN_INVARIANT,
    Behaviour,
    EngineDouble,
    aborts_with_200,
    behaves,
    drops_mid_body,
    drops_the_connection,
    fails_inside,
    hangs,
    is_overloaded,
    refuses_the_request,
)

from pipeline.audit import audit
from pipeline.cli import main

EVERY_FAULT = [
    *(is_overloaded, fails_inside, drops_the_connection, drops_mid_body, hangs, aborts_with_200),
    *BREAKS_AN_INVARIANT,
]


@contextmanager
def running(double: EngineDouble) -> Iterator[EngineDouble]:
    """The double, serving from a thread of its own while the command line has this one."""
    loop = asyncio.new_event_loop()
    started, stopped = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with double:
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield double
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)


def words(folder: Path, urls: str, *more: str) -> list[str]:
    return [
        *("run", "dataset=B2", "model=tiny", "engine=attach", f"engine.urls=[{urls}]", f"run.dir={folder}"),
        *("dataset.limit=12", "sampling.max_new_tokens=9", "capture.top_k=5", "client.concurrency=4"),
        *("client.timeout_s=1", "client.backoff_s=0.001", "client.backoff_max_s=0.01", "store.rows_per_shard=5"),
        *more,
    ]


def failures_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("tiny_model")
class TestRunsAgainstADouble:
    @pytest.mark.parametrize("behaviour", EVERY_FAULT, ids=lambda behaviour: behaviour.__name__)
    def test_a_passing_fault_costs_nothing(self, behaviour: Behaviour, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        with running(EngineDouble(*[behaviour] * 6)) as double:
            assert main(words(folder, double.url)) == 0
        found = audit(folder)
        assert (found.problems, found.rows, found.failures) == ([], 12, 0)

    @pytest.mark.parametrize("behaviour", [*BREAKS_AN_INVARIANT, hangs], ids=lambda behaviour: behaviour.__name__)
    def test_a_lasting_fault_is_recorded_for_its_prompt_and_the_rest_goes_on(
        self, behaviour: Behaviour, tmp_path: Path
    ) -> None:
        async def for_one_prompt(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (behaviour if len(body["input_ids"]) == victim else behaves)(request, body)

        lengths: list[int] = []

        async def measures(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            lengths.append(len(body["input_ids"]))
            return await behaves(request, body)

        with running(EngineDouble(always=measures)) as double:
            assert main(words(tmp_path / "first", double.url)) == 0
        victim = next(length for length in lengths if lengths.count(length) == 1)
        folder = tmp_path / "run"
        quick = ("client.max_attempts=2", "client.timeout_s=0.5")
        with running(EngineDouble(always=for_one_prompt)) as double:
            assert main(words(folder, double.url, *quick)) == 3
        found = audit(folder)
        assert (found.problems, found.rows, found.failures) == ([], 11, 1)
        (failure,) = failures_in(folder)
        assert failure["kind"] == ("timeout" if behaviour is hangs else "bad_answer")
        assert failure["attempts"] == 2
        with running(EngineDouble()) as double:
            assert main(words(folder, double.url)) == 3
            assert not double.requests
            assert main(words(folder, double.url, "run.retry_failed=true")) == 0
        found = audit(folder)
        assert (found.problems, found.rows, found.failures) == ([], 12, 0)

    def test_a_run_in_which_everything_fails_is_stopped(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "run"
        with running(EngineDouble(always=refuses_the_request)) as double:
            assert main(words(folder, double.url, "dataset.limit=40", "run.max_failures_in_a_row=6")) == 1
        assert "6 prompts in a row have failed" in capsys.readouterr().err
        assert len(failures_in(folder)) < 12
        with running(EngineDouble()) as double:
            assert main(words(folder, double.url, "dataset.limit=40", "run.retry_failed=true")) == 0
        assert (audit(folder).rows, audit(folder).failures) == (40, 0)

    def test_an_engine_that_dies_is_waited_for_and_no_prompt_pays(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        dying = EngineDouble()
        dying.dies_after(5, for_s=2.5)
        with running(dying) as double:
            assert main(words(folder, double.url, "client.max_attempts=1")) == 0
        found = audit(folder)
        assert (found.problems, found.rows, found.failures) == ([], 12, 0)

    def test_a_run_ends_when_no_engine_comes_back(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "run"
        dying = EngineDouble()
        dying.dies_after(5, for_s=3600)
        with running(dying) as double:
            assert main(words(folder, double.url, "engine.lost_after_s=2")) == 1
        assert "no engine has answered for 2 s" in capsys.readouterr().err
        assert failures_in(folder) == []
        with running(EngineDouble()) as double:
            assert main(words(folder, double.url)) == 0
        assert (audit(folder).problems, audit(folder).rows) == ([], 12)

    def test_an_engine_that_dies_is_routed_around(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        dying, steady = EngineDouble(), EngineDouble()
        dying.dies_after(3, for_s=3600)
        with running(dying), running(steady):
            assert main(words(folder, f"{dying.url},{steady.url}")) == 0
        assert (audit(folder).problems, audit(folder).rows) == ([], 12)
        assert len(steady.requests) >= 9

    def test_the_segments_of_an_answer_stay_on_one_engine(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        with running(EngineDouble()) as one, running(EngineDouble()) as other:
            assert main(words(folder, f"{one.url},{other.url}", "sampling.segment_tokens=2")) == 0
        assert audit(folder).problems == []
        for double in (one, other):
            first = [tuple(request["input_ids"]) for request in double.requests]
            # Each continuation has the whole of an earlier request of the same engine as its beginning.
            begun = {ids for ids in first if not any(ids[: len(o)] == o for o in first if len(o) < len(ids))}
            assert len(first) == 5 * len(begun)

    def test_scaled_logprobs_are_refused_unless_allowed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with running(EngineDouble(scaled=True)) as double:
            assert main(words(tmp_path / "a", double.url, "sampling.temperature=0.5")) == 2
            assert "capture.allow_scaled" in capsys.readouterr().err
            assert main(words(tmp_path / "b", double.url, "sampling.temperature=0.5", "capture.allow_scaled=true")) == 0
            assert main(words(tmp_path / "c", double.url, "sampling.temperature=1.0")) == 0
        kinds = [json.loads((tmp_path / name / "manifest.json").read_text())["capture"]["logprobs"] for name in "bc"]
        assert kinds == ["scaled", "raw"]

    @pytest.mark.parametrize("urls", ["http://127.0.0.1:9", "http://127.0.0.1:9/"])
    def test_an_unreachable_engine_is_one_clear_line(
        self, urls: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words(tmp_path / "run", urls)) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: engine.urls: http://127.0.0.1:9 does not answer")
        assert len(error.splitlines()) == 1

    def test_a_mirror_that_is_away_costs_nothing_but_the_last_word(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, copy = tmp_path / "run", tmp_path / "copy"
        copy.write_text("a file where the folder should be")
        with running(EngineDouble()) as double:
            assert main(words(folder, double.url, f"store.mirror=file://{copy}")) == 1
            assert "could not be copied to file://" in capsys.readouterr().err
            assert (audit(folder).problems, audit(folder).rows) == ([], 12)
            copy.unlink()
            asked = len(double.requests)
            assert main(words(folder, double.url, f"store.mirror=file://{copy}")) == 0
            assert len(double.requests) == asked
        names = {path.name for path in copy.iterdir()}
        assert names == {path.name for path in (folder / "shards").iterdir()}
