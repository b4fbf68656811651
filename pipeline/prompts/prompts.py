"""Dataset rows -> prompts, each with an id that does not depend on where the row lies.

Every row ends in at least one prompt or in a failure that says why; none is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pipeline.config import DatasetConfig
from pipeline.prompts.formats import Conversation, MalformedRow, conversation
from pipeline.prompts.ids import SourceIds, columns_hash, content_hash, own_id
from pipeline.prompts.raw import BrokenRow, RawRow, Row
from pipeline.prompts.rows import read_rows
from pipeline.prompts.turns import Cut, cuts
from pipeline.records import Failure, FailureKind, Prompt


def read_prompts(dataset: DatasetConfig) -> Iterator[Prompt | Failure]:
    """The prompts of a dataset, in its order, as a stream.

    ``dataset.limit`` counts source rows, those that fail among them. The source is opened before this returns.

    Raises:
        InputError: naming the key of ``dataset`` at fault.
    """
    cuts((), dataset.turns)  # a name that is not known is refused before the first row
    return _prompts(dataset, islice(read_rows(dataset), dataset.limit))


def _prompts(dataset: DatasetConfig, rows: Iterator[Row]) -> Iterator[Prompt | Failure]:
    ids = SourceIds()
    for row in rows:
        yield from _broken(dataset, row, ids) if isinstance(row, BrokenRow) else _of_row(dataset, row, ids)


def _broken(dataset: DatasetConfig, row: BrokenRow, ids: SourceIds) -> Iterator[Failure]:
    yield _failure(dataset, ids.claim(None, row.text_digest), 0, "malformed_row", f"{row.where}: {row.problem}")


def _of_row(dataset: DatasetConfig, row: RawRow, ids: SourceIds) -> Iterator[Prompt | Failure]:
    own = own_id(row.columns)
    try:
        talk = conversation(row.columns)
    except MalformedRow as error:
        source_id = ids.claim(own, columns_hash(row.columns))
        yield _failure(dataset, source_id, 0, "malformed_row", f"{row.where}: {error}")
        return
    source_id = ids.claim(own, content_hash(talk))
    found = cuts(talk.messages, dataset.turns)
    if not found:
        yield _failure(dataset, source_id, 0, "no_user_turn", f"{row.where}: nothing to answer at the end")
    for cut in found:
        yield from _of_cut(dataset, source_id, talk, cut, row.where)


def _of_cut(
    dataset: DatasetConfig, source_id: str, talk: Conversation, cut: Cut, where: str
) -> Iterator[Prompt | Failure]:
    messages = talk.messages[: cut.end]
    if not any(message.role == "user" and (message.content or "").strip() for message in messages):
        detail = f"{where}: no user message with text before assistant turn {cut.turn}"
        yield _failure(dataset, source_id, cut.turn, "no_user_turn", detail)
        return
    for sample in range(dataset.samples):
        yield Prompt(
            id=_row_id(dataset.name, source_id, cut.turn, sample),
            dataset=dataset.name,
            source_id=source_id,
            turn=cut.turn,
            sample=sample,
            messages=messages,
            tools=talk.tools,
            reference_chars=cut.reference_chars,
        )


def _failure(dataset: DatasetConfig, source_id: str, turn: int, kind: FailureKind, detail: str) -> Failure:
    return Failure(_row_id(dataset.name, source_id, turn, 0), dataset.name, source_id, kind, detail)


def _row_id(dataset: str, source_id: str, turn: int, sample: int) -> str:
    return f"{dataset}/{source_id}/t{turn}/s{sample}"
