"""Completions and run folders made up for the tests of the store.

The numbers of a completion agree with each other as an engine's would: the top-k entries descend, the tail holds the
rest of the probability, and a sampled token among the entries has the log-probability of its entry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from pipeline.config import Config, DatasetConfig, StoreConfig, content_settings, fingerprint
from pipeline.prompts import read_prompts
from pipeline.records import Answer, Completion, Failure, Message, Outcome, Prompt, Segment
from pipeline.store import Capture, Manifest, RunFolder, open_run
from pipeline.store.journal import read_records
from pipeline.store.rows import encode_segment, record_kind, unpack_scalars

VOCAB = 40
ARRAY_COLUMNS = ("prompt_ids", "output_ids", "output_logprobs", "topk_ids", "topk_logprobs", "tail_logprob")
DISTRIBUTION = ("topk_ids", "topk_logprobs", "tail_logprob")

# Every character that some notion of "line" ends at, a NUL, quotes, and scripts beyond ASCII.
UNICODE = 'naïve 漢字 🦜\u2028\u2029\x85\x0b\x0c\x1c\r\n\ttab "quoted" \\ \x00 end'
TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]'
CALLS = '[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]'

# The table "Shard schema, version 1" of the design contract, written out once more.
STRING, INT, FLOAT = pa.string(), pa.int32(), pa.float32()
MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
CONTRACT = pa.schema(
    [
        ("id", STRING),
        ("dataset", STRING),
        ("source_id", STRING),
        ("turn", INT),
        ("sample", INT),
        ("messages", pa.list_(pa.struct([(name, STRING) for name in MESSAGE_FIELDS]))),
        ("tools", STRING),
        ("prompt_ids", pa.list_(INT)),
        ("output_ids", pa.list_(INT)),
        ("output_logprobs", pa.list_(FLOAT)),
        ("topk_ids", pa.list_(pa.list_(INT))),
        ("topk_logprobs", pa.list_(pa.list_(FLOAT))),
        ("tail_logprob", pa.list_(FLOAT)),
        ("text", STRING),
        ("finish_reason", STRING),
        ("prompt_tokens", INT),
        ("completion_tokens", INT),
        ("cached_device_tokens", INT),
        ("cached_host_tokens", INT),
        ("retractions", INT),
        ("segments", INT),
        ("attempts", INT),
        ("latency_s", FLOAT),
        ("queue_s", FLOAT),
        ("engine", STRING),
        ("weight_version", STRING),
        ("sampling", STRING),
        ("created_at", pa.timestamp("us", tz="UTC")),
    ]
)


# ---- prompts and their outcomes


def prompt(name: str = "0", **more: Any) -> Prompt:
    made = Prompt(f"B1/{name}/t0/s0", "B1", name, 0, 0, (Message("user", f"question {name}"),))
    return replace(made, **more)


def failure(name: str | Prompt = "0", detail: str = "no answer") -> Failure:
    asked = prompt(name) if isinstance(name, str) else name
    return Failure(asked.id, asked.dataset, asked.source_id, "timeout", detail, 5)


def answer(tokens: int = 3, k: int = 4, seed: int = 0, missing: Sequence[str] = (), **more: Any) -> Answer:
    """An answer of ``tokens`` tokens with ``k`` entries a position; ``missing`` arrays are None.

    Now and then fewer than k tokens are possible at all, and the entries of the others are minus infinity.
    """
    draw = np.random.default_rng(seed)
    logits = draw.normal(scale=3.0, size=(tokens, VOCAB))
    for position in range(tokens):
        if draw.random() < 0.3:
            possible = draw.choice(VOCAB, size=int(draw.integers(1, max(k, 1) + 1)), replace=False)
            logits[position, np.setdiff1d(np.arange(VOCAB), possible)] = -np.inf
    logprobs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    order = np.argsort(-logprobs, axis=1, kind="stable").astype(np.int32)
    sampled = [draw.choice(np.flatnonzero(np.isfinite(row))) for row in logprobs]
    with np.errstate(divide="ignore"):
        tail = np.log(np.exp(np.take_along_axis(logprobs, order[:, k:], axis=1).astype(np.float64)).sum(axis=1))
    arrays: dict[str, Any] = {
        "output_ids": np.array(sampled, dtype=np.int32),
        "output_logprobs": logprobs[np.arange(tokens), sampled],
        # Views with gaps between their rows, as a reply cut to k entries gives them.
        "topk_ids": order[:, :k],
        "topk_logprobs": np.take_along_axis(logprobs, order, axis=1)[:, :k],
        "tail_logprob": tail.astype(np.float32),
    }
    unwanted = {*missing, *(DISTRIBUTION if k == 0 else ())}
    made = Answer(
        **{name: None if name in unwanted else array for name, array in arrays.items()},
        finish_reason="stop",
        prompt_tokens=5,
        completion_tokens=tokens,
        cached_device_tokens=2,
        cached_host_tokens=1,
        retractions=0,
        queue_s=0.25,
        weight_version="default",
    )
    return replace(made, **more)


def completion(
    name: str | Prompt = "0", tokens: int = 3, k: int = 4, seed: int = 0, missing: Sequence[str] = (), **more: Any
) -> Completion:
    asked = prompt(name) if isinstance(name, str) else name
    answered = answer(tokens, k, seed, missing)
    made = Completion(
        prompt=asked,
        prompt_ids=None if "prompt_ids" in missing else np.arange(answered.prompt_tokens, dtype=np.int32),
        answer=answered,
        text=f"answer to {asked.id}<|im_end|>",
        reply=Message("assistant", f"answer to {asked.id}"),
        segments=1,
        attempts=1,
        latency_s=0.1,
        engine="engine-0",
        sampling='{"temperature":1.0}',
        created_us=1_800_000_000_000_000 + seed,
    )
    return replace(made, **more)


def segment(seed: int = 0, tokens: int = 2, k: int = 4, missing: Sequence[str] = ()) -> Segment:
    """A piece of an answer, which ended because as many tokens as were asked for had come."""
    return Segment(answer(tokens, k, seed, missing, finish_reason="length"), 1 + seed % 3, 0.5, "engine-0")


def segment_bytes(segments: Sequence[Segment]) -> list[bytes]:
    """Segments in a form that can be compared."""
    return [encode_segment("", 0, one) for one in segments]


texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.just(UNICODE)
_maybe_text = st.none() | texts
_maybe_count = st.none() | st.integers(0, 2**31 - 1)
_seconds = st.floats(0, 1e6)
messages = st.builds(Message, texts, _maybe_text, _maybe_text, st.none() | st.just(CALLS), _maybe_text, _maybe_text)
missing_columns = st.sampled_from(
    [(), ARRAY_COLUMNS, DISTRIBUTION, ("prompt_ids",), ("output_logprobs", *DISTRIBUTION)]
)


@st.composite
def completions(draw: st.DrawFn, name: str | None = None, k: int | None = None) -> Completion:
    """Completions of every form that the client lets through."""
    asked = prompt(
        draw(texts) if name is None else name,
        dataset=draw(texts),
        source_id=draw(texts),
        turn=draw(st.integers(0, 2**31 - 1)),
        sample=draw(st.integers(0, 9)),
        messages=tuple(draw(st.lists(messages, min_size=1, max_size=3))),
        tools=draw(st.sampled_from([None, TOOLS, "[]"])),
    )
    made = completion(
        asked,
        tokens=draw(st.integers(1, 6)),
        k=draw(st.integers(0, 5)) if k is None else k,
        seed=draw(st.integers(0, 2**32 - 1)),
        missing=draw(missing_columns),
        text=draw(texts),
        reply=draw(messages),
        segments=draw(st.integers(1, 9)),
        attempts=draw(st.integers(1, 9)),
        latency_s=draw(_seconds),
        engine=draw(texts),
        sampling=draw(texts),
        created_us=draw(st.integers(0, 4_000_000_000_000_000)),
    )
    given = replace(
        made.answer,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        cached_device_tokens=draw(_maybe_count),
        cached_host_tokens=draw(_maybe_count),
        retractions=draw(_maybe_count),
        queue_s=draw(st.none() | _seconds),
        weight_version=draw(_maybe_text),
    )
    return replace(made, answer=given)


def row_of(made: Completion) -> dict[str, Any]:
    """The row that a completion must become, as plain values, column by column."""
    asked, given = made.prompt, made.answer

    def listed(array: Any) -> Any:
        return None if array is None else array.tolist()

    def rounded(value: float | None) -> float | None:
        return None if value is None else float(np.float32(value))

    return {
        "id": asked.id,
        "dataset": asked.dataset,
        "source_id": asked.source_id,
        "turn": asked.turn,
        "sample": asked.sample,
        "messages": [
            {name: getattr(message, name) for name in MESSAGE_FIELDS} for message in (*asked.messages, made.reply)
        ],
        "tools": asked.tools,
        "prompt_ids": listed(made.prompt_ids),
        "output_ids": listed(given.output_ids),
        "output_logprobs": listed(given.output_logprobs),
        "topk_ids": listed(given.topk_ids),
        "topk_logprobs": listed(given.topk_logprobs),
        "tail_logprob": listed(given.tail_logprob),
        "text": made.text,
        "finish_reason": given.finish_reason,
        "prompt_tokens": given.prompt_tokens,
        "completion_tokens": given.completion_tokens,
        "cached_device_tokens": given.cached_device_tokens,
        "cached_host_tokens": given.cached_host_tokens,
        "retractions": given.retractions,
        "segments": made.segments,
        "attempts": made.attempts,
        "latency_s": rounded(made.latency_s),
        "queue_s": rounded(given.queue_s),
        "engine": made.engine,
        "weight_version": given.weight_version,
        "sampling": made.sampling,
        "created_at": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=made.created_us),
    }


# ---- run folders


K = 4


def write_dataset(path: Path, rows: int) -> DatasetConfig:
    """A local dataset of ``rows`` prompts."""
    lines = [
        json.dumps({"id": f"r{n}", "messages": [{"role": "user", "content": f"What is {n}?"}]}) for n in range(rows)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return DatasetConfig(name="made", path=str(path), split="train", source="hub")


def prompts_of(dataset: DatasetConfig) -> list[Prompt]:
    found = list(read_prompts(dataset))
    assert all(isinstance(one, Prompt) for one in found)
    return found


def outcome_of(asked: Prompt) -> Outcome:
    """The same outcome whenever it is asked for: one prompt in four fails."""
    number = int(asked.source_id.removeprefix("r"))
    return failure(asked) if number % 4 == 2 else completion(asked, tokens=1 + number % 3, k=K, seed=number)


def segments_of(asked: Prompt) -> list[Segment]:
    """The same segments of an answer whenever they are asked for."""
    return [segment(seed, k=K) for seed in range(3)]


def config_of(dataset: DatasetConfig | None = None, **sampling: Any) -> Config:
    made = Config()
    made.dataset = dataset or DatasetConfig(name="elsewhere", path="nobody/nothing")
    made.model.name, made.model.path = "tiny", "nobody/tiny"
    made.capture.top_k = K
    for key, value in sampling.items():
        setattr(made.sampling, key, value)
    return made


def open_folder(
    path: Path,
    config: Config | None = None,
    rows_per_shard: int = 3,
    extend: bool = False,
    tokenizer: str = "t0",
    retry_failed: bool = False,
) -> RunFolder:
    config = config or config_of()
    fresh = Manifest(fingerprint(config), content_settings(config), config.model.path, tokenizer, "")
    settings = StoreConfig(rows_per_shard=rows_per_shard)
    folder = open_run(path, settings, fresh, "made: up\n", extend, retry_failed)
    try:
        folder.set_capture(Capture(K, "raw"))
    except BaseException:
        folder.close()
        raise
    return folder


def abandon(folder: RunFolder) -> None:
    """What the end of its process does to an open folder: descriptors are closed, nothing else happens."""
    folder._folder_lock.release()
    for file in (folder._failure_log, folder._writer):
        if file is not None:
            os.close(file._fd)


@dataclass(slots=True)
class Contents:
    """A folder read without the store's own reckoning: ids by where they lie, and the segments of unfinished answers
    as pairs of id and number."""

    shards: list[str] = field(default_factory=list)
    journals: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    segments: set[tuple[str, int]] = field(default_factory=set)

    @property
    def all(self) -> list[str]:
        return [*self.shards, *self.journals, *self.failures]


def contents(path: Path) -> Contents:
    """What counts in a folder: listed shards, journals without a listed shard, whole lines of failures."""
    found = Contents()
    listed = [entry["name"] for entry in orjson.loads((path / "manifest.json").read_bytes())["shards"]]
    for name in listed:
        found.shards += pq.read_table(path / "shards" / name)["id"].to_pylist()
    for journal in sorted((path / "journal").glob("*.journal")):
        if f"{journal.stem}.parquet" not in listed:
            for _, payload in read_records(journal):
                scalars = unpack_scalars(payload)
                if record_kind(payload) == b"C":
                    found.journals.append(scalars["id"])
                else:
                    found.segments.add((scalars["id"], scalars["number"]))
    failures = path / "failures.jsonl"
    for line in failures.read_bytes().splitlines(keepends=True) if failures.exists() else []:
        if line.endswith(b"\n"):
            found.failures.append(json.loads(line)["id"])
    found.segments = {(asked, number) for asked, number in found.segments if asked not in found.all}
    return found


def temporary_files(path: Path) -> list[str]:
    return [str(found.relative_to(path)) for found in path.rglob("*.tmp")]
