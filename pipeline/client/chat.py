"""Any OpenAI-compatible server: conversations in, and as much of the distributions out as it can give.

The rule that the columns of a run rest on: a column is given by every server, for every row, or it is null in every
row. What is given is found out before the run; an answer that then lacks it is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import openai

from pipeline.client.answers import Expectation, check_answer
from pipeline.client.chat_probe import ARRAYS, COLUMNS, ChatAbilities, probe, without
from pipeline.client.chat_reply import parse, to_answer
from pipeline.client.chat_server import ChatServer, Dialect, words_of
from pipeline.client.endpoint import Request
from pipeline.client.faults import RequestFault, bad_answer
from pipeline.client.generate import fault_of_status
from pipeline.config import Config, SamplingConfig
from pipeline.records import Answer
from pipeline.store import Capture

__all__ = ["ChatAbilities", "ChatClient", "open_chat", "probe"]


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Speaks to ``/v1/chat/completions``. ``capture`` is what the answers hold; ``dialects`` says how each server,
    by address, is asked for it."""

    servers: Mapping[str, ChatServer]
    dialects: Mapping[str, Dialect]
    sampling: SamplingConfig
    capture: Capture
    timeout_s: float

    async def answer(self, url: str, request: Request) -> Answer:
        """One answer; ``request.input_ids`` are not used, the server renders the conversation.

        Raises:
            RequestFault: no usable answer came.
        """
        try:
            body = await self.servers[url].ask(request, self.sampling, self.dialects[url], self.timeout_s)
        except TimeoutError:
            detail = f"no answer from {url} within {self.timeout_s:g} s"
            raise RequestFault("timeout", detail, connection=True) from None
        except openai.APIError as error:
            raise fault_of(error, url) from None
        answer = without(to_answer(parse(body), self.capture.top_k), self.capture.missing)
        self._check(answer, request)
        return answer

    def _check(self, answer: Answer, request: Request) -> None:
        unwanted = {"topk_ids", "topk_logprobs", "tail_logprob"} if self.capture.top_k == 0 else set()
        for column in ARRAYS:
            if getattr(answer, column) is None and column not in {*self.capture.missing, *unwanted}:
                raise bad_answer(f"{column} did not come, though the server gave it before the run")
        check_answer(answer, Expectation(None, request.max_new_tokens, self.capture.top_k, None))


@asynccontextmanager
async def open_chat(config: Config, urls: Iterable[str]) -> AsyncIterator[ChatClient]:
    """A client for the servers at ``urls``, each probed once; its connections are closed on the way out.

    Raises:
        InputError: a server cannot be used; see :func:`pipeline.client.chat_probe.probe`.
    """
    async with AsyncExitStack() as stack:
        servers, abilities = {}, {}
        for url in urls:
            servers[url] = await stack.enter_async_context(ChatServer(config, url))
            abilities[url] = await probe(servers[url], config)
        capture = capture_by(list(abilities.values()))
        dialects = {url: _asked(found.dialect, capture) for url, found in abilities.items()}
        yield ChatClient(servers, dialects, config.sampling, capture, config.client.timeout_s)


def capture_by(abilities: list[ChatAbilities]) -> Capture:
    """What all of the servers give: a column that one of them lacks is missing."""
    missing = tuple(column for column in COLUMNS if any(column in found.missing for found in abilities))
    top_k = 0 if "topk_ids" in missing else min(found.top_entries for found in abilities)
    if "output_logprobs" in missing:
        return Capture(top_k, "none", missing)
    return Capture(top_k, "scaled" if any(found.logprobs == "scaled" for found in abilities) else "raw", missing)


def _asked(dialect: Dialect, capture: Capture) -> Dialect:
    """The server's way of being asked, for no more than the run keeps (one entry more: see ``to_answer``)."""
    top_logprobs = capture.top_k + 1 if capture.top_k else 0
    return replace(dialect, logprobs=capture.logprobs != "none", top_logprobs=top_logprobs)


def fault_of(error: openai.APIError, url: str) -> RequestFault:
    """What an error of the SDK means for the prompt."""
    if isinstance(error, openai.APITimeoutError):
        return RequestFault("timeout", f"no answer from {url} in time", connection=True)
    if isinstance(error, openai.APIConnectionError):
        reason = error.__cause__ or error
        return RequestFault("unreachable", f"{url}: {type(reason).__name__}: {reason}", connection=True)
    if isinstance(error, openai.APIStatusError):
        return fault_of_status(error.status_code, words_of(error), url)
    return bad_answer(f"{url}: {error}")
