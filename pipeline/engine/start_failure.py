"""Why an engine did not start, in its own words: the log is read, never the clock alone."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 200_000

# What the engine says, and the key that it is about.
_KNOWN = (
    (re.compile(r"address already in use.*", re.I), "engine.port"),
    (re.compile(r"Not enough host memory available.*"), "engine.hicache.size_gb, or engine.hicache.ratio"),
    (re.compile(r"unrecognized arguments: .*"), "engine.args"),
    (re.compile(r"error: (?:argument|ambiguous option).*"), "engine.args"),
    (re.compile(r"No module named '?sglang[\w.]*'?"), "engine.python, the interpreter that has SGLang"),
    (re.compile(r"(?:torch\.)?(?:cuda\.)?OutOfMemoryError.*|CUDA out of memory.*"), "engine.mem_fraction_static"),
    (re.compile(r"Not enough memory\. .*"), "engine.mem_fraction_static"),
    (
        re.compile(r"^.*(?:is not a local folder|does not appear to have a file named|Repo id must be).*"),
        "model.path, or model.tokenizer",
    ),
)
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[\w.]+(?:Error|Exception|Interrupt)\b: .*|error: .*)$")


def explain_start_failure(log: Path, exit_status: int | None) -> str:
    """One line: the engine's reason, with the key it is about where that is known, else how it ended; and the log.

    A log that was appended to tells of its last start only.
    """
    lines = _last_start(_tail(log))
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
    """The last line that reads as an error since the engine's last start."""
    return _last_error(_last_start(_tail(log)))


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def _last_start(lines: list[str]) -> list[str]:
    """What follows the last command line: each start writes its own first, as a comment."""
    starts = [number for number, line in enumerate(lines) if line.startswith("# ") and "sglang.launch_server" in line]
    return lines[starts[-1] + 1 :] if starts else lines


def _known_reason(lines: list[str]) -> str | None:
    for line in reversed(lines):
        for pattern, key in _KNOWN:
            if match := pattern.search(line):
                return f"{match.group(0).strip()} (see {key})"
    return None


def _last_error(lines: list[str]) -> str | None:
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return line
    return None
