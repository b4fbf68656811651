"""The journal under cuts, flipped bytes and a full disk: what is read is always a prefix of what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_faults import folder_in_memory, full_disk, never_wait_for_the_disk

from pipeline.errors import StoreError
from pipeline.store import durable
from pipeline.store.journal import MAGIC, JournalWriter, count_records, frame, read_records

RECORDS = [b"C first", b"", b"C" + bytes(20), b"P partial", frame(b"C a frame in a record") * 2, b"C last \xff\r\n"]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    never_wait_for_the_disk(monkeypatch)


def write(path: Path, records: list[bytes], valid_end: int = 0) -> list[int]:
    """Appends records; gives the offset behind each."""
    writer = JournalWriter(path, valid_end)
    ends = []
    for record in records:
        writer.append(record)
        ends.append(writer.end)
    writer.close()
    return ends


def read(path: Path) -> list[bytes]:
    return [payload for _, payload in read_records(path)]


def valid_end(path: Path) -> int:
    return max([end for end, _ in read_records(path)], default=0)


def reopened_with(path: Path, record: bytes) -> list[bytes]:
    """What is read after the file was opened again as the run folder does it, and a record was appended."""
    write(path, [record], valid_end(path))
    return read(path)


def test_records_come_back_in_order_with_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    ends = write(path, RECORDS)
    assert list(read_records(path)) == list(zip(ends, RECORDS, strict=True))
    assert ends[-1] == path.stat().st_size


@settings(max_examples=15, deadline=None)
@given(st.lists(st.binary(max_size=24), min_size=1, max_size=4))
def test_a_journal_cut_at_every_byte_reads_as_the_whole_records_before_the_cut(records: list[bytes]) -> None:
    with folder_in_memory() as folder:
        path = folder / "a.journal"
        ends = write(path, records)
        whole = path.read_bytes()
        for cut in range(len(whole) + 1):
            before = records[: sum(end <= cut for end in ends)]
            path.write_bytes(whole[:cut])
            assert read(path) == before
            assert reopened_with(path, b"appended") == [*before, b"appended"]


@pytest.mark.parametrize("change", [lambda byte: byte ^ 0x01, lambda byte: byte ^ 0x80, lambda byte: 0], ids=str)
def test_no_changed_byte_brings_a_record_that_was_not_written(tmp_path: Path, change: object) -> None:
    path = tmp_path / "a.journal"
    ends = write(path, RECORDS)
    whole = path.read_bytes()
    for position, byte in enumerate(whole):
        changed = change(byte)  # type: ignore[operator]
        path.write_bytes(whole[:position] + bytes([changed]) + whole[position + 1 :])
        if changed == byte:
            assert read(path) == RECORDS
        elif position < len(MAGIC):
            with pytest.raises(StoreError, match="not a journal"):
                read(path)
        else:
            before = RECORDS[: sum(end <= position for end in ends)]
            assert read(path) == before
            assert reopened_with(path, b"appended") == [*before, b"appended"]


def test_records_behind_a_damaged_one_never_come_back(tmp_path: Path) -> None:
    """Not even when one of the same length takes the place of the damaged one."""
    path = tmp_path / "a.journal"
    ends = write(path, [b"first", b"second", b"third"])
    data = bytearray(path.read_bytes())
    data[ends[1] - 1] ^= 1
    path.write_bytes(data)
    assert reopened_with(path, b"SECOND") == [b"first", b"SECOND"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=24), max_size=3), st.binary(max_size=60))
def test_whatever_lies_behind_the_last_record_is_no_record(records: list[bytes], tail: bytes) -> None:
    with folder_in_memory() as folder:
        path = folder / "a.journal"
        write(path, records)
        path.write_bytes(path.read_bytes() + tail)
        assert read(path) == records
        assert reopened_with(path, b"appended") == [*records, b"appended"]


@pytest.mark.parametrize("zeros", [1, 7, 8, 9, 16, 4096])
def test_a_tail_of_zeros_is_no_record(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "a.journal"
    write(path, RECORDS)
    path.write_bytes(path.read_bytes() + bytes(zeros))
    assert read(path) == RECORDS
    assert count_records(path, b"C") == 3
    assert reopened_with(path, b"appended") == [*RECORDS, b"appended"]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_a_file_whose_bytes_never_reached_the_disk_is_an_empty_journal(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(bytes(size))
    assert read(path) == []
    assert count_records(path, b"C") == 0
    assert reopened_with(path, b"appended") == [b"appended"]


@pytest.mark.parametrize("content", [b"EAGLE3J2", b"PAR1 something else", bytes(8) + frame(b"C lost its magic")])
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"a\.journal is not a journal"):
        read(path)
    assert path.read_bytes() == content


def test_count_records_counts_by_kind_and_leaves_torn_ones_out(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    ends = write(path, RECORDS)
    assert count_records(path, b"C") == 3
    assert count_records(path, b"P") == 1
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        whole_records = RECORDS[: sum(end <= cut for end in ends)]
        assert count_records(path, b"C") == sum(record.startswith(b"C") for record in whole_records)


def test_count_records_of_a_journal_that_was_just_sealed_and_deleted(tmp_path: Path) -> None:
    assert count_records(tmp_path / "part-00000.journal", b"C") == 0


@pytest.mark.parametrize("written", [0, 1, 5, 8, 20])
def test_a_failed_append_leaves_the_file_as_it_was(tmp_path: Path, written: int) -> None:
    path = tmp_path / "a.journal"
    writer = JournalWriter(path)
    writer.append(b"C before")
    before = path.read_bytes()
    with full_disk(after=written), pytest.raises(OSError, match="No space left"):
        writer.append(b"C a record that does not fit")
    assert path.read_bytes() == before
    assert writer.end == len(before)
    writer.append(b"C after")
    writer.close()
    assert read(path) == [b"C before", b"C after"]


def test_a_journal_that_cannot_be_begun_leaves_no_file_and_no_descriptor(tmp_path: Path) -> None:
    opened = set(os.listdir("/proc/self/fd"))
    with full_disk(after=3), pytest.raises(OSError, match="No space left"):
        JournalWriter(tmp_path / "a.journal")
    assert set(os.listdir("/proc/self/fd")) == opened
    assert os.listdir(tmp_path) == []
    (tmp_path / "a.journal").touch()
    assert reopened_with(tmp_path / "a.journal", b"C") == [b"C"]


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    path = tmp_path / "a.journal"
    write(path, RECORDS)
    assert read(path) == RECORDS


def test_opening_announces_a_cut_and_only_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.journal"
    end = write(path, RECORDS)[-1]
    steps: list[str] = []
    monkeypatch.setattr(durable, "on_step", steps.append)
    JournalWriter(path, end).close()
    assert steps == ["journal: sync"]
    path.write_bytes(path.read_bytes() + b"torn")
    JournalWriter(path, end).close()
    assert steps == ["journal: sync", "journal: cut torn tail", "journal: sync"]
