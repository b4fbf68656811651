"""Opening a run folder for writing: whose it is, and whether this configuration may write in it."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import StoreConfig, differences
from pipeline.errors import InputError, StoreError
from pipeline.store import failures as failure_file
from pipeline.store import manifest as manifest_file
from pipeline.store.durable import explain, replace_file, sync_folder
from pipeline.store.failures import read_failures
from pipeline.store.folder import OWN_NAMES, RunFolder, now
from pipeline.store.journal import read_records
from pipeline.store.lock import FolderLock
from pipeline.store.manifest import Manifest


def open_run(
    folder: Path,
    settings: StoreConfig,
    fresh: Manifest,
    config_yaml: str,
    extend: bool = False,
    retry_failed: bool = False,
) -> RunFolder:
    """Opens a run folder for writing, making it where there is none.

    Args:
        fresh: the manifest that a new run starts with; an existing one must have the same fingerprint.
        extend: accept a larger ``dataset.limit`` than the folder was made with.
        retry_failed: take back the recorded failures, so that their prompts have no outcome again.

    Raises:
        InputError: the folder belongs to another configuration, to another process, or to no run at all.
        StoreError: the folder is damaged, or cannot be written.
    """
    try:
        _refuse_foreign(folder)
        for name in ("journal", "shards", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise explain(error, f"making the run folder {folder}") from error
    try:
        is_new = not (folder / manifest_file.NAME).exists()
        if is_new:
            _refuse_orphans(folder)
        if is_new or _has_no_outcome(folder):
            fresh.created_at = fresh.updated_at = now()
            replace_file(folder / "config.yaml", config_yaml.encode(), "config")
            manifest_file.save(fresh, folder)
            sync_folder(folder.parent)
        manifest = _matching(folder, manifest_file.load(folder), fresh, extend)
        if manifest.fingerprint != fresh.fingerprint:
            manifest.fingerprint, manifest.content, manifest.complete = fresh.fingerprint, fresh.content, False
            replace_file(folder / "config.yaml", config_yaml.encode(), "config")
            manifest_file.save(manifest, folder)
        if retry_failed:
            manifest.complete = False
            manifest_file.save(manifest, folder)
            replace_file(folder / failure_file.NAME, b"", "failures: take back")
        return RunFolder(folder, settings, manifest, lock)
    except OSError as error:
        lock.release()
        raise explain(error, f"opening the run folder {folder}") from error
    except BaseException:
        lock.release()
        raise


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError("run.dir", f"{folder} is a file", "a folder, new or of an earlier run")
    if not folder.exists() or (folder / manifest_file.NAME).exists():
        return
    foreign = [path.name for path in folder.iterdir() if path.name not in OWN_NAMES and not path.name.endswith(".tmp")]
    if foreign:
        raise InputError("run.dir", f"{folder} is not a run folder (it holds {foreign[0]})", "a new or empty folder")


def _has_no_outcome(folder: Path) -> bool:
    """Whether a folder with a manifest holds nothing yet, as after a start that failed: then another configuration
    may have it."""
    if manifest_file.load(folder).shards or any(True for _ in read_failures(folder / failure_file.NAME)):
        return False
    journals = (folder / "journal").glob("part-*.journal")
    return not any(True for path in journals for _ in read_records(path))


def _refuse_orphans(folder: Path) -> None:
    """Outcomes are only ever written behind a manifest; without one, whose they are is not known."""
    failures = folder / failure_file.NAME
    found = [*(folder / "journal").glob("part-*.journal"), *(folder / "shards").glob("*.parquet")]
    if found or (failures.exists() and failures.stat().st_size):
        first = found[0] if found else failures
        raise StoreError(
            f"{folder} holds outcomes ({first.relative_to(folder)}) and no {manifest_file.NAME}; restore that, or "
            "choose another folder"
        )


def _matching(folder: Path, found: Manifest, fresh: Manifest, extend: bool) -> Manifest:
    changed = differences(found.content, fresh.content)
    grows = set(changed) == {"dataset.limit"} and _grows(*changed["dataset.limit"])
    if changed and not (extend and grows):
        shown = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, (old, new) in changed.items())
        hint = " (to take more prompts into it, add run.extend=true)" if grows else ""
        raise InputError("run.dir", f"{folder} belongs to another configuration: {shown}{hint}")
    if found.tokenizer_sha256 != fresh.tokenizer_sha256:
        raise InputError("model.path", f"the tokenizer has changed since {folder} was begun")
    return found


def _grows(old: int | None, new: int | None) -> bool:
    return old is not None and (new is None or new > old)
