"""The native client against an engine double: sound answers in both layouts, and every fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import numpy as np
import pytest
from doubles import (
    BREAKS_AN_INVARIANT,
    VOCAB,
    Behaviour,
    EngineDouble,
    aborts_with_200,
    answer_to,
    answers_in_the_nested_layout,
    behaves,
    drops_mid_body,
    drops_the_connection,
    fails_inside,
    finds_it_too_long,
    hangs,
    is_overloaded,
    refuses_the_request,
)

from pipeline.client.complete import Answered, Completer, seed_of
from pipeline.client.endpoint import Request
from pipeline.client.faults import RequestFault
from pipeline.client.generate import GenerateClient
from pipeline.client.segments import join
from pipeline.config import ClientConfig, SamplingConfig
from pipeline.engine.fleet import Engine, Fleet
from pipeline.engine.probe import engine_facts
from pipeline.records import Answer, Failure, Message, Prompt, Segment, TokenizedPrompt

PROMPT = Prompt("local/a/t0/s0", "local", "a", 0, 0, (Message("user", "hello"),))
IDS = np.arange(5, 12, dtype=np.int32)
SAMPLING = SamplingConfig(max_new_tokens=9)
QUICK = ClientConfig(concurrency=2, max_attempts=3, timeout_s=0.5, backoff_s=0.001, backoff_max_s=0.002)


async def keep_nothing(number: int, segment: Segment) -> None:
    raise AssertionError("a whole answer is no segment to keep")


def ask(behaviour: Behaviour, top_k: int = 5) -> Answer:
    """One request to an engine that behaves so."""

    async def scenario(engine: EngineDouble, client: GenerateClient) -> Answer:
        return await client.answer(engine.url, Request(PROMPT, IDS, SAMPLING.max_new_tokens, None))

    return with_engine(scenario, behaviour, top_k=top_k)


def with_engine(
    scenario: Callable[[EngineDouble, GenerateClient], Awaitable[Answer]], *behaviours: Behaviour, top_k: int = 5
) -> Answer:
    async def main() -> Answer:
        async with EngineDouble(*behaviours) as engine, aiohttp.ClientSession() as session:
            return await scenario(engine, GenerateClient(session, SAMPLING, top_k, QUICK.timeout_s, VOCAB))

    return asyncio.run(main())


def complete(*behaviours: Behaviour, client: ClientConfig = QUICK) -> tuple[Answered | Failure, EngineDouble]:
    """One prompt through retries."""

    async def main() -> tuple[Answered | Failure, EngineDouble]:
        async with EngineDouble(*behaviours) as double, aiohttp.ClientSession() as session:
            engine = Engine("double", double.url, await engine_facts(session, double.url), client.concurrency)
            endpoint = GenerateClient(session, SAMPLING, 5, client.timeout_s, VOCAB)
            completer = Completer(Fleet([engine]), endpoint, client, SAMPLING)
            return await completer.answer(TokenizedPrompt(PROMPT, IDS), (), keep_nothing), double

    return asyncio.run(main())


@pytest.mark.parametrize("behaviour", [behaves, answers_in_the_nested_layout])
def test_both_layouts_give_what_the_engine_sent(behaviour: Behaviour) -> None:
    answer = ask(behaviour)
    body = {"rid": "", "input_ids": IDS.tolist(), "sampling_params": {"max_new_tokens": 9}, "top_logprobs_num": 5}
    sent = answer_to(body)["meta_info"]
    assert answer.output_ids is not None
    assert answer.output_ids.tolist() == [entry[1] for entry in sent["output_token_logprobs"]]
    expected = np.array([[e[0] for e in row] for row in sent["output_top_logprobs"]], dtype=np.float32)
    np.testing.assert_array_equal(answer.topk_logprobs, expected)
    np.testing.assert_array_equal(answer.topk_ids, [[e[1] for e in row] for row in sent["output_top_logprobs"]])
    assert (answer.cached_device_tokens, answer.cached_host_tokens) == (2, 1)
    assert answer.finish_reason == "length"


def test_the_tail_is_the_probability_that_the_top_k_leave() -> None:
    answer = ask(behaves)
    assert answer.topk_logprobs is not None
    assert answer.tail_logprob is not None
    kept = np.exp(answer.topk_logprobs.astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(kept + np.exp(answer.tail_logprob.astype(np.float64)), 1.0, atol=1e-6)


def test_no_distribution_is_asked_for_or_kept_at_top_k_0() -> None:
    answer = ask(behaves, top_k=0)
    assert answer.topk_ids is None
    assert answer.topk_logprobs is None
    assert answer.tail_logprob is None
    assert answer.output_logprobs is not None


@pytest.mark.parametrize(
    ("behaviour", "words"), BREAKS_AN_INVARIANT.items(), ids=lambda value: getattr(value, "__name__", None)
)
def test_an_answer_that_breaks_an_invariant_is_refused_by_name(behaviour: Behaviour, words: str) -> None:
    with pytest.raises(RequestFault) as refused:
        ask(behaviour)
    assert refused.value.kind == "bad_answer"
    assert words in refused.value.detail
    assert not refused.value.permanent


@pytest.mark.parametrize(
    ("behaviour", "kind", "permanent"),
    [
        (is_overloaded, "unreachable", False),
        (fails_inside, "unreachable", False),
        (drops_the_connection, "unreachable", False),
        (drops_mid_body, "unreachable", False),
        (hangs, "timeout", False),
        (aborts_with_200, "aborted", False),
        (refuses_the_request, "rejected", True),
        (finds_it_too_long, "too_long", True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_has_its_kind(behaviour: Behaviour, kind: str, permanent: bool) -> None:
    with pytest.raises(RequestFault) as fault:
        ask(behaviour)
    assert (fault.value.kind, fault.value.permanent) == (kind, permanent)


TRANSIENT = [
    *(is_overloaded, fails_inside, drops_the_connection, drops_mid_body, hangs, aborts_with_200),
    *BREAKS_AN_INVARIANT,
]


@pytest.mark.parametrize("behaviour", TRANSIENT, ids=lambda behaviour: behaviour.__name__)
def test_one_bad_attempt_costs_one_attempt(behaviour: Behaviour) -> None:
    answered, engine = complete(behaviour)
    assert isinstance(answered, Answered)
    assert [segment.attempts for segment in answered.segments] == [2]
    assert len(engine.requests) == 2


@pytest.mark.parametrize("behaviour", TRANSIENT, ids=lambda behaviour: behaviour.__name__)
def test_bad_attempts_to_the_end_are_a_recorded_failure(behaviour: Behaviour) -> None:
    failure, engine = complete(*[behaviour] * 3)
    assert isinstance(failure, Failure)
    assert failure.id == PROMPT.id
    assert failure.attempts == 3
    assert len(engine.requests) == 3


def test_a_permanent_fault_is_not_tried_again() -> None:
    failure, engine = complete(refuses_the_request)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.attempts) == ("rejected", 1)
    assert "top_p must be in" in failure.detail
    assert len(engine.requests) == 1


def test_a_request_that_is_given_up_is_aborted_at_the_engine() -> None:
    _, engine = complete(hangs)
    assert engine.aborted == [engine.requests[0]["rid"]]


def test_each_attempt_has_an_id_of_its_own() -> None:
    _, engine = complete(is_overloaded, is_overloaded)
    assert len({request["rid"] for request in engine.requests}) == 3


def test_a_prompt_that_no_engine_takes_is_not_sent() -> None:
    async def main() -> tuple[Answered | Failure, int]:
        async with EngineDouble() as double, aiohttp.ClientSession() as session:
            engine = Engine("double", double.url, await engine_facts(session, double.url), 1)
            completer = Completer(Fleet([engine]), GenerateClient(session, SAMPLING, 5, 5, VOCAB), QUICK, SAMPLING)
            long = TokenizedPrompt(PROMPT, np.ones(2000, dtype=np.int32))
            return await completer.answer(long, (), keep_nothing), len(double.requests)

    failure, requests = asyncio.run(main())
    assert isinstance(failure, Failure)
    assert failure.kind == "too_long"
    assert "2000 tokens" in failure.detail
    assert requests == 0


def test_an_engine_is_never_asked_more_than_its_limit_at_once() -> None:
    async def slowly(request: object, body: dict[str, object]) -> object:
        await asyncio.sleep(0.01)
        return await behaves(request, body)  # type: ignore[arg-type]

    async def main() -> int:
        async with EngineDouble(always=slowly) as double, aiohttp.ClientSession() as session:  # type: ignore[arg-type]
            engine = Engine("double", double.url, await engine_facts(session, double.url), 4)
            completer = Completer(Fleet([engine]), GenerateClient(session, SAMPLING, 5, 5, VOCAB), QUICK, SAMPLING)
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(completer.answer(TokenizedPrompt(PROMPT, IDS), (), keep_nothing))
            return double.most_in_flight

    assert asyncio.run(main()) == 4


def test_a_rows_seed_depends_on_the_runs_seed_and_the_row_alone() -> None:
    assert seed_of(None, "a") is None
    assert seed_of(7, "a") == seed_of(7, "a")
    assert len({seed_of(7, "a"), seed_of(7, "b"), seed_of(8, "a")}) == 3
    assert all(0 <= (seed_of(1, str(i)) or 0) < 2**31 for i in range(1000))


def test_an_answer_begun_is_gone_on_with_from_its_last_segment() -> None:
    sampling = SamplingConfig(max_new_tokens=9, segment_tokens=2)
    kept: list[int] = []

    async def keep(number: int, segment: Segment) -> None:
        kept.append(number)

    async def main(begun: tuple[Segment, ...]) -> tuple[Answered | Failure, list[list[int]]]:
        async with EngineDouble() as double, aiohttp.ClientSession() as session:
            engine = Engine("double", double.url, await engine_facts(session, double.url), 1)
            completer = Completer(Fleet([engine]), GenerateClient(session, sampling, 5, 5, VOCAB), QUICK, sampling)
            answered = await completer.answer(TokenizedPrompt(PROMPT, IDS), begun, keep)
            return answered, [request["input_ids"] for request in double.requests]

    whole, requests = asyncio.run(main(()))
    assert isinstance(whole, Answered)
    assert [len(ids) - len(IDS) for ids in requests] == [0, 2, 4, 6, 8]
    assert kept == [0, 1, 2, 3]
    kept.clear()
    resumed, later = asyncio.run(main(whole.segments[:3]))
    assert isinstance(resumed, Answered)
    assert later == requests[3:]
    assert kept == [3]
    np.testing.assert_array_equal(join(resumed.segments).output_ids, join(whole.segments).output_ids)
    np.testing.assert_array_equal(join(resumed.segments).topk_logprobs, join(whole.segments).topk_logprobs)
    assert join(resumed.segments).completion_tokens == 9
