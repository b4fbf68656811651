"""DigestSet against a plain set."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import digests
from pipeline.digests import DigestSet


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BATCH", 8)


def text_with_digest_ending(tail: bytes, above: int = 0) -> str:
    return next(str(n) for n in range(above, 10_000_000) if digests._digest(str(n)).endswith(tail))


def test_add_says_whether_a_text_is_new() -> None:
    seen = DigestSet()
    assert seen.add("a")
    assert not seen.add("a")
    assert seen.add("b")
    assert len(seen) == 2


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.text(max_size=2), max_size=30)), max_size=12))
def test_agrees_with_a_set_over_any_mix_of_add_and_update(steps: list[tuple[bool, list[str]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BATCH", 8)
        seen, model = DigestSet(), set()
        for in_bulk, texts in steps:
            if in_bulk:
                seen.update(texts)
                model |= set(texts)
            for text in [] if in_bulk else texts:
                assert seen.add(text) == (text not in model)
                model.add(text)
        assert len(seen) == len(model)
        assert all(text in seen for text in model)
        assert "not a text of two characters" not in seen


@pytest.mark.usefixtures("small_batches")
def test_texts_are_still_known_after_they_are_merged() -> None:
    seen = DigestSet()
    for n in range(1000):
        assert seen.add(str(n))
    assert len(seen._sorted) > 900, "the test is about digests that have moved to the array"
    assert not any(seen.add(str(n)) for n in range(1000))
    assert len(seen) == 1000


@pytest.mark.parametrize("tail", [b"\0", b"\0\0"])
def test_a_digest_that_ends_in_zero_bytes_is_found_in_the_array(tail: bytes) -> None:
    text = text_with_digest_ending(tail)
    seen = DigestSet(["other", text])
    assert text in seen
    assert not seen.add(text)
    assert len(seen) == 2


def test_digests_that_differ_in_zero_bytes_at_the_end_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = {"short": b"x" * 14 + b"\0\0", "long": b"x" * 14 + b"\0y", "zero": bytes(16), "one": bytes(15) + b"\1"}
    monkeypatch.setattr(digests, "_digest", padded.__getitem__)
    seen = DigestSet(["short", "zero"])
    assert "short" in seen
    assert "zero" in seen
    assert "long" not in seen
    assert "one" not in seen
    seen.update(["one", "long"])
    assert len(seen) == 4


def test_an_update_counts_a_repeated_text_once() -> None:
    seen = DigestSet(["a"])
    seen.update(["a", "b", "b"])
    assert len(seen) == 2


def test_an_update_keeps_what_was_added_one_by_one() -> None:
    seen = DigestSet()
    seen.add("a")
    seen.update(["b"])
    assert "a" in seen
    assert len(seen) == 2


def test_half_a_surrogate_pair_is_a_text_too() -> None:
    seen = DigestSet(["\ud800"])
    assert "\ud800" in seen
    assert "\ud801" not in seen


def test_a_million_ids_take_under_four_seconds_and_17_bytes_each() -> None:
    started = time.process_time()
    seen = DigestSet(f"B2/{n}/t0/s0" for n in range(1_000_000))
    assert time.process_time() - started < 4.0
    assert len(seen) == 1_000_000
    assert seen._sorted.nbytes / len(seen) < 17
    assert not seen._recent
