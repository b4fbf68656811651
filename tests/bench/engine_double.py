"""The engine double as a process of its own: prints its address, answers until it is ended.

    python tests/bench/engine_double.py [--slots 64] [--token-s 0.0005]

A request waits for one of ``slots``, then takes ``token-s`` seconds a token. ``GET /served`` gives the number of tokens
of all answers that were sent whole.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))
from doubles import EngineDouble, answer_to


class SlottedEngine(EngineDouble):
    """Answers as a loaded engine does: a fixed number at a time, each as long as it is."""

    def __init__(self, slots: int, token_s: float) -> None:
        super().__init__(always=self._slowly)
        self._slots = asyncio.Semaphore(slots)
        self._token_s = token_s
        self._replies: dict[tuple[int, int], dict[str, Any]] = {}
        self.served = 0

    async def _slowly(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        limit = body["sampling_params"]["max_new_tokens"]
        async with self._slots:
            await asyncio.sleep(self._token_s * limit)
        reply = self._reply(body)
        self.served += len(reply["output_ids"])
        return web.json_response(reply)

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """A reply made once for each shape of request, so that making it is not what is measured."""
        shape = (body["sampling_params"]["max_new_tokens"], body.get("top_logprobs_num", 0))
        if shape not in self._replies:
            self._replies[shape] = answer_to(body)
        made = self._replies[shape]
        return {**made, "meta_info": {**made["meta_info"], "id": body["rid"], "prompt_tokens": len(body["input_ids"])}}

    def routes(self) -> list[web.RouteDef]:
        """Those of the double, and the count of what was served."""
        return [*super().routes(), web.get("/served", self._served)]

    async def _served(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self.served})


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--token-s", type=float, default=0.0005)
    words = parser.parse_args()
    async with SlottedEngine(words.slots, words.token_s) as engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
