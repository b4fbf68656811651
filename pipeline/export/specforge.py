"""SpecForge 0.2.0: ``prompts.jsonl`` (exact token ids) and ``conversations.jsonl`` (messages, tokenised there).

Read by ``specforge.data.prompt_builder.prepare_prompt_tasks``, which decides by a file's first record. Of a
pre-tokenised record it reads ``input_ids`` and ``loss_mask`` and ignores every other key, so there is none. Of a
conversation record, any key but ``id``, ``conversations`` and ``tools`` becomes an argument of the chat template.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from pipeline.export.examples import Example
from pipeline.export.shards import Row
from pipeline.export.staging import Staging
from pipeline.records import Message

PROMPTS = "prompts.jsonl"
CONVERSATIONS = "conversations.jsonl"

_JSON_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def write(examples: Iterable[Example], stage: Staging) -> None:
    """Writes both files; line i of each is the same row."""
    prompts, conversations = stage.open(PROMPTS), stage.open(CONVERSATIONS)
    for example in examples:
        record = {"input_ids": example.input_ids, "loss_mask": example.loss_mask}
        prompts.write_line(orjson.dumps(record, option=_JSON_LINE))
        conversations.write_line(orjson.dumps(_conversation(example.row), option=_JSON_LINE))


def advice(folder: Path, longest: int) -> tuple[str, ...]:
    """How ``specforge train`` takes the files (``specforge.config.schema.DataConfig``)."""
    prompts, conversations = (shlex.quote(str(folder / name)) for name in (PROMPTS, CONVERSATIONS))
    return (
        f"specforge train --config RUN.yaml data.prompts_path={prompts} data.max_length={longest}",
        f"  data.max_length below {longest:,} (SpecForge's default is 2048) cuts rows, and drops those whose answer "
        "starts beyond it",
        f"  or data.train_data_path={conversations} data.chat_template=NAME data.train_only_last_turn=true, tokenised "
        "again by SpecForge; set one of the two, not both",
    )


def _conversation(row: Row) -> dict[str, Any]:
    # `tools` is on every row, as JSON text: the reader infers one type for the column from the first 10 MB, and would
    # merge the parameters of all tools into one struct, or stop where the first tools come later than that.
    return {"id": row.id, "conversations": [_message(message) for message in row.messages], "tools": row.tools or "[]"}


def _message(message: Message) -> dict[str, str]:
    """Only the fields that the message has: some chat templates ask whether ``tool_calls`` is there, not what it is.

    ``tool_calls`` stays JSON text, which the reader parses.
    """
    fields = {name: value for name, value in asdict(message).items() if value is not None}
    return {"role": message.role, "content": "", **fields}
