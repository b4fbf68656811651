"""The one place that decides whether, and when, a request is made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from pipeline.client.faults import RequestFault
from pipeline.config import ClientConfig


def attempts(client: ClientConfig, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> AsyncRetrying:
    """Up to ``client.max_attempts`` attempts, with full-jitter exponential pauses between them.

    Permanent faults, and anything that is no :class:`RequestFault`, end the attempts at once. The last fault is
    raised as it is.
    """
    return AsyncRetrying(
        sleep=sleep,
        stop=stop_after_attempt(client.max_attempts),
        wait=wait_random_exponential(multiplier=client.backoff_s, max=client.backoff_max_s),
        retry=retry_if_exception(_passes),
        reraise=True,
    )


def _passes(error: BaseException) -> bool:
    return isinstance(error, RequestFault) and not error.permanent
