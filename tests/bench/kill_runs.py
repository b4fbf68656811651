"""Kills runs with SIGKILL at random instants, resumes them, and counts what was lost, doubled, torn and done twice.

    python tests/bench/kill_runs.py [--kills 200] [--rows 400] [--seed 0]

Each run answers ``rows`` prompts in segments against an engine double, with a shard sealed every few rows; it is killed
and started again until it finishes, then the next run begins, until ``kills`` kills have been made. The first start of
Python and its imports are shared (each run is a fork), so that the kills fall on work and not on imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.audit import audit
from pipeline.cli import main as pipeline_main
from pipeline.cli import models_folder
from pipeline.models import tiny
from pipeline.prompts.template import PromptTemplate, load_template  # noqa: F401 - imported before the first fork

SEGMENT_TOKENS = 8
CONCURRENCY = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    tiny(Path(models_folder("tiny-llama")).parent)
    __import__("transformers").AutoTokenizer  # noqa: B018 - loads the lazy module
    rng = random.Random(words.seed)
    engine = [sys.executable, str(Path(__file__).with_name("engine_double.py")), "--slots", str(CONCURRENCY)]
    totals: Counter[str] = Counter()
    with subprocess.Popen(engine, stdout=subprocess.PIPE, text=True) as double, tempfile.TemporaryDirectory() as place:
        assert double.stdout is not None
        url = double.stdout.readline().strip()
        try:
            while totals["kills"] < words.kills:
                totals["runs"] += 1
                folder = Path(place) / f"run-{totals['runs']}"
                one_run(folder, url, words.rows, words.kills - totals["kills"], rng, totals)
        finally:
            double.kill()
    report(totals)
    return 0 if not (totals["lost"] or totals["doubled"] or totals["problems"]) else 1


def one_run(folder: Path, url: str, rows: int, kills: int, rng: random.Random, totals: Counter[str]) -> None:
    data = folder.with_suffix(".jsonl")
    data.write_text("".join(json.dumps({"id": f"row-{n}", "prompt": f"question {n}"}) + "\n" for n in range(rows)))
    before = served(url)
    killed_here = 0
    while True:
        process = start(folder, url, data)
        if killed_here < kills:
            time.sleep(rng.uniform(0.05, 1.2))
            if os.waitpid(process, os.WNOHANG) == (0, 0):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                killed_here += 1
                continue
            break
        _, status = os.waitpid(process, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        break
    count(folder, rows, served(url) - before, killed_here, totals)


def start(folder: Path, url: str, data: Path) -> int:
    """The run, in a fork; returns its process id."""
    child = os.fork()
    if child:
        return child
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os._exit(
        pipeline_main(
            [
                *("run", "profile=none", "dataset=local", f"dataset.path={data}", "model=tiny", "engine=attach"),
                *(f"engine.urls=[{url}]", f"run.dir={folder}", "sampling.max_new_tokens=32", "capture.top_k=5"),
                *(f"sampling.segment_tokens={SEGMENT_TOKENS}", f"client.concurrency={CONCURRENCY}"),
                *("store.rows_per_shard=7", "store.sync_interval_s=0.05", "client.backoff_s=0.01"),
            ]
        )
    )


def count(folder: Path, rows: int, tokens_served: int, kills: int, totals: Counter[str]) -> None:
    table = pq.read_table(folder / "shards", columns=["id", "completion_tokens"])
    seen = Counter(table["id"].to_pylist())
    totals["kills"] += kills
    totals["rows"] += len(seen)
    totals["lost"] += rows - len(seen)
    totals["doubled"] += sum(seen.values()) - len(seen)
    totals["problems"] += len(audit(folder).problems)
    totals["tokens"] += sum(table["completion_tokens"].to_pylist())
    totals["tokens served"] += tokens_served


def served(url: str) -> int:
    with urllib.request.urlopen(f"{url}/served") as reply:
        return int(json.load(reply)["tokens"])


def report(totals: Counter[str]) -> None:
    again = totals["tokens served"] - totals["tokens"]
    most = totals["kills"] * CONCURRENCY * SEGMENT_TOKENS
    print(f"{totals['kills']} kills over {totals['runs']} runs, {totals['rows']} rows")
    print(f"lost {totals['lost']}, doubled {totals['doubled']}, broken rules (torn rows included) {totals['problems']}")
    print(
        f"generated again: {again} of {totals['tokens']} tokens ({again / totals['tokens']:.1%}), "
        f"{again / max(totals['kills'], 1):.0f} a kill; one segment of each request in flight would be "
        f"{CONCURRENCY * SEGMENT_TOKENS} a kill, {most} in all"
    )


if __name__ == "__main__":
    sys.exit(main())
