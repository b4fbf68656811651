"""One prompt to its outcome: a completion, or the failure that says why there is none.

An answer is asked for whole, or ``sampling.segment_tokens`` at a time: each request continues with the prompt and the
output so far, until the answer stops or reaches ``sampling.max_new_tokens``. Sampling is the same either way, since
the distribution at a position depends on the tokens before it and on nothing else that a request carries.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

from pipeline.client.endpoint import Endpoint, Request
from pipeline.client.faults import RequestFault
from pipeline.client.retry import attempts
from pipeline.client.segments import join, output_so_far
from pipeline.config import ClientConfig, SamplingConfig
from pipeline.engine.fleet import Engine, Fleet, Seat
from pipeline.prompts.template import PromptTemplate
from pipeline.records import Answer, Completion, Failure, Message, Prompt, Segment, TokenizedPrompt

Keep = Callable[[int, Segment], Awaitable[None]]
"""Called with each segment that is not an answer's last, and its number, counted from 0."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer in its segments; :func:`to_completion` makes a row of it."""

    prompt: TokenizedPrompt
    segments: tuple[Segment, ...]
    sampling: str


@dataclass(frozen=True, slots=True)
class Completer:
    """Answers prompts through a fleet. One is shared by all workers."""

    fleet: Fleet
    endpoint: Endpoint
    client: ClientConfig
    sampling: SamplingConfig

    async def answer(self, prompt: TokenizedPrompt, begun: Sequence[Segment], keep: Keep) -> Answered | Failure:
        """Asks until the answer is whole or no attempt is left.

        Args:
            begun: the segments that are there already, from an earlier session.

        Faults of the request become a Failure; whatever else goes wrong is raised.
        """
        segments = list(begun)
        try:
            self._refuse_too_long(prompt)
            async with self.fleet.seat() as seat:
                while limit := self._tokens_to_ask_for(prompt, segments):
                    if len(segments) > len(begun):
                        await keep(len(segments) - 1, segments[-1])
                    segments.append(await self._segment(self._request(prompt, segments, limit), seat))
        except _GivenUp as given_up:
            made = given_up.attempts + sum(segment.attempts for segment in segments)
            return failure_of(prompt.prompt, given_up.fault, made)
        seed = seed_of(self.sampling.seed, prompt.prompt.id)
        return Answered(prompt, tuple(segments), sampling_json(self.sampling, seed))

    def _tokens_to_ask_for(self, prompt: TokenizedPrompt, segments: Sequence[Segment]) -> int:
        """The limit of the next request, 0 where the answer is whole: stopped, at its limit, or at the end of the
        context (a segment that is shorter than what was asked for, without having stopped)."""
        lengths = [segment.answer.completion_tokens for segment in segments]
        left = self.sampling.max_new_tokens - sum(lengths)
        if not segments:
            return self._at_a_time(left)
        if segments[-1].answer.finish_reason == "stop" or lengths[-1] < self._at_a_time(left + lengths[-1]):
            return 0
        most = self.fleet.max_input_tokens
        if prompt.prompt_ids is not None and most is not None and len(prompt.prompt_ids) + sum(lengths) >= most:
            return 0
        return self._at_a_time(left)

    def _at_a_time(self, left: int) -> int:
        return min(self.sampling.segment_tokens or left, left)

    def _request(self, prompt: TokenizedPrompt, segments: Sequence[Segment], limit: int) -> Request:
        ids = None if prompt.prompt_ids is None else output_so_far(prompt.prompt_ids, segments)
        return Request(prompt.prompt, ids, limit, seed_of(self.sampling.seed, prompt.prompt.id))

    async def _segment(self, request: Request, seat: Seat) -> Segment:
        started = time.monotonic()
        made = 0
        try:
            async for attempt in attempts(self.client):
                with attempt:
                    made = attempt.retry_state.attempt_number
                    engine = await seat.take()
                    answer = await self._ask(engine, request, seat)
        except RequestFault as fault:
            raise _GivenUp(fault, made) from None
        return Segment(answer, made, time.monotonic() - started, engine.name)

    async def _ask(self, engine: Engine, request: Request, seat: Seat) -> Answer:
        try:
            return await self.endpoint.answer(engine.url, request)
        except RequestFault as fault:
            # The pause before the next attempt is somebody else's turn.
            await seat.leave()
            if fault.connection:
                fault.engine_lost = await self.fleet.lost(engine)
            raise

    def _refuse_too_long(self, prompt: TokenizedPrompt) -> None:
        most = self.fleet.max_input_tokens
        if prompt.prompt_ids is not None and most is not None and len(prompt.prompt_ids) >= most:
            detail = f"the prompt has {len(prompt.prompt_ids)} tokens, the engine takes fewer than {most}"
            raise _GivenUp(RequestFault("too_long", detail, permanent=True), 0)


class _GivenUp(Exception):
    """No attempt is left; ``attempts`` were made for the segment at hand."""

    def __init__(self, fault: RequestFault, attempts: int) -> None:
        self.fault = fault
        self.attempts = attempts
        super().__init__(str(fault))


def to_completion(answered: Answered, template: PromptTemplate | None) -> Completion:
    """The row of an answer: its segments joined, its ids decoded, its reply as a message. CPU work, for a thread."""
    answer, prompt, segments = join(answered.segments), answered.prompt, answered.segments
    text, reply = answer.text, answer.message
    if template is not None and answer.output_ids is not None:
        text = template.decode(answer.output_ids, skip_special=False)
        reply = reply or Message("assistant", template.decode(answer.output_ids, skip_special=True))
    return Completion(
        prompt=prompt.prompt,
        prompt_ids=prompt.prompt_ids if prompt.prompt_ids is not None else answer.prompt_ids,
        answer=answer,
        text=text or "",
        reply=reply or Message("assistant", text),
        segments=len(segments),
        attempts=sum(segment.attempts for segment in segments),
        latency_s=sum(segment.latency_s for segment in segments),
        engine=",".join(dict.fromkeys(segment.engine for segment in segments)),
        sampling=answered.sampling,
        created_us=time.time_ns() // 1000,
    )


def failure_of(prompt: Prompt, fault: RequestFault, made: int) -> Failure:
    """The failure record of a prompt whose last attempt ended in ``fault``."""
    return Failure(prompt.id, prompt.dataset, prompt.source_id, fault.kind, fault.detail, made)


def seed_of(seed: int | None, prompt_id: str) -> int | None:
    """The seed of one row: the first 31 bits of BLAKE2b over the run's seed and the row's id, so that a row is
    drawn alike in whatever order, and on whatever day, it is asked for."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_json(sampling: SamplingConfig, seed: int | None) -> str:
    """The sampling of one row, as JSON text; what decides how requests are cut is no part of it."""
    settings = {name: value for name, value in asdict(sampling).items() if name != "segment_tokens"}
    return json.dumps({**settings, "seed": seed}, separators=(",", ":"))
