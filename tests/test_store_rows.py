"""A completion as a record and as a row: what goes in comes out, to the bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import (
    ARRAY_COLUMNS,
    CONTRACT,
    DISTRIBUTION,
    TOOLS,
    UNICODE,
    answer,
    completion,
    completions,
    prompt,
    row_of,
    segment,
)

from pipeline.errors import StoreError
from pipeline.records import Completion, Message, Totals
from pipeline.store.rows import (
    ARRAYS,
    COMPLETION,
    SCHEMA,
    SEGMENT,
    Row,
    decode_segment,
    encode_completion,
    encode_segment,
    record_kind,
    to_table,
    totals_of,
    unpack,
    unpack_scalars,
)


def as_row(made: Completion) -> Row:
    return unpack(encode_completion(made))


def table_of(*made: Completion) -> pa.Table:
    table = to_table([as_row(one) for one in made])
    table.validate(full=True)
    return table


def given_arrays(made: Completion) -> dict[str, Any]:
    return {name: made.prompt_ids if name == "prompt_ids" else getattr(made.answer, name) for name in ARRAY_COLUMNS}


def column_bytes(table: pa.Table, index: int, name: str) -> bytes | None:
    """The values of one list column in one row, flat, as they lie in memory."""
    cell = table.slice(index, 1)[name].combine_chunks()
    if cell.null_count:
        return None
    while pa.types.is_list(cell.type):
        cell = cell.flatten()
    values: bytes = cell.to_numpy(zero_copy_only=False).tobytes()
    return values


def test_the_schema_is_the_contract_to_the_letter() -> None:
    assert SCHEMA.names == CONTRACT.names
    assert [str(column.type) for column in SCHEMA] == [str(column.type) for column in CONTRACT]
    assert SCHEMA.equals(CONTRACT)


@settings(max_examples=30, deadline=None)
@given(st.lists(completions(), min_size=1, max_size=4))
def test_a_table_of_completions_equals_them(made: list[Completion]) -> None:
    table = table_of(*made)
    assert table.schema.equals(CONTRACT)
    assert table.to_pylist() == [row_of(one) for one in made]
    for index, one in enumerate(made):
        for name, array in given_arrays(one).items():
            assert column_bytes(table, index, name) == (None if array is None else array.tobytes()), name


@settings(max_examples=20, deadline=None)
@given(completions())
def test_a_record_unpacks_into_the_arrays_it_was_made_of(made: Completion) -> None:
    payload = encode_completion(made)
    assert record_kind(payload) == COMPLETION
    assert unpack_scalars(payload) == unpack(payload).scalars
    assert unpack(payload).id == made.prompt.id
    for name, array in given_arrays(made).items():
        found = unpack(payload).arrays[name]
        assert (found is None) == (array is None)
        if found is not None:
            assert found.dtype == np.dtype(ARRAYS[name])
            assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("missing", [(), ARRAY_COLUMNS, DISTRIBUTION])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_segment_comes_back_as_it_was(k: int, missing: tuple[str, ...]) -> None:
    made = segment(seed=7, tokens=3, k=k, missing=missing)
    payload = encode_segment("B1/a/t0/s0", 2, made)
    assert record_kind(payload) == SEGMENT != COMPLETION
    assert (unpack_scalars(payload)["id"], unpack_scalars(payload)["number"]) == ("B1/a/t0/s0", 2)
    found = decode_segment(payload)
    assert (found.attempts, found.latency_s, found.engine) == (made.attempts, made.latency_s, made.engine)
    for field in fields(made.answer):
        before, after = getattr(made.answer, field.name), getattr(found.answer, field.name)
        if isinstance(before, np.ndarray):
            assert (after.dtype, after.shape, after.tobytes()) == (before.dtype, before.shape, before.tobytes())
        else:
            assert after == before


def test_bits_of_a_float_survive() -> None:
    odd = np.array([-np.inf, -0.0, -1e-45, -3.4028235e38, -np.float32(0.1)], dtype=np.float32)
    made = completion(tokens=5, k=1)
    made = completion(tokens=5, k=1, answer=answer(5, 1, tail_logprob=odd, topk_logprobs=odd[:, None]))
    table = table_of(made)
    assert column_bytes(table, 0, "tail_logprob") == odd.tobytes()
    assert column_bytes(table, 0, "topk_logprobs") == odd.tobytes()


@pytest.mark.parametrize("missing", [*ARRAY_COLUMNS, ARRAY_COLUMNS])
def test_null_columns_stand_beside_others_in_one_table(missing: str | tuple[str, ...]) -> None:
    gone = (missing,) if isinstance(missing, str) else missing
    made = [completion("a", seed=1), completion("b", seed=2, missing=gone), completion("c", tokens=7, seed=3)]
    table = table_of(*made)
    for name in ARRAY_COLUMNS:
        assert table[name].null_count == (name in gone)
    assert table.to_pylist() == [row_of(one) for one in made]
    assert table_of(made[1]).to_pylist() == [row_of(made[1])]


def test_rows_of_different_width_stand_in_one_table() -> None:
    made = [completion(str(k), tokens=1 + k, k=k, seed=k) for k in (4, 1, 0, 20, 2)]
    found = table_of(*made)
    assert found.to_pylist() == [row_of(one) for one in made]
    assert [name for name in DISTRIBUTION if found[name][2].as_py() is not None] == []


def test_positions_without_entries_are_as_many_as_tokens() -> None:
    empty = {"topk_ids": np.empty((3, 0), np.int32), "topk_logprobs": np.empty((3, 0), np.float32)}
    table = table_of(completion("a"), completion("b", answer=answer(3, 0, **empty)), completion("c", seed=9))
    assert table["topk_ids"][1].as_py() == table["topk_logprobs"][1].as_py() == [[], [], []]
    assert table["topk_ids"][2].as_py() == row_of(completion("c", seed=9))["topk_ids"]


def test_an_answer_of_no_tokens_is_a_row() -> None:
    made = [completion("a", tokens=0, k=2), completion("b", tokens=2, k=2, seed=1)]
    assert table_of(*made).to_pylist() == [row_of(one) for one in made]
    assert table_of(made[0])["topk_ids"][0].as_py() == []


def test_an_empty_table_has_the_schema() -> None:
    table = table_of()
    assert table.num_rows == 0
    assert table.schema.equals(CONTRACT)


@pytest.mark.parametrize("name", ARRAY_COLUMNS[1:])
def test_arrays_of_another_length_than_the_answer_are_refused(name: str) -> None:
    """They would shift the values of every row behind them."""
    short = getattr(answer(3, 4), name)[:2]
    made = completion("B", answer=answer(3, 4, **{name: short}))
    with pytest.raises(StoreError, match=rf"B1/B/t0/s0: {name} .* 3"):
        encode_completion(made)


def test_text_survives() -> None:
    message = Message("tool", UNICODE, UNICODE, '[{"id": "é"}]', "c1", UNICODE)
    made = completion(
        prompt(UNICODE, messages=(message, Message("user", None)), tools=TOOLS), text=UNICODE, reply=message
    )
    assert table_of(made).to_pylist() == [row_of(made)]


def test_counts_of_a_row() -> None:
    cut = answer(3, finish_reason="length", retractions=2, cached_device_tokens=7, cached_host_tokens=None)
    totals = totals_of(unpack_scalars(encode_completion(completion(answer=cut))))
    assert totals == Totals(1, 5, 3, 7, 0, 1, 2, {"length": 1})
    totals.add(totals_of(unpack_scalars(encode_completion(completion()))))
    assert totals == Totals(2, 10, 6, 9, 1, 1, 2, {"length": 1, "stop": 1})
    assert {field.name for field in fields(Totals)} == {
        "rows",
        "prompt_tokens",
        "completion_tokens",
        "cached_device_tokens",
        "cached_host_tokens",
        "truncated",
        "retractions",
        "finish_reasons",
    }, "a new count: give it a test here"
