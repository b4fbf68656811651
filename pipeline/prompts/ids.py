"""Stable names for source rows: the row's own id, or a digest of what it says; never a position in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from pipeline.digests import DigestSet
from pipeline.prompts.formats import Conversation
from pipeline.prompts.raw import short_digest
from pipeline.records import Message

OWN_ID_COLUMNS = ("id", "prompt_id", "uuid", "conversation_id", "question_id")


def own_id(row: Mapping[str, Any]) -> str | None:
    """The id that a row brings along, from the first column that has one (text or an integer)."""
    for column in OWN_ID_COLUMNS:
        value = row.get(column)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return _escaped(str(value).strip())
    return None


def content_hash(conversation: Conversation) -> str:
    """16 hex digits over the whole conversation, the dataset's own answers included, and its tools."""
    messages = [_present_fields(message) for message in conversation.messages]
    tools = json.loads(conversation.tools) if conversation.tools else None
    return _json_digest({"messages": messages, "tools": tools})


def columns_hash(row: Mapping[str, Any]) -> str:
    """16 hex digits over the columns of a row that no conversation can be made of."""
    return _json_digest(row)


class SourceIds:
    """Gives each source row of a dataset an id that no other row has.

    A row's own id, where it has been seen before, gets ``~`` and 8 digits of the content hash. Rows that are alike
    in both get ``.2``, ``.3`` and so on: they are copies of each other, so it does not matter which is which.
    """

    def __init__(self) -> None:
        self._taken = DigestSet()

    def claim(self, own: str | None, content: str) -> str:
        """The id of a row with this id of its own (or none) and this content hash."""
        return next(name for name in self._candidates(own, content) if self._taken.add(name))

    def _candidates(self, own: str | None, content: str) -> Iterable[str]:
        if own is not None:
            yield own
        base = content if own is None else f"{own}~{content[:8]}"
        yield base
        yield self._numbered(base)

    def _numbered(self, base: str) -> str:
        """``base.n`` with the first n that is free, found in steps that double: a row may have 100,000 copies."""
        low, high = 1, 2
        while f"{base}.{high}" in self._taken:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if f"{base}.{middle}" in self._taken else (low, middle)
        return f"{base}.{high}"


def _escaped(text: str) -> str:
    return "".join(_percent_encoded(char) if char.isspace() or not char.isprintable() else char for char in text)


def _percent_encoded(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


def _present_fields(message: Message) -> dict[str, Any]:
    # Only fields with a value: one that Message gains later changes no id.
    values = ((field.name, getattr(message, field.name)) for field in fields(message))
    return {name: value for name, value in values if value is not None}


def _json_digest(value: Any) -> str:
    return short_digest(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode())
