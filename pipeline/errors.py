"""What can go wrong, as types; each carries the exit status that the command line ends with.

==========  ======  =====================================================================
error       status  meaning
==========  ======  =====================================================================
InputError  2       a key, a file, a run folder or an address that cannot be used as given
EngineDown  1       an engine that we started, or were using, is gone
StoreError  1       the run folder cannot be written or does not hold what it says
==========  ======  =====================================================================

A prompt that cannot be answered is none of these: it is a :class:`pipeline.records.Failure`.
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_OK = 0
EXIT_BROKEN = 1
EXIT_BAD_INPUT = 2
EXIT_SOME_FAILED = 3
EXIT_STOPPED = 130


class PipelineError(Exception):
    """A fault that ends a command. Its text is one line, written for the person who ran the command."""

    exit_status = EXIT_BROKEN


class InputError(PipelineError):
    """Configuration or input that cannot be used.

    ``key`` names the configuration key or file at fault, ``accepted`` what would do instead.
    """

    exit_status = EXIT_BAD_INPUT

    def __init__(self, key: str, problem: str, accepted: Iterable[str] | str = ()) -> None:
        self.key = key
        choices = accepted if isinstance(accepted, str) else ", ".join(accepted)
        super().__init__(f"{key}: {problem}" + (f" (accepted: {choices})" if choices else ""))


class EngineDown(PipelineError):
    """An engine failed to start, died, or stopped answering."""


class StoreError(PipelineError):
    """The run folder could not be written, or what is in it is not what was written."""


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, however deep it lies; the others were its consequences or its like."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
