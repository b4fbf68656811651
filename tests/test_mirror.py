"""The second copy of sealed shards: verified, made once, and no reason to lose anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from store_rows import completion, open_folder

from pipeline.errors import InputError, StoreError
from pipeline.store import Mirror, RunFolder, durable
from pipeline.store import manifest as manifest_file
from pipeline.store.shards import file_digest

K = 4


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two sealed shards, and a row in the journal."""
    folder = open_folder(tmp_path / "run", rows_per_shard=2)
    for name in "abcde":
        folder.append(completion(name, k=K))
    folder.seal_full()
    return folder


def copies(place: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(place.iterdir())}


def shards(folder: RunFolder) -> dict[str, str]:
    return copies(folder.path / "shards")


def test_every_sealed_shard_is_copied_once(folder: RunFolder, tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path / 'copy'}")
    assert folder.mirror_sealed(mirror) == 2
    assert copies(tmp_path / "copy") == shards(folder)
    assert folder.mirror_sealed(mirror) == 0
    folder.finish()
    assert folder.mirror_sealed(mirror) == 1
    assert copies(tmp_path / "copy") == shards(folder)
    assert [entry.mirrored for entry in manifest_file.load(folder.path).shards] == [True] * 3


def test_what_is_there_already_is_left_alone_and_what_is_wrong_is_replaced(folder: RunFolder, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    place.mkdir()
    right, wrong = sorted((folder.path / "shards").iterdir())
    (place / right.name).write_bytes(right.read_bytes())
    (place / wrong.name).write_bytes(wrong.read_bytes()[:-1] + b"?")
    before = (place / right.name).stat().st_mtime_ns
    folder.mirror_sealed(Mirror(f"file://{place}"))
    assert copies(place) == shards(folder)
    assert (place / right.name).stat().st_mtime_ns == before


@pytest.mark.parametrize("step", ["mirror: upload", "mirror: rename"])
def test_an_interrupted_copy_is_made_again(
    step: str, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    mirror = Mirror(f"file://{tmp_path / 'copy'}")
    monkeypatch.setattr(durable, "on_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        folder.mirror_sealed(mirror)
    monkeypatch.setattr(durable, "on_step", None)
    assert not any(entry.mirrored for entry in manifest_file.load(folder.path).shards)
    assert folder.mirror_sealed(mirror) == 2
    assert copies(tmp_path / "copy") == shards(folder)


def test_a_copy_that_reads_back_differently_is_not_confirmed(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = Mirror._digest

    def damaged(self: Mirror, path: str) -> Any:
        return digest(self, path) and "0" * 64

    monkeypatch.setattr(Mirror, "_digest", damaged)
    with pytest.raises(StoreError, match="reads back differently"):
        folder.mirror_sealed(Mirror(f"file://{tmp_path / 'copy'}"))
    assert not any(entry.mirrored for entry in manifest_file.load(folder.path).shards)
    assert len(shards(folder)) == 2


def test_a_mirror_that_cannot_be_written_is_named_and_nothing_is_lost(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "copy").write_text("a file")
    with pytest.raises(StoreError, match=r"part-00000\.parquet could not be copied to file://"):
        folder.mirror_sealed(Mirror(f"file://{tmp_path / 'copy'}"))
    assert len(shards(folder)) == 2


def test_filesystems_that_only_fsspec_knows(folder: RunFolder) -> None:
    assert folder.mirror_sealed(Mirror("memory://bucket/run")) == 2
    files = fsspec.filesystem("memory")
    assert [Path(path).name for path in sorted(files.ls("/bucket/run", detail=False))] == list(shards(folder))


@pytest.mark.parametrize("uri", ["nonsense://x/y", "s3"])
def test_an_address_of_nothing_is_refused_by_its_key(uri: str) -> None:
    with pytest.raises(InputError, match=r"store\.mirror: "):
        Mirror(uri)
