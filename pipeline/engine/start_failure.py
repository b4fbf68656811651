"""Why an engine did not start, in its own words: the log is read, never the clock alone."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 200_000

_KNOWN = (
    (re.compile(r"address already in use", re.I), "the port is taken"),
    (re.compile(r"Not enough host memory available.*"), ""),
    (re.compile(r"unrecognized arguments: .*"), ""),
    (re.compile(r"error: argument .*"), ""),
    (re.compile(r"No module named '?sglang'?.*"), "SGLang is not installed in this environment (see engine.python)"),
    (re.compile(r"(?:torch\.)?(?:cuda\.)?OutOfMemoryError.*|CUDA out of memory.*"), ""),
    (re.compile(r".*(?:is not a local folder|does not appear to have a file named|Repo id must be).*"), ""),
)
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[\w.]+(?:Error|Exception|Interrupt)\b: .*|error: .*)$")


def explain_start_failure(log: Path, exit_status: int | None) -> str:
    """One line: the engine's reason where the log gives one, else how it ended and where to look."""
    lines = _tail(log)
    reason = _known_reason(lines) or _last_error(lines)
    if reason:
        return f"{reason} (log: {log})"
    return f"{describe_exit(exit_status)}; its log ends: {lines[-1] if lines else '(empty)'} (log: {log})"


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "it did not get ready in time"
    if status == -9:
        return "it was killed (SIGKILL: the kernel's out-of-memory killer, or SGLang ending itself after a crash)"
    if status < 0:
        return f"it was ended by signal {-status}"
    return f"it ended with status {status}"


def last_error(log: Path) -> str | None:
    """The last line of a log that reads as an error."""
    return _last_error(_tail(log))


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def _known_reason(lines: list[str]) -> str | None:
    for pattern, words in _KNOWN:
        for line in reversed(lines):
            if match := pattern.search(line):
                return words or match.group(0).strip()
    return None


def _last_error(lines: list[str]) -> str | None:
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return line
    return None
