"""One row -> the conversation it holds, by the columns it has.

``FORMATS`` is tried from the top; to add a format, write a function from columns to messages and give it a line there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipeline.prompts.raw import kind_of
from pipeline.records import Message

Columns: TypeAlias = Mapping[str, Any]

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "function_response"), "tool"),
}
"""What datasets call the speakers (in any case) -> what chat templates call them."""

END_OF_TEXT = "<|endoftext|>"
SYSTEM_COLUMNS = ("system", "system_prompt")

_GLAIVE_TURN = re.compile(r"\s*(USER|ASSISTANT|FUNCTION RESPONSE):(.*)", re.DOTALL)
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


class MalformedRow(ValueError):
    """A row that no conversation can be made of. The text names the column and what was found there."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All turns of a row, the dataset's own answers among them. ``tools`` is the JSON text of a list."""

    messages: tuple[Message, ...]
    tools: str | None


@dataclass(frozen=True, slots=True)
class Format:
    """A row has this format where it has all ``columns`` and the first of them is not null.

    ``read`` gives its turns, ``system`` the system message (or none) that goes first where the turns have none.
    """

    columns: tuple[str, ...]
    read: Callable[[Columns], list[Message]]
    system: Callable[[Columns], list[Message]]

    def fits(self, row: Columns) -> bool:
        return row.get(self.columns[0]) is not None and all(column in row for column in self.columns)


def conversation(row: Columns) -> Conversation:
    """Reads a row.

    Raises:
        MalformedRow: no column to make a prompt of, or a value of the wrong type in one.
    """
    form = _format_of(row)
    messages = form.read(row)
    if not any(message.role == "system" for message in messages):
        messages = form.system(row) + messages
    return Conversation(tuple(messages), _json_list(row.get("tools"), "tools"))


def _format_of(row: Columns) -> Format:
    for candidate in FORMATS:
        if candidate.fits(row):
            return candidate
    for candidate in FORMATS:
        if candidate.columns[0] in row:
            raise MalformedRow(f"{candidate.columns[0]}: {_unfit(candidate, row)}")
    found = ", ".join(list(row)[:10]) or "none"
    accepted = ", ".join("+".join(candidate.columns) for candidate in FORMATS)
    raise MalformedRow(f"no column that a prompt is made of (found: {found}; accepted: {accepted})")


def _unfit(candidate: Format, row: Columns) -> str:
    missing = [column for column in candidate.columns if column not in row]
    return f"alone is no prompt, {', '.join(missing)} is missing" if missing else "expected a value, found null"


# The formats


def _messages(row: Columns) -> list[Message]:
    return _message_list(row["messages"], "messages")


def _conversations(row: Columns) -> list[Message]:
    return _message_list(row["conversations"], "conversations")


def _conversation(row: Columns) -> list[Message]:
    return _message_list(row["conversation"], "conversation")


def _glaive_chat(row: Columns) -> list[Message]:
    return _glaive_turns(_text(row["chat"], "chat"))


def _question(row: Columns) -> list[Message]:
    return [Message("user", _text(row["question"], "question")), *_answer(row, "answer")]


def _instruction(row: Columns) -> list[Message]:
    instruction, extra = _text(row["instruction"], "instruction"), _optional_text(row, "input")
    request = f"{instruction}\n\n{extra}" if extra and extra.strip() else instruction
    return [Message("user", request), *_answer(row, "output")]


def _input_output(row: Columns) -> list[Message]:
    return [Message("user", _text(row["input"], "input")), *_answer(row, "output")]


def _prompt(row: Columns) -> list[Message]:
    prompt = row["prompt"]
    return [Message("user", _text(prompt, "prompt"))] if isinstance(prompt, str) else _message_list(prompt, "prompt")


def _text_column(row: Columns) -> list[Message]:
    return [Message("user", _text(row["text"], "text"))]


def _system(row: Columns) -> list[Message]:
    for column in SYSTEM_COLUMNS:
        text = _optional_text(row, column)
        if text and text.strip():
            return [Message("system", text)]
    return []


def _glaive_system(row: Columns) -> list[Message]:
    text = (_optional_text(row, "system") or "").strip().removeprefix("SYSTEM:").strip()
    return [Message("system", text)] if text else []


FORMATS = (
    Format(("messages",), _messages, _system),
    Format(("conversations",), _conversations, _system),
    Format(("conversation",), _conversation, _system),
    Format(("chat",), _glaive_chat, _glaive_system),
    Format(("question",), _question, _system),
    Format(("instruction",), _instruction, _system),
    Format(("input", "output"), _input_output, _system),
    Format(("prompt",), _prompt, _system),
    Format(("text",), _text_column, _system),
)


def _answer(row: Columns, column: str) -> list[Message]:
    answer = _optional_text(row, column)
    return [] if answer is None else [Message("assistant", answer)]


# Glaive's chat column: turns as text


def _glaive_turns(chat: str) -> list[Message]:
    """A turn begins at a line that begins with its marker, after a blank line or the end of a text."""
    turns: list[tuple[str, list[str]]] = []
    at_boundary = True
    for line in chat.split("\n"):
        marker = _GLAIVE_TURN.match(line) if at_boundary else None
        if marker:
            turns.append((_GLAIVE_ROLES[marker[1]], [marker[2]]))
        elif turns:
            turns[-1][1].append(line)
        elif line.strip():
            raise MalformedRow(f"chat: expected USER:, ASSISTANT: or FUNCTION RESPONSE: first, found {line[:40]!r}")
        at_boundary = not line.strip() or line.rstrip().endswith(END_OF_TEXT)
    return [Message(role, "\n".join(lines).replace(END_OF_TEXT, "").strip()) for role, lines in turns]


# Lists of messages


def _message_list(value: Any, column: str) -> list[Message]:
    items = _parsed(value, column)
    if not isinstance(items, list):
        raise MalformedRow(f"{column}: expected a list of messages, found {kind_of(items)}")
    return [_message(item, f"{column}[{index}]") for index, item in enumerate(items)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise MalformedRow(f"{where}: expected an object, found {kind_of(item)}")
    role = _role(item, where)
    message = Message(
        role=role,
        content=_content(item, where),
        reasoning_content=_optional_text(item, "reasoning_content", where),
        tool_calls=_json_list(item.get("tool_calls"), f"{where}.tool_calls"),
        tool_call_id=_optional_text(item, "tool_call_id", where),
        name=_optional_text(item, "name", where),
    )
    says_something_else = role == "assistant" and (message.tool_calls or message.reasoning_content)
    if message.content is None and not says_something_else:
        raise MalformedRow(f"{where}.content: expected text, found null")
    return message


def _role(item: Columns, where: str) -> str:
    key = "role" if item.get("role") is not None else "from"
    if item.get(key) is None:
        raise MalformedRow(f"{where}.role: missing")
    name = _text(item[key], f"{where}.{key}").strip().lower()
    if name not in ROLES:
        raise MalformedRow(f"{where}.{key}: {name!r} is not known (accepted: {', '.join(ROLES)})")
    return ROLES[name]


def _content(item: Columns, where: str) -> str | None:
    key = "content" if item.get("content") is not None or "value" not in item else "value"
    content = item.get(key)
    if content is None:
        return None
    if isinstance(content, list):
        return "".join(_part(part, f"{where}.{key}[{index}]") for index, part in enumerate(content))
    return _text(content, f"{where}.{key}")


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise MalformedRow(f"{where}: expected an object, found {kind_of(part)}")
    if part.get("type") != "text":
        raise MalformedRow(f"{where}.type: expected 'text', found {part.get('type')!r}")
    return _text(part.get("text"), f"{where}.text")


# Values


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise MalformedRow(f"{where}: expected text, found {kind_of(value)}")
    if not _is_unicode(value):
        raise MalformedRow(f"{where}: holds half of a surrogate pair, which no tokenizer and no Parquet file takes")
    return value


def _optional_text(row: Columns, column: str, where: str = "") -> str | None:
    value = row.get(column)
    return None if value is None else _text(value, f"{where}.{column}" if where else column)


def _json_list(value: Any, where: str) -> str | None:
    """JSON text of a list of objects; None where there is none, or nothing in it."""
    items = _parsed(value, where) if value else None
    if items is None or items == []:
        return None
    if not isinstance(items, list):
        raise MalformedRow(f"{where}: expected a list of objects, found {kind_of(items)}")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise MalformedRow(f"{where}[{index}]: expected an object, found {kind_of(item)}")
    try:
        return _text(json.dumps(items, ensure_ascii=False, allow_nan=False), where)
    except (TypeError, ValueError) as error:
        raise MalformedRow(f"{where}: {error}") from error


def _parsed(value: Any, where: str) -> Any:
    """The value itself, or what it says where it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f"{where}: expected a list or its JSON text, found text that is not JSON") from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
