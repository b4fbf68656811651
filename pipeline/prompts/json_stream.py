"""The values of a JSON file one by one: the items of a list, or values that simply follow each other."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_AT_LEAST = 1 << 16
_LONGEST_TOKEN = 16
"""Characters: more than a literal or an escape sequence that the window may cut in two."""


class JsonStream:
    """Holds the text around the next value and no more; a value is read once all of it is there.

    Bytes that are not UTF-8 are kept as lone surrogates (``surrogateescape``), for the caller to find.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = ""
        self._at = 0
        self._ended = False
        self._damage: OSError | None = None

    def values(self) -> Iterator[tuple[Any, str]]:
        """Each value with its text.

        Raises:
            ValueError: at the first place that is not JSON; what comes after it cannot be told apart.
            OSError: where the bytes themselves end in damage, after the values before it.
        """
        listed = self._take("[")
        while not (self._take("]") if listed else self._peek() == ""):
            yield self._value()
            if listed and not self._take(",") and self._peek() != "]":
                self._fail("expected , or ] after an item of the list")
        if self._damage or self._peek():
            self._fail("text after the end of the list")

    def _value(self) -> tuple[Any, str]:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not _cut_short(error):
                    self._fail(error.msg)
            else:
                if self._ended or len(self._text) - end > _LONGEST_TOKEN:  # else "0" may turn out to be "0.5"
                    text, self._at = self._text[self._at : end], end
                    return value, text
            self._grow()

    def _take(self, character: str) -> bool:
        if self._peek() != character:
            return False
        self._at += 1
        return True

    def _peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._grow()

    def _grow(self) -> None:
        """Reads at least as much as is waiting, so that a long value is scanned a few times and not many."""
        parts = [self._text[self._at :]]
        wanted = 2 * max(len(parts[0]), _AT_LEAST)
        held = len(parts[0])
        while held < wanted and not self._ended:
            block = self._block()
            parts.append(self._decoder.decode(block, final=self._ended))
            held += len(parts[-1])
        self._text, self._at = "".join(parts), 0

    def _block(self) -> bytes:
        try:
            block = next(self._blocks, None)
        except OSError as error:
            self._damage, block = error, None
        self._ended = block is None
        return block or b""

    def _fail(self, problem: str) -> None:
        if self._damage:
            raise self._damage
        raise ValueError(f"not JSON: {problem}")


def _cut_short(error: json.JSONDecodeError) -> bool:
    """Whether more text might mend it: the fault is at the end of the text, or a string that has no end yet."""
    return error.msg.startswith("Unterminated string") or len(error.doc) - error.pos < _LONGEST_TOKEN
