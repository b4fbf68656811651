"""One OpenAI-compatible server, asked through the ``openai`` package."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import openai

from pipeline.client.endpoint import Request
from pipeline.config import Config, ModelConfig, SamplingConfig
from pipeline.errors import InputError
from pipeline.prompts.messages import message_fields
from pipeline.records import Message

KEEP_ALIVE_S = 4.0
"""Engines close idle connections after 5 s; ours go first."""

# Fields that SGLang knows: ids of prompt and answer, and its meta_info with the distributions in base64.
_SGLANG = {"return_token_ids": True, "return_meta_info": True}
_SGLANG_TOP = {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
# Fields that vLLM knows: ids of prompt and answer, and the tokens of log-probabilities as "token_id:N".
_VLLM = {"return_token_ids": True, "return_tokens_as_token_ids": True}

LimitField = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server is asked for.

    ``extras``: whether fields that are not in OpenAI's interface are sent unbidden. ``top_logprobs``: entries asked
    for per position, 0 for none. ``limit_field``: the name under which it takes the most tokens to generate.
    """

    extras: bool
    logprobs: bool
    top_logprobs: int
    limit_field: LimitField = "max_tokens"


class ChatServer:
    """One server and its connections, reused. The SDK's own retries are off: retrying is done in one place.

    Closed by ``async with``.
    """

    def __init__(self, config: Config, url: str) -> None:
        self.url = url
        self.model = config.model.served_name or config.model.path
        self._config = config.model
        base = url.rstrip("/")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        try:
            self._sdk = openai.AsyncOpenAI(
                base_url=base if base.endswith("/v1") else f"{base}/v1",
                api_key=os.environ.get(config.engine.api_key_env, "").strip() or "EMPTY",
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(limits=limits),
            )
        except httpx.InvalidURL as error:
            raise InputError("engine.urls", f"{url!r} is not an address ({error})") from None

    async def __aenter__(self) -> ChatServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sdk.close()

    async def ask(self, request: Request, sampling: SamplingConfig, dialect: Dialect, timeout_s: float) -> bytes:
        """The body of one chat completion. The SDK does not parse it: its objects cost more than all else here.

        Raises:
            openai.APIError: as the SDK raises it.
            TimeoutError: the whole of it took longer than ``timeout_s``; the connection is closed, which tells the
                server that nobody waits any more.
        """
        fields = request_fields(self._config, sampling, dialect, request)
        async with asyncio.timeout(timeout_s):
            response = await self._sdk.chat.completions.with_raw_response.create(**fields, timeout=timeout_s)
        body: bytes = response.content
        return body

    async def models(self, timeout_s: float) -> list[str]:
        """The names of the models that the server lists; none where there is no such list to be had."""
        try:
            page = await self._sdk.models.list(timeout=timeout_s)
            return [model.id for model in page.data]
        except (openai.APIError, ValueError, TypeError, AttributeError):  # the SDK does not check what it parses
            return []


def request_fields(model: ModelConfig, sampling: SamplingConfig, dialect: Dialect, request: Request) -> dict[str, Any]:
    """The arguments of ``chat.completions.create`` for one request."""
    fields: dict[str, Any] = {
        "model": model.served_name or model.path,
        "messages": [_message(message) for message in request.prompt.messages],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        dialect.limit_field: request.max_new_tokens,
        "extra_body": _extra_body(model, sampling, dialect),
    }
    if request.prompt.tools:
        fields["tools"] = json.loads(request.prompt.tools)
    if request.seed is not None:
        fields["seed"] = request.seed
    if dialect.logprobs:
        fields["logprobs"] = True
    if dialect.top_logprobs:
        fields["top_logprobs"] = dialect.top_logprobs
    return fields


def words_of(error: openai.APIStatusError) -> str:
    """The server's own words in an error reply."""
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error", body)
        found = inner.get("message", inner) if isinstance(inner, dict) else inner
        return str(found)
    return str(body or error.message)


def _message(message: Message) -> dict[str, Any]:
    """A message as the interface has it: the arguments of calls as JSON text."""
    return message_fields(message, _call)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _extra_body(model: ModelConfig, sampling: SamplingConfig, dialect: Dialect) -> dict[str, Any]:
    """The fields outside OpenAI's interface: those that the configuration asks for, and those that are offered.

    Sampling that is off is offered as off: SGLang and vLLM take a field that is not sent from the model's
    ``generation_config.json``, and a row would say another sampling than it was drawn with.
    """
    extra: dict[str, Any] = {}
    if model.chat_template_kwargs:
        extra["chat_template_kwargs"] = model.chat_template_kwargs
    if dialect.extras or sampling.top_k != -1:
        extra["top_k"] = sampling.top_k
    if dialect.extras or sampling.min_p != 0.0:
        extra["min_p"] = sampling.min_p
    if dialect.extras:
        extra |= {"repetition_penalty": 1.0} | _SGLANG | _VLLM
        if dialect.top_logprobs:
            extra |= _SGLANG_TOP
    return extra
