"""An engine's flags, checked by the parser of the SGLang that will read them."""

from __future__ import annotations

import difflib
import subprocess
from dataclasses import dataclass

import orjson

from pipeline.engine.command import EngineCommand

_ASK = """
import json, sys
out = {"version": None, "known": [], "unknown": [], "deprecated": {}, "problem": None}
try:
    import argparse, sglang
    from sglang.version import __version__
    out["version"] = __version__
    from sglang.srt.server_args import ServerArgs
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    options = parser._option_string_actions
    out["known"] = sorted(options)
    words = []
    for word in sys.argv[1:]:
        flag, mark, value = word.partition("=")
        if flag.startswith("--") and flag not in options:
            # The engine's own parser takes the beginning of a flag's name, where one flag alone has it.
            longer = [option for option in options if option.startswith(flag)]
            flag = longer[0] if len(longer) == 1 else flag
        words.append(flag + mark + value)
        action = options.get(flag)
        if action is not None and (action.help or "").lstrip("(").startswith("Deprecated"):
            out["deprecated"][flag] = getattr(action, "new_flag", None) or action.help
    try:
        _, rest = parser.parse_known_args(words)
        out["unknown"] = [word for word in rest if word.startswith("-")] or rest
    except (argparse.ArgumentError, SystemExit) as error:
        out["problem"] = str(error)
except Exception as error:
    out["problem"] = f"{type(error).__name__}: {error}"
print("\\n@" + json.dumps(out))
"""

_TIMEOUT_S = 180


RENAMED = {
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--enable-ep-moe": "--ep-size",
    "--enable-deepep-moe": "--moe-a2a-backend",
    "--enable-flashinfer-cutlass-moe": "--moe-runner-backend",
    "--enable-flashinfer-trtllm-moe": "--moe-runner-backend",
    "--enable-triton-kernel-moe": "--moe-runner-backend",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
}
"""Flags of earlier versions that SGLang 0.5.23 refuses, and what it has instead."""

IGNORED = ("--num-continuous-decode-steps",)
"""Flags that SGLang 0.5.23 reads and does nothing with."""


@dataclass(frozen=True, slots=True)
class UnknownFlag:
    """A flag that SGLang does not know, and its new name, or else the one it knows that is most like it."""

    flag: str
    nearest: str | None


@dataclass(frozen=True, slots=True)
class OutdatedFlag:
    """A flag that SGLang still takes; ``instead`` is what it asks for in its place, None where it ignores the flag."""

    flag: str
    instead: str | None


@dataclass(frozen=True, slots=True)
class FlagReport:
    """``version`` None: the interpreter has no SGLang, ``problem`` says why. ``problem`` else: a flag's value."""

    version: str | None
    unknown: tuple[UnknownFlag, ...]
    problem: str | None
    outdated: tuple[OutdatedFlag, ...] = ()


def ask_parser(python: str, command: EngineCommand) -> FlagReport:
    """Has the engine's own interpreter parse the command's flags; takes as long as importing SGLang."""
    flags = command.argv[command.argv.index("sglang.launch_server") + 1 :]
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, *flags], env=command.env, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FlagReport(None, (), f"{python} did not import SGLang within {_TIMEOUT_S} s")
    except OSError as error:
        return FlagReport(None, (), f"{python} cannot be run: {error.strerror}")
    _, mark, found = asked.stdout.rpartition(b"\n@")
    if not mark:
        words = asked.stderr.decode(errors="replace").strip().splitlines()
        return FlagReport(None, (), words[-1] if words else f"{python} ended with status {asked.returncode}")
    reply = orjson.loads(found)
    unknown = tuple(UnknownFlag(flag, _nearest(flag, reply["known"])) for flag in reply["unknown"])
    outdated = [OutdatedFlag(flag, instead) for flag, instead in reply["deprecated"].items()]
    outdated += [OutdatedFlag(flag, None) for flag in IGNORED if _names(flags, flag)]
    return FlagReport(reply["version"], unknown, reply["problem"], tuple(outdated))


def _names(words: list[str], flag: str) -> bool:
    return any(word.split("=")[0] == flag for word in words)


def _nearest(flag: str, known: list[str]) -> str | None:
    name = flag.split("=")[0]
    if (renamed := RENAMED.get(name)) in known:
        return renamed
    matches = difflib.get_close_matches(name, known, 1)
    return matches[0] if matches else None
