"""Rows as they come from a file or the hub, before anything is made of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a dataset. ``where`` ("train.jsonl line 12") is for texts that people read and nothing else."""

    columns: dict[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row, or the rest of a file, that cannot be read. ``text_digest`` (16 hex digits) tells it from others."""

    where: str
    text_digest: str
    problem: str


Row: TypeAlias = RawRow | BrokenRow


def short_digest(data: bytes) -> str:
    """The first 16 hex digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def kind_of(value: Any) -> str:
    """What a value is, in the words of an error text: ``a number``, ``a list``, ``null``."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "a boolean"),
        (str, "text"),
        ((int, float), "a number"),
        ((list, tuple), "a list"),
        (dict, "an object"),
        (bytes, "bytes"),
        (type(None), "null"),
    )
    return next((name for types, name in kinds if isinstance(value, types)), type(value).__name__)


def one_line(error: BaseException) -> str:
    """An error's text on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"
