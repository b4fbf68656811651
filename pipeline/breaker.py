"""Stopping a run in which everything fails, before a million prompts have become failures."""

from __future__ import annotations

from pipeline.errors import EngineDown, InputError
from pipeline.records import Failure, FailureKind

_OF_THE_INPUT: frozenset[FailureKind] = frozenset({"malformed_row", "no_user_turn", "too_long"})

INPUT_FAILURES = 500
"""A run that has begun with this many unusable rows and not one usable one was given the wrong file."""


class CircuitBreaker:
    """Counts failures in a row; a completion sets the counts back.

    ``most`` failures of requests in a row end the run (0: never). Rows that are bad in themselves end it only where
    they are all there is from the start.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests_in_a_row = 0
        self._bad_rows_from_the_start: int | None = 0

    def succeeded(self) -> None:
        """A completion came."""
        self._requests_in_a_row = 0
        self._bad_rows_from_the_start = None

    def failed(self, failure: Failure) -> None:
        """A failure was recorded.

        Raises:
            EngineDown: too many requests in a row have failed.
            InputError: no row of the dataset is usable.
        """
        if failure.kind in _OF_THE_INPUT:
            self._count_bad_row(failure)
            return
        self._requests_in_a_row += 1
        if self._most and self._requests_in_a_row >= self._most:
            raise EngineDown(
                f"{self._requests_in_a_row} prompts in a row have failed, the last one so: {failure.kind}: "
                f"{failure.detail}; mend that, then run the same command with run.retry_failed=true "
                "(run.max_failures_in_a_row sets the limit, 0 takes it away)"
            )

    def _count_bad_row(self, failure: Failure) -> None:
        if self._bad_rows_from_the_start is None:
            return
        self._bad_rows_from_the_start += 1
        if self._bad_rows_from_the_start >= INPUT_FAILURES:
            raise InputError(
                "dataset.path",
                f"not one of the first {INPUT_FAILURES} rows is usable; the last one: {failure.kind}: {failure.detail}",
            )
