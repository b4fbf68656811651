"""From stored rows to training examples: the ids and the mask, made in one place for every format.

The invariant that trainers rely on: *the ids of an example are the ids that the engine read and wrote, in that
order and never tokenised again; the mask is 0 over what it read and 1 over what it wrote.* Nothing is shifted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.errors import StoreError
from pipeline.export.shards import Row
from pipeline.records import Ids

Reason = Literal[
    "no_ids",  # the server that answered returned no token ids
    "empty_answer",  # nothing was generated, so nothing is supervised; readers drop such a row or stop at it
    "too_long",  # longer than export.max_length
]
Mask: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Example:
    """A row ready for a trainer: ``input_ids`` int32 [S] and ``loss_mask`` uint8 [S] of zeros and ones."""

    row: Row
    input_ids: Ids
    loss_mask: Mask


@dataclass(slots=True)
class Selection:
    """The rows that can be trained on, and what became of the others.

    Iterating over :meth:`examples` fills the counts: ``longest`` is the length of the longest example in tokens,
    ``shortest_too_long`` that of the shortest row that ``max_length`` kept out; ``left_out`` holds ids by reason.
    """

    max_length: int | None
    rows: int = 0
    prompt_tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    shortest_too_long: int = 0
    left_out: dict[Reason, list[str]] = field(default_factory=dict)

    def examples(self, rows: Iterable[Row]) -> Iterator[Example]:
        """The rows that can be trained on, as examples, in order.

        Raises:
            StoreError: a row has another number of output ids than it says.
        """
        for row in rows:
            made = _example(row)
            if isinstance(made, Example):
                made = self._within_length(made)
            if isinstance(made, Example):
                self._count(made)
                yield made
            else:
                self.left_out.setdefault(made, []).append(row.id)

    def _within_length(self, example: Example) -> Example | Reason:
        length = len(example.input_ids)
        if self.max_length is None or length <= self.max_length:
            return example
        self.shortest_too_long = min(length, self.shortest_too_long or length)
        return "too_long"

    def _count(self, example: Example) -> None:
        supervised = int(example.loss_mask.sum())
        self.rows += 1
        self.prompt_tokens += len(example.input_ids) - supervised
        self.supervised_tokens += supervised
        self.longest = max(self.longest, len(example.input_ids))


def _example(row: Row) -> Example | Reason:
    prompt, output = row.prompt_ids, row.output_ids
    if prompt is None or output is None:
        return "no_ids"
    if len(output) != row.completion_tokens:
        raise StoreError(
            f"row {row.id} has {len(output)} output_ids where completion_tokens is {row.completion_tokens}"
        )
    if not len(output):
        return "empty_answer"
    mask = np.zeros(len(prompt) + len(output), np.uint8)
    mask[len(prompt) :] = 1
    return Example(row, np.concatenate([prompt, output]), mask)
