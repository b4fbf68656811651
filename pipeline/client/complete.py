"""One prompt to its outcome: a completion, or the failure that says why there is none."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass

from pipeline.client.endpoint import Endpoint, Request
from pipeline.client.faults import RequestFault
from pipeline.client.retry import attempts
from pipeline.config import ClientConfig, SamplingConfig
from pipeline.engine.fleet import Fleet
from pipeline.prompts.template import PromptTemplate
from pipeline.records import Answer, Completion, Failure, Message, Outcome, Prompt, TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer with what was needed to get it; :func:`to_completion` makes a row of it."""

    prompt: TokenizedPrompt
    answer: Answer
    attempts: int
    latency_s: float
    engine: str
    sampling: str


@dataclass(frozen=True, slots=True)
class Completer:
    """Answers prompts through a fleet. One is shared by all workers."""

    fleet: Fleet
    endpoint: Endpoint
    client: ClientConfig
    sampling: SamplingConfig

    async def answer(self, tokenized: TokenizedPrompt) -> Answered | Failure:
        """Asks until there is a usable answer or no attempt is left. Faults of the request become a Failure;
        whatever else goes wrong is raised."""
        prompt = tokenized.prompt
        if problem := self._too_long(tokenized):
            return failure_of(prompt, RequestFault("too_long", problem), 0)
        request = Request(
            prompt, tokenized.prompt_ids, self.sampling.max_new_tokens, seed_of(self.sampling.seed, prompt.id)
        )
        started = time.monotonic()
        made = 0
        try:
            async for attempt in attempts(self.client):
                with attempt:
                    made = attempt.retry_state.attempt_number
                    async with self.fleet.lease() as engine:
                        answer = await self.endpoint.answer(engine.url, request)
        except RequestFault as fault:
            return failure_of(prompt, fault, made)
        latency_s = time.monotonic() - started
        return Answered(tokenized, answer, made, latency_s, engine.name, sampling_json(self.sampling, request.seed))

    def _too_long(self, tokenized: TokenizedPrompt) -> str | None:
        most = self.fleet.max_input_tokens
        if tokenized.prompt_ids is None or most is None or len(tokenized.prompt_ids) < most:
            return None
        return f"the prompt has {len(tokenized.prompt_ids)} tokens, the engine takes fewer than {most}"


def to_completion(answered: Answered, template: PromptTemplate | None) -> Outcome:
    """The row of an answer: its ids decoded, its reply as a message. CPU work, for a thread."""
    answer, prompt = answered.answer, answered.prompt
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
        segments=1,
        attempts=answered.attempts,
        latency_s=answered.latency_s,
        engine=answered.engine,
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
    """The sampling of one row, as JSON text."""
    return json.dumps(
        {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": seed,
        },
        separators=(",", ":"),
    )
