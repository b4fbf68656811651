"""What both kinds of server have in common: a request, and something that answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.records import Answer, Ids, Prompt


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request's worth of work.

    ``input_ids`` int32 [prompt_tokens] is what the model reads (None where the server renders ``prompt`` itself);
    ``max_new_tokens`` the most tokens to generate; ``seed`` None leaves the draw to the server.
    """

    prompt: Prompt
    input_ids: Ids | None
    max_new_tokens: int
    seed: int | None


class Endpoint(Protocol):
    """A way of asking engines."""

    async def answer(self, url: str, request: Request) -> Answer:
        """Makes one request of the engine at ``url``.

        Raises:
            pipeline.client.faults.RequestFault: no usable answer came.
        """
        ...
