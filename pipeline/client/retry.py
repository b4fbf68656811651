"""The one place that decides whether, and when, a request is made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from pipeline.client.faults import RequestFault
from pipeline.config import ClientConfig

LOSSES_PER_ATTEMPT = 3
"""A prompt may see this many engines end for each attempt it has. It is a prompt's bad luck, up to the point where
the prompt is more likely to be what ends them."""


def attempts(client: ClientConfig, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> AsyncRetrying:
    """Up to ``client.max_attempts`` attempts, with full-jitter exponential pauses between them.

    Attempts during which the engine ended are not counted, up to a limit of their own. Permanent faults, and anything
    that is no :class:`RequestFault`, end the attempts at once. The last fault is raised as it is.
    """
    return AsyncRetrying(
        sleep=sleep,
        stop=_Budget(client.max_attempts),
        wait=wait_random_exponential(multiplier=client.backoff_s, max=client.backoff_max_s),
        retry=retry_if_exception(_passes),
        reraise=True,
    )


class _Budget:
    """Says when to stop, as tenacity asks once after each failed attempt."""

    def __init__(self, attempts: int) -> None:
        self._attempts_left = attempts
        self._losses_left = attempts * LOSSES_PER_ATTEMPT

    def __call__(self, state: RetryCallState) -> bool:
        fault = state.outcome.exception() if state.outcome else None
        if isinstance(fault, RequestFault) and fault.engine_lost:
            self._losses_left -= 1
        else:
            self._attempts_left -= 1
        return min(self._attempts_left, self._losses_left) <= 0


def _passes(error: BaseException) -> bool:
    return isinstance(error, RequestFault) and not error.permanent
