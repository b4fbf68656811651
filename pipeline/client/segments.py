"""Answers in pieces: what to continue with, and the pieces as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.records import Answer, Ids, Segment

A = TypeVar("A", bound=npt.NDArray[Any])


def output_so_far(prompt_ids: Ids, segments: Sequence[Segment]) -> Ids:
    """What the next segment continues: the prompt's ids and those of every segment, int32."""
    outputs = [segment.answer.output_ids for segment in segments if segment.answer.output_ids is not None]
    return np.concatenate([prompt_ids, *outputs]) if outputs else prompt_ids


def join(segments: Sequence[Segment]) -> Answer:
    """The answer that the segments make up.

    What describes the prompt (its tokens, and how many of them were cached) is the first segment's: those of the
    others count output that was sent back. Retractions and queueing add up.
    """
    if len(segments) == 1:
        return segments[0].answer
    answers = [segment.answer for segment in segments]
    first, last = answers[0], answers[-1]
    return Answer(
        output_ids=_joined([answer.output_ids for answer in answers]),
        output_logprobs=_joined([answer.output_logprobs for answer in answers]),
        topk_ids=_joined([answer.topk_ids for answer in answers]),
        topk_logprobs=_joined([answer.topk_logprobs for answer in answers]),
        tail_logprob=_joined([answer.tail_logprob for answer in answers]),
        finish_reason=last.finish_reason,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(answer.completion_tokens for answer in answers),
        prompt_ids=first.prompt_ids,
        cached_device_tokens=first.cached_device_tokens,
        cached_host_tokens=first.cached_host_tokens,
        retractions=_total([answer.retractions for answer in answers]),
        queue_s=_total([answer.queue_s for answer in answers]),
        weight_version=_versions(answers),
    )


def _joined(arrays: Sequence[A | None]) -> A | None:
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(present) != len(arrays):
        raise ValueError("some segments have a distribution and some have none")
    whole: A = np.concatenate(present)
    return whole


def _total(values: Sequence[Any]) -> Any:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def _versions(answers: Sequence[Answer]) -> str | None:
    """One version, or all of them in order where the weights changed in the middle of the answer."""
    found = dict.fromkeys(answer.weight_version for answer in answers if answer.weight_version is not None)
    return ",".join(found) or None
