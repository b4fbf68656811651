"""speculators 0.9.0: ``train.jsonl``, rows as its own ``regenerate-responses`` writes them.

Read by ``speculators prepare-data`` (``build_speculator_training_dataset``), which takes ``input_ids`` and
``loss_mask`` through as they are and drops the other columns. They are kept for whoever looks at the file, under the
names that the trainer's own producer uses, and with one type each: its loader infers types from the first 10 MB.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from pipeline.export.examples import Example
from pipeline.export.shards import Row
from pipeline.export.staging import Staging

TRAIN = "train.jsonl"

_JSON_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def write(examples: Iterable[Example], stage: Staging) -> None:
    """Writes the file, and nothing beside it: given a folder, the reader takes every JSON file in it for data."""
    file = stage.open(TRAIN)
    for example in examples:
        file.write_line(orjson.dumps(_record(example), option=_JSON_LINE))


def advice(folder: Path, longest: int) -> tuple[str, ...]:
    """How ``speculators prepare-data`` takes the file, and ``speculators train`` what comes of it."""
    data = shlex.quote(str(folder / TRAIN))
    return (
        f"speculators prepare-data --model TARGET --data {data} --output PREPARED --seq-length {longest}",
        f"  --seq-length below {longest:,} (its default is 8192) cuts rows; --render-endpoint is not needed",
        "speculators train --verifier-name-or-path TARGET --data-path PREPARED --speculator-type eagle3 "
        f"--total-seq-len {longest}",
    )


def _record(example: Example) -> dict[str, Any]:
    """``primary_id`` is the conversation the row comes from; ``text`` is the answer alone, special tokens kept."""
    row = example.row
    return {
        "id": row.id,
        "primary_id": row.source_id,
        "input_ids": example.input_ids,
        "loss_mask": example.loss_mask,
        "text": row.text or "",
        "metadata": _metadata(row, prompt_tokens=len(example.input_ids) - row.completion_tokens),
    }


def _metadata(row: Row, prompt_tokens: int) -> dict[str, Any]:
    return {
        "dataset": row.dataset,
        "turn": row.turn,
        "sample": row.sample,
        "finish_reason": row.finish_reason,
        "is_tool_call": bool(row.messages and row.messages[-1].tool_calls),
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": row.completion_tokens},
        "endpoint": row.engine or "",
        "sampling_params": row.sampling or "",
    }
