"""SGLang's native endpoint: token ids in, token ids and distributions out."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from pipeline.client.answers import Expectation, decode_answer
from pipeline.client.endpoint import Request
from pipeline.client.faults import RequestFault
from pipeline.config import SamplingConfig
from pipeline.records import Answer

_TRY_AGAIN = {408, 409, 425, 429}
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class GenerateClient:
    """Speaks to ``/generate``. ``timeout_s`` bounds one request; ``vocab_size`` bounds the ids of an answer."""

    session: aiohttp.ClientSession
    sampling: SamplingConfig
    top_k: int
    timeout_s: float
    vocab_size: int | None

    async def answer(self, url: str, request: Request) -> Answer:
        """One answer, or one segment of it; ``request.input_ids`` are sent as they are.

        Raises:
            RequestFault: no usable answer; the engine was told to stop working on it where that was needed.
        """
        if request.input_ids is None:
            raise TypeError("the native endpoint takes token ids")
        rid = uuid.uuid4().hex
        body = orjson.dumps(self._body(rid, request), option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await self._post(f"{url}/generate", body)
        except TimeoutError:
            await self._abort(url, rid)
            detail = f"no answer from {url} within {self.timeout_s:g} s"
            raise RequestFault("timeout", detail, connection=True) from None
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(url, rid))
            raise
        expected = Expectation(len(request.input_ids), request.max_new_tokens, self.top_k, self.vocab_size)
        return decode_answer(reply, expected)

    def _body(self, rid: str, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": request.input_ids,
            "sampling_params": sampling_params(self.sampling, request.max_new_tokens, request.seed),
            "return_logprob": True,
            "stream": False,
        }
        if self.top_k:
            body |= {
                "top_logprobs_num": self.top_k,
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
            }
        return body

    async def _post(self, url: str, body: bytes) -> bytes:
        try:
            async with self.session.post(url, data=body, headers=_JSON) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFault("unreachable", f"{url}: {type(error).__name__}: {error}", connection=True) from None
        if response.status == 200:
            return content
        raise fault_of_status(response.status, _message(content), url)

    async def _abort(self, url: str, rid: str) -> None:
        """Tells the engine that nobody waits for this answer any more; an engine that cannot hear it is not
        working on it either."""
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with self.session.post(f"{url}/abort_request", json={"rid": rid}, timeout=timeout):
                return
        except (aiohttp.ClientError, OSError, TimeoutError):
            return


def sampling_params(sampling: SamplingConfig, max_new_tokens: int, seed: int | None) -> dict[str, Any]:
    """The ``sampling_params`` of a request."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": max_new_tokens,
        **sampling.whole_output_options,
    }
    if seed is not None:
        params["sampling_seed"] = seed
    return params


def fault_of_status(status: int, message: str, url: str) -> RequestFault:
    """What an HTTP status other than 200 means for the prompt."""
    detail = f"{url}: HTTP {status}: {message}"
    if status >= 500 or status in _TRY_AGAIN:
        return RequestFault("unreachable", detail)
    too_long = status == 400 and ("context length" in message or "longer than" in message)
    return RequestFault("too_long" if too_long else "rejected", detail, permanent=True)


def _message(content: bytes) -> str:
    """The engine's own words in an error reply."""
    try:
        found = orjson.loads(content)
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, AttributeError):
        return content[:300].decode(errors="replace")
