"""From the body of a chat completion to an :class:`~pipeline.records.Answer`.

Token ids come from the server as ids or not at all: text is never tokenised again, because the same text may be
another sequence of tokens than the one that was drawn. Servers say ids in three ways:

- SGLang: ``choices[0].prompt_token_ids``, ``.response_token_ids``, and ``.meta_info`` as in its native reply;
- vLLM: ``prompt_token_ids``, ``choices[0].token_ids``;
- vLLM: the tokens of the log-probabilities as the text ``token_id:N``.

An older SGLang that knows ``return_meta_info`` only still has the ids of the answer in it.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.client.answers import cached_tokens, sampled_logprobs, tail_logprob, top_k_entries
from pipeline.client.faults import RequestFault, bad_answer
from pipeline.records import Answer, Ids, Logprobs, Message

LOWEST = -9999.0
"""What the interface writes for log-probabilities at or below it, minus infinity among them."""

_TOKEN_ID = "token_id:"


def parse(body: bytes) -> dict[str, Any]:
    """The reply as plain values.

    Raises:
        RequestFault: it is no chat completion.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_answer(f"the reply is no JSON ({error}): {body[:80]!r}") from None
    if not isinstance(reply, dict) or not reply.get("choices"):
        raise bad_answer(f"the reply is no chat completion: {body[:200]!r}")
    return reply


def to_answer(reply: dict[str, Any], k: int) -> Answer:
    """What a reply holds; None for what it does not. ``k`` entries are kept where ``k + 1`` were asked for.

    One more, because vLLM puts the drawn token first among the entries, and where it is none of the most likely,
    the least likely of those is pushed out. All but the last of the sorted entries are the top k on any server.

    Raises:
        RequestFault: the answer was given up or withheld, or the reply has another form.
    """
    with _expected_form():
        choice, usage = reply["choices"][0], reply["usage"]
        finish_reason = _finish_reason(choice.get("finish_reason"))
        meta = choice.get("meta_info") or {}
        message = _message(choice["message"])
        output_ids = _output_ids(choice)
        topk_ids, topk_logprobs = _top_k(choice, output_ids, k)
        return Answer(
            output_ids=output_ids,
            output_logprobs=_logprobs(choice, output_ids),
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            tail_logprob=None if topk_logprobs is None else tail_logprob(topk_logprobs),
            finish_reason=finish_reason,
            prompt_tokens=int(usage["prompt_tokens"]),
            completion_tokens=int(usage["completion_tokens"]),
            prompt_ids=_ids(choice.get("prompt_token_ids") or reply.get("prompt_token_ids")),
            text=message.content or "",
            message=message,
            cached_device_tokens=cached_tokens(meta, "device") if meta else _cached_in(usage),
            cached_host_tokens=cached_tokens(meta, "host"),
            retractions=meta.get("num_retractions"),
            queue_s=meta.get("queue_time"),
            weight_version=_text(meta.get("weight_version")),
        )


def first_entries(reply: dict[str, Any]) -> list[float]:
    """The log-probabilities that the first position came with, descending; with or without ids.

    Raises:
        RequestFault: the reply has another form.
    """
    with _expected_form():
        return sorted(_first_entries(reply["choices"][0]), reverse=True)


def _first_entries(choice: dict[str, Any]) -> list[float]:
    meta = choice.get("meta_info") or {}
    if "output_top_logprobs_val_flat_b64" in meta:
        _, values = top_k_entries(meta, int(meta["output_top_logprobs_shape"][1]))
        return [] if values is None else [float(value) for value in values[0]]
    if meta.get("output_top_logprobs"):
        return [entry[0] for entry in meta["output_top_logprobs"][0] if entry[0] is not None]
    content = _content(choice)
    return [entry["logprob"] for entry in content[0].get("top_logprobs") or ()] if content else []


def _finish_reason(reason: str | None) -> Literal["stop", "length"]:
    if reason in ("stop", "tool_calls", "function_call"):
        return "stop"
    if reason == "length":
        return "length"
    if reason == "abort":
        raise RequestFault("aborted", "the server aborted the request")
    raise bad_answer(f"the server ended the answer with finish_reason {reason!r}")


def _message(found: dict[str, Any]) -> Message:
    calls = found.get("tool_calls")
    return Message(
        role="assistant",
        content=_text(found.get("content")),
        reasoning_content=_text(found.get("reasoning_content") or found.get("reasoning")),
        tool_calls=orjson.dumps(calls).decode() if calls else None,
    )


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text came as {type(value).__name__}")
    return value


def _content(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """``logprobs.content``: one entry per generated token; empty where the server gives none."""
    return (choice.get("logprobs") or {}).get("content") or []


def _output_ids(choice: dict[str, Any]) -> Ids | None:
    """Ids of the answer, int32 [n]. Where a server says them twice, both must agree."""
    meta_ids = [entry[1] for entry in (choice.get("meta_info") or {}).get("output_token_logprobs") or ()]
    given = _ids(choice.get("response_token_ids") or choice.get("token_ids") or meta_ids)
    named = _named_ids([entry["token"] for entry in _content(choice)])
    if given is not None and named is not None and not np.array_equal(given, named):
        raise bad_answer(f"the log-probabilities ({len(named)}) are not those of the output ids ({len(given)})")
    return named if given is None else given


def _ids(values: list[int] | None) -> Ids | None:
    return np.asarray(values, dtype=np.int32) if values else None


def _named_ids(tokens: list[str]) -> Ids | None:
    """The ids in tokens written as ``token_id:N``; None where any is written otherwise, or there is none."""
    if not tokens or not all(token.startswith(_TOKEN_ID) for token in tokens):
        return None
    return np.array([int(token[len(_TOKEN_ID) :]) for token in tokens], dtype=np.int32)


def _logprobs(choice: dict[str, Any], output_ids: Ids | None) -> Logprobs | None:
    """Log p of each generated token, float32 [n]."""
    entries = (choice.get("meta_info") or {}).get("output_token_logprobs")
    if entries and output_ids is not None:
        return sampled_logprobs(entries, output_ids)
    content = _content(choice)
    return _floored(np.array([entry["logprob"] for entry in content], dtype=np.float32)) if content else None


def _top_k(choice: dict[str, Any], output_ids: Ids | None, k: int) -> tuple[Ids | None, Logprobs | None]:
    """The k most likely tokens of each position, ids int32 [n, k] and log p float32 [n, k], or None and None."""
    if k == 0 or output_ids is None:
        return None, None
    meta = choice.get("meta_info") or {}
    if "output_top_logprobs_val_flat_b64" in meta or meta.get("output_top_logprobs"):
        ids, values = top_k_entries(meta, k + 1)
        return (None, None) if ids is None or values is None else (ids[:, :k], values[:, :k])
    return _named_top_k([entry.get("top_logprobs") or [] for entry in _content(choice)], k)


def _named_top_k(rows: list[list[dict[str, Any]]], k: int) -> tuple[Ids | None, Logprobs | None]:
    ids = _named_ids([entry["token"] for row in rows for entry in row])
    if ids is None:  # written as text: without ids the entries mean nothing
        return None, None
    widths = {len(row) for row in rows}
    if widths != {k + 1}:
        raise bad_answer(f"positions with {sorted(widths)} entries where {k + 1} were asked for")
    values = np.array([entry["logprob"] for row in rows for entry in row], dtype=np.float32).reshape(len(rows), k + 1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    kept = np.take_along_axis(ids.reshape(values.shape), order, axis=1)
    return kept, _floored(np.take_along_axis(values, order, axis=1))


def _floored(values: npt.NDArray[np.float32]) -> Logprobs:
    return np.where(values <= LOWEST, np.float32(-np.inf), values)


def _cached_in(usage: dict[str, Any]) -> int | None:
    """Cached prompt tokens; OpenAI's interface knows one tier."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return None if cached is None else int(cached)


@contextmanager
def _expected_form() -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, binascii.Error) as error:
        raise bad_answer(f"the reply has not the expected form: {type(error).__name__}: {error}") from None
