"""What keeping answers costs: the same work with the journal, its fsyncs and the shards, and with none of them.

    python tests/bench/store_cost.py [--rows 1500] [--rounds 3]

Both kinds of run answer the same prompts through the real client against an engine double of 64 slots (a process of its
own), in turn; the ratio is that of whole runs, sealing included.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from pipeline.cli import main as pipeline_main
from pipeline.records import Completion, Outcome
from pipeline.store import RunFolder
from pipeline.store.rows import totals_of

NEW_TOKENS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    script = Path(__file__).with_name("engine_double.py")
    command = [sys.executable, str(script), "--slots", "64", "--token-s", "0.004"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as double, tempfile.TemporaryDirectory() as place:
        assert double.stdout is not None
        url = double.stdout.readline().strip()
        try:
            seconds = measure(Path(place), url, words.rows, words.rounds)
        finally:
            double.kill()
    kept, bare = (statistics.median(seconds[name]) for name in ("kept", "bare"))
    tokens = words.rows * NEW_TOKENS
    print(f"{words.rows} rows, {tokens} tokens, k = 20, {words.rounds} rounds in turn, medians")
    print(f"kept  {kept:6.2f} s  {tokens / kept:8.0f} tok/s   {sorted(round(value, 2) for value in seconds['kept'])}")
    print(f"bare  {bare:6.2f} s  {tokens / bare:8.0f} tok/s   {sorted(round(value, 2) for value in seconds['bare'])}")
    print(f"journal, fsync and shards cost {kept / bare - 1:+.1%} of the time")
    return 0


def measure(place: Path, url: str, rows: int, rounds: int) -> dict[str, list[float]]:
    data = place / "rows.jsonl"
    data.write_text("".join(json.dumps({"id": f"row-{n}", "prompt": f"question {n}"}) + "\n" for n in range(rows)))
    seconds: dict[str, list[float]] = {"kept": [], "bare": []}
    one_run(place / "warm-up", url, data)
    for number in range(rounds):
        seconds["kept"].append(one_run(place / f"kept-{number}", url, data))
        with keeping_nothing():
            seconds["bare"].append(one_run(place / f"bare-{number}", url, data))
    return seconds


@contextlib.contextmanager
def keeping_nothing() -> Iterator[None]:
    """Counts outcomes and writes none of them."""

    def only_count(folder: RunFolder, outcome: Outcome) -> None:
        assert isinstance(outcome, Completion)
        folder.done.add(outcome.prompt.id)
        answer = outcome.answer
        names = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_device_tokens", "cached_host_tokens")
        folder.totals.add(totals_of({**{name: getattr(answer, name) for name in names}, "retractions": 0}))

    with mock.patch.object(RunFolder, "append", only_count):
        yield


def one_run(folder: Path, url: str, data: Path) -> float:
    words = [
        *("run", "profile=none", "dataset=local", f"dataset.path={data}", "model=tiny", "engine=attach"),
        *(f"engine.urls=[{url}]", f"run.dir={folder}", f"sampling.max_new_tokens={NEW_TOKENS}"),
        *("client.concurrency=64", "store.rows_per_shard=500"),
    ]
    started = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        assert pipeline_main(words) == 0
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
