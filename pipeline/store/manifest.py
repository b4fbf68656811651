"""``manifest.json``: what a run folder holds and what it was made with. Written last, replaced whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pipeline.errors import InputError, StoreError
from pipeline.records import Totals
from pipeline.store.durable import replace_file

NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Capture:
    """What the stored distributions are.

    ``logprobs``: "raw" (the model's own, at temperature 1), "scaled" (after the sampling temperature), or "none".
    ``missing`` names the columns that the engine cannot give.
    """

    top_k: int
    logprobs: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One sealed shard: its file name in ``shards/``, its size, the SHA-256 (hex) of the file, and whether a copy in
    ``store.mirror`` was read back and found equal."""

    name: str
    rows: int
    bytes: int
    sha256: str
    mirrored: bool = False


@dataclass(slots=True)
class Manifest:
    """``content`` holds the settings that ``fingerprint`` covers; ``totals`` counts the rows of sealed shards, and
    ``failures`` the records of ``failures.jsonl`` when the manifest was written. ``seconds`` is time spent
    generating, over all sessions."""

    fingerprint: str
    content: dict[str, Any]
    model: str
    tokenizer_sha256: str | None
    created_at: str
    schema_version: int = 1
    capture: Capture | None = None
    engines: list[dict[str, Any]] = field(default_factory=list)
    shards: list[ShardEntry] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    failures: int = 0
    seconds: float = 0.0
    complete: bool = False
    updated_at: str = ""

    def metadata(self) -> dict[bytes, bytes]:
        """The key-value metadata of every shard of this run: one key, ``eagle3``, JSON."""
        capture = self.capture or Capture(0, "none")
        facts = {
            "schema_version": self.schema_version,
            "model": self.model,
            "tokenizer_sha256": self.tokenizer_sha256,
            "fingerprint": self.fingerprint,
            "k": capture.top_k,
            "logprobs": capture.logprobs,
            "missing": list(capture.missing),
            "alignment": "unshifted",
        }
        return {b"eagle3": orjson.dumps(facts)}


def save(manifest: Manifest, folder: Path) -> None:
    """Replaces the folder's manifest, durably."""
    data = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    replace_file(folder / NAME, data.encode(), "manifest")


def load(folder: Path) -> Manifest:
    """Reads a folder's manifest.

    Raises:
        InputError: the folder is no run folder, or a later version wrote it.
        StoreError: the manifest cannot be understood.
    """
    path = folder / NAME
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError("run.dir", f"{folder} holds no run (no {NAME} in it)", "the folder of a run") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None
    try:
        if found["schema_version"] > 1:
            raise InputError("run.dir", f"{folder} was written by a later version (schema {found['schema_version']})")
        capture = found.pop("capture")
        shards = [ShardEntry(**entry) for entry in found.pop("shards")]
        totals = Totals(**found.pop("totals"))
        if capture is not None:
            capture = Capture(**{**capture, "missing": tuple(capture["missing"])})
        return Manifest(**found, capture=capture, shards=shards, totals=totals)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is not a manifest of this program: {error}") from None
