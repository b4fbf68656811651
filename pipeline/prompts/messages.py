"""A message as a dictionary, the way chat templates and OpenAI's interface take it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pipeline.records import Message

Call = dict[str, Any]


def message_fields(message: Message, call: Callable[[Call], Call]) -> dict[str, Any]:
    """The fields that have a value, tool calls as objects; ``call`` puts each of those in the form that is wanted."""
    fields = {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [call(found) for found in json.loads(message.tool_calls)] if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {name: value for name, value in fields.items() if value is not None}
