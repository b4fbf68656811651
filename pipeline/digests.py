"""A set of texts that is kept as digests: 16 bytes a text, where a set of ids would take ten times that."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Digests: TypeAlias = npt.NDArray[np.bytes_]

BATCH = 65_536
"""Digests held in a Python set before they are merged into the sorted array."""

_WIDTH = 16
_DTYPE = f"S{_WIDTH}"


class DigestSet:
    """A set of texts that answers whether a text is in it and how many there are, and cannot list them.

    It holds the BLAKE2b digest (16 bytes) of each text: among 10 million texts, the odds that two of them are taken
    for one are below 1e-24. Most digests lie in one sorted array; the newest wait in a small Python set. Memory is
    about 16 bytes a text at rest, 24 while texts are added one by one, 48 for the moment of a merge.

    Digests are compared as stretches of the array's memory, never as elements taken out of it: numpy strips trailing
    NUL bytes from an ``S16`` element, and one digest in 256 ends in one.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._recent: set[bytes] = set()
        self._sorted: Digests = np.empty(0, dtype=_DTYPE)
        self.update(texts)

    def add(self, text: str) -> bool:
        """Adds a text; says whether it is new."""
        digest = _digest(text)
        if self._holds(digest):
            return False
        self._recent.add(digest)
        # A share of the whole, so that the cost of merging stays in proportion to the texts added.
        if len(self._recent) >= max(BATCH, len(self._sorted) // 16):
            self._merge(b"")
        return True

    def update(self, texts: Iterable[str]) -> None:
        """Adds many texts at once: 1 million take about a second."""
        packed = bytearray()
        for batch in _batches(texts):
            packed += b"".join(map(_digest, batch))
        if packed:
            self._merge(packed)

    def __contains__(self, text: str) -> bool:
        return self._holds(_digest(text))

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def _holds(self, digest: bytes) -> bool:
        if digest in self._recent:
            return True
        at = int(self._sorted.searchsorted(_as_array(digest))[0])
        return self._sorted[at : at + 1].tobytes() == digest

    def _merge(self, packed: bytes | bytearray) -> None:
        """Moves the recent digests, and ``packed`` ones (one after the other, perhaps repeated), into the array."""
        merged = np.concatenate([self._sorted, _as_array(packed), _as_array(b"".join(self._recent))])
        merged.sort(kind="stable")  # takes a run that is sorted already as it is
        self._sorted = merged[_first_of_each(merged)]
        self._recent.clear()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_WIDTH).digest()


def _as_array(packed: bytes | bytearray) -> Digests:
    return np.frombuffer(packed, dtype=_DTYPE)


def _first_of_each(ordered: Digests) -> npt.NDArray[np.bool_]:
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return first


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while batch := list(islice(remaining, BATCH)):
        yield batch
