"""The values that pass between the stages of a run.

Lengths: ``n`` is the number of generated tokens, ``k`` the entries kept per position. Everything is unshifted:
position ``t`` of every array describes the distribution from which ``output_ids[t]`` was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]

FailureKind = Literal[
    "malformed_row",  # the row cannot be read, or has none of the columns a prompt is made from
    "no_user_turn",  # the row has nothing that a user asked
    "too_long",  # the prompt leaves no room for an answer in the model's context
    "template",  # the model's chat template refuses the conversation
    "rejected",  # the engine refuses the request (a 4xx answer that a retry would not change)
    "bad_answer",  # every attempt brought an answer that breaks an invariant
    "aborted",  # the engine gave the answer up
    "timeout",  # no answer within client.timeout_s, at every attempt
    "unreachable",  # refused, reset or 5xx, at every attempt
]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, with the fields that chat templates know. ``tool_calls`` is JSON text."""

    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends where the target is to answer.

    ``id`` is stable: dataset, source row, turn and sample, never a position in a file. ``reference_chars`` is the
    length of the dataset's own answer where it has one, a hint for ordering and planning and nothing else.
    """

    id: str
    dataset: str
    source_id: str
    turn: int
    sample: int
    messages: tuple[Message, ...]
    tools: str | None = None
    reference_chars: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt (or a row that never became one) that ended without a completion, and why."""

    id: str
    dataset: str
    source_id: str
    kind: FailureKind
    detail: str
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt with the ids the engine will read: int32 [prompt_tokens], or None where the server renders the
    conversation itself (an OpenAI-compatible server)."""

    prompt: Prompt
    prompt_ids: Ids | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated for one request.

    ``output_ids`` int32 [n]; ``output_logprobs`` float32 [n]; ``topk_ids`` int32 [n, k] and ``topk_logprobs``
    float32 [n, k], descending along k; ``tail_logprob`` float32 [n], the log of the probability outside the k.
    None marks what the engine did not give. Times are in seconds.
    """

    output_ids: Ids | None
    output_logprobs: Logprobs | None
    topk_ids: Ids | None
    topk_logprobs: Logprobs | None
    tail_logprob: Logprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    prompt_ids: Ids | None = None
    text: str | None = None
    message: Message | None = None
    cached_device_tokens: int | None = None
    cached_host_tokens: int | None = None
    retractions: int | None = None
    queue_s: float | None = None
    weight_version: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of an answer as one request brought it; a whole answer is one segment or several.

    ``attempts`` counts the requests made for it, ``latency_s`` spans them; ``engine`` gave it.
    """

    answer: Answer
    attempts: int
    latency_s: float
    engine: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its answer: one row of a shard.

    ``latency_s`` spans the first byte sent to the last received, all segments and retries included;
    ``created_us`` is microseconds since 1970 (UTC).
    """

    prompt: Prompt
    prompt_ids: Ids | None
    answer: Answer
    text: str
    reply: Message
    segments: int
    attempts: int
    latency_s: float
    engine: str
    sampling: str
    created_us: int


Outcome: TypeAlias = Completion | Failure


@dataclass(slots=True)
class Totals:
    """Counts over completions. ``prompt_tokens`` splits into device-cached, host-cached and computed."""

    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    truncated: int = 0
    retractions: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def add(self, other: Totals) -> None:
        """Adds another set of counts to this one."""
        self.rows += other.rows
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_device_tokens += other.cached_device_tokens
        self.cached_host_tokens += other.cached_host_tokens
        self.truncated += other.truncated
        self.retractions += other.retractions
        for reason, count in other.finish_reasons.items():
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + count
