"""Questions to an engine that serves: what it is, whether it is the right one, what its log-probabilities are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal

import aiohttp
import orjson

from pipeline.config import ModelConfig
from pipeline.errors import EngineDown, InputError

Semantics = Literal["raw", "scaled"]

_PROBE_K = 10


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself. Lengths and pools in tokens; None where it does not say."""

    url: str
    version: str | None
    model_path: str | None
    served_name: str | None
    max_input_tokens: int | None
    kv_pool_tokens: int | None
    hicache: bool | None
    weight_version: str | None

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


async def engine_facts(session: aiohttp.ClientSession, url: str) -> EngineFacts:
    """Asks ``/model_info`` and ``/server_info``, or their older names.

    Raises:
        EngineDown: nothing answers at the address, or what does is no SGLang engine.
    """
    model = await _first(session, url, ("/model_info", "/get_model_info"))
    server = await _first(session, url, ("/server_info", "/get_server_info"))
    return EngineFacts(
        url=url,
        version=server.get("version"),
        model_path=model.get("model_path"),
        served_name=model.get("served_model_name") or server.get("served_model_name"),
        max_input_tokens=server.get("max_req_input_len"),
        kv_pool_tokens=server.get("max_total_num_tokens"),
        hicache=server.get("enable_hierarchical_cache"),
        weight_version=model.get("weight_version"),
    )


def check_model(facts: EngineFacts, model: ModelConfig) -> None:
    """Refuses an engine that serves another model than the configured one.

    The same model may lie under another folder on the engine's machine, so the last part of the path is enough.

    Raises:
        InputError: naming both models and the key that accepts the engine all the same.
    """
    served = _names(facts.model_path, facts.served_name)
    wanted = _names(model.path, model.served_name)
    if served and not served & wanted:
        raise InputError(
            "engine.urls",
            f"{facts.url} serves {facts.served_name or facts.model_path}, the run is for {model.path}",
            "an engine of that model; engine.check_model=false takes this one",
        )


async def logprob_semantics(session: aiohttp.ClientSession, url: str) -> Semantics:
    """Whether log-probabilities are the model's own ("raw") or those after the temperature ("scaled").

    The same position is asked at temperatures 1 and 0.5. Dividing logits by the temperature multiplies every
    difference of two log-probabilities by 1/0.5, and nothing else does, so the spread of the top entries tells.

    Raises:
        EngineDown: the engine's answers fit neither.
    """
    spreads = [await _spread(session, url, temperature) for temperature in (1.0, 0.5)]
    ratio = spreads[1] / spreads[0] if spreads[0] > 0 else float("nan")
    if 0.8 < ratio < 1.25:
        return "raw"
    if 1.6 < ratio < 2.5:
        return "scaled"
    raise EngineDown(f"{url}: log-probabilities fit no known meaning (spread {spreads[0]:.4f}, then {spreads[1]:.4f})")


async def _spread(session: aiohttp.ClientSession, url: str, temperature: float) -> float:
    request = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"temperature": temperature, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": _PROBE_K,
    }
    reply = await _json(session, url, "POST", "/generate", request)
    try:
        values = [entry[0] for entry in reply["meta_info"]["output_top_logprobs"][0]]
        return float(max(values) - min(values))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineDown(f"{url}/generate gives no log-probabilities ({type(error).__name__}: {error})") from None


async def _first(session: aiohttp.ClientSession, url: str, paths: tuple[str, ...]) -> dict[str, Any]:
    for path in paths[:-1]:
        try:
            return await _json(session, url, "GET", path)
        except _NoSuchPath:
            continue
    return await _json(session, url, "GET", paths[-1])


class _NoSuchPath(EngineDown):
    pass


async def _json(session: aiohttp.ClientSession, url: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        async with session.request(method, url + path, json=body, timeout=timeout) as response:
            content = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineDown(f"{url} does not answer: {words_of(error)}") from None
    if response.status == 404:
        raise _NoSuchPath(f"{url} answers, but is no SGLang engine (no {path})")
    if response.status != 200:
        raise EngineDown(f"{url}{path} answers HTTP {response.status}: {content[:200].decode(errors='replace')}")
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        raise EngineDown(f"{url} answers, but is no SGLang engine ({path} is not JSON)") from None
    if not isinstance(found, dict):
        raise EngineDown(f"{url} answers, but is no SGLang engine ({path} is no object)")
    return found


def words_of(error: BaseException) -> str:
    """An error's text, without the note on TLS that aiohttp adds for every address."""
    return str(error).replace(" ssl:default", "") or type(error).__name__


def _names(*values: str | None) -> set[str]:
    given = [value.rstrip("/") for value in values if value]
    return {*given, *(PurePath(value).name for value in given)}
