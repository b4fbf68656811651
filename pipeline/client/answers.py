"""From the bytes of a SGLang ``/generate`` reply to a checked :class:`~pipeline.records.Answer`.

No Python object is made per distribution entry: base64 goes straight to numpy. The nested layout, which the engine
falls back to for ragged rows and older engines always send, is read as well. Nothing is repaired: an answer that
breaks an invariant is refused with the reason.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.client.faults import RequestFault, bad_answer
from pipeline.records import Answer, Ids, Logprobs

MINUS_INFINITY = -1e30
"""Engines write log-probabilities at or below this for minus infinity."""

SUM_TOLERANCE = 1e-3
"""How far above 1 the kept probabilities may sum: float32 log-softmax over a large vocabulary is this exact."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an answer must agree with: the request it answers. ``vocab_size`` None leaves the ids unbounded;
    ``prompt_tokens`` is None where the server made the prompt's ids itself."""

    prompt_tokens: int | None
    max_new_tokens: int
    top_k: int
    vocab_size: int | None


def decode_answer(body: bytes, expected: Expectation) -> Answer:
    """Reads and checks a reply.

    Raises:
        RequestFault: the engine gave the request up, or the reply breaks an invariant; the detail names it.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_answer(f"the reply is no JSON ({error}): {body[:80]!r}") from None
    try:
        meta = reply["meta_info"]
        finish_reason = _finish_reason(meta)
        output_ids = np.asarray(reply["output_ids"], dtype=np.int32)
        logprobs = sampled_logprobs(meta["output_token_logprobs"], output_ids)
        topk_ids, topk_logprobs = top_k_entries(meta, expected.top_k)
        answer = Answer(
            output_ids=output_ids,
            output_logprobs=logprobs,
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            tail_logprob=None if topk_logprobs is None else tail_logprob(topk_logprobs),
            finish_reason=finish_reason,
            prompt_tokens=int(meta["prompt_tokens"]),
            completion_tokens=int(meta["completion_tokens"]),
            cached_device_tokens=cached_tokens(meta, "device"),
            cached_host_tokens=cached_tokens(meta, "host"),
            retractions=meta.get("num_retractions"),
            queue_s=meta.get("queue_time"),
            weight_version=_text(meta.get("weight_version")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, binascii.Error) as error:
        raise bad_answer(f"the reply has not the expected form: {type(error).__name__}: {error}") from None
    check_answer(answer, expected)
    return answer


def check_answer(answer: Answer, expected: Expectation) -> None:
    """Refuses an answer whose parts disagree with each other or with the request.

    Raises:
        RequestFault: naming the invariant that does not hold.
    """
    ids, logprobs = answer.output_ids, answer.output_logprobs
    count = answer.completion_tokens
    _require(count > 0, "the answer is empty")
    _require(count <= expected.max_new_tokens, f"{count} tokens came, {expected.max_new_tokens} were allowed")
    if expected.prompt_tokens is not None:
        _require(
            answer.prompt_tokens == expected.prompt_tokens,
            f"the engine read {answer.prompt_tokens} prompt tokens, {expected.prompt_tokens} were sent",
        )
    if answer.prompt_ids is not None:
        _require(
            len(answer.prompt_ids) == answer.prompt_tokens,
            f"{len(answer.prompt_ids)} prompt ids for {answer.prompt_tokens} prompt tokens",
        )
    if ids is not None:
        _require(len(ids) == count, f"{len(ids)} output ids for {count} completion tokens")
        _check_ids("output ids", ids, expected.vocab_size)
    if logprobs is not None:
        _require(len(logprobs) == count, f"{len(logprobs)} log-probabilities for {count} completion tokens")
        _require(bool(np.isfinite(logprobs).all()), "a sampled token's log-probability is not finite")
        _require(bool((logprobs <= SUM_TOLERANCE).all()), "a sampled token's log-probability is above 0")
    if answer.topk_logprobs is not None and answer.topk_ids is not None:
        _check_top_k(answer.topk_ids, answer.topk_logprobs, count, expected)


def tail_logprob(topk_logprobs: Logprobs) -> Logprobs:
    """Log of the probability outside the top k, float32 [n]: log(1 - sum(exp(topk))), summed in float64.

    Minus infinity where the k entries hold all of the probability.
    """
    rest = 1.0 - np.exp(topk_logprobs.astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore"):
        tail: Logprobs = np.log(np.maximum(rest, 0.0)).astype(np.float32)
    return tail


def _finish_reason(meta: dict[str, Any]) -> Literal["stop", "length"]:
    reason = meta["finish_reason"]
    kind = reason["type"]
    if kind == "abort":
        raise RequestFault("aborted", f"the engine aborted the request: {reason.get('message')}")
    if kind not in ("stop", "length"):
        raise bad_answer(f"unknown finish reason {kind!r}")
    return cast(Literal["stop", "length"], kind)


def sampled_logprobs(entries: list[list[Any]], output_ids: Ids) -> Logprobs:
    """Log p of each output id, float32 [n], from ``output_token_logprobs``: [log p, id, ...] per token.

    Raises:
        RequestFault: they are those of other ids.
    """
    values = np.array([entry[0] for entry in entries], dtype=np.float32)
    ids = np.array([entry[1] for entry in entries], dtype=np.int32)
    _require(
        len(ids) == len(output_ids) and bool((ids == output_ids).all()),
        f"the log-probabilities ({len(ids)}) are not those of the output ids ({len(output_ids)})",
    )
    return values


def top_k_entries(meta: dict[str, Any], k: int) -> tuple[Ids | None, Logprobs | None]:
    """The k entries per position that a ``meta_info`` holds, in either layout: ids int32 [n, k], log p float32 [n, k].

    Raises:
        RequestFault: positions without k entries, or entries of another type.
    """
    if k == 0:
        return None, None
    if "output_top_logprobs_val_flat_b64" in meta:
        return _flat_top_k(meta)
    return _nested_top_k(meta["output_top_logprobs"], k)


def _flat_top_k(meta: dict[str, Any]) -> tuple[Ids, Logprobs]:
    rows, k = meta["output_top_logprobs_shape"]
    _require(meta.get("output_top_logprobs_null_prefix", 0) == 0, "the first positions have no distribution")
    for field, dtype in (("val", "float32"), ("idx", "int32")):
        found = meta[f"output_top_logprobs_{field}_flat_b64_dtype"]
        _require(found == dtype, f"{field} entries came as {found}, not {dtype}")
    values = np.frombuffer(binascii.a2b_base64(meta["output_top_logprobs_val_flat_b64"]), "<f4")
    ids = np.frombuffer(binascii.a2b_base64(meta["output_top_logprobs_idx_flat_b64"]), "<i4")
    return ids.reshape(rows, k), _with_infinities(values.reshape(rows, k))


def _nested_top_k(rows: list[list[list[Any]] | None], k: int) -> tuple[Ids, Logprobs]:
    widths = {0 if row is None else len(row) for row in rows}
    _require(widths <= {k}, f"positions with {sorted(widths)} entries where {k} were asked for")
    # JSON has no infinity, so the engine writes null for the log-probability of an impossible token.
    values = np.array([[MINUS_INFINITY if entry[0] is None else entry[0] for entry in row or ()] for row in rows])
    ids = np.array([[entry[1] for entry in row or ()] for row in rows])
    shape = (len(rows), k)
    return ids.astype(np.int32).reshape(shape), _with_infinities(values.astype(np.float32).reshape(shape))


def _with_infinities(values: npt.NDArray[np.float32]) -> Logprobs:
    low = values <= MINUS_INFINITY
    return np.where(low, np.float32(-np.inf), values) if low.any() else values


def _check_top_k(ids: Ids, values: Logprobs, count: int, expected: Expectation) -> None:
    shape = (count, expected.top_k)
    _require(ids.shape == shape and values.shape == shape, f"distributions of shape {values.shape}, expected {shape}")
    _require(not bool(np.isnan(values).any()), "a distribution holds NaN")
    _require(bool((values[:, 1:] <= values[:, :-1]).all()), "a distribution is not in descending order")
    sums = np.exp(values.astype(np.float64)).sum(axis=1)
    _require(bool((sums <= 1.0 + SUM_TOLERANCE).all()), f"a distribution sums to {sums.max():.6f}")
    _check_ids("distribution ids", ids, expected.vocab_size)


def _check_ids(what: str, ids: Ids, vocab_size: int | None) -> None:
    _require(int(ids.min()) >= 0, f"{what} hold {int(ids.min())}")
    if vocab_size is not None:
        _require(int(ids.max()) < vocab_size, f"{what} hold {int(ids.max())}, the vocabulary has {vocab_size}")


def cached_tokens(meta: dict[str, Any], tier: str) -> int | None:
    """Prompt tokens from one tier. Without a breakdown, all cached tokens are the device's: there is no other tier."""
    details = meta.get("cached_tokens_details")
    if details is not None:
        return int(details.get(tier) or 0)
    cached = meta.get("cached_tokens")
    if cached is None:
        return None
    return int(cached) if tier == "device" else 0


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise bad_answer(otherwise)
