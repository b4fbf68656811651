"""Where rows come from, and what is left of a file that is damaged."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline.config import DatasetConfig
from pipeline.errors import InputError
from pipeline.prompts import hub, rows
from pipeline.prompts.hub import hub_rows
from pipeline.prompts.json_stream import JsonStream
from pipeline.prompts.rows import BUNDLED, BrokenRow, RawRow, bundled_dir, read_rows


def local(path: Path | str, **keys: Any) -> DatasetConfig:
    return DatasetConfig(name="local", path=str(path), **keys)


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"n": n, "text": f"row {n}"} for n in range(start, start + count)]


def lines(values: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def columns(found: Iterable[RawRow | BrokenRow]) -> list[dict[str, Any]]:
    return [row.columns for row in found if isinstance(row, RawRow)]


def write_parquet(path: Path, values: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(values), path, **options)
    return path


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


# Kinds of files


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".JSONL"])
def test_json_lines(tmp_path: Path, suffix: str, packed: str) -> None:
    path = tmp_path / f"a{suffix}{packed}"
    path.write_bytes(PACKED[packed](lines(numbered(3))))
    found = list(read_rows(local(path)))
    assert columns(found) == numbered(3)
    assert [row.where for row in found] == [f"{path.name} line {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("packed", PACKED)
def test_a_json_list(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"a.json{packed}"
    path.write_bytes(PACKED[packed](json.dumps(numbered(3), indent=2).encode()))
    found = list(read_rows(local(path)))
    assert columns(found) == numbered(3)
    assert found[2].where == f"{path.name} row 3"


def test_one_json_object_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(numbered(1)[0], indent=2))
    assert columns(read_rows(local(path))) == numbered(1)


def test_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", numbered(300), row_group_size=100)
    found = list(read_rows(local(path)))
    assert columns(found) == numbered(300)
    assert found[299].where == "a.parquet row 300"


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_packed_file_of_two_members_is_read_to_its_end(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(PACKED[packed](lines(numbered(2))) + PACKED[packed](lines(numbered(2, 2))))
    assert columns(read_rows(local(path))) == numbered(4)


def test_a_folder_is_read_in_order_of_relative_paths_without_hidden_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b" / "2.jsonl").write_bytes(lines(numbered(1, 2)))
    (tmp_path / "c.json").write_text(json.dumps(numbered(1, 3)))
    write_parquet(tmp_path / "a" / "1.parquet", numbered(1, 1))
    (tmp_path / ".hidden.jsonl").write_bytes(lines(numbered(1, 9)))
    (tmp_path / ".cache" / "x.jsonl").write_bytes(lines(numbered(1, 9)))
    (tmp_path / "README.md").write_text("# not rows")
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    found = list(read_rows(local(tmp_path)))
    assert [row["n"] for row in columns(found)] == [1, 2, 3]
    assert [row.where for row in found] == ["a/1.parquet row 1", "b/2.jsonl line 1", "c.json row 1"]


# Lines


def test_a_line_that_is_no_json_is_broken_and_reading_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": \n[1]\n\xff\xfe\n"text"\n{"n": 5}\n')
    found = list(read_rows(local(path)))
    assert columns(found) == [{"n": 0}, {"n": 5}]
    broken = {row.where: row.problem for row in found if isinstance(row, BrokenRow)}
    assert list(broken) == [f"a.jsonl line {n}" for n in (2, 3, 4, 5)]
    assert broken["a.jsonl line 2"].startswith("not JSON: ")
    assert broken["a.jsonl line 3"] == "expected an object, found a list"
    assert broken["a.jsonl line 4"] == "not UTF-8: byte 0xff at 0"
    assert broken["a.jsonl line 5"] == "expected an object, found text"


def test_a_broken_line_has_the_same_digest_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"oops\n{}\nother\n")
    (tmp_path / "b.jsonl").write_bytes(b"{}\noops\n")
    digests = [row.text_digest for row in read_rows(local(tmp_path)) if isinstance(row, BrokenRow)]
    assert len(digests) == 3
    assert digests[0] == digests[2] != digests[1]


def test_blank_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"n": 0}\n  \r\n\n{"n": 1}\r\n')
    found = list(read_rows(local(path)))
    assert columns(found) == [{"n": 0}, {"n": 1}]
    assert found[1].where == "a.jsonl line 5"


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(numbered(2)))
    assert columns(read_rows(local(path))) == numbered(2)


def test_a_line_separator_inside_a_string_splits_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    values = [{"text": "one\u2028two\u0085three\u000bfour"}, {"text": "next"}]
    path.write_text("\n".join(json.dumps(value, ensure_ascii=False) for value in values), "utf-8")
    assert columns(read_rows(local(path))) == values


def test_nan_and_a_line_of_megabytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"score": NaN}\n' + lines([{"text": "x" * 3_000_000}]) + b'{"n": 1}')
    found = columns(read_rows(local(path)))
    assert found[0]["score"] != found[0]["score"]
    assert len(found[1]["text"]) == 3_000_000
    assert found[2] == {"n": 1}


def test_a_number_too_long_and_brackets_too_deep_are_broken_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": ' + b"9" * 5000 + b'}\n{"n": ' + b"[" * 200_000 + b'}\n{"n": 1}\n')
    found = list(read_rows(local(path)))
    assert [type(row) for row in found] == [BrokenRow, BrokenRow, RawRow]


def test_the_whole_file_is_never_in_memory(tmp_path: Path) -> None:
    files = {"a.jsonl": lines, "b.json": lambda values: json.dumps(list(values)).encode()}
    for name, encoded in files.items():
        path = tmp_path / name
        path.write_bytes(encoded({"n": n, "text": "x" * 1000} for n in range(8_000)))
        tracemalloc.start()
        count = sum(1 for _ in read_rows(local(path)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == 8_000
        assert peak < path.stat().st_size / 10


def test_rows_are_read_as_they_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(numbered(1)))
    (tmp_path / "b.jsonl").write_bytes(lines(numbered(1)))
    found = read_rows(local(tmp_path))
    (tmp_path / "b.jsonl").write_bytes(lines(numbered(1, 7)))
    assert columns(found) == [*numbered(1), *numbered(1, 7)]


# Damage half-way


def rest_unread(row: RawRow | BrokenRow) -> bool:
    return isinstance(row, BrokenRow) and row.problem.startswith("the rest of the file could not be read: ")


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_truncated_file_gives_every_row_before_the_cut(tmp_path: Path, suffix: str, packed: str) -> None:
    values = [{"n": n, "text": str(pow(3, 40 * n, 2**521 - 1))} for n in range(5000)]
    whole = lines(values) if suffix == ".jsonl" else json.dumps(values).encode()
    data = PACKED[packed](whole)
    cut = len(data) * 2 // 3
    (tmp_path / f"a{suffix}{packed}").write_bytes(data[:cut])
    (tmp_path / "b.jsonl").write_bytes(lines(numbered(2)))
    *before, broken, first, second = read_rows(local(tmp_path))
    assert columns(before) == values[: len(before)]
    # zstd gives whole blocks of 128 KiB only.
    assert len(before) > 5000 * (0.6 if packed == ".gz" else 0.2)
    assert rest_unread(broken)
    assert broken.where == f"a{suffix}{packed} after row {len(before)}"
    assert columns([first, second]) == numbered(2)


def test_no_byte_that_gzip_could_give_is_lost_to_a_cut(tmp_path: Path) -> None:
    values = numbered(20_000)
    data = gzip.compress(lines(values))[:-5000]
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    could_be_read = zlib.decompressobj(31).decompress(data).count(b"\n")
    *before, broken = read_rows(local(tmp_path))
    assert columns(before) == values[:could_be_read]
    assert rest_unread(broken)


def test_json_that_breaks_off_gives_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(numbered(3))[:-4])
    *before, broken = read_rows(local(path))
    assert columns(before) == numbered(2)
    assert rest_unread(broken)


def test_a_list_item_that_is_no_object_is_one_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"n": 0}, 12, {"n": "\xff"}, {"n": 3}]')
    found = list(read_rows(local(path)))
    assert columns(found) == [{"n": 0}, {"n": 3}]
    assert isinstance(found[1], BrokenRow)
    assert found[1].problem == "expected an object, found a number"
    assert isinstance(found[2], BrokenRow)
    assert found[2].problem == "not UTF-8"


def test_text_after_a_json_list_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"n": 0}] {"n": 1}')
    found = list(read_rows(local(path)))
    assert columns(found) == [{"n": 0}]
    assert rest_unread(found[1])


def damage_second_row_group(path: Path, compression: str) -> None:
    options = {"write_page_checksum": True, "use_dictionary": False, "compression": compression}
    write_parquet(path, numbered(300), row_group_size=100, **options)
    data = bytearray(path.read_bytes())
    if compression == "none":  # a letter that only the page's checksum tells from the right one
        at = data.index(b"row 150")
        data[at : at + 3] = b"raw"
    else:
        at = pq.read_metadata(path).row_group(1).column(1).data_page_offset + 40
        data[at : at + 20] = bytes(20)
    path.write_bytes(data)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_damaged_row_group_gives_the_rows_before_it(tmp_path: Path, compression: str) -> None:
    damage_second_row_group(tmp_path / "a.parquet", compression)
    (tmp_path / "b.jsonl").write_bytes(lines(numbered(2)))
    *before, broken, first, second = read_rows(local(tmp_path))
    assert columns(before) == numbered(100)
    assert rest_unread(broken)
    assert broken.where == "a.parquet after row 100"
    assert columns([first, second]) == numbered(2)


def test_a_parquet_row_whose_text_is_not_utf8_is_one_broken_row(tmp_path: Path) -> None:
    column = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    found = list(read_rows(local(tmp_path)))
    assert columns(found) == [{"text": "a"}, {"text": "c"}]
    assert isinstance(found[1], BrokenRow)
    assert (found[1].where, found[1].problem) == ("a.parquet row 2", "text that is not UTF-8")


# The JSON stream

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.lists(json_values, max_size=6), st.booleans(), st.integers(1, 5), st.booleans())
def test_a_json_list_survives_being_read_in_pieces(items: list[Any], ascii_only: bool, size: int, spread: bool) -> None:
    data = json.dumps(items, ensure_ascii=ascii_only, indent=1 if spread else None).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.prompts.json_stream._AT_LEAST", 1)
        pieces = (data[at : at + size] for at in range(0, len(data), size))
        assert [value for value, _ in JsonStream(pieces).values()] == items


def test_json_that_is_wrong_is_found_without_reading_on() -> None:
    def blocks() -> Iterable[bytes]:
        yield b"[{}, oops" + b" " * 200_000
        raise AssertionError("read on after the fault")

    stream = JsonStream(iter(blocks()))
    with pytest.raises(ValueError, match="not JSON: Expecting value"):
        list(stream.values())


# Input that cannot be used


def refused(dataset: DatasetConfig) -> str:
    with pytest.raises(InputError) as caught:
        read_rows(dataset)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_empty_path() -> None:
    text = refused(local(""))
    assert text.startswith("dataset.path: it is empty (accepted: a hub id, a file (.jsonl")


@pytest.mark.parametrize("path", ["/no/such/file.jsonl", "data/no_such_file.parquet", "./nothing", "a b/c"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path: str) -> None:
    assert refused(local(path)).startswith(f"dataset.path: {path!r} does not exist")


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.parquet.gz", "a", "a.gz"])
def test_an_unsupported_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    text = refused(local(tmp_path / name))
    assert text.startswith("dataset.path: ")
    assert text.endswith("is of a kind that is not read (accepted: .jsonl, .ndjson or .json, each also with .gz or "
                         ".zst, and .parquet)")  # fmt: skip


def test_a_folder_without_rows_files(tmp_path: Path) -> None:
    (tmp_path / ".hidden.jsonl").write_bytes(lines(numbered(1)))
    text = refused(local(tmp_path))
    assert text.startswith("dataset.path: ")
    assert "has no file that can be read (accepted: .jsonl" in text


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.json", b""), ("a.json", b"[]"), ("a.jsonl.gz", gzip.compress(b""))],
)
def test_an_empty_file(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert refused(local(tmp_path / name)) == f"dataset.path: {str(tmp_path / name)!r} holds no rows"


def test_parquet_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert refused(local(path)).endswith("holds no rows")


@pytest.mark.parametrize("data", [b"", b"PAR1 and nothing else", b"text"])
def test_unreadable_parquet_even_late_in_a_folder(tmp_path: Path, data: bytes) -> None:
    write_parquet(tmp_path / "a.parquet", numbered(1))
    (tmp_path / "b.parquet").write_bytes(data)
    text = refused(local(tmp_path))
    assert text.startswith(f"dataset.path: {str(tmp_path / 'b.parquet')!r} is not readable Parquet: ")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json"])
def test_a_file_of_which_nothing_can_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither packed nor JSON")
    assert refused(local(tmp_path / name)).startswith(f"dataset.path: {str(tmp_path / name)!r} cannot be read: ")


def test_local_files_have_the_split_train_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(numbered(1)))
    text = refused(local(tmp_path, split="test"))
    assert text == "dataset.split: 'test' is unknown: files have one split (accepted: train)"


def test_local_files_have_no_subsets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(numbered(1)))
    text = refused(local(tmp_path, subset="en"))
    assert text == "dataset.subset: 'en' is unknown: local files have no subsets (accepted: null)"


# Bundled rows


@pytest.mark.parametrize("path", BUNDLED)
def test_bundled_rows_are_there_and_whole(path: str) -> None:
    found = list(read_rows(local(path, source="bundled", subset="train")))
    assert len(found) >= 48
    assert all(isinstance(row, RawRow) for row in found)


def test_bundled_rows_of_an_installed_package_lie_inside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pipeline"
    package.mkdir()
    monkeypatch.setattr(pipeline, "__file__", str(package / "__init__.py"))
    assert bundled_dir() == tmp_path / "data"
    (package / "data").mkdir()
    assert bundled_dir() == package / "data"


def test_a_path_that_is_not_bundled(tmp_path: Path) -> None:
    text = refused(local("org/other", source="bundled"))
    assert text.startswith("dataset.path: 'org/other' is neither bundled nor a local file or folder (accepted: a local")


def test_a_bundled_file_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "bundled_dir", lambda: tmp_path)
    text = refused(local("nvidia/OpenCodeInstruct", source="bundled"))
    assert text.startswith("dataset.source: the bundled file ")
    assert text.endswith("is missing from this installation (accepted: hub)")


def test_bundled_rows_have_the_split_train_and_no_other() -> None:
    text = refused(local("nvidia/OpenCodeInstruct", source="bundled", split="test"))
    assert text.startswith("dataset.split: 'test' is unknown")


def test_a_local_file_is_read_whatever_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(numbered(2)))
    assert columns(read_rows(local(tmp_path / "a.jsonl", source="bundled"))) == numbered(2)


# The hub, with a folder in its place


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "data" / "train-00000.parquet", numbered(3))
    write_parquet(tmp_path / "data" / "test-00000.parquet", numbered(1, 9))
    return tmp_path


def test_a_split_of_the_hub(repository: Path) -> None:
    assert columns(hub_rows(local(repository))) == numbered(3)
    test_rows = list(hub_rows(local(repository, split="test")))
    assert columns(test_rows) == numbered(1, 9)
    assert test_rows[0].where == f"{repository} row 1"


def test_an_unknown_split_of_the_hub(repository: Path) -> None:
    with pytest.raises(InputError) as caught:
        hub_rows(local(repository, split="validation"))
    assert str(caught.value) == "dataset.split: 'validation' is unknown (accepted: train, test)"


def test_an_unknown_subset_of_the_hub(repository: Path) -> None:
    with pytest.raises(InputError) as caught:
        hub_rows(local(repository, subset="en"))
    assert str(caught.value).startswith("dataset.subset: ")
    assert "['default']" in str(caught.value)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach 'org/name' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    text = refused(local("org/name"))
    assert text == (
        "dataset.path: 'org/name' cannot be opened: Couldn't reach 'org/name' on the Hub (LocalEntryNotFoundError)"
    )


def test_a_hub_id_is_opened_as_a_stream_with_its_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(path: str, subset: str | None, **options: Any) -> Any:
        assert (path, subset, options) == ("org/name", "en", {"streaming": True})
        return {"train": numbered(2)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert columns(read_rows(local("org/name", subset="en"))) == numbered(2)


def test_a_hub_that_stops_answering_half_way_ends_the_run_and_not_the_row() -> None:
    def answers() -> Iterable[dict[str, Any]]:
        yield from numbered(2)
        raise ConnectionError("reset")

    found = hub._stream(answers(), "org/name")
    assert columns(islice(found, 2)) == numbered(2)
    with pytest.raises(InputError, match=r"^dataset\.path: 'org/name' stopped after row 2: reset$"):
        next(found)
