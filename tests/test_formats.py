"""One row of each format -> its conversation; wrong types -> a text that names the column."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.prompts.formats import FORMATS, MalformedRow, conversation
from pipeline.records import Message


def said(row: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(message.role, message.content) for message in conversation(row).messages]


def complaint(row: dict[str, Any]) -> str:
    with pytest.raises(MalformedRow) as caught:
        conversation(row)
    return str(caught.value)


USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


# messages


def test_messages_keep_every_field_a_template_knows() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        ]
    }
    assert conversation(row).messages == (
        Message("system", "s"),
        Message("user", "hi"),
        Message("assistant", None, reasoning_content="hm", tool_calls=json.dumps([CALL])),
        Message("tool", "2", tool_call_id="c1", name="add"),
    )


def test_fields_that_parquet_fills_with_null_are_as_if_absent() -> None:
    filled = {**USER, "reasoning_content": None, "tool_calls": None, "tool_call_id": None, "name": None}
    assert conversation({"messages": [filled]}) == conversation({"messages": [USER]})


def test_messages_as_json_text() -> None:
    assert said({"messages": json.dumps([USER])}) == [("user", "hi")]


def test_content_in_text_parts_is_joined_as_it_is() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image_url": None}]
    assert said({"messages": [{"role": "user", "content": parts}]}) == [("user", "a b")]


def test_tool_calls_as_json_text_are_the_same_as_a_list() -> None:
    listed, text = ({"role": "assistant", "tool_calls": calls} for calls in ([CALL], json.dumps([CALL], indent=1)))
    assert conversation({"messages": [listed]}) == conversation({"messages": [text]})


@pytest.mark.parametrize("none", [None, [], "", "[]"])
def test_no_tool_calls(none: Any) -> None:
    row = {"messages": [{"role": "assistant", "content": "x", "tool_calls": none}]}
    assert conversation(row).messages[0].tool_calls is None


@pytest.mark.parametrize(
    ("name", "role"),
    [("Human", "user"), ("gpt", "assistant"), ("developer", "system"), ("observation", "tool"), ("function", "tool")],
)
def test_speakers_under_other_names(name: str, role: str) -> None:
    assert said({"conversations": [{"from": name, "value": "x"}]}) == [(role, "x")]


def test_conversations_with_role_and_content() -> None:
    assert said({"conversations": [USER, {"role": "assistant", "content": ""}]}) == [("user", "hi"), ("assistant", "")]


# glaive


GLAIVE = {
    "system": 'SYSTEM: You have functions -\n{\n  "name": "add"\n}\n',
    "chat": (
        "USER: Add 1 and 2.\nASSISTANT: is not a turn here, nor USER: there\n\n\n"
        "ASSISTANT: <functioncall> {\"name\": \"add\"} <|endoftext|>\n\n\nFUNCTION RESPONSE: 3\n\n\n"
        "ASSISTANT: It is 3.\n\nAnything else? <|endoftext|>\nUSER: No\n\n\n"
    ),
}  # fmt: skip


def test_glaive_turns_begin_after_blank_lines_and_ends_of_text() -> None:
    assert said(GLAIVE) == [
        ("system", 'You have functions -\n{\n  "name": "add"\n}'),
        ("user", "Add 1 and 2.\nASSISTANT: is not a turn here, nor USER: there"),
        ("assistant", '<functioncall> {"name": "add"}'),
        ("tool", "3"),
        ("assistant", "It is 3.\n\nAnything else?"),
        ("user", "No"),
    ]


def test_glaive_without_a_system_text() -> None:
    assert said({"system": None, "chat": "USER: hi"}) == [("user", "hi")]
    assert said({"system": "SYSTEM: ", "chat": "USER: hi"}) == [("user", "hi")]
    assert said({"chat": "USER: hi"}) == [("user", "hi")]


def test_glaive_with_windows_line_ends() -> None:
    assert said({"chat": "USER: a\r\n\r\n\r\nASSISTANT: b"}) == [("user", "a"), ("assistant", "b")]


def test_an_empty_glaive_chat_has_no_turns() -> None:
    assert said({"chat": "  \n"}) == []


def test_a_glaive_chat_that_begins_with_something_else() -> None:
    assert complaint({"chat": "Hello\n\nUSER: hi"}) == (
        "chat: expected USER:, ASSISTANT: or FUNCTION RESPONSE: first, found 'Hello'"
    )


MARKERS = {"user": "USER", "assistant": "ASSISTANT", "tool": "FUNCTION RESPONSE"}
pieces = st.sampled_from(["a", ":", "{", " ", "\n", "USER: ", "x ASSISTANT:", "SYSTEM:"])
turn_texts = st.lists(pieces, max_size=8).map(lambda parts: "".join(parts).strip())
turn_texts = turn_texts.filter(lambda text: not re.search(r"(^|\n[ ]*\n)\s*(USER|ASSISTANT):", text))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(MARKERS)), turn_texts), min_size=1, max_size=6), st.integers(2, 4))
def test_any_turns_survive_being_written_as_a_glaive_chat(turns: list[tuple[str, str]], newlines: int) -> None:
    end = {"assistant": " <|endoftext|>"}
    chat = ("\n" * newlines).join(f"{MARKERS[role]}: {text}{end.get(role, '')}" for role, text in turns)
    assert said({"chat": chat}) == turns


# Columns of text


def test_question_and_answer() -> None:
    assert said({"question": "q", "answer": "a"}) == [("user", "q"), ("assistant", "a")]
    assert said({"question": "q"}) == [("user", "q")]


@pytest.mark.parametrize(("extra", "request_text"), [("more", "do\n\nmore"), ("", "do"), (" \n", "do"), (None, "do")])
def test_instruction_and_input_are_joined_by_a_blank_line(extra: str | None, request_text: str) -> None:
    row = {"instruction": "do", "input": extra, "output": "done"}
    assert said(row) == [("user", request_text), ("assistant", "done")]


def test_instruction_alone() -> None:
    assert said({"instruction": "do"}) == [("user", "do")]


def test_input_and_output() -> None:
    row = {"id": "x", "input": "i", "output": "o", "unit_tests": "[]"}
    assert said(row) == [("user", "i"), ("assistant", "o")]
    assert said({"input": "i", "output": None}) == [("user", "i")]


def test_prompt_as_text_and_as_messages() -> None:
    assert said({"prompt": "p"}) == [("user", "p")]
    assert said({"prompt": [USER], "chosen": [USER]}) == [("user", "hi")]


def test_text_is_one_user_message() -> None:
    assert said({"text": "USER: all of it\n"}) == [("user", "USER: all of it\n")]


def test_messages_come_before_the_prompt_they_began_with() -> None:
    assert said({"prompt": "hi", "messages": [USER, {"role": "assistant", "content": "a"}]})[1:] == [("assistant", "a")]


def test_a_column_that_is_null_gives_way_to_the_next_format() -> None:
    assert said({"messages": None, "prompt": "p"}) == [("user", "p")]


# System and tools


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_column_goes_first(column: str) -> None:
    assert said({"prompt": "p", column: "s"}) == [("system", "s"), ("user", "p")]
    assert said({"messages": [USER], column: "s"}) == [("system", "s"), ("user", "hi")]


def test_a_system_message_of_its_own_stands_in_place_of_the_column() -> None:
    row = {"messages": [{"role": "system", "content": "own"}, USER], "system": "column"}
    assert said(row) == [("system", "own"), ("user", "hi")]


@pytest.mark.parametrize("empty", [None, "", "  "])
def test_an_empty_system_column_is_no_message(empty: Any) -> None:
    assert said({"prompt": "p", "system": empty}) == [("user", "p")]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), json.dumps([TOOL], indent=2)])
def test_tools_are_kept_as_json_text(tools: Any) -> None:
    assert conversation({"prompt": "p", "tools": tools}).tools == json.dumps([TOOL])


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", "null"])
def test_no_tools(tools: Any) -> None:
    assert conversation({"prompt": "p", "tools": tools}).tools is None


def test_tools_keep_characters_beyond_ascii() -> None:
    assert "größe" in (conversation({"prompt": "p", "tools": [{"name": "größe"}]}).tools or "")


# What is malformed


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": 3}, "messages: expected a list of messages, found a number"),
        ({"messages": "oops"}, "messages: expected a list or its JSON text, found text that is not JSON"),
        ({"messages": ["hi"]}, "messages[0]: expected an object, found text"),
        ({"messages": [USER, None]}, "messages[1]: expected an object, found null"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: missing"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role: expected text, found a number"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected text, found a number"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: expected text, found null"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: expected text, found null"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content: expected text, found null"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content: expected text, found an object"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]: expected an object, found text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type: expected 'text', found 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: expected text, found null",
        ),
        ({"messages": [{**USER, "name": 3}]}, "messages[0].name: expected text, found a number"),
        (
            {"messages": [{**USER, "tool_calls": {"a": 1}}]},
            "messages[0].tool_calls: expected a list of objects, found an object",
        ),
        ({"messages": [{**USER, "tool_calls": ["x"]}]}, "messages[0].tool_calls[0]: expected an object, found text"),
        (
            {"conversations": [{"from": "human", "value": True}]},
            "conversations[0].value: expected text, found a boolean",
        ),
        ({"chat": ["USER: hi"]}, "chat: expected text, found a list"),
        ({"chat": "USER: hi", "system": 3}, "system: expected text, found a number"),
        ({"question": {}}, "question: expected text, found an object"),
        ({"question": "q", "answer": 2}, "answer: expected text, found a number"),
        ({"instruction": "i", "input": 2}, "input: expected text, found a number"),
        ({"input": "i", "output": []}, "output: expected text, found a list"),
        ({"prompt": 1.5}, "prompt: expected a list of messages, found a number"),
        ({"prompt": [USER, 1]}, "prompt[1]: expected an object, found a number"),
        ({"text": b"raw"}, "text: expected text, found bytes"),
        ({"text": "half \ud83d"}, "text: holds half of a surrogate pair, which no tokenizer and no Parquet file takes"),
        ({"prompt": "p", "system_prompt": []}, "system_prompt: expected text, found a list"),
        ({"prompt": "p", "tools": 3}, "tools: expected a list of objects, found a number"),
        ({"prompt": "p", "tools": "oops"}, "tools: expected a list or its JSON text, found text that is not JSON"),
        ({"prompt": "p", "tools": ["add"]}, "tools[0]: expected an object, found text"),
        ({"prompt": None}, "prompt: expected a value, found null"),
        ({"input": "x"}, "input: alone is no prompt, output is missing"),
    ],
)
def test_a_wrong_type_is_named_with_its_column(row: dict[str, Any], text: str) -> None:
    assert complaint(row) == text


def test_a_role_that_is_not_known_is_met_with_those_that_are() -> None:
    text = complaint({"messages": [{"role": "narrator", "content": "x"}]})
    assert text.startswith("messages[0].role: 'narrator' is not known (accepted: system, developer, user, ")


def test_tools_that_json_cannot_hold() -> None:
    assert complaint({"prompt": "p", "tools": [{"x": b"raw"}]}).startswith("tools: ")
    assert complaint({"prompt": "p", "tools": [{"x": float("nan")}]}).startswith("tools: ")


def test_a_row_of_other_columns_is_met_with_those_accepted() -> None:
    assert complaint({"foo": 1, "bar": 2}) == (
        "no column that a prompt is made of (found: foo, bar; accepted: messages, conversations, conversation, chat, "
        "question, instruction, input+output, prompt, text)"
    )
    assert "found: none;" in complaint({})


def test_every_format_is_told_apart_by_its_columns() -> None:
    assert len({form.columns for form in FORMATS}) == len(FORMATS)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "from", "content", "value", "type", "text", "tool_calls"]), inner)
    ),
    max_leaves=6,
)
column_names = st.sampled_from([*(form.columns[0] for form in FORMATS), "output", "answer", "system", "tools"])


@settings(deadline=None)
@given(st.dictionaries(column_names, anything, max_size=4))
def test_any_row_is_a_conversation_or_malformed_and_nothing_else(row: dict[str, Any]) -> None:
    with contextlib.suppress(MalformedRow):
        talk = conversation(row)
        json.dumps([message.content for message in talk.messages], ensure_ascii=False).encode()
