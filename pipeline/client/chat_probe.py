"""What an OpenAI-compatible server can give, found out by asking it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, NoReturn

import openai

from pipeline.client.answers import Expectation, check_answer
from pipeline.client.chat_reply import LOWEST, first_entries, parse, to_answer
from pipeline.client.chat_server import ChatServer, Dialect, words_of
from pipeline.client.endpoint import Request
from pipeline.client.faults import RequestFault, bad_answer
from pipeline.client.generate import fault_of_status
from pipeline.client.retry import attempts
from pipeline.config import Config, SamplingConfig
from pipeline.errors import InputError
from pipeline.records import Answer, Message, Prompt

Semantics = Literal["raw", "scaled", "none"]

COLUMNS = (
    "prompt_ids",
    "output_ids",
    "output_logprobs",
    "topk_ids",
    "topk_logprobs",
    "tail_logprob",
    "cached_device_tokens",
    "cached_host_tokens",
    "retractions",
    "queue_s",
    "weight_version",
)
"""Columns of a shard, and fields of an Answer, that a server may or may not give; every server gives the others."""

ARRAYS = COLUMNS[:6]
LOGPROB_COLUMNS = frozenset(COLUMNS[2:6])

MAX_ENTRIES = 20
"""OpenAI's limit on ``top_logprobs``, and vLLM's default."""

PROBE_TIMEOUT_S = 120.0
_PROBE_TOKENS = 16
_SPREAD_ENTRIES = 10
_PROBE = Prompt(
    id="probe",
    dataset="",
    source_id="",
    turn=0,
    sample=0,
    # Longer than a block of a prefix cache, so that the second request shows whether cached tokens are reported.
    messages=(
        Message(
            "user",
            "This is a short check of what this server can report about an answer, sent once before a longer run and "
            "then a second time. Nothing depends on what you say. Please reply with one short word, and then stop.",
        ),
    ),
)

_REFUSED = (openai.BadRequestError, openai.UnprocessableEntityError)


@dataclass(frozen=True, slots=True)
class ChatAbilities:
    """What a server gives, and how it is to be asked for it.

    ``gives``: those of :data:`COLUMNS` that it gives. ``top_entries``: entries per position that are certainly the
    most likely ones, at most as many as the run keeps. ``logprobs``: whether log-probabilities are the model's own,
    those after the temperature, or not to be had; what fits neither meaning counts as not to be had.
    """

    dialect: Dialect
    gives: frozenset[str]
    top_entries: int
    logprobs: Semantics

    @property
    def missing(self) -> tuple[str, ...]:
        """The columns that are null in every row that this server answers."""
        return tuple(column for column in COLUMNS if column not in self.gives)


async def probe(server: ChatServer, config: Config) -> ChatAbilities:
    """Asks the server for everything, then for less until it accepts; what comes back is what it can give.

    A second request at another temperature shows what its log-probabilities mean.

    Raises:
        InputError: naming the key at fault: not reachable, not allowed in, another model, or no usable answer.
    """
    try:
        await _check_model(server, config)
        at_one = replace(config.sampling, temperature=1.0)
        dialect, first = await _richest_reply(server, config, at_one)
        entries = first_entries(first) if dialect.top_logprobs else []
        # Where there is nothing to compare, the run's own temperature is tried, so that a refusal shows now.
        second_temperature = 0.5 if entries else config.sampling.temperature
        second = await _ask(server, config, replace(config.sampling, temperature=second_temperature), dialect)
        return _abilities(config.capture.top_k, dialect, first, second)
    except _REFUSED as error:
        raise InputError("engine.urls", f"{server.url} refuses a plain request: {words_of(error)}") from None
    except RequestFault as fault:
        raise InputError("engine.urls", f"{server.url} gives no usable answer: {fault}") from None


def semantics(at_one: list[float], at_half: list[float]) -> Semantics:
    """What log-probabilities mean, from those of one position at the temperatures 1 and 0.5, each descending.

    As in :func:`pipeline.engine.probe.logprob_semantics`: dividing by the temperature doubles every difference. The
    last entry is left out: vLLM may put the drawn token in its place.
    """
    ones, halves = ([value for value in values[:-1] if value > LOWEST] for values in (at_one, at_half))
    count = min(len(ones), len(halves), _SPREAD_ENTRIES)
    if count < 2 or ones[0] == ones[count - 1]:
        return "none"
    ratio = (halves[0] - halves[count - 1]) / (ones[0] - ones[count - 1])
    if 0.8 < ratio < 1.25:
        return "raw"
    return "scaled" if 1.6 < ratio < 2.5 else "none"


def _abilities(top_k: int, dialect: Dialect, first: dict[str, Any], second: dict[str, Any]) -> ChatAbilities:
    at_one, at_half = first_entries(first), first_entries(second)
    meaning = semantics(at_one, at_half)
    most = max(len(at_one) - 1, 0)
    answer = _whole(to_answer(first, most))
    check_answer(answer, Expectation(None, _PROBE_TOKENS, most, None))
    # A count of cached tokens may be left out where it is 0, as it is the first time.
    gives = _given(answer) | _given(to_answer(second, 0)).difference(ARRAYS)
    if meaning == "none" or "output_logprobs" not in gives:
        gives, meaning = gives - LOGPROB_COLUMNS, "none"
    kept = min(top_k, most) if "topk_ids" in gives else 0
    spoken = replace(dialect, logprobs=meaning != "none", top_logprobs=kept + 1 if kept else 0)
    return ChatAbilities(spoken, gives, kept, meaning)


def _given(answer: Answer) -> frozenset[str]:
    return frozenset(column for column in COLUMNS if getattr(answer, column) is not None)


def without(answer: Answer, columns: Iterable[str]) -> Answer:
    """The answer with these fields null."""
    nulls: dict[str, Any] = dict.fromkeys(columns)
    return replace(answer, **nulls)


def _whole(answer: Answer) -> Answer:
    """The answer without the arrays that are not as long as the server says it is.

    Some servers leave the token that ends an answer out of the log-probabilities, and hide what a model thinks.
    """
    wanted = dict.fromkeys(ARRAYS, answer.completion_tokens) | {"prompt_ids": answer.prompt_tokens}
    found = {column: array for column in ARRAYS if (array := getattr(answer, column)) is not None}
    return without(answer, [column for column, array in found.items() if len(array) != wanted[column]])


async def _richest_reply(
    server: ChatServer, config: Config, sampling: SamplingConfig
) -> tuple[Dialect, dict[str, Any]]:
    """The first way of asking that the server does not refuse, richest first, and its reply."""
    waiting = deque(_dialects(config.capture.top_k))
    while True:
        dialect = waiting.popleft()
        try:
            return dialect, await _ask(server, config, sampling, dialect)
        except _REFUSED as error:
            if dialect.limit_field == "max_tokens" and "max_completion_tokens" in words_of(error):
                waiting = deque(replace(other, limit_field="max_completion_tokens") for other in (dialect, *waiting))
            elif not waiting:
                raise


def _dialects(top_k: int) -> Iterator[Dialect]:
    """Ways of asking, richest first: all that is wanted; fewer entries; no fields of others; no log-probabilities."""
    most = min(max(top_k, _SPREAD_ENTRIES), MAX_ENTRIES) + 1
    entries = [most, *(count for count in (MAX_ENTRIES, 5) if count < most)]
    for extras in (True, False):
        for count in entries:
            yield Dialect(extras, True, count)
    for extras in (True, False):
        yield Dialect(extras, False, 0)


async def _ask(server: ChatServer, config: Config, sampling: SamplingConfig, dialect: Dialect) -> dict[str, Any]:
    """One probing request; a server that is busy is asked again, as it would be for a prompt."""
    request = Request(_PROBE, None, _PROBE_TOKENS, None)
    async for attempt in attempts(config.client):
        with attempt:
            try:
                return parse(await server.ask(request, sampling, dialect, _timeout_s(config)))
            except openai.NotFoundError as error:
                await _not_found(server, config, words_of(error))
            except _REFUSED:
                raise
            except (openai.APIError, TimeoutError) as error:
                raise _problem(error, server, config) from None
    raise AssertionError("the attempts end in an answer or an error")


def _problem(error: openai.APIError | TimeoutError, server: ChatServer, config: Config) -> InputError | RequestFault:
    """What a failed probing request means: a key that is wrong, or a fault that may pass."""
    if isinstance(error, TimeoutError | openai.APITimeoutError):
        return InputError("engine.urls", f"{server.url} does not answer within {_timeout_s(config):g} s")
    if isinstance(error, openai.APIConnectionError):
        reason = error.__cause__ or error
        return InputError("engine.urls", f"{server.url} does not answer: {type(reason).__name__}: {reason}")
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        variable = config.engine.api_key_env
        return InputError("engine.api_key_env", f"{server.url} refuses the key in {variable}: {words_of(error)}")
    if isinstance(error, openai.APIStatusError):
        return fault_of_status(error.status_code, words_of(error), server.url)
    return bad_answer(str(error))


def _timeout_s(config: Config) -> float:
    return min(config.client.timeout_s, PROBE_TIMEOUT_S)


async def _check_model(server: ChatServer, config: Config) -> None:
    """Refuses a server that lists its models and ours not among them: SGLang answers under any name.

    The same model may lie under another folder on the server's machine, so the last part of a path is enough.
    """
    if not config.engine.check_model:
        return
    listed = await server.models(_timeout_s(config))
    if listed and PurePath(server.model).name not in {PurePath(name).name for name in listed}:
        _wrong_model(server, listed, "it lists others; engine.check_model=false asks it all the same")


async def _not_found(server: ChatServer, config: Config, words: str) -> NoReturn:
    listed = await server.models(_timeout_s(config))
    if listed:
        _wrong_model(server, listed, words)
    raise InputError("engine.urls", f"{server.url} has no chat completions, or no {server.model!r}: {words}")


def _wrong_model(server: ChatServer, listed: list[str], words: str) -> NoReturn:
    shown = ", ".join(listed[:10]) + (", ..." if len(listed) > 10 else "")
    raise InputError("model.served_name", f"{server.url} does not serve {server.model!r}: {words}", shown)
