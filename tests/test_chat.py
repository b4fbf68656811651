"""ChatClient against servers that are named after what they do, and against the real engine."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from pipeline.client.chat import ChatClient, open_chat
from pipeline.client.chat_probe import COLUMNS, semantics
from pipeline.client.chat_reply import parse, to_answer
from pipeline.client.complete import Answered, Completer, to_completion
from pipeline.client.endpoint import Request
from pipeline.client.faults import RequestFault
from pipeline.client.generate import GenerateClient
from pipeline.client.open import open_endpoint
from pipeline.config import Config
from pipeline.engine.fleet import Engine, Fleet
from pipeline.engine.probe import EngineFacts
from pipeline.errors import InputError
from pipeline.records import Answer, Message, Prompt, Segment, TokenizedPrompt
from pipeline.store.rows import encode_completion, to_table, unpack

LOGPROBS = ("output_logprobs", "topk_ids", "topk_logprobs", "tail_logprob")
ACCOUNTING = ("cached_device_tokens", "cached_host_tokens", "retractions", "queue_s", "weight_version")
VOCABULARY = 100


# --- doubles ------------------------------------------------------------------------------------------------------


def logits(position: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The logits of a position, the same on every double: [VOCABULARY]."""
    return np.random.default_rng(position).normal(0.0, 3.0, VOCABULARY)


def log_softmax(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return values - np.log(np.exp(values).sum())


class PlainOpenAI:
    """Ignores the fields of others and gives log-probabilities with the tokens as text. Draws the 30th most likely
    token at position 1, and the most likely elsewhere."""

    model = "target"
    length = 4
    finish_reason = "stop"
    most_entries = 20

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if refusal := self.refuses(body):
            return error(400, refusal)
        return web.json_response(self.reply(body))

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model", "created": 0,
                                                              "owned_by": "test"}]})  # fmt: skip

    def refuses(self, body: dict[str, Any]) -> str | None:
        if body.get("top_logprobs", 0) > self.most_entries:
            return f"top_logprobs must be at most {self.most_entries}"
        return None

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "message": self.message(), "finish_reason": self.finish_reason}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [self.entry(t, body) for t in range(self.length)]}
        usage = {"prompt_tokens": 7, "completion_tokens": self.length, "total_tokens": 7 + self.length}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": self.model, "choices": [choice],
                "usage": usage}  # fmt: skip

    def message(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "four words are here"}

    def drawn(self, position: int) -> int:
        order = np.argsort(-logits(position))
        return int(order[30 if position == 1 else 0])

    def values(self, position: int, body: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return log_softmax(logits(position))

    def token(self, token: int) -> str:
        return f"w{token}"

    def entry(self, position: int, body: dict[str, Any]) -> dict[str, Any]:
        values = self.values(position, body)
        top = [int(token) for token in np.argsort(-values)[: body.get("top_logprobs", 0)]]
        return self.one(self.drawn(position), values) | {
            "top_logprobs": [self.one(token, values) for token in self.order(top, self.drawn(position))]
        }

    def order(self, top: list[int], drawn: int) -> list[int]:
        return top

    def one(self, token: int, values: Any) -> dict[str, Any]:
        text = self.token(token)
        return {"token": text, "logprob": max(float(values[token]), -9999.0), "bytes": list(text.encode())}


class VllmLike(PlainOpenAI):
    """Ids in ``token_ids`` and as token_id:N; the drawn token is first among the entries, as in vLLM."""

    def token(self, token: int) -> str:
        return f"token_id:{token}"

    def order(self, top: list[int], drawn: int) -> list[int]:
        return [drawn, *(token for token in top if token != drawn)][: len(top)]

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = super().reply(body)
        if body.get("return_token_ids"):
            reply["prompt_token_ids"] = list(range(7))
            reply["choices"][0]["token_ids"] = [self.drawn(t) for t in range(self.length)]
        return reply


class SglangLike(PlainOpenAI):
    """Ids, and the distributions in the flat layout of ``meta_info``. No limit on entries."""

    most_entries = 1000

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = super().reply(body)
        if not body.get("return_meta_info"):
            return reply
        k = body.get("top_logprobs", 0)
        ids = [self.drawn(t) for t in range(self.length)]
        reply["choices"][0] |= {
            "prompt_token_ids": list(range(7)),
            "response_token_ids": ids,
            "meta_info": {
                "output_token_logprobs": [[self.values(t, body)[i], i, "w"] for t, i in enumerate(ids)],
                "cached_tokens": 3,
                "cached_tokens_details": {"device": 1, "host": 2},
                "num_retractions": 1,
                "queue_time": 0.5,
                "weight_version": "default",
                **(self.flat(k, body) if body.get("return_flat_raw_output_top_logprobs") else {}),
            },
        }
        for entry in reply["choices"][0].get("logprobs", {}).get("content", []):
            entry["top_logprobs"] = []
        return reply

    def flat(self, k: int, body: dict[str, Any]) -> dict[str, Any]:
        rows = [self.values(t, body) for t in range(self.length)]
        ids = np.array([np.argsort(-row)[:k] for row in rows], dtype="<i4")
        values = np.array([np.sort(row)[::-1][:k] for row in rows], dtype="<f4")
        return {
            "output_top_logprobs_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
            "output_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
            "output_top_logprobs_val_flat_b64_dtype": "float32",
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
            "output_top_logprobs_shape": [self.length, k],
        }


class StrictServer(PlainOpenAI):
    """Answers 400 to every field that OpenAI's interface does not have."""

    known = frozenset(
        ("model", "messages", "tools", "temperature", "top_p", "max_tokens", "seed", "logprobs", "top_logprobs")
    )

    def refuses(self, body: dict[str, Any]) -> str | None:
        unknown = sorted(body.keys() - self.known)
        return f"Extra inputs are not permitted: {unknown}" if unknown else super().refuses(body)


class NoLogprobs(PlainOpenAI):
    """Has ids but takes no notice of ``logprobs``."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = super().reply({**body, "logprobs": False})
        reply["choices"][0]["token_ids"] = [self.drawn(t) for t in range(self.length)]
        return reply


class RefusesLogprobs(StrictServer):
    """Answers 400 to ``logprobs``."""

    known = StrictServer.known - {"logprobs", "top_logprobs"}


class Scales(VllmLike):
    """Gives log-probabilities after the temperature."""

    def values(self, position: int, body: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return log_softmax(logits(position) / (body["temperature"] or 1.0))


class MeansSomethingElse(VllmLike):
    """Gives log-probabilities that fit neither meaning."""

    def values(self, position: int, body: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return log_softmax(logits(position) / body["temperature"] ** 3)


class LeavesTheEndOut(PlainOpenAI):
    """Counts the token that ends an answer, and gives no log-probability for it."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = super().reply(body)
        reply["usage"]["completion_tokens"] += 1
        return reply


class NewLimitName(PlainOpenAI):
    """Takes only ``max_completion_tokens``."""

    def refuses(self, body: dict[str, Any]) -> str | None:
        if "max_tokens" in body:
            return "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
        return super().refuses(body)


class RateLimited(PlainOpenAI):
    """Answers every second request with 429."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if len(self.requests) % 2 == 0:
            self.requests.append({})
            return error(429, "slow down")
        return await super().chat(request)


class WrongModel(PlainOpenAI):
    """Knows no model of our name, and says so."""

    model = "another"

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return error(404, "The model does not exist.")


class AnswersToAnyName(PlainOpenAI):
    """Lists another model than ours and answers all the same, as SGLang does."""

    model = "another"


class RefusesTheKey(PlainOpenAI):
    async def chat(self, request: web.Request) -> web.StreamResponse:
        return error(401, "Incorrect API key provided.")


class CallsATool(PlainOpenAI):
    """Thinks, and answers with a tool call."""

    finish_reason = "tool_calls"

    def message(self) -> dict[str, Any]:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        return {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}


class AfterTheProbe(VllmLike):
    """Behaves for the two requests of the probe, and then as a subclass says."""

    most_entries = 1000

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if len(self.requests) < 2:
            return await super().chat(request)
        return await self.later(request)

    async def later(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError


class Hangs(AfterTheProbe):
    async def later(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return error(500, "too late")


class DropsConnection(AfterTheProbe):
    async def later(self, request: web.Request) -> web.StreamResponse:
        assert request.transport
        request.transport.abort()
        return error(500, "gone")


class TooShortForUs(AfterTheProbe):
    async def later(self, request: web.Request) -> web.StreamResponse:
        return error(400, "This model's maximum context length is 10 tokens.")


class Overloaded(AfterTheProbe):
    async def later(self, request: web.Request) -> web.StreamResponse:
        return error(503, "The queue is full.")


class RefusesThePrompt(AfterTheProbe):
    async def later(self, request: web.Request) -> web.StreamResponse:
        return error(422, "no")


class Changes(AfterTheProbe):
    """Sends its usual reply with something changed."""

    def __init__(self, change: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.change = change

    async def later(self, request: web.Request) -> web.StreamResponse:
        reply = self.reply(await request.json())
        self.change(reply)
        return web.json_response(reply)


class SpeaksHtml(AfterTheProbe):
    async def later(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>", content_type="text/html")


def content_filter(reply: dict[str, Any]) -> None:
    reply["choices"][0]["finish_reason"] = "content_filter"


def no_reason(reply: dict[str, Any]) -> None:
    del reply["choices"][0]["finish_reason"]


def aborted(reply: dict[str, Any]) -> None:
    reply["choices"][0]["finish_reason"] = "abort"


def no_ids(reply: dict[str, Any]) -> None:
    del reply["prompt_token_ids"]


def other_ids(reply: dict[str, Any]) -> None:
    reply["choices"][0]["token_ids"][0] += 1


def one_token_less(reply: dict[str, Any]) -> None:
    reply["usage"]["completion_tokens"] -= 1


def no_usage(reply: dict[str, Any]) -> None:
    reply["usage"] = None


def ragged(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"]["content"][2]["top_logprobs"].pop()


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "code": status}}, status=status)


# --- running them -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(double: PlainOpenAI) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", double.chat)
    app.router.add_get("/v1/models", double.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def config_for(*urls: str) -> Config:
    config = Config()
    config.engine.kind = "openai"
    config.engine.urls = list(urls)
    config.model.path = "target"
    config.sampling.temperature = 0.7
    config.sampling.max_new_tokens = 16
    config.client.timeout_s = 60.0
    config.client.backoff_s = config.client.backoff_max_s = 0.001
    config.client.max_attempts = 3
    return config


PROMPT = Prompt("d/1/0/0", "d", "1", 0, 0, (Message("system", "Be brief."), Message("user", "Hello")))


def request_of(prompt: Prompt = PROMPT, seed: int | None = None, max_new_tokens: int = 16) -> Request:
    return Request(prompt, None, max_new_tokens, seed)


def ask(double: PlainOpenAI, change: Callable[[Config], object] = lambda config: None) -> tuple[Answer, ChatClient]:
    """One answer of a client that probed the double."""

    async def scenario() -> tuple[Answer, ChatClient]:
        async with serving(double) as url:
            config = config_for(url)
            change(config)
            async with open_chat(config, [url]) as client:
                return await client.answer(url, request_of()), client

    return asyncio.run(scenario())


def fault(double: PlainOpenAI, change: Callable[[Config], object] = lambda config: None) -> RequestFault:
    with pytest.raises(RequestFault) as caught:
        ask(double, change)
    return caught.value


def refusal(double: PlainOpenAI, change: Callable[[Config], object] = lambda config: None) -> InputError:
    with pytest.raises(InputError) as caught:
        ask(double, change)
    return caught.value


def truth(double: PlainOpenAI, k: int) -> tuple[Any, Any]:
    """The k most likely ids of each position, and their log-probabilities."""
    rows = [log_softmax(logits(t)) for t in range(double.length)]
    ids = np.array([np.argsort(-row)[:k] for row in rows])
    return ids, np.take_along_axis(np.array(rows), ids, axis=1)


# --- what servers give --------------------------------------------------------------------------------------------


def test_a_plain_server_gives_logprobs_but_no_ids() -> None:
    double = PlainOpenAI()
    answer, client = ask(double)
    assert client.capture.missing == ("prompt_ids", "output_ids", *LOGPROBS[1:], *ACCOUNTING)
    assert (client.capture.top_k, client.capture.logprobs) == (0, "raw")
    for column in client.capture.missing:
        assert getattr(answer, column) is None
    expected = [log_softmax(logits(t))[double.drawn(t)] for t in range(4)]
    np.testing.assert_allclose(answer.output_logprobs, expected, rtol=1e-6)
    assert answer.text == "four words are here"
    assert answer.message == Message("assistant", "four words are here")
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == ("stop", 7, 4)
    assert double.requests[-1]["logprobs"] is True
    assert "top_logprobs" not in double.requests[-1], "entries without ids are of no use"


def test_vllm_gives_ids_and_one_entry_less_than_its_limit() -> None:
    double = VllmLike()
    answer, client = ask(double)
    assert client.capture.missing == ACCOUNTING
    assert (client.capture.top_k, client.capture.logprobs) == (19, "raw")
    assert answer.output_ids is not None
    assert answer.topk_ids is not None
    assert answer.topk_logprobs is not None
    assert answer.tail_logprob is not None
    assert answer.output_ids.tolist() == [double.drawn(t) for t in range(4)]
    assert answer.prompt_ids is not None
    assert answer.prompt_ids.tolist() == list(range(7))
    ids, values = truth(double, 19)
    np.testing.assert_array_equal(answer.topk_ids, ids)
    np.testing.assert_allclose(answer.topk_logprobs, values, rtol=1e-5)
    np.testing.assert_allclose(np.exp(answer.tail_logprob), 1 - np.exp(values).sum(axis=1), atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 10, 19])
def test_vllm_entries_are_the_most_likely_even_where_the_drawn_token_is_none_of_them(k: int) -> None:
    double = VllmLike()
    answer, client = ask(double, lambda config: setattr(config.capture, "top_k", k))
    assert client.capture.top_k == k
    np.testing.assert_array_equal(answer.topk_ids, truth(double, k)[0])
    assert double.requests[-1]["top_logprobs"] == k + 1


def test_vllm_without_token_ids_still_names_them_in_its_tokens() -> None:
    class OlderVllm(VllmLike):
        reply = PlainOpenAI.reply

    answer, client = ask(OlderVllm())
    assert "output_ids" not in client.capture.missing
    assert "prompt_ids" in client.capture.missing
    assert answer.output_ids is not None


def test_sglang_gives_everything() -> None:
    double = SglangLike()
    answer, client = ask(double)
    assert client.capture.missing == ()
    assert client.capture.top_k == 20
    ids, values = truth(double, 20)
    np.testing.assert_array_equal(answer.topk_ids, ids)
    np.testing.assert_allclose(answer.topk_logprobs, values, rtol=1e-5)
    assert (answer.cached_device_tokens, answer.cached_host_tokens) == (1, 2)
    assert (answer.retractions, answer.queue_s, answer.weight_version) == (1, 0.5, "default")


def test_a_strict_server_is_sent_nothing_it_does_not_know() -> None:
    double = StrictServer()
    answer, client = ask(double)
    assert set(double.requests[-1]) <= double.known
    assert answer.output_logprobs is not None
    assert client.capture.logprobs == "raw"


def test_what_the_user_asks_for_is_not_left_out_for_a_strict_server() -> None:
    found = refusal(StrictServer(), lambda config: setattr(config.sampling, "top_k", 40))
    assert found.key == "engine.urls"
    assert "top_k" in str(found)


@pytest.mark.parametrize("double", [NoLogprobs(), RefusesLogprobs()])
def test_without_logprobs_there_are_none(double: PlainOpenAI) -> None:
    answer, client = ask(double)
    assert client.capture.logprobs == "none"
    assert set(LOGPROBS) <= set(client.capture.missing)
    assert answer.output_logprobs is None
    assert answer.topk_ids is None
    assert (answer.output_ids is None) == isinstance(double, RefusesLogprobs)
    assert "logprobs" not in double.requests[-1]


def test_values_that_mean_something_else_are_not_kept() -> None:
    answer, client = ask(MeansSomethingElse())
    assert client.capture.logprobs == "none"
    assert answer.output_logprobs is None
    assert answer.topk_logprobs is None
    assert answer.output_ids is not None


def test_logprobs_that_do_not_cover_the_answer_are_not_kept() -> None:
    answer, client = ask(LeavesTheEndOut())
    assert client.capture.logprobs == "none"
    assert answer.output_logprobs is None
    assert answer.completion_tokens == 5


def test_no_entries_are_kept_where_none_are_wanted() -> None:
    double = SglangLike()
    answer, client = ask(double, lambda config: setattr(config.capture, "top_k", 0))
    assert client.capture.missing == ()
    assert client.capture.top_k == 0
    assert answer.topk_ids is None
    assert answer.output_logprobs is not None
    assert "top_logprobs" not in double.requests[-1]


def test_a_column_that_one_server_lacks_is_null_for_all() -> None:
    async def scenario() -> None:
        async with serving(VllmLike()) as one, serving(SglangLike()) as two, serving(PlainOpenAI()) as three:
            config = config_for(one, two, three)
            async with open_chat(config, [one, two]) as client:
                answers = [await client.answer(url, request_of()) for url in (one, two)]
            assert client.capture.top_k == 19
            assert [answer.topk_ids is None or answer.topk_ids.shape for answer in answers] == [(4, 19), (4, 19)]
            assert [answer.queue_s for answer in answers] == [None, None]
            async with open_chat(config, [one, two, three]) as client:
                answers = [await client.answer(url, request_of()) for url in (one, two, three)]
            assert [answer.output_ids for answer in answers] == [None, None, None]

    asyncio.run(scenario())


def test_cached_tokens_of_usage_are_the_device_s() -> None:
    class ReportsCache(PlainOpenAI):
        def reply(self, body: dict[str, Any]) -> dict[str, Any]:
            reply = super().reply(body)
            if len(self.requests) > 1:  # as vLLM does: nothing is said of 0 tokens
                reply["usage"]["prompt_tokens_details"] = {"cached_tokens": 5}
            return reply

    answer, client = ask(ReportsCache())
    assert (answer.cached_device_tokens, answer.cached_host_tokens) == (5, None)
    assert "cached_device_tokens" not in client.capture.missing
    assert "cached_host_tokens" in client.capture.missing


def test_a_tool_call_is_an_answer_that_stopped() -> None:
    answer, _ = ask(CallsATool())
    assert answer.finish_reason == "stop"
    assert answer.text == ""
    assert answer.message is not None
    assert answer.message.reasoning_content == "hm"
    assert json.loads(answer.message.tool_calls or "")[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_minus_infinity_is_read_as_such() -> None:
    reply = VllmLike().reply({"top_logprobs": 3, "logprobs": True})
    for row in reply["choices"][0]["logprobs"]["content"]:
        row["top_logprobs"][1]["logprob"] = row["top_logprobs"][2]["logprob"] = -9999.0
    answer = to_answer(parse(json.dumps(reply).encode()), 2)
    assert answer.topk_logprobs is not None
    assert np.isneginf(answer.topk_logprobs[:, 1]).all()


@pytest.mark.parametrize(
    ("at_one", "at_half", "meaning"),
    [
        ([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0], "raw"),
        ([-1.0, -2.0, -3.0, -4.0], [-0.5, -2.5, -4.5, -6.5], "scaled"),
        ([-1.0, -2.0, -3.0, -4.0], [-0.5, -4.5, -9.5, -12.5], "none"),
        ([-1.0, -2.0, -3.0, -9.0], [-0.5, -2.5, -4.5, -99.0], "scaled"),
        ([-1.0, -2.0, -3.0, -4.0], [-0.5, -2.5, -9999.0, -9999.0], "scaled"),
        ([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], "none"),
        ([-1.0, -2.0], [-1.0, -2.0], "none"),
        ([], [], "none"),
    ],
)
def test_semantics(at_one: list[float], at_half: list[float], meaning: str) -> None:
    assert semantics(at_one, at_half) == meaning


# --- what is sent -------------------------------------------------------------------------------------------------


def test_the_conversation_is_sent_as_the_interface_has_it() -> None:
    calls = json.dumps([{"id": "c", "function": {"name": "f", "arguments": {"a": "é"}}}])
    prompt = Prompt(
        "d/2/0/0",
        "d",
        "2",
        0,
        0,
        (
            Message("user", "Hello"),
            Message("assistant", None, tool_calls=calls),
            Message("tool", "1", tool_call_id="c", name="f"),
        ),
        tools='[{"type": "function", "function": {"name": "f"}}]',
    )
    double = PlainOpenAI()

    async def scenario() -> None:
        async with serving(double) as url:
            config = config_for(url)
            config.model.chat_template_kwargs = {"enable_thinking": False}
            async with open_chat(config, [url]) as client:
                await client.answer(url, request_of(prompt, seed=11, max_new_tokens=9))

    asyncio.run(scenario())
    sent = double.requests[-1]
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    assert sent["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"},
    ]
    assert sent["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert (sent["model"], sent["temperature"], sent["top_p"]) == ("target", 0.7, 1.0)
    assert (sent["max_tokens"], sent["seed"]) == (9, 11)
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    # Said although they are off: left out, a server would take them from the model's generation settings.
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (-1, 0.0, 1.0)


def test_a_server_that_wants_the_new_name_of_the_limit_gets_it() -> None:
    double = NewLimitName()
    ask(double)
    assert double.requests[-1]["max_completion_tokens"] == 16
    assert "max_tokens" not in double.requests[-1]


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret\n")
    double = PlainOpenAI()
    ask(double, lambda config: setattr(config.engine, "api_key_env", "SOME_KEY"))
    assert set(double.keys) == {"Bearer s3cret"}


def test_a_url_that_ends_in_v1_is_taken_as_it_is() -> None:
    async def scenario() -> None:
        async with serving(PlainOpenAI()) as url, open_chat(config_for(url), [f"{url}/v1"]) as client:
            await client.answer(f"{url}/v1", request_of())

    asyncio.run(scenario())


# --- faults of one request ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("double", "kind", "permanent", "words"),
    [
        (DropsConnection(), "unreachable", False, "http://127"),
        (Overloaded(), "unreachable", False, "The queue is full."),
        (TooShortForUs(), "too_long", True, "maximum context length is 10"),
        (RefusesThePrompt(), "rejected", True, "HTTP 422: no"),
        (SpeaksHtml(), "bad_answer", False, "no JSON"),
        (Changes(content_filter), "bad_answer", False, "'content_filter'"),
        (Changes(no_reason), "bad_answer", False, "finish_reason None"),
        (Changes(aborted), "aborted", False, "aborted"),
        (Changes(no_ids), "bad_answer", False, "prompt_ids did not come"),
        (Changes(other_ids), "bad_answer", False, "not those of the output ids"),
        (Changes(one_token_less), "bad_answer", False, "4 output ids for 3 completion tokens"),
        (Changes(no_usage), "bad_answer", False, "not the expected form"),
        (Changes(ragged), "bad_answer", False, "entries where 21 were asked for"),
    ],
    ids=lambda value: getattr(getattr(value, "change", value), "__name__", type(value).__name__),
)
def test_a_fault_says_what_became_of_the_request(double: Any, kind: str, permanent: bool, words: str) -> None:
    found = fault(double)
    assert (found.kind, found.permanent) == (kind, permanent)
    assert words in found.detail


def test_a_server_that_hangs_is_a_timeout() -> None:
    async def scenario() -> None:
        async with serving(Hangs()) as url, open_chat(config_for(url), [url]) as client:
            await replace(client, timeout_s=0.2).answer(url, request_of())

    with pytest.raises(RequestFault) as caught:
        asyncio.run(scenario())
    assert (caught.value.kind, caught.value.permanent) == ("timeout", False)


def test_a_rate_limited_prompt_is_answered_at_the_next_attempt() -> None:
    async def scenario() -> Any:
        async with serving(RateLimited()) as url, aiohttp.ClientSession() as session:
            config, fleet = config_for(url), fleet_of(url)
            async with open_endpoint(config, session, fleet) as (endpoint, _):
                completer = Completer(fleet, endpoint, config.client, config.sampling)
                return await completer.answer(TokenizedPrompt(PROMPT, None), [], keep_nothing)

    async def keep_nothing(number: int, segment: Segment) -> None:
        raise AssertionError("there is one segment")

    completion = to_completion(asyncio.run(scenario()), None)
    assert completion.attempts == 2
    assert completion.text == "four words are here"
    assert completion.reply == Message("assistant", "four words are here")


@pytest.mark.parametrize("double", [PlainOpenAI(), VllmLike(), SglangLike()])
def test_a_row_is_null_where_its_run_says_so_and_nowhere_else(double: PlainOpenAI) -> None:
    answer, client = ask(double)
    answered = Answered(TokenizedPrompt(PROMPT, None), (Segment(answer, 1, 0.5, "e"),), "{}")
    (row,) = to_table([unpack(encode_completion(to_completion(answered, None)))]).to_pylist()
    assert {column for column in COLUMNS if row[column] is None} == set(client.capture.missing)
    assert row["text"] == "four words are here"
    assert row["messages"][-1]["role"] == "assistant"
    if answer.topk_logprobs is not None:
        assert row["topk_logprobs"] == answer.topk_logprobs.tolist()


# --- what makes a server unusable ---------------------------------------------------------------------------------


def test_another_model_is_refused_with_the_names_there_are() -> None:
    found = refusal(WrongModel(), lambda config: setattr(config.engine, "check_model", False))
    assert found.key == "model.served_name"
    assert "another" in str(found)
    assert refusal(WrongModel()).key == "model.served_name"


def test_a_server_that_answers_to_any_name_is_found_out() -> None:
    found = refusal(AnswersToAnyName())
    assert found.key == "model.served_name"
    assert "engine.check_model=false" in str(found)
    answer, _ = ask(AnswersToAnyName(), lambda config: setattr(config.engine, "check_model", False))
    assert answer.completion_tokens == 4


def test_a_wrong_key_is_named_but_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    found = refusal(RefusesTheKey())
    assert found.key == "engine.api_key_env"
    assert "OPENAI_API_KEY" in str(found)
    assert "s3cret" not in str(found)


def test_a_server_that_is_not_there_is_named() -> None:
    async def scenario() -> None:
        async with open_chat(config_for("http://127.0.0.1:9"), ["http://127.0.0.1:9"]):
            pass

    with pytest.raises(InputError, match=r"engine\.urls: http://127\.0\.0\.1:9 does not answer"):
        asyncio.run(scenario())


# --- the choice of endpoint ---------------------------------------------------------------------------------------


def fleet_of(*urls: str) -> Fleet:
    return Fleet([Engine(url, url, EngineFacts(url, *[None] * 7), 2) for url in urls])


def opened(double: PlainOpenAI, change: Callable[[Config], object] = lambda config: None) -> Any:
    async def scenario() -> Any:
        async with serving(double) as url, aiohttp.ClientSession() as session:
            config = config_for(url)
            change(config)
            async with open_endpoint(config, session, fleet_of(url)) as (endpoint, capture):
                return endpoint, capture

    return asyncio.run(scenario())


def test_one_line_says_what_a_server_cannot_give(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("pipeline").propagate = True
    endpoint, capture = opened(VllmLike())
    assert isinstance(endpoint, ChatClient)
    assert capture == endpoint.capture
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("pipeline")]
    assert "weight_version" in line
    assert "19 of the 20 entries" in line


def test_a_server_that_gives_everything_needs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    opened(SglangLike())
    assert not [record for record in caplog.records if record.name.startswith("pipeline")]


def test_scaled_values_are_taken_only_where_that_is_allowed() -> None:
    with pytest.raises(InputError, match=r"capture\.allow_scaled: http://127.*temperature=0\.7"):
        opened(Scales())
    _, capture = opened(Scales(), lambda config: setattr(config.capture, "allow_scaled", True))
    assert capture.logprobs == "scaled"
    _, capture = opened(Scales(), lambda config: setattr(config.sampling, "temperature", 1.0))
    assert capture.logprobs == "raw"


def test_a_server_that_renders_by_itself_is_not_asked_in_segments() -> None:
    with pytest.raises(InputError, match=r"sampling\.segment_tokens"):
        opened(VllmLike(), lambda config: setattr(config.sampling, "segment_tokens", 8))


# --- the real engine ----------------------------------------------------------------------------------------------

CONVERSATION = (
    Message("system", "Be brief."),
    Message("user", "Write a Python function that adds two numbers."),
    Message("assistant", "def add(a, b): return a + b"),
    Message("user", "Now one that subtracts."),
)


def engine_config(url: str, kind: str) -> Config:
    config = config_for(url)
    config.engine.kind = kind
    config.engine.check_model = False  # the fixture's model has a folder of its own
    config.client.timeout_s = 300.0
    config.sampling.temperature = 0.0
    return config


async def engine_answer(url: str, kind: str, request: Request) -> tuple[Answer, Any, Any]:
    config = engine_config(url, kind)
    async with (
        aiohttp.ClientSession() as session,
        open_endpoint(config, session, fleet_of(url)) as (endpoint, capture),
    ):
        return await endpoint.answer(url, request), endpoint, capture


@pytest.mark.engine
def test_chat_and_generate_give_the_same(engine_url: str) -> None:
    async def scenario() -> tuple[Any, Any]:
        prompt = Prompt("d/3/0/0", "d", "3", 0, 0, CONVERSATION)
        chat = await engine_answer(engine_url, "openai", Request(prompt, None, 48, None))
        native = await engine_answer(engine_url, "attach", Request(prompt, chat[0].prompt_ids, 48, None))
        return chat, native

    (by_chat, client, capture), (native, native_client, native_capture) = asyncio.run(scenario())
    assert isinstance(client, ChatClient)
    assert isinstance(native_client, GenerateClient)
    assert capture == native_capture, "nothing is missing"
    assert by_chat.prompt_tokens == native.prompt_tokens
    np.testing.assert_array_equal(by_chat.output_ids, native.output_ids)
    np.testing.assert_array_equal(by_chat.topk_ids, native.topk_ids)
    for column in ("output_logprobs", "topk_logprobs", "tail_logprob"):
        np.testing.assert_allclose(getattr(by_chat, column), getattr(native, column), atol=1e-4)
    assert (by_chat.finish_reason, by_chat.completion_tokens) == (native.finish_reason, native.completion_tokens)
    for column in ACCOUNTING:
        assert getattr(by_chat, column) is not None
    assert by_chat.message is not None
    assert by_chat.text == by_chat.message.content


@pytest.mark.engine
def test_a_prompt_too_long_for_the_engine_is_no_fault_of_the_engine(engine_url: str) -> None:
    prompt = Prompt("d/4/0/0", "d", "4", 0, 0, (Message("user", "word " * 20000),))
    with pytest.raises(RequestFault) as caught:
        asyncio.run(engine_answer(engine_url, "openai", Request(prompt, None, 8, None)))
    assert (caught.value.kind, caught.value.permanent) == ("too_long", True)
