"""The circuit breaker: when a run in which everything fails is ended."""

from __future__ import annotations

import pytest

from pipeline.breaker import INPUT_FAILURES, CircuitBreaker
from pipeline.errors import EngineDown, InputError
from pipeline.records import Failure, FailureKind


def failure(kind: FailureKind) -> Failure:
    return Failure("local/a/t0/s0", "local", "a", kind, "the reason", 5)


def test_failed_requests_in_a_row_end_the_run_with_the_last_reason() -> None:
    breaker = CircuitBreaker(3)
    breaker.failed(failure("timeout"))
    breaker.failed(failure("unreachable"))
    with pytest.raises(EngineDown, match=r"3 prompts in a row.*bad_answer: the reason.*run\.retry_failed=true"):
        breaker.failed(failure("bad_answer"))


def test_a_completion_sets_the_count_back() -> None:
    breaker = CircuitBreaker(2)
    for _ in range(10):
        breaker.failed(failure("timeout"))
        breaker.succeeded()


def test_bad_rows_among_good_ones_never_end_a_run() -> None:
    breaker = CircuitBreaker(2)
    breaker.succeeded()
    for _ in range(INPUT_FAILURES * 3):
        breaker.failed(failure("malformed_row"))


def test_a_dataset_without_one_usable_row_ends_the_run() -> None:
    breaker = CircuitBreaker(2)
    for _ in range(INPUT_FAILURES - 1):
        breaker.failed(failure("no_user_turn"))
    with pytest.raises(InputError, match=r"dataset\.path: not one of the first"):
        breaker.failed(failure("malformed_row"))


def test_a_limit_of_0_takes_it_away() -> None:
    breaker = CircuitBreaker(0)
    for _ in range(1000):
        breaker.failed(failure("timeout"))
