"""What an engine reports while it works: ``/v1/loads``, in the few numbers that a person watches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

_WORK_COUNTERS = ("num_used_tokens", "total_prefill_uncached_tokens", "decode_moments", "num_running_reqs")


@dataclass(frozen=True, slots=True)
class Load:
    """One engine's load, summed over its data-parallel ranks. ``token_usage`` is the fullest rank's, 0 to 1."""

    running: int
    waiting: int
    retracted: int
    used_tokens: int
    pool_tokens: int
    token_usage: float
    tokens_per_s: float


async def read_load(session: aiohttp.ClientSession, url: str) -> Load | None:
    """The engine's load now; None where it does not answer or has no such endpoint."""
    try:
        async with session.get(f"{url}/v1/loads", timeout=aiohttp.ClientTimeout(total=3)) as response:
            if response.status != 200:
                return None
            return parse_loads(orjson.loads(await response.read()))
    except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None


async def read_progress(session: aiohttp.ClientSession, url: str) -> object | None:
    """Something that changes whenever the engine computes a token, prompt or output; None where it does not answer.

    The port answers while the scheduler hangs, and throughput figures keep their last value; the work counters move
    only with work.
    """
    try:
        async with session.get(f"{url}/v1/loads", timeout=aiohttp.ClientTimeout(total=5)) as response:
            if response.status != 200:
                return None
            ranks = orjson.loads(await response.read())["loads"]
            return [[rank.get(name) for name in _WORK_COUNTERS] for rank in ranks]
    except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError):
        return None


def parse_loads(reply: dict[str, Any]) -> Load:
    """Reads a ``/v1/loads`` reply."""
    ranks = reply["loads"]
    return Load(
        running=sum(rank["num_running_reqs"] for rank in ranks),
        waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
        retracted=sum((rank.get("queues") or {}).get("retracted", 0) for rank in ranks),
        used_tokens=sum(rank["num_used_tokens"] for rank in ranks),
        pool_tokens=sum(rank["max_total_num_tokens"] for rank in ranks),
        token_usage=max((rank["token_usage"] for rank in ranks), default=0.0),
        tokens_per_s=sum(rank["gen_throughput"] for rank in ranks),
    )


def total(loads: Iterable[Load]) -> Load | None:
    """Several engines' loads as one; None where there are none."""
    known = list(loads)
    if not known:
        return None
    return Load(
        running=sum(load.running for load in known),
        waiting=sum(load.waiting for load in known),
        retracted=sum(load.retracted for load in known),
        used_tokens=sum(load.used_tokens for load in known),
        pool_tokens=sum(load.pool_tokens for load in known),
        token_usage=max(load.token_usage for load in known),
        tokens_per_s=sum(load.tokens_per_s for load in known),
    )
