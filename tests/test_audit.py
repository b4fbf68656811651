"""The audit names every planted defect, and nothing in a folder that is sound."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_faults import folder_in_memory, never_wait_for_the_disk
from store_rows import (
    ARRAY_COLUMNS,
    CONTRACT,
    DISTRIBUTION,
    K,
    abandon,
    answer,
    completion,
    config_of,
    failure,
    open_folder,
    outcome_of,
    prompts_of,
    segment,
    write_dataset,
)

from pipeline.audit import Audit, audit, report_lines
from pipeline.config import DatasetConfig
from pipeline.errors import InputError, StoreError
from pipeline.records import Failure
from pipeline.store import Capture, RunFolder
from pipeline.store.journal import JournalWriter
from pipeline.store.rows import encode_completion

Rows = list[dict[str, Any]]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    never_wait_for_the_disk(monkeypatch)


def unfinished(folder: Path, rows: int = 9, capture: Capture | None = None, **answers: Any) -> RunFolder:
    """An open folder with an outcome for every prompt, in two shards and a journal of one row."""
    dataset = write_dataset(folder / "prompts.jsonl", rows)
    opened = open_folder(folder / "run", config_of(dataset), rows_per_shard=3)
    if capture:
        opened.set_capture(capture)
    for asked in prompts_of(dataset):
        outcome = outcome_of(asked)
        opened.append(outcome if isinstance(outcome, Failure) or not answers else completion(asked, **answers))
    opened.seal_full()
    return opened


def complete(folder: Path, capture: Capture | None = None, **answers: Any) -> Path:
    opened = unfinished(folder, capture=capture, **answers)
    opened.finish()
    opened.close()
    return opened.path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A complete folder: three shards of 3, 3 and 1 rows, two failures."""
    return complete(tmp_path)


def change_rows(run: Path, change: Callable[[Rows], object], schema: pa.Schema = CONTRACT) -> None:
    """Changes the first shard as a bug of ours would: the manifest agrees with the file."""
    path = run / "shards" / "part-00000.parquet"
    metadata = pq.read_schema(path).metadata
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema.with_metadata(metadata)), path)
    agree(run, path, len(rows))


def agree(run: Path, path: Path, rows: int) -> None:
    def change(manifest: dict[str, Any]) -> None:
        data = path.read_bytes()
        manifest["shards"][0] |= {"rows": rows, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    change_manifest(run, change)


def change_manifest(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = run / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


# ---- sound folders


def test_a_complete_folder_is_sound(run: Path) -> None:
    found = audit(run)
    assert found == Audit(rows=7, positions=14, shards=3, failures=2)
    assert report_lines(found) == ["read 3 shards, 7 rows, 14 positions, 2 failures", "the run is sound"]


def test_an_unfinished_folder_is_sound_as_far_as_it_goes(tmp_path: Path) -> None:
    opened = unfinished(tmp_path)
    opened.append_segment("B1/begun/t0/s0", 0, segment())
    abandon(opened)
    found = audit(opened.path)
    assert found.problems == []
    assert (found.rows, found.shards, found.failures) == (7, 2, 2)
    assert any("not complete" in note for note in found.notes)


def test_a_folder_being_written_is_said_to_be(tmp_path: Path) -> None:
    opened = unfinished(tmp_path)
    assert any("is writing" in note for note in audit(opened.path).notes)
    opened.close()
    assert not any("is writing" in note for note in audit(opened.path).notes)


@pytest.mark.parametrize(
    ("capture", "answers"),
    [
        (Capture(0, "raw"), {"k": 0}),
        (Capture(0, "none", ARRAY_COLUMNS), {"missing": ARRAY_COLUMNS}),
        (Capture(0, "none", ARRAY_COLUMNS[1:]), {"missing": ARRAY_COLUMNS[1:]}),
        (Capture(0, "raw", DISTRIBUTION), {"missing": DISTRIBUTION}),
        (Capture(20, "scaled"), {"k": 20, "tokens": 1}),
        (Capture(1, "raw"), {"k": 1, "tokens": 8}),
    ],
    ids=str,
)
def test_every_capture_is_sound(tmp_path: Path, capture: Capture, answers: dict[str, Any]) -> None:
    assert audit(complete(tmp_path, capture, **answers)).problems == []


def test_a_dataset_that_is_not_here_is_not_compared(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run")
    folder.append(completion("a", k=K))
    folder.finish()
    folder.close()
    found = audit(folder.path)
    assert found.problems == []
    assert any("on a hub" in note for note in found.notes)


def test_a_dataset_that_cannot_be_read_any_more_is_not_compared(run: Path) -> None:
    (run.parent / "prompts.jsonl").unlink()
    (run.parent / "prompts.jsonl").mkdir()
    found = audit(run)
    assert found.problems == []
    assert any("cannot be read here" in note for note in found.notes)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        audit(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match=r"manifest\.json"):
        audit(tmp_path)


# ---- defects of rows


def shorten(name: str) -> Callable[[Rows], object]:
    return lambda rows: rows[1][name].pop()


def put(name: str, value: Any) -> Callable[[Rows], object]:
    return lambda rows: rows[1].update({name: value})


def put_first(name: str, value: Any) -> Callable[[Rows], object]:
    return lambda rows: rows[1][name].__setitem__(0, value)


def swap_entries(rows: Rows) -> None:
    for name in ("topk_ids", "topk_logprobs"):
        entries = rows[1][name][0]
        entries[0], entries[-1] = entries[-1], entries[0]


def narrow(rows: Rows) -> None:
    for name in ("topk_ids", "topk_logprobs"):
        rows[1][name] = [entries[:-1] for entries in rows[1][name]]


def miss_a_sampled_entry(rows: Rows) -> None:
    row = rows[1]
    row["output_ids"][0] = row["topk_ids"][0][0]
    row["output_logprobs"][0] = row["topk_logprobs"][0][0] - 0.01


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (shorten("prompt_ids"), r"4 prompt ids, prompt_tokens is 5"),
        (shorten("output_ids"), r"output_ids has 1 entries, completion_tokens is 2"),
        (shorten("output_logprobs"), r"output_logprobs has 1 entries, completion_tokens is 2"),
        (shorten("tail_logprob"), r"tail_logprob has 1 entries, completion_tokens is 2"),
        (shorten("topk_ids"), r"topk_ids is \(1, 4\) and topk_logprobs \(2, 4\), expected \(2, 4\)"),
        (shorten("topk_logprobs"), r"topk_logprobs \(1, 4\), expected \(2, 4\)"),
        (lambda rows: rows[1]["topk_ids"][0].pop(), r"topk_ids is .* expected \(2, 4\)"),
        (narrow, r"topk_ids is \(2, 3\) and topk_logprobs \(2, 3\), expected \(2, 4\)"),
        (swap_entries, r"not in descending order"),
        (put_first("tail_logprob", -0.01), r"sum to 1 only within"),
        (put_first("tail_logprob", float("nan")), r"sum to 1 only within nan"),
        (miss_a_sampled_entry, r"differs from its top-k entry by 1\.00e-02"),
        (put_first("output_logprobs", 0.5), r"no log-probability"),
        (put_first("output_logprobs", float("-inf")), r"no log-probability"),
        (put("finish_reason", "abort"), r"finish_reason is 'abort'"),
        (put("messages", []), r"no messages"),
        (put("messages", None), r"no messages"),
        *((put(name, None), rf"{name} is null") for name in ARRAY_COLUMNS),
    ],
)
def test_a_row_that_breaks_a_rule_is_named(run: Path, change: Callable[[Rows], object], problem: str) -> None:
    change_rows(run, change)
    found = [text for text in audit(run).problems if "totals are" not in text]
    assert found
    assert all(text.startswith("part-00000.parquet: made/r1/t0/s0: ") for text in found)
    assert any(re.search(problem, text) for text in found)


def test_values_that_the_run_has_not_are_named(tmp_path: Path) -> None:
    run = complete(tmp_path, Capture(0, "none", ARRAY_COLUMNS), missing=ARRAY_COLUMNS)
    change_rows(run, put("output_ids", [1, 2, 3]))
    assert any(re.search("r1/t0/s0: output_ids is there, the run lacks it", text) for text in audit(run).problems)


def test_a_row_without_tokens_does_not_stop_the_audit(run: Path) -> None:
    change_rows(run, lambda rows: rows[1].update({name: [] for name in ARRAY_COLUMNS[1:]}, completion_tokens=0))
    assert [text for text in audit(run).problems if "totals are" not in text] == []


def test_rows_in_the_journal_are_checked_too(tmp_path: Path) -> None:
    opened = unfinished(tmp_path)
    opened.append(completion("bad", k=K, answer=answer(3, K, tail_logprob=answer(3, K).tail_logprob + 1)))
    opened.close()
    (problem,) = audit(opened.path).problems
    assert re.fullmatch(r"part-00002\.journal: B1/bad/t0/s0: .*sum to 1.*", problem)


def test_an_id_in_a_shard_and_a_journal_is_named(tmp_path: Path) -> None:
    opened = unfinished(tmp_path)
    abandon(opened)
    writer = JournalWriter(opened.path / "journal" / "part-00009.journal")
    for asked in prompts_of(dataset_of(opened.path))[:1]:
        writer.append(encode_completion(completion(asked, k=K)))
    writer.close()
    assert audit(opened.path).problems == ["part-00009.journal: made/r0/t0/s0 is there twice"]


# ---- defects of the folder


def append_line(run: Path, line: bytes) -> None:
    with (run / "failures.jsonl").open("ab") as file:
        file.write(line)


def line_of(one: Failure) -> bytes:
    fields = ("id", "dataset", "source_id", "kind", "detail", "attempts")
    return json.dumps({name: getattr(one, name) for name in fields}).encode() + b"\n"


def flip_a_byte(run: Path) -> None:
    path = run / "shards" / "part-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def repeat_an_id(run: Path) -> None:
    change_rows(run, lambda rows: rows[1].update(id=rows[0]["id"]))


def drop_a_row(run: Path) -> None:
    change_rows(run, lambda rows: rows.pop(1))
    change_manifest(run, lambda manifest: manifest["totals"].update(rows=6))


def leave_rows_in_the_journal(run: Path) -> None:
    change_manifest(run, lambda manifest: manifest.update(complete=False))
    dataset = write_dataset(run.parent / "prompts.jsonl", 10)
    opened = open_folder(run, config_of(dataset))
    opened.append(outcome_of(prompts_of(dataset)[9]))
    opened.close()
    change_manifest(run, lambda manifest: manifest.update(complete=True))


def copy_a_shard(run: Path) -> None:
    shutil.copy(run / "shards" / "part-00000.parquet", run / "shards" / "part-00007.parquet")


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (flip_a_byte, r"part-00001\.parquet: its SHA-256 is not the one in the manifest"),
    "missing shard": (
        lambda run: (run / "shards" / "part-00001.parquet").unlink(),
        r"part-00001\.parquet: cannot be read: .*No such file",
    ),
    "empty shard": (
        lambda run: (run / "shards" / "part-00001.parquet").write_bytes(b""),
        r"part-00001\.parquet: cannot be read",
    ),
    "unlisted shard": (copy_a_shard, r"shards/part-00007\.parquet is not in the manifest"),
    "other columns": (
        lambda run: change_rows(run, lambda rows: None, CONTRACT.remove(4)),
        r"part-00000\.parquet: its columns are not those of schema version 1",
    ),
    "id twice": (repeat_an_id, r"part-00000\.parquet: made/r0/t0/s0 is there twice"),
    "row lost": (drop_a_row, r"made/r1/t0/s0 has no outcome"),
    "row count": (
        lambda run: change_manifest(run, lambda manifest: manifest["shards"][1].update(rows=4)),
        r"part-00001\.parquet: 3 rows, the manifest says 4",
    ),
    "totals": (
        lambda run: change_manifest(run, lambda manifest: manifest["totals"].update(completion_tokens=1)),
        r"manifest\.json: totals are .*completion_tokens=1.* the shards hold .*completion_tokens=14",
    ),
    "finish reasons": (
        lambda run: change_manifest(run, lambda manifest: manifest["totals"].update(finish_reasons={"length": 7})),
        r"totals are .*'length': 7",
    ),
    "journal rows in a complete run": (
        leave_rows_in_the_journal,
        r"marked complete, and 1 rows are still in the journal",
    ),
    "journal of another kind": (
        lambda run: (run / "journal" / "part-00009.journal").write_bytes(b"something else"),
        r"part-00009\.journal: cannot be read",
    ),
    "failure of an answered prompt": (
        lambda run: append_line(run, line_of(outcome_of_failure(run, "r0"))),
        r"failures\.jsonl: made/r0/t0/s0 has another outcome too",
    ),
    "failure twice": (
        lambda run: append_line(run, line_of(outcome_of_failure(run, "r2"))),
        r"failures\.jsonl: made/r2/t0/s0 has another outcome too",
    ),
    "failure count": (
        lambda run: append_line(run, line_of(failure("else"))),
        r"failures\.jsonl has 3 lines, the manifest says 2",
    ),
    "outcome of no prompt": (
        lambda run: append_line(run, line_of(failure("else"))),
        r"1 outcomes belong to no prompt of the dataset",
    ),
    "torn failure": (
        lambda run: append_line(run, b'{"id": "x'),
        r"failures\.jsonl: what follows byte \d+ cannot be read",
    ),
    "dataset grown": (
        lambda run: write_dataset(run.parent / "prompts.jsonl", 10),
        r"made/r9/t0/s0 has no outcome",
    ),
    "dataset shrunk": (
        lambda run: write_dataset(run.parent / "prompts.jsonl", 8),
        r"1 outcomes belong to no prompt of the dataset",
    ),
}


def dataset_of(run: Path) -> DatasetConfig:
    return DatasetConfig(name="made", path=str(run.parent / "prompts.jsonl"))


def outcome_of_failure(run: Path, source_id: str) -> Failure:
    return failure(next(asked for asked in prompts_of(dataset_of(run)) if asked.source_id == source_id))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_named(run: Path, defect: str) -> None:
    plant, problem = DEFECTS[defect]
    assert audit(run).problems == []
    plant(run)
    found = audit(run)
    assert any(re.search(problem, text) for text in found.problems), found.problems
    assert report_lines(found)[-1].endswith("rules are broken")


def test_whatever_byte_of_a_shard_changes_it_is_named_and_the_audit_goes_on(run: Path) -> None:
    path = run / "shards" / "part-00000.parquet"
    whole = path.read_bytes()
    for position in [*range(0, len(whole), len(whole) // 60), *range(len(whole) - 12, len(whole))]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :])
        found = audit(run)
        assert any(text.startswith("part-00000.parquet: its SHA-256") for text in found.problems)
        assert found.shards == 3
        assert found.failures == 2


def test_shards_of_another_run_are_noted(run: Path) -> None:
    change_manifest(run, lambda manifest: manifest.update(fingerprint="another"))
    found = audit(run)
    assert found.problems == []
    assert sum("by another run" in note for note in found.notes) == 3
    assert sum(line.startswith("note: ") for line in report_lines(found)) == 3


@pytest.mark.parametrize("facts", [b"not JSON", b"[]", None])
def test_metadata_that_is_not_ours_is_named(run: Path, facts: bytes | None) -> None:
    path = run / "shards" / "part-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({} if facts is None else {"eagle3": facts}), path)
    agree(run, path, 3)
    found = audit(run)
    assert any("part-00000.parquet" in text for text in [*found.problems, *found.notes])


def test_a_long_list_of_problems_is_cut_and_counted(run: Path) -> None:
    write_dataset(run.parent / "prompts.jsonl", 50)
    lines = report_lines(audit(run))
    assert sum(line.startswith("BROKEN ") for line in lines) == 20
    assert lines[-2:] == ["... and 21 more", "41 rules are broken"]
