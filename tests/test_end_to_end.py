"""The main job against the real engine: SGLang on the CPU, HiCache on, the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.audit import audit
from pipeline.cli import main
from pipeline.status import read_status
from pipeline.store.journal import count_records
from pipeline.store.rows import SEGMENT

pytestmark = pytest.mark.engine

K = 20


def run_words(folder: Path, url: str, *words: str) -> list[str]:
    """A `run` of the tiny model on the shared engine; later words win."""
    return [
        *("run", "dataset=B2", "model=tiny", "engine=attach", f"engine.urls=[{url}]", f"run.dir={folder}"),
        *("sampling.max_new_tokens=40", "store.rows_per_shard=8", "client.concurrency=8", *words),
    ]


def rows_of(folder: Path) -> pa.Table:
    """All sealed rows of a run."""
    return pq.read_table(folder / "shards")


def ids_of(folder: Path) -> list[str]:
    ids: list[str] = rows_of(folder)["id"].to_pylist()
    return ids


def assert_sound(folder: Path, rows: int) -> None:
    found = audit(folder)
    assert found.problems == []
    assert found.rows == rows
    ids = ids_of(folder)
    assert len(ids) == len(set(ids)) == rows


@pytest.fixture(scope="module")
def finished(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished greedy run of 20 rows."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(run_words(folder, engine_url, "dataset.limit=20", "sampling=greedy", "sampling.max_new_tokens=40")) == 0
    return folder


@pytest.mark.parametrize("dataset", ["B1", "B2"])
def test_a_bundled_dataset_becomes_shards(dataset: str, engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(run_words(folder, engine_url, f"dataset={dataset}", "dataset.limit=20")) == 0
    assert_sound(folder, 20)
    assert [path.name for path in sorted((folder / "shards").iterdir())] == [f"part-0000{n}.parquet" for n in range(3)]
    assert set(rows_of(folder)["dataset"].to_pylist()) == {dataset}
    assert not list((folder / "journal").glob("*.journal"))
    assert main(["audit", f"run.dir={folder}"]) == 0
    assert main(["status", f"run.dir={folder}"]) == 0


def test_the_other_half_of_b1_is_chosen_by_its_path(engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("dataset=B1", "dataset.path=glaiveai/glaive-code-assistant-v3", "dataset.limit=4")
    assert main(run_words(folder, engine_url, *words)) == 0
    assert_sound(folder, 4)


def test_every_distribution_sums_to_one_and_holds_the_sampled_token(finished: Path) -> None:
    for row in rows_of(finished).to_pylist():
        topk = np.array(row["topk_logprobs"], dtype=np.float64)
        assert topk.shape == (row["completion_tokens"], K)
        np.testing.assert_allclose(np.exp(topk).sum(axis=1) + np.exp(row["tail_logprob"]), 1.0, atol=1e-3)
        where = np.array(row["topk_ids"]) == np.array(row["output_ids"])[:, None]
        assert where.any(axis=1).all()  # greedy: the sampled token is the first of the k
        np.testing.assert_allclose(topk[where], row["output_logprobs"], atol=1e-5)


def test_greedy_ids_and_raw_logprobs_are_those_of_transformers(finished: Path, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    rows = rows_of(finished).to_pylist()
    assert len(rows) >= 8
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["output_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        assert logprobs.argmax(dim=-1).tolist() == row["output_ids"]
        sampled = logprobs.gather(1, torch.tensor(row["output_ids"])[:, None])[:, 0]
        np.testing.assert_allclose(row["output_logprobs"], sampled, atol=1e-3)
        top = logprobs.gather(1, torch.tensor(row["topk_ids"]))
        np.testing.assert_allclose(row["topk_logprobs"], top, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_logprobs_are_raw_whatever_the_temperature(
    temperature: float, engine_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "run"
    words = ("dataset.limit=3", f"sampling.temperature={temperature}", "sampling.top_p=0.9")
    assert main(run_words(folder, engine_url, *words)) == 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for row in rows_of(folder).to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["output_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
        sampled = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(row["output_ids"])[:, None])[:, 0]
        np.testing.assert_allclose(row["output_logprobs"], sampled, atol=1e-3)
    assert json.loads((folder / "manifest.json").read_text())["capture"]["logprobs"] == "raw"


def test_a_prefix_evicted_to_the_host_tier_comes_back(engine_url: str, tmp_path: Path) -> None:
    # 20 prompts of over 500 tokens each do not fit the pool of 6,000 together; asked again, in the same order, most
    # of each must come from the host.
    rows = [
        {"prompt": f"{number}: " + f"remember the number {number} and the word kettle " * 30} for number in range(20)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("dataset=local", f"dataset.path={data}", "dataset.limit=null", "sampling.max_new_tokens=4")
    for name in ("first", "second"):
        assert main(run_words(tmp_path / name, engine_url, *words, "client.concurrency=2")) == 0
        assert_sound(tmp_path / name, 20)
    again = rows_of(tmp_path / "second")
    host = sum(again["cached_host_tokens"].to_pylist())
    assert host > 0.3 * sum(again["prompt_tokens"].to_pylist())
    totals = json.loads((tmp_path / "second" / "manifest.json").read_text())["totals"]
    assert totals["cached_host_tokens"] == host


def test_killed_twice_and_run_again_every_prompt_is_there_once(engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = run_words(folder, engine_url, "dataset.limit=48", "sampling.max_new_tokens=60", "client.concurrency=4")
    command = [sys.executable, "-m", "pipeline", *words]
    for enough in (10, 26):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_rows(folder, enough, process)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    partial = read_status(folder)
    assert 26 <= partial.sealed + partial.journalled < 48
    assert main(words) == 0
    assert_sound(folder, 48)


def wait_for_rows(folder: Path, enough: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        if (folder / "manifest.json").exists():
            found = read_status(folder)
            if found.sealed + found.journalled >= enough:
                return
        time.sleep(0.02)
    raise AssertionError("the run made no progress")


def test_a_finished_run_starts_no_engine(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = run_words(
        finished, "http://127.0.0.1:9", "dataset.limit=20", "sampling=greedy", "sampling.max_new_tokens=40"
    )
    assert main(words) == 0
    assert_sound(finished, 20)
    assert "rows       20" in capsys.readouterr().out


def test_a_run_grows_with_its_limit_when_told_to(engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(run_words(folder, engine_url, "dataset.limit=6")) == 0
    assert main(run_words(folder, engine_url, "dataset.limit=10")) == 2
    assert main(run_words(folder, engine_url, "dataset.limit=10", "run.extend=true")) == 0
    assert_sound(folder, 10)


def test_bad_rows_are_recorded_and_the_rest_goes_on(engine_url: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    good = [json.dumps({"prompt": f"question {number}"}) for number in range(5)]
    bad = ['{"prompt": "torn', '{"colour": "red"}', '{"messages": [{"role": "system", "content": "hi"}]}']
    long = json.dumps({"prompt": "word " * 20_000})
    data.write_text("\n".join([*good[:2], *bad, long, *good[2:]]) + "\n")
    folder = tmp_path / "run"
    words = ("dataset=local", f"dataset.path={data}", "dataset.limit=null")
    assert main(run_words(folder, engine_url, *words)) == 3
    assert_sound(folder, 5)
    failures = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    assert sorted(failure["kind"] for failure in failures) == ["malformed_row"] * 2 + ["no_user_turn", "too_long"]
    assert any("line 3" in failure["detail"] for failure in failures)
    assert main(run_words(folder, engine_url, *words)) == 3  # nothing is tried again, nothing recorded twice
    assert len((folder / "failures.jsonl").read_text().splitlines()) == 4


def test_several_samples_of_a_prompt_are_rows_of_their_own(engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(run_words(folder, engine_url, "dataset.limit=3", "dataset.samples=2", "sampling.temperature=1.0")) == 0
    assert_sound(folder, 6)
    assert sorted(rows_of(folder)["sample"].to_pylist()) == [0, 0, 0, 1, 1, 1]


def test_no_distribution_is_stored_at_top_k_0(engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(run_words(folder, engine_url, "dataset.limit=3", "capture.top_k=0")) == 0
    assert_sound(folder, 3)
    table = rows_of(folder)
    assert table["topk_ids"].null_count == table["tail_logprob"].null_count == 3
    assert table["output_logprobs"].null_count == 0


def test_an_engine_of_another_model_is_refused(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run_words(tmp_path / "run", engine_url, "model.served_name=other", "model.tokenizer=${model.path}")
    path = str(tmp_path / "kimi")
    assert main([*words, f"model.path={path}", f"model.tokenizer={tiny_tokenizer()}"]) == 2
    error = capsys.readouterr().err
    assert "engine.urls" in error
    assert "engine.check_model=false" in error


def tiny_tokenizer() -> str:
    from pipeline.cli import models_folder

    return models_folder("tiny-llama")


def test_the_exports_of_a_run_are_what_was_generated(finished: Path) -> None:
    from specforge.data.prompt_builder import prepare_prompt_tasks  # noqa: F401 - the reader's own tests use it

    assert main(["export", f"run.dir={finished}", "to=specforge"]) == 0
    lines = (finished / "export" / "specforge" / "prompts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rows = rows_of(finished).to_pylist()
    assert [record["input_ids"] for record in records] == [row["prompt_ids"] + row["output_ids"] for row in rows]
    assert [sum(record["loss_mask"]) for record in records] == [row["completion_tokens"] for row in rows]
    assert main(["export", f"run.dir={finished}", "to=speculators"]) == 0


@pytest.mark.parametrize("segment_tokens", [1, 7, 32])
def test_an_answer_in_segments_is_the_answer_in_one(
    segment_tokens: int, finished: Path, engine_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = (
        "dataset.limit=8",
        "sampling=greedy",
        "sampling.max_new_tokens=40",
        f"sampling.segment_tokens={segment_tokens}",
    )
    assert main(run_words(folder, engine_url, *words)) == 0
    assert_sound(folder, 8)
    whole = {row["id"]: row for row in rows_of(finished).to_pylist()}
    for row in rows_of(folder).to_pylist():
        other = whole[row["id"]]
        assert row["segments"] == -(-row["completion_tokens"] // segment_tokens)
        for name in ("prompt_ids", "output_ids", "text", "finish_reason", "prompt_tokens", "messages"):
            assert row[name] == other[name], name
        for name in ("output_logprobs", "topk_logprobs", "tail_logprob"):
            np.testing.assert_allclose(row[name], other[name], atol=1e-4)


def test_an_interrupted_answer_goes_on_from_its_last_segment(engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = run_words(
        *(folder, engine_url, "dataset.limit=6", "sampling=greedy", "sampling.max_new_tokens=400"),
        *("sampling.segment_tokens=8", "client.concurrency=3", "store.rows_per_shard=2"),
    )
    command = [sys.executable, "-m", "pipeline", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_segments(folder, 12, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = segments_in(folder)
    assert main(words) == 0
    assert_sound(folder, 6)
    whole = tmp_path / "whole"
    assert main([*words, f"run.dir={whole}", "sampling.segment_tokens=0"]) == 0
    texts = dict(zip(ids_of(whole), rows_of(whole)["output_ids"].to_pylist(), strict=True))
    rows = rows_of(folder).to_pylist()
    assert {row["id"]: row["output_ids"] for row in rows} == texts
    # What the first session kept was not asked for again: the attempts of all rows are those of both sessions.
    assert sum(row["attempts"] for row in rows) == sum(row["segments"] for row in rows)
    assert kept >= 12


def segments_in(folder: Path) -> int:
    return sum(count_records(path, SEGMENT) for path in (folder / "journal").glob("part-*.journal"))


def wait_for_segments(folder: Path, enough: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        if segments_in(folder) >= enough:
            return
        time.sleep(0.02)
    raise AssertionError("the run made no progress")


def test_the_same_engine_as_an_openai_server_gives_the_same_rows(
    finished: Path, engine_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("engine=openai", f"engine.urls=[{engine_url}]", "dataset.limit=8", "sampling=greedy")
    assert main(run_words(folder, engine_url, *words, "sampling.max_new_tokens=40")) == 0
    assert_sound(folder, 8)
    native = {row["id"]: row for row in rows_of(finished).to_pylist()}
    for row in rows_of(folder).to_pylist():
        for name in ("prompt_ids", "output_ids", "finish_reason", "completion_tokens"):
            assert row[name] == native[row["id"]][name], name
        np.testing.assert_allclose(row["topk_logprobs"], native[row["id"]]["topk_logprobs"], atol=1e-4)
    capture = json.loads((folder / "manifest.json").read_text())["capture"]
    assert capture == {"top_k": K, "logprobs": "raw", "missing": []}
