"""A double of the SGLang engine, for the faults that a real one does not produce on request.

Each behaviour is a function of the request that answers it, named after what it does; :class:`EngineDouble` plays
them in turn and is well-behaved afterwards.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

VOCAB = 1024

Reply = web.StreamResponse
Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[Reply]]


def answer_to(body: dict[str, Any], tokens: int | None = None) -> dict[str, Any]:
    """A sound reply to a ``/generate`` request, in the layout that it asked for; the same request, the same reply."""
    ids = body["input_ids"]
    rng = np.random.default_rng(len(ids) + sum(ids))
    limit = body["sampling_params"]["max_new_tokens"]
    count = limit if tokens is None else tokens
    k = body.get("top_logprobs_num", 0)
    logits = rng.normal(size=(count, VOCAB)) * 3
    logprobs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    order = np.argsort(-logprobs, axis=1)[:, : max(k, 1)]
    values = np.take_along_axis(logprobs, order, axis=1)
    output = order[:, 0].tolist()
    meta: dict[str, Any] = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": limit} if count == limit else {"type": "stop", "matched": 2},
        "prompt_tokens": len(ids),
        "completion_tokens": count,
        "cached_tokens": 3,
        "cached_tokens_details": {"device": 2, "host": 1},
        "num_retractions": 0,
        "queue_time": 0.01,
        "weight_version": "default",
        "output_token_logprobs": [[float(row[0]), int(i), None] for row, i in zip(values, output, strict=True)],
    }
    if k and body.get("return_flat_raw_top_logprobs_b64"):
        meta |= {
            "output_top_logprobs_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
            "output_top_logprobs_idx_flat_b64": base64.b64encode(order.astype(np.int32).tobytes()).decode(),
            "output_top_logprobs_val_flat_b64_dtype": "float32",
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
            "output_top_logprobs_shape": [count, k],
            "output_top_logprobs_null_prefix": 0,
        }
    elif k:
        meta["output_top_logprobs"] = [
            [[float(v), int(i), None] for v, i in zip(row_v, row_i, strict=True)]
            for row_v, row_i in zip(values, order, strict=True)
        ]
    return {"text": "", "output_ids": output, "meta_info": meta}


async def behaves(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.json_response(answer_to(body))


async def answers_in_the_nested_layout(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.json_response(answer_to({**body, "return_flat_raw_top_logprobs_b64": False}))


async def is_overloaded(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.json_response({"error": {"message": "The request queue is full."}}, status=503)


async def fails_inside(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.Response(text="Internal Server Error", status=500)


async def refuses_the_request(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.json_response({"error": {"message": "top_p must be in (0, 1], got 7."}}, status=400)


async def finds_it_too_long(request: web.Request, body: dict[str, Any]) -> Reply:
    words = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
    return web.json_response({"error": {"message": words}}, status=400)


async def drops_the_connection(request: web.Request, body: dict[str, Any]) -> Reply:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def drops_mid_body(request: web.Request, body: dict[str, Any]) -> Reply:
    whole = json.dumps(answer_to(body)).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(whole[: len(whole) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def hangs(request: web.Request, body: dict[str, Any]) -> Reply:
    await asyncio.sleep(3600)
    return web.Response()


async def sends_garbage(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.Response(body=b'{"output_ids": [1, 2', content_type="application/json")


async def sends_another_document(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.json_response(["not", "an", "answer"])


async def aborts_with_200(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to(body)
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted by the scheduler"}
    return web.json_response(reply)


async def loses_a_distribution(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to(body)
    short = answer_to(body, tokens=len(reply["output_ids"]) - 1)
    for name in ("val_flat_b64", "idx_flat_b64", "shape"):
        reply["meta_info"][f"output_top_logprobs_{name}"] = short["meta_info"][f"output_top_logprobs_{name}"]
    return web.json_response(reply)


async def loses_a_token(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to(body)
    reply["output_ids"] = reply["output_ids"][:-1]
    return web.json_response(reply)


async def sends_nan(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to(body)
    shape = reply["meta_info"]["output_top_logprobs_shape"]
    values = np.full(shape, np.nan, dtype=np.float32)
    reply["meta_info"]["output_top_logprobs_val_flat_b64"] = base64.b64encode(values.tobytes()).decode()
    return web.json_response(reply)


async def samples_outside_the_vocabulary(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to(body)
    reply["output_ids"][0] = VOCAB
    reply["meta_info"]["output_token_logprobs"][0][1] = VOCAB
    return web.json_response(reply)


async def reads_another_prompt(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to(body)
    reply["meta_info"]["prompt_tokens"] += 1
    return web.json_response(reply)


async def answers_nothing(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.json_response(answer_to(body, tokens=0))


async def talks_too_long(request: web.Request, body: dict[str, Any]) -> Reply:
    return web.json_response(answer_to(body, tokens=body["sampling_params"]["max_new_tokens"] + 1))


async def disorders_a_distribution(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to({**body, "return_flat_raw_top_logprobs_b64": False})
    reply["meta_info"]["output_top_logprobs"][0].reverse()
    return web.json_response(reply)


async def sums_above_one(request: web.Request, body: dict[str, Any]) -> Reply:
    reply = answer_to({**body, "return_flat_raw_top_logprobs_b64": False})
    for entry in reply["meta_info"]["output_top_logprobs"][0]:
        entry[0] = -0.1
    return web.json_response(reply)


BREAKS_AN_INVARIANT: dict[Behaviour, str] = {
    sends_garbage: "no JSON",
    sends_another_document: "expected form",
    loses_a_distribution: "distributions of shape",
    loses_a_token: "not those of the output ids",
    sends_nan: "NaN",
    samples_outside_the_vocabulary: "the vocabulary has 1024",
    reads_another_prompt: "prompt tokens",
    answers_nothing: "empty",
    talks_too_long: "were allowed",
    disorders_a_distribution: "descending",
    sums_above_one: "sums to",
}
"""Answers that must never become a row, and what the refusal says."""


class EngineDouble:
    """``async with EngineDouble(behaviour, ...) as engine``: plays the behaviours, one a request, then behaves.

    ``always`` answers every request instead. ``requests`` are the bodies received; ``aborted`` the ids that
    ``/abort_request`` named.
    """

    def __init__(
        self, *behaviours: Behaviour, always: Behaviour = behaves, scaled: bool = False, model: str = "tiny"
    ) -> None:
        self._script = list(behaviours)
        self._always = always
        self._scaled = scaled
        self._model = model
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.url = ""
        self._dies_after: int | None = None
        self._dead_for_s = 0.0
        self._dead_until = 0.0

    def dies_after(self, requests: int, for_s: float) -> None:
        """From the request after so many on, breaks every connection, for ``for_s`` seconds."""
        self._dies_after, self._dead_for_s = requests, for_s

    def _is_dead(self) -> bool:
        if self._dies_after is not None and len(self.requests) >= self._dies_after:
            self._dies_after, self._dead_until = None, time.monotonic() + self._dead_for_s
        return time.monotonic() < self._dead_until

    @web.middleware
    async def _breaks_connections_when_dead(self, request: web.Request, handler: Any) -> Reply:
        if self._is_dead():
            return await drops_the_connection(request, {})
        reply: Reply = await handler(request)
        return reply

    def routes(self) -> list[web.RouteDef]:
        """What it answers."""
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.get("/ready", self._empty),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
            web.get("/v1/loads", self._loads),
        ]

    async def __aenter__(self) -> EngineDouble:
        app = web.Application(client_max_size=2**30, middlewares=[self._breaks_connections_when_dead])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> Reply:
        body = await request.json()
        if "rid" not in body:  # the probe for raw or scaled log-probabilities
            return web.json_response(self._probed(body))
        self.requests.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            behaviour = self._script.pop(0) if self._script else self._always
            return await behaviour(request, body)
        finally:
            self.in_flight -= 1

    def _probed(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = answer_to({**body, "rid": "probe"})
        if self._scaled:
            temperature = body["sampling_params"]["temperature"]
            for entry in reply["meta_info"]["output_top_logprobs"][0]:
                entry[0] /= temperature
        return reply

    async def _abort(self, request: web.Request) -> Reply:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _empty(self, request: web.Request) -> Reply:
        return web.Response()

    async def _model_info(self, request: web.Request) -> Reply:
        return web.json_response({"model_path": f"/models/{self._model}", "served_model_name": self._model})

    async def _server_info(self, request: web.Request) -> Reply:
        return web.json_response({"version": "0.5.23", "max_req_input_len": 2000, "max_total_num_tokens": 8000})

    async def _loads(self, request: web.Request) -> Reply:
        rank = {
            "num_running_reqs": self.in_flight,
            "num_waiting_reqs": 0,
            "num_used_tokens": 0,
            "max_total_num_tokens": 8000,
            "token_usage": 0.5,
            "gen_throughput": 100.0,
        }
        return web.json_response({"loads": [rank]})
