"""Exports, read back by the trainers' own readers (SpecForge 0.2.0 and speculators 0.9.0 as released).

A missing trainer is a failure here, not a skip: ``locks/trainers.lock`` lists both, installed with ``--no-deps``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from specforge.data.prompt_builder import prepare_prompt_tasks

from pipeline.config import Config
from pipeline.errors import InputError, StoreError
from pipeline.export import ExportReport, export, shards

MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
STRING, INT, FLOAT = pa.string(), pa.int32(), pa.float32()

# The table "Shard schema, version 1" of the design contract.
SCHEMA = pa.schema(
    [
        *((name, STRING) for name in ("id", "dataset", "source_id")),
        *((name, INT) for name in ("turn", "sample")),
        ("messages", pa.list_(pa.struct([(name, STRING) for name in MESSAGE_FIELDS]))),
        ("tools", STRING),
        *((name, pa.list_(INT)) for name in ("prompt_ids", "output_ids")),
        ("output_logprobs", pa.list_(FLOAT)),
        ("topk_ids", pa.list_(pa.list_(INT))),
        ("topk_logprobs", pa.list_(pa.list_(FLOAT))),
        ("tail_logprob", pa.list_(FLOAT)),
        *((name, STRING) for name in ("text", "finish_reason")),
        *((name, INT) for name in ("prompt_tokens", "completion_tokens", "cached_device_tokens", "cached_host_tokens")),
        *((name, INT) for name in ("retractions", "segments", "attempts")),
        *((name, FLOAT) for name in ("latency_s", "queue_s")),
        *((name, STRING) for name in ("engine", "weight_version", "sampling")),
        ("created_at", pa.timestamp("us", tz="UTC")),
    ]
)

# Every character that some notion of "line" ends at; JSON lines end at "\n" alone.
UNICODE = 'naïve 漢字 🦜\u2028\u2029\x85\x0b\x0c\x1c\r\n\ttab "quoted" \\ \x00 end'
TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]'
CALLS = '[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]'


def message(role: str, content: str | None, **more: str) -> dict[str, str | None]:
    return {**dict.fromkeys(MESSAGE_FIELDS), "role": role, "content": content, **more}


def row(
    name: str,
    prompt: Sequence[int] | None = (1, 2, 3),
    output: Sequence[int] | None = (4, 5),
    messages: Sequence[dict[str, str | None]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A shard row; its distributions are made up, two entries a position."""
    n = 2 if output is None else len(output)
    kept = output is not None
    return {
        "id": f"B1/{name}/0/0",
        "dataset": "B1",
        "source_id": name,
        "turn": 0,
        "sample": 0,
        "messages": messages or [message("user", "hello"), message("assistant", "hi")],
        "tools": None,
        "prompt_ids": None if prompt is None else list(prompt),
        "output_ids": list(output) if output is not None else None,
        "output_logprobs": [-0.5] * n if kept else None,
        "topk_ids": [[7, 8]] * n if kept else None,
        "topk_logprobs": [[-0.5, -1.5]] * n if kept else None,
        "tail_logprob": [-2.0] * n if kept else None,
        "text": "hi<|im_end|>",
        "finish_reason": "stop",
        "prompt_tokens": 3 if prompt is None else len(prompt),
        "completion_tokens": n,
        "cached_device_tokens": 0,
        "cached_host_tokens": None,
        "retractions": None,
        "segments": 1,
        "attempts": 1,
        "latency_s": 0.5,
        "queue_s": None,
        "engine": "http://127.0.0.1:30000",
        "weight_version": None,
        "sampling": '{"temperature": 1.0}',
        "created_at": datetime(2026, 11, 30, tzinfo=UTC),
        **more,
    }


def write_run(folder: Path, parts: Sequence[Sequence[dict[str, Any]]], complete: bool = True) -> Path:
    """A run folder with one shard for each part, as the store leaves it."""
    (folder / "shards").mkdir(parents=True)
    entries = []
    for number, rows in enumerate(parts):
        path = folder / "shards" / f"part-{number:05d}.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), path, compression="zstd", row_group_size=3)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append({"name": path.name, "rows": len(rows), "bytes": path.stat().st_size, "sha256": digest})
    write_manifest(folder, {"schema_version": 1, "shards": entries, "complete": complete})
    return folder


def write_manifest(folder: Path, manifest: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def varied_rows() -> list[list[dict[str, Any]]]:
    """Three shards: unicode, history of every role, tools, a cut answer, a single token, an empty prompt, no ids."""
    history = [
        message("system", "Be brief."),
        message("user", "Weather?"),
        message("assistant", None, tool_calls=CALLS, reasoning_content="I should look."),
        message("tool", '{"rain": true}', tool_call_id="c1", name="f"),
        message("assistant", "Rain.", reasoning_content="It says so."),
    ]
    return [
        [
            row("unicode", messages=[message("user", UNICODE), message("assistant", UNICODE)], text=UNICODE),
            row("single", (9,), (163_585,)),
            row("no-ids", None, None),
            row("tools", range(100, 140), range(200, 217), messages=history, tools=TOOLS),
        ],
        [row("cut", range(50), range(1000, 1064), finish_reason="length")],
        [row("no-prompt", (), (4, 5, 6)), *(row(f"more-{i}", range(i + 1), range(i, i + 3)) for i in range(7))],
    ]


def exportable(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [r for part in parts for r in part if r["prompt_ids"] is not None and r["output_ids"] is not None]


def config(run_dir: Path | str, to: str, folder: Path | None = None, max_length: int | None = None) -> Config:
    made = Config()
    made.run.dir = str(run_dir)
    made.export.to, made.export.max_length = to, max_length
    made.export.dir = None if folder is None else str(folder)
    return made


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def read_prompts(path: Path, max_length: int = 1 << 20, min_loss_tokens: int = 1) -> list[dict[str, list[int]]]:
    """The payloads that SpecForge makes of a file, with the options that its EAGLE-3 training gives the reader."""
    tasks = prepare_prompt_tasks(
        path,
        None,
        chat_template="qwen",
        max_length=max_length,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
        min_loss_tokens=min_loss_tokens,
    )
    return [task["payload"] for task in tasks]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", varied_rows())


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what the ``datasets`` loader caches out of the home folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# ---- SpecForge, exact ids


def test_specforge_reads_back_the_stored_ids_and_masks(run_dir: Path) -> None:
    report = export(config(run_dir, "specforge"))

    payloads = read_prompts(run_dir / "export" / "specforge" / "prompts.jsonl")
    stored = exportable(varied_rows())
    assert [p["input_ids"] for p in payloads] == [r["prompt_ids"] + r["output_ids"] for r in stored]
    assert [p["loss_mask"] for p in payloads] == [
        [0] * len(r["prompt_ids"]) + [1] * r["completion_tokens"] for r in stored
    ]
    assert report.rows == len(stored)
    assert report.supervised_tokens == sum(r["completion_tokens"] for r in stored)
    assert report.prompt_tokens == sum(r["prompt_tokens"] for r in stored)
    assert report.longest == max(len(p["input_ids"]) for p in payloads) == 114


def test_specforge_keeps_every_row_whole_at_the_length_that_the_report_advises(run_dir: Path) -> None:
    report = export(config(run_dir, "specforge"))

    whole = read_prompts(report.files[0].path, max_length=report.longest)
    assert sum(sum(p["loss_mask"]) for p in whole) == report.supervised_tokens
    shorter = read_prompts(report.files[0].path, max_length=report.longest - 1)
    assert sum(sum(p["loss_mask"]) for p in shorter) == report.supervised_tokens - 1


def test_pretokenised_records_hold_only_what_the_reader_takes(run_dir: Path) -> None:
    report = export(config(run_dir, "specforge"))

    assert {tuple(record) for record in read_lines(report.files[0].path)} == {("input_ids", "loss_mask")}


# ---- SpecForge, conversations


def test_conversations_hold_the_messages_and_nothing_that_they_do_not_have(run_dir: Path) -> None:
    report = export(config(run_dir, "specforge"))

    records = read_lines(report.files[1].path)
    stored = exportable(varied_rows())
    assert [record["id"] for record in records] == [r["id"] for r in stored]
    assert {tuple(record) for record in records} == {("id", "conversations", "tools")}
    assert records[0]["conversations"] == [
        {"role": "user", "content": UNICODE},
        {"role": "assistant", "content": UNICODE},
    ]
    assert records[2]["conversations"][2:4] == [
        {"role": "assistant", "content": "", "reasoning_content": "I should look.", "tool_calls": CALLS},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "c1", "name": "f"},
    ]
    assert [record["tools"] for record in records if record["tools"] != "[]"] == [TOOLS]


CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
)


def byte_tokenizer() -> Any:
    """One token a byte, with the chat markers that SpecForge's "qwen" template looks for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.filterwarnings("ignore:The first message is from system:UserWarning")
def test_specforge_renders_the_conversations_and_supervises_the_answer(run_dir: Path) -> None:
    report = export(config(run_dir, "specforge"))
    tokenizer = byte_tokenizer()

    tasks = prepare_prompt_tasks(
        report.files[1].path,
        tokenizer,
        chat_template="qwen",
        max_length=4096,
        is_preformatted=False,
        train_only_last_turn=True,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
    )

    texts, answers = [], []
    for payload in (task["payload"] for task in tasks):
        texts.append(tokenizer.decode(payload["input_ids"]))
        pairs = zip(payload["input_ids"], payload["loss_mask"], strict=True)
        answers.append(tokenizer.decode([i for i, supervised in pairs if supervised]))
    stored = exportable(varied_rows())
    assert sorted(answers) == sorted(r["messages"][-1]["content"] + "<|im_end|>\n" for r in stored)
    with_tools = [text for text in texts if "<|im_start|>tools" in text]
    assert len(with_tools) == 1  # "[]" is no tools to the reader
    assert '{"x": 1}' in with_tools[0]  # parsed from the JSON text
    assert "Weather?" in with_tools[0]


# ---- speculators


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("given", ["file", "folder"])
def test_speculators_reads_back_the_stored_ids_and_masks(run_dir: Path, tmp_path: Path, given: str) -> None:
    import torch
    from safetensors.torch import save_file
    from speculators.data_generation.preprocessing import build_speculator_training_dataset, load_raw_dataset
    from speculators.train.data import ArrowDataset
    from speculators.train.recovery import SampleUnavailable

    report = export(config(run_dir, "speculators"))
    source = report.files[0].path if given == "file" else report.files[0].path.parent
    raw, _ = load_raw_dataset(str(source))
    prepared = build_speculator_training_dataset(raw, None, max_length=report.longest, num_proc=None)
    prepared.save_to_disk(tmp_path / "prepared")
    (tmp_path / "prepared" / "hidden_states").mkdir()
    stored = exportable(varied_rows())
    first = torch.tensor(stored[0]["prompt_ids"] + stored[0]["output_ids"])
    states = {"token_ids": first, "hidden_states": torch.zeros(len(first), 4, 8, dtype=torch.bfloat16)}
    save_file(states, tmp_path / "prepared" / "hidden_states" / "hs_0.safetensors")
    opened = ArrowDataset(max_len=report.longest, datapath=tmp_path / "prepared", on_missing="skip")

    assert prepared.column_names == ["input_ids", "loss_mask", "seq_len"]
    assert [ids.tolist() for ids in opened.data["input_ids"]] == [r["prompt_ids"] + r["output_ids"] for r in stored]
    assert [mask.tolist() for mask in opened.data["loss_mask"]] == [
        [0] * len(r["prompt_ids"]) + [1] * r["completion_tokens"] for r in stored
    ]
    assert opened.approx_lengths == [r["prompt_tokens"] + r["completion_tokens"] for r in stored]
    assert opened[0]["input_ids"].tolist() == first.tolist()
    assert opened[0]["loss_mask"].sum() == stored[0]["completion_tokens"]
    assert isinstance(opened[1], SampleUnavailable)  # no hidden states were written for it


def test_speculators_rows_have_the_columns_of_its_own_producer(run_dir: Path) -> None:
    report = export(config(run_dir, "speculators"))

    records = read_lines(report.files[0].path)
    assert {tuple(record) for record in records} == {("id", "primary_id", "input_ids", "loss_mask", "text", "metadata")}
    assert (records[0]["id"], records[0]["primary_id"], records[0]["text"]) == ("B1/unicode/0/0", "unicode", UNICODE)
    assert records[3]["metadata"] == {
        "dataset": "B1",
        "turn": 0,
        "sample": 0,
        "finish_reason": "length",
        "is_tool_call": False,
        "usage": {"prompt_tokens": 50, "completion_tokens": 64},
        "endpoint": "http://127.0.0.1:30000",
        "sampling_params": '{"temperature": 1.0}',
    }
    assert [path.name for path in report.files[0].path.parent.iterdir()] == ["train.jsonl"]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("to", ["specforge", "speculators"])
def test_values_that_first_come_late_in_a_file_load(tmp_path: Path, to: str) -> None:
    """The ``datasets`` loader infers types from the first chunk (10 MB, here less); a column that is null there, or
    missing, would stop it where a value comes."""
    from datasets import load_dataset

    rows = [row(f"r{i}", engine=None, sampling=None, text=None) for i in range(300)]
    last = row("last", tools=TOOLS)
    report = export(config(write_run(tmp_path / "run", [rows, [last]]), to))

    for file in report.files:
        assert file.bytes > 4096
        loaded = load_dataset("json", data_files=str(file.path), split="train", chunksize=4096)
        assert len(loaded) == 301
        assert loaded[-1].get("tools", TOOLS) == TOOLS


# ---- what is left out


@pytest.mark.parametrize("to", ["specforge", "speculators"])
def test_rows_without_ids_are_left_out_and_named(run_dir: Path, to: str) -> None:
    report = export(config(run_dir, to))

    assert report.left_out == {"no_ids": ("B1/no-ids/0/0",)}
    assert "left out, the server that answered returned no token ids: 1 (B1/no-ids/0/0)" in report.lines()


@pytest.mark.parametrize(("prompt", "output"), [(None, None), (None, (1, 2)), ((1, 2), None)])
def test_a_run_without_ids_says_why_and_what_to_do(tmp_path: Path, prompt: Any, output: Any) -> None:
    run = write_run(tmp_path / "run", [[row("a", prompt, output)], [row("b", prompt, output)]])

    with pytest.raises(InputError) as caught:
        export(config(run, "specforge"))

    assert str(caught.value) == (
        f"run.dir: the rows of {run} have no token ids: the server that answered returned none (engine=openai), and "
        "specforge is given exact ids, never text tokenised a second time "
        "(accepted: a run made by SGLang's own interface: engine=cpu, gpu or attach)"
    )


def test_an_empty_answer_is_left_out_since_the_reader_would_stop_at_it(tmp_path: Path) -> None:
    report = export(
        config(write_run(tmp_path / "run", [[row("a", (), ()), row("b", (1,), ()), row("c")]]), "specforge")
    )

    assert report.left_out == {"empty_answer": ("B1/a/0/0", "B1/b/0/0")}
    assert len(read_prompts(report.files[0].path, min_loss_tokens=0)) == report.rows == 1


def test_max_length_leaves_longer_rows_out_and_lists_them(run_dir: Path) -> None:
    report = export(config(run_dir, "specforge", max_length=57))

    assert report.left_out == {"no_ids": ("B1/no-ids/0/0",), "too_long": ("B1/cut/0/0",)}
    assert report.longest == 57  # the row of exactly that length stays
    assert all(len(p["input_ids"]) <= 57 for p in read_prompts(report.files[0].path))


def test_max_length_below_every_row_keeps_the_earlier_export(run_dir: Path) -> None:
    before = export(config(run_dir, "specforge")).files[0].path.read_bytes()

    with pytest.raises(InputError, match=r"export\.max_length: 1 leaves no row of .*; the shortest has 2 tokens"):
        export(config(run_dir, "specforge", max_length=1))

    assert (run_dir / "export" / "specforge" / "prompts.jsonl").read_bytes() == before


def test_the_lines_of_a_report_name_twenty_ids_and_counts_the_rest(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [[row("kept"), *(row(f"r{i}", None, None) for i in range(25))]])

    report = export(config(run, "speculators"))

    assert len(report.left_out["no_ids"]) == 25
    assert any(line.endswith("B1/r19/0/0 and 5 more)") for line in report.lines())


# ---- whole or not at all, and the same again


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("to", ["specforge", "speculators"])
def test_an_export_made_again_has_the_same_bytes(
    run_dir: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(config(run_dir, to, tmp_path / "one"))
    monkeypatch.setattr(shards, "BATCH_ROWS", 2)
    export(config(run_dir, to, tmp_path / "two"))
    export(config(run_dir, to, tmp_path / "two"))

    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_larger_run_replaces_the_export(tmp_path: Path) -> None:
    export(config(write_run(tmp_path / "small", [[row("a"), row("b")]]), "specforge", tmp_path / "out"))
    export(config(write_run(tmp_path / "other", [[row("c")]]), "specforge", tmp_path / "out"))

    assert [record["id"] for record in read_lines(tmp_path / "out" / "conversations.jsonl")] == ["B1/c/0/0"]


@pytest.mark.parametrize("to", ["specforge", "speculators"])
def test_a_failed_export_leaves_the_earlier_one(run_dir: Path, to: str) -> None:
    folder = export(config(run_dir, to)).files[0].path.parent
    before = contents(folder)
    (run_dir / "shards" / "part-00002.parquet").unlink()

    with pytest.raises(StoreError):
        export(config(run_dir, to))

    assert contents(folder) == before


def test_a_killed_export_leaves_the_earlier_one_and_the_next_succeeds(run_dir: Path) -> None:
    folder = export(config(run_dir, "specforge")).files[0].path.parent
    before = contents(folder)
    killed_on_the_fourth_line = (
        "import os, signal, sys\n"
        "from pipeline.config import Config\n"
        "from pipeline.export import export, staging\n"
        "write = staging.StagedFile.write_line\n"
        "def write_line(self, line):\n"
        "    write(self, line)\n"
        "    self._file.flush()\n"
        "    if self.rows == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "staging.StagedFile.write_line = write_line\n"
        "config = Config()\n"
        "config.run.dir, config.export.to = sys.argv[1], 'specforge'\n"
        "export(config)\n"
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", killed_on_the_fourth_line, str(run_dir)]
    assert subprocess.run(command, cwd=root, check=False).returncode == -signal.SIGKILL

    assert {name: data for name, data in contents(folder).items() if not name.startswith(".")} == before
    assert (folder / ".prompts.jsonl.tmp").stat().st_size > 0
    export(config(run_dir, "specforge"))
    assert contents(folder) == before


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError) as caught:
        export(config(run_dir, "speculators"))

    folder = run_dir / "export" / "speculators"
    assert str(caught.value) == (
        f"the export into {folder} could not be written: No space left on device; no file there is half-written"
    )
    assert not list(folder.iterdir())


def test_two_exports_do_not_write_one_file(run_dir: Path) -> None:
    folder = export(config(run_dir, "speculators")).files[0].path.parent
    with (folder / ".train.jsonl.tmp").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"export\.dir: another export is writing .*train\.jsonl"):
            export(config(run_dir, "speculators"))
    export(config(run_dir, "speculators"))


# ---- runs that are not finished, and folders that cannot be used


def test_a_running_folder_is_exported_as_far_as_it_is_sealed(tmp_path: Path) -> None:
    report = export(config(write_run(tmp_path / "run", [[row("a")]], complete=False), "specforge"))

    assert not report.complete
    assert "the run is not complete: rows that are not in a sealed shard yet are not exported yet" in report.lines()
    done: ExportReport = export(config(write_run(tmp_path / "done", [[row("a")]]), "specforge"))
    assert done.complete
    assert "not complete" not in "".join(done.lines())


def nothing(_: Path) -> None:
    """Leaves the folder out."""


def no_manifest(folder: Path) -> None:
    folder.mkdir()


def a_file(folder: Path) -> None:
    folder.write_text("")


def no_rows(folder: Path) -> None:
    write_manifest(folder, {"shards": [], "complete": True})


def no_rows_yet(folder: Path) -> None:
    write_manifest(folder, {"shards": [], "complete": False})


def later_version(folder: Path) -> None:
    write_manifest(folder, {"schema_version": 2, "shards": [], "complete": True})


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (nothing, "run.dir: {run} holds no run (no manifest.json in it) (accepted: the folder of a run)"),
        (no_manifest, "run.dir: {run} holds no run (no manifest.json in it) (accepted: the folder of a run)"),
        (a_file, "run.dir: {run} holds no run (no manifest.json in it) (accepted: the folder of a run)"),
        (no_rows, "run.dir: {run} has no finished rows (accepted: a run with at least one row)"),
        (
            no_rows_yet,
            "run.dir: {run} has no finished rows yet: they appear when a shard is sealed (every store.rows_per_shard "
            "rows) (accepted: a run with at least one row)",
        ),
        (later_version, "run.dir: {run} has shard schema 2, which this version cannot read (accepted: 1)"),
    ],
)
def test_a_folder_without_rows_is_bad_input(tmp_path: Path, prepare: Callable[[Path], None], text: str) -> None:
    run = tmp_path / "run"
    prepare(run)

    with pytest.raises(InputError) as caught:
        export(config(run, "specforge"))

    assert str(caught.value) == text.format(run=run)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"shards": [{"name": "a"}], "complete": true}', '{"shards": 3}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)

    with pytest.raises(StoreError, match=r"manifest\.json is not a run's manifest"):
        export(config(tmp_path, "specforge"))


def missing(path: Path) -> None:
    path.unlink()


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:600] = b"\xff" * 596
    path.write_bytes(data)


def shorter(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 1), path)


def without_a_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["output_ids"]), path)


def with_wide_ids(path: Path) -> None:
    table = pq.read_table(path)
    wide = pa.array([[2**40]] * len(table), pa.list_(pa.int64()))
    pq.write_table(table.set_column(table.schema.get_field_index("output_ids"), "output_ids", wide), path)


def with_a_null_id(path: Path) -> None:
    table = pq.read_table(path)
    holed = pa.array([[1, None]] * len(table), pa.list_(pa.int32()))
    pq.write_table(table.set_column(table.schema.get_field_index("output_ids"), "output_ids", holed), path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (missing, "is missing, though the manifest lists it"),
        (torn, "cannot be read: "),
        (empty, "cannot be read: "),
        (garbled, "cannot be read: "),
        (shorter, "holds 1 rows where the manifest says 8"),
        (without_a_column, "lacks the columns output_ids"),
        (with_wide_ids, "has token ids that are no int32"),
        (with_a_null_id, "has a null among its token ids"),
    ],
)
def test_a_damaged_shard_is_named(run_dir: Path, damage: Callable[[Path], None], text: str) -> None:
    path = run_dir / "shards" / "part-00002.parquet"
    damage(path)

    with pytest.raises(StoreError) as caught:
        export(config(run_dir, "specforge"))

    assert str(caught.value).startswith(f"{path} {text}")
    assert "\n" not in str(caught.value)


def test_a_row_that_contradicts_itself_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [[row("a"), row("b", completion_tokens=9)]])

    with pytest.raises(StoreError, match="row B1/b/0/0 has 2 output_ids where completion_tokens is 9"):
        export(config(run, "specforge"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"to": "nemo"}, "to: 'nemo' is no trainer that an export is made for (accepted: specforge, speculators)"),
        ({"to": ""}, "to: '' is no trainer that an export is made for (accepted: specforge, speculators)"),
        ({"run_dir": ""}, "run.dir: not given (accepted: the folder of a run)"),
        ({"max_length": 0}, "export.max_length: 0 is too small (accepted: 1 or more)"),
    ],
)
def test_bad_keys_are_named(run_dir: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        export(config(**{"run_dir": run_dir, "to": "specforge", **change}))

    assert str(caught.value) == text


def test_a_folder_that_cannot_be_made_is_bad_input(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(InputError, match=r"export\.dir: .*file/in cannot be made \(Not a directory\)"):
        export(config(run_dir, "specforge", tmp_path / "file" / "in"))


# ---- advice


DOCS = Path(__file__).parents[1] / "docs" / "export.md"


def test_specforge_takes_the_documented_configuration_and_the_advised_options(run_dir: Path, tmp_path: Path) -> None:
    from specforge.config import load_config

    recipe = tmp_path / "RUN.yaml"
    recipe.write_text(DOCS.read_text().split("```yaml\n")[1].split("```")[0])
    report = export(config(run_dir, "specforge", tmp_path / "with space"))
    pretokenised, note, conversations = report.advice
    command, raw = shlex.split(pretokenised), shlex.split(conversations.split(", tokenised")[0])

    assert command[:4] == ["specforge", "train", "--config", "RUN.yaml"]
    taken = load_config(str(recipe), command[4:])
    assert (taken.mode, taken.data.prompts_path, taken.data.max_length) == ("online", str(report.files[0].path), 114)
    taken = load_config(str(recipe), ["data.prompts_path=", *raw[1:]])
    assert (taken.data.train_data_path, taken.data.train_only_last_turn) == (str(report.files[1].path), True)
    assert f"default is {type(taken.data).model_fields['max_length'].default})" in note


def test_the_advice_for_speculators_names_options_that_it_has(run_dir: Path) -> None:
    import speculators
    from speculators.cli.prepare_data import prepare_data

    # Read, not imported: the schema needs pydantic-settings, which SGLang's environment lacks.
    schema = (Path(speculators.__file__).parent / "train" / "config" / "schema.py").read_text()
    report = export(config(run_dir, "speculators"))
    prepare, note, train = report.advice

    def options(line: str) -> set[str]:
        return {word.removeprefix("--").replace("-", "_") for word in line.split() if word.startswith("--")}

    parameters = inspect.signature(prepare_data).parameters
    assert options(prepare) == {"model", "data", "output", "seq_length"}
    assert options(prepare) | options(note) <= parameters.keys()
    assert parameters["seq_length"].default == 8192
    assert options(train) == {"verifier_name_or_path", "data_path", "speculator_type", "total_seq_len"}
    assert options(train) <= set(re.findall(r"^    (\w+): ", schema, re.MULTILINE))
    assert f"--data {report.files[0].path}" in prepare
