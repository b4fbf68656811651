"""The way a run asks its engines, chosen by the kind of engine, and what its rows will hold."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp

from pipeline.client.chat import open_chat
from pipeline.client.endpoint import Endpoint
from pipeline.client.generate import GenerateClient
from pipeline.client.vocabulary import model_vocab_size
from pipeline.config import Config
from pipeline.engine.fleet import Fleet
from pipeline.engine.probe import logprob_semantics
from pipeline.errors import InputError
from pipeline.store import Capture

log = logging.getLogger(__name__)

NOTHING_TO_SCALE = (0.0, 1.0)
"""Temperatures at which scaled and raw values are the same: 0 is greedy sampling, with the logits as they are."""


@asynccontextmanager
async def open_endpoint(
    config: Config, session: aiohttp.ClientSession, fleet: Fleet
) -> AsyncIterator[tuple[Endpoint, Capture]]:
    """The endpoint for the engines of ``fleet``, every one of them asked what its answers hold.

    Raises:
        InputError: a server cannot be used, or is to answer in segments; or an engine gives temperature-scaled values
            and ``capture.allow_scaled`` is not set.
        EngineDown: a native engine's log-probabilities fit no known meaning.
    """
    if config.engine.kind == "openai":
        if config.sampling.segment_tokens:
            problem = "a server that is sent conversations cannot continue an answer from its token ids"
            raise InputError("sampling.segment_tokens", problem, "0 where engine=openai")
        async with open_chat(config, [engine.url for engine in fleet.engines]) as client:
            _say_what_is_missing(config, client.capture)
            yield client, _accepted(config, client.capture, " ".join(config.engine.urls))
        return
    capture = await _native_capture(config, session, fleet)
    vocab_size = model_vocab_size(config.model)
    yield GenerateClient(session, config.sampling, config.capture.top_k, config.client.timeout_s, vocab_size), capture


async def _native_capture(config: Config, session: aiohttp.ClientSession, fleet: Fleet) -> Capture:
    scaled = [engine.url for engine in fleet.engines if await logprob_semantics(session, engine.url) == "scaled"]
    if scaled and len(scaled) < len(fleet.engines) and config.sampling.temperature not in NOTHING_TO_SCALE:
        raise InputError("engine.urls", f"{' '.join(scaled)} gives scaled log-probabilities, the others raw ones")
    return _accepted(config, Capture(config.capture.top_k, "scaled" if scaled else "raw"), " ".join(scaled))


def _accepted(config: Config, capture: Capture, urls: str) -> Capture:
    """The capture as it is recorded. At the temperatures 0 and 1 values are scaled by nothing."""
    if capture.logprobs != "scaled":
        return capture
    if config.sampling.temperature in NOTHING_TO_SCALE:
        return replace(capture, logprobs="raw")
    if not config.capture.allow_scaled:
        raise InputError(
            "capture.allow_scaled",
            f"{urls} gives log-probabilities scaled by sampling.temperature={config.sampling.temperature:g}",
            "start the engine with SGLANG_RETURN_ORIGINAL_LOGPROB=1, or capture.allow_scaled=true",
        )
    return capture


def _say_what_is_missing(config: Config, capture: Capture) -> None:
    missing = [f"no {', '.join(capture.missing)} (null in every row)"] if capture.missing else []
    if "topk_ids" not in capture.missing and capture.top_k < config.capture.top_k:
        missing.append(f"{capture.top_k} of the {config.capture.top_k} entries of capture.top_k")
    if missing:
        log.warning("%s: can give %s", " ".join(config.engine.urls), "; ".join(missing))
