"""Where in a conversation the target is to answer."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.records import Message

ASKING = ("user", "tool")
"""Roles whose message an assistant answers."""


@dataclass(frozen=True, slots=True)
class Cut:
    """``messages[:end]`` is what assistant turn number ``turn`` answers. ``reference_chars`` is the length of the
    dataset's own answer there, None where it has none."""

    turn: int
    end: int
    reference_chars: int | None


def cuts(messages: tuple[Message, ...], turns: str) -> list[Cut]:
    """The places that ``dataset.turns`` (``first``, ``last`` or ``all``) chooses; none where nobody asks.

    Assistant messages with no question between them are one turn. A conversation that ends with a question has a
    turn there too, one without an answer of the dataset's.
    """
    found = _all_cuts(messages)
    chosen = {"first": found[:1], "last": found[-1:], "all": found}
    if turns not in chosen:
        raise InputError("dataset.turns", f"{turns!r} is not known", chosen)
    return chosen[turns]


def _all_cuts(messages: tuple[Message, ...]) -> list[Cut]:
    ends = _answer_starts(messages)
    found = [Cut(turn, end, _answer_chars(messages[end:])) for turn, end in enumerate(ends)]
    if messages and messages[-1].role in ASKING:
        found.append(Cut(len(found), len(messages), None))
    return found


def _answer_starts(messages: tuple[Message, ...]) -> list[int]:
    starts: list[int] = []
    answered = False
    for index, message in enumerate(messages):
        if message.role == "assistant" and not answered:
            starts.append(index)
            answered = True
        elif message.role in ASKING:
            answered = False
    return starts


def _answer_chars(following: tuple[Message, ...]) -> int:
    chars = 0
    for message in following:
        if message.role in ASKING:
            break
        if message.role == "assistant":
            chars += len(message.content or "") + len(message.reasoning_content or "")
    return chars
