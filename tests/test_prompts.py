"""Rows -> prompts: which turns, which ids, what fails."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import DatasetConfig
from pipeline.digests import DigestSet
from pipeline.errors import InputError
from pipeline.prompts import read_prompts
from pipeline.prompts.formats import conversation
from pipeline.prompts.ids import SourceIds, content_hash, own_id
from pipeline.prompts.rows import BUNDLED
from pipeline.records import Failure, Prompt


def write(folder: Path, *rows: dict[str, Any] | bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def prompts(path: Path, **keys: Any) -> list[Prompt | Failure]:
    return list(read_prompts(DatasetConfig(name="D", path=str(path), **keys)))


def only_prompts(path: Path, **keys: Any) -> list[Prompt]:
    found = prompts(path, **keys)
    assert all(isinstance(prompt, Prompt) for prompt in found), found
    return [prompt for prompt in found if isinstance(prompt, Prompt)]


def talk(*turns: str, **columns: Any) -> dict[str, Any]:
    """``u:hello`` is a user message, ``a:``, ``s:`` and ``t:`` one of the assistant, the system or a tool."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return {**columns, "messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]}


def asked(prompt: Prompt | Failure) -> list[str]:
    assert isinstance(prompt, Prompt), prompt
    return [f"{message.role[0]}:{message.content}" for message in prompt.messages]


# Turns

LONG = ("s:be", "u:1", "a:one", "u:2", "a:three", "t:x", "a:seven..", "u:3")
ENDS = {0: ["s:be", "u:1"], 1: [*LONG[:4]], 2: [*LONG[:6]], 3: [*LONG]}


def test_first_is_what_comes_before_the_first_answer(tmp_path: Path) -> None:
    (prompt,) = only_prompts(write(tmp_path, talk(*LONG)), turns="first")
    assert (asked(prompt), prompt.turn, prompt.reference_chars) == (ENDS[0], 0, 3)


def test_last_is_what_comes_before_the_last_answer(tmp_path: Path) -> None:
    (prompt,) = only_prompts(write(tmp_path, talk(*LONG[:-1])), turns="last")
    assert (asked(prompt), prompt.turn, prompt.reference_chars) == (ENDS[2], 2, 7)


def test_last_is_everything_where_the_user_has_the_last_word(tmp_path: Path) -> None:
    (prompt,) = only_prompts(write(tmp_path, talk(*LONG)), turns="last")
    assert (asked(prompt), prompt.turn, prompt.reference_chars) == (ENDS[3], 3, None)


def test_all_is_every_place_where_an_assistant_answers_or_is_to(tmp_path: Path) -> None:
    found = only_prompts(write(tmp_path, talk(*LONG)), turns="all")
    assert {prompt.turn: asked(prompt) for prompt in found} == ENDS
    assert [prompt.reference_chars for prompt in found] == [3, 5, 7, None]


@pytest.mark.parametrize("turns", ["first", "last", "all"])
@pytest.mark.parametrize("ending", ["u:1", "t:1"])
def test_a_conversation_without_answers_is_one_prompt(tmp_path: Path, turns: str, ending: str) -> None:
    (prompt,) = only_prompts(write(tmp_path, talk("u:0", ending)), turns=turns)
    assert asked(prompt) == ["u:0", ending]
    assert prompt.reference_chars is None


def test_assistant_messages_in_a_row_are_one_turn(tmp_path: Path) -> None:
    path = write(tmp_path, talk("u:1", "a:12", "s:note", "a:345", "u:2", "a:6"))
    assert [(p.turn, len(p.messages), p.reference_chars) for p in only_prompts(path, turns="all")] == [
        (0, 1, 5),
        (1, 5, 1),
    ]
    assert asked(only_prompts(write(tmp_path, talk("u:1", "a:2", "a:3")), turns="last")[0]) == ["u:1"]


def test_the_same_turn_has_the_same_id_in_last_and_in_all(tmp_path: Path) -> None:
    path = write(tmp_path, talk(*LONG))
    assert prompts(path, turns="last")[0].id == prompts(path, turns="all")[-1].id
    assert prompts(path, turns="first")[0].id == prompts(path, turns="all")[0].id


def test_the_reference_counts_reasoning_too(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "four", "reasoning_content": "2+2"}
    (prompt,) = only_prompts(write(tmp_path, {"messages": [{"role": "user", "content": "?"}, answer]}))
    assert prompt.reference_chars == 7


def test_turns_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^dataset\.turns: 'rollout' is not known \(accepted: first, last, all\)$"):
        read_prompts(DatasetConfig(name="D", path=str(write(tmp_path, talk("u:1"))), turns="rollout"))


def test_a_source_that_cannot_be_used_is_known_before_the_first_prompt(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^dataset\.path: "):
        read_prompts(DatasetConfig(name="D", path=str(tmp_path / "none.jsonl")))


# Samples, tools and limit


def test_samples_are_prompts_of_their_own(tmp_path: Path) -> None:
    found = only_prompts(write(tmp_path, talk("u:1", "a:2", "u:3", "a:4", id="x")), turns="all", samples=2)
    assert [p.id for p in found] == ["D/x/t0/s0", "D/x/t0/s1", "D/x/t1/s0", "D/x/t1/s1"]
    assert [(p.dataset, p.source_id, p.turn, p.sample) for p in found[2:]] == [("D", "x", 1, 0), ("D", "x", 1, 1)]
    assert found[0].messages == found[1].messages


def test_tools_go_with_every_prompt(tmp_path: Path) -> None:
    found = only_prompts(write(tmp_path, talk("u:1", "a:2", "u:3", tools=[{"name": "f"}])), turns="all")
    assert [p.tools for p in found] == ['[{"name": "f"}]'] * 2


def test_the_limit_counts_source_rows_failures_among_them(tmp_path: Path) -> None:
    path = write(tmp_path, talk("u:1", "a:2", "u:3"), b"oops", talk("a:1"), talk("u:4"))
    found = prompts(path, limit=3, turns="all", samples=2)
    assert [type(item) for item in found] == [Prompt] * 4 + [Failure] * 2


def test_rows_beyond_the_limit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.prompts import prompts as module
    from pipeline.prompts.rows import RawRow

    def rows(_: DatasetConfig) -> Any:
        yield RawRow({"prompt": "p"}, "row 1")
        raise AssertionError("read beyond the limit")

    monkeypatch.setattr(module, "read_rows", rows)
    assert len(list(read_prompts(DatasetConfig(name="D", path="x", limit=1)))) == 1


# Failures


def failure(path: Path, **keys: Any) -> Failure:
    (found,) = prompts(path, **keys)
    assert isinstance(found, Failure), found
    return found


@pytest.mark.parametrize("turns", ["first", "last", "all"])
@pytest.mark.parametrize("row", [talk("s:x"), talk("u:  \n", "a:x"), talk("s:x", "a:y"), talk(), talk("t:only")])
def test_a_row_in_which_no_user_asks(tmp_path: Path, row: dict[str, Any], turns: str) -> None:
    found = failure(write(tmp_path, {**row, "id": "x"}), turns=turns, samples=3)
    assert (found.kind, found.id, found.dataset, found.source_id) == ("no_user_turn", "D/x/t0/s0", "D", "x")
    assert found.detail.startswith("rows.jsonl line 1: ")


def test_a_greeting_is_a_failure_of_its_turn_alone(tmp_path: Path) -> None:
    greeting, prompt = prompts(write(tmp_path, talk("a:hello", "u:1", "a:2", id="x")), turns="all")
    assert isinstance(greeting, Failure)
    assert greeting.id == "D/x/t0/s0"
    assert prompt.id == "D/x/t1/s0"


def test_a_malformed_row_says_where_and_what(tmp_path: Path) -> None:
    found = failure(write(tmp_path, b"", {"id": "x", "messages": [{"role": "user", "content": 3}]}))
    assert (found.kind, found.id) == ("malformed_row", "D/x/t0/s0")
    assert found.detail == "rows.jsonl line 2: messages[0].content: expected text, found a number"


def test_a_broken_line_says_where_and_what_and_is_named_by_its_bytes(tmp_path: Path) -> None:
    found = failure(write(tmp_path, b"", b"oops"))
    assert found.kind == "malformed_row"
    assert found.detail.startswith("rows.jsonl line 2: not JSON: ")
    assert found.source_id == hashlib.sha256(b"oops").hexdigest()[:16]


def test_a_failure_takes_nothing_from_the_rows_around_it(tmp_path: Path) -> None:
    found = prompts(write(tmp_path, talk("u:1"), b"oops", {"foo": 1}, talk("s:x"), talk("u:2")))
    assert [type(item) for item in found] == [Prompt, Failure, Failure, Failure, Prompt]


# Ids


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"id": " a "}, "a"),
        ({"id": 7}, "7"),
        ({"id": 0}, "0"),
        ({"uuid": "u", "prompt_id": "p"}, "p"),
        ({"id": "", "conversation_id": "c", "question_id": "q"}, "c"),
        ({"id": None, "question_id": 3}, "3"),
        ({"id": 1.5}, None),
        ({"id": True}, None),
        ({"id": ["x"]}, None),
        ({}, None),
        ({"id": "a b\nc\u2028\x00"}, "a%20b%0Ac%E2%80%A8%00"),
        ({"id": "größe/ü"}, "größe/ü"),
        ({"id": "\ud800"}, "%ED%A0%80"),
    ],
)
def test_the_id_a_row_brings_along(columns: dict[str, Any], expected: str | None) -> None:
    assert own_id(columns) == expected


def test_a_content_hash_is_the_sha256_of_canonical_json(tmp_path: Path) -> None:
    (prompt,) = only_prompts(write(tmp_path, {"question": "q", "answer": "ä", "tools": '[{"b": 1, "a": 2}]'}))
    canonical = (
        '{"messages":[{"content":"q","role":"user"},{"content":"\\u00e4","role":"assistant"}],"tools":[{"a":2,"b":1}]}'
    )
    assert prompt.source_id == hashlib.sha256(canonical.encode()).hexdigest()[:16]


def test_a_content_hash_does_not_depend_on_columns_but_on_answers_and_tools() -> None:
    def digest(row: dict[str, Any]) -> str:
        return content_hash(conversation(row))

    row = {"question": "q", "answer": "a", "level": 1}
    assert digest(row) == digest(dict(reversed(row.items())))
    assert digest(row) == digest(talk("u:q", "a:a"))
    different = [row, row | {"answer": "b"}, {"question": "q"}, row | {"tools": [{"n": 1}]}, row | {"system": "s"}]
    assert len({digest(each) for each in different}) == len(different)


def test_an_id_seen_before_gets_a_part_of_the_content_hash(tmp_path: Path) -> None:
    found = only_prompts(write(tmp_path, talk("u:1", id="x"), talk("u:2", id="x"), talk("u:3", id="x")))
    digests = [content_hash(conversation(talk(f"u:{n}"))) for n in (1, 2, 3)]
    assert [p.source_id for p in found] == ["x", f"x~{digests[1][:8]}", f"x~{digests[2][:8]}"]


def test_copies_of_a_row_are_numbered(tmp_path: Path) -> None:
    digest = content_hash(conversation(talk("u:1")))
    found = only_prompts(write(tmp_path, *[talk("u:1")] * 4))
    assert [p.source_id for p in found] == [digest, f"{digest}.2", f"{digest}.3", f"{digest}.4"]
    found = only_prompts(write(tmp_path, *[talk("u:1", id="x")] * 4))
    suffix = f"x~{digest[:8]}"
    assert [p.source_id for p in found] == ["x", suffix, f"{suffix}.2", f"{suffix}.3"]


def test_copies_of_a_broken_row_are_numbered(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"oops").hexdigest()[:16]
    assert [f.source_id for f in prompts(write(tmp_path, b"oops", b"oops"))] == [digest, f"{digest}.2"]


def test_a_copy_is_numbered_without_a_look_at_each_copy_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    holds = DigestSet.__contains__

    def counted(self: DigestSet, text: str) -> bool:
        nonlocal looks
        looks += 1
        return holds(self, text)

    monkeypatch.setattr(DigestSet, "__contains__", counted)
    ids = SourceIds()
    names = [ids.claim(None, "c") for _ in range(3000)]
    assert names == ["c", *(f"c.{n}" for n in range(2, 3001))]
    assert looks < 3000 * 25


def test_an_id_that_looks_like_a_numbered_one_is_met_with_another(tmp_path: Path) -> None:
    digest = content_hash(conversation(talk("u:1")))
    found = only_prompts(write(tmp_path, talk("u:9", id=f"{digest}.2"), talk("u:1"), talk("u:1"), talk("u:1")))
    assert len({p.id for p in found}) == 4


rows_of_any_kind = st.one_of(
    st.builds(lambda n: talk(f"u:{n}", "a:x"), st.integers(0, 3)),
    st.builds(lambda n, name: talk(f"u:{n}", id=name), st.integers(0, 3), st.sampled_from(["a", "b", "a.2"])),
    st.just({"foo": 1}),
)


@settings(deadline=None)
@given(st.lists(rows_of_any_kind, min_size=1, max_size=12))
def test_no_two_rows_have_the_same_id(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    found = prompts(write(tmp_path_factory.mktemp("rows"), *rows))
    assert len({item.id for item in found}) == len(rows)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_ids_do_not_depend_on_the_order_of_rows(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], chance: random.Random
) -> None:
    """Copies (the same number twice) included: as a whole they bear the same ids in any order."""
    rows = [talk(f"u:{n}", "a:x", **({"id": f"r{n}"} if n % 2 else {})) for n in numbers]
    folder = tmp_path_factory.mktemp("rows")

    def names() -> list[tuple[str, str]]:
        return sorted((item.id, asked(item)[0]) for item in prompts(folder / "rows.jsonl"))

    write(folder, *rows)
    before = names()
    chance.shuffle(rows)
    write(folder, *rows)
    assert names() == before


def test_ids_do_not_depend_on_the_file_a_row_lies_in(tmp_path: Path) -> None:
    for folder, names in (("one", "ab"), ("two", "ba")):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            write(tmp_path / folder, talk(f"u:{number}"), name=f"{name}.jsonl")
    first, second = (prompts(tmp_path / folder) for folder in ("one", "two"))
    assert {item.id for item in first} == {item.id for item in second}


@pytest.mark.parametrize("path", BUNDLED)
@pytest.mark.parametrize("turns", ["first", "last", "all"])
def test_every_bundled_row_is_a_prompt(path: str, turns: str) -> None:
    found = only_prompts(Path(path), source="bundled", turns=turns)
    assert len(found) >= 48
    assert len({prompt.id for prompt in found}) == len(found)
    assert all(prompt.messages[-1].role in ("user", "tool") for prompt in found)
