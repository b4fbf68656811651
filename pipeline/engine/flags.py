"""An engine's flags, checked by the parser of the SGLang that will read them."""

from __future__ import annotations

import difflib
import subprocess
from dataclasses import dataclass

import orjson

from pipeline.engine.command import EngineCommand

_ASK = """
import json, sys
out = {"version": None, "known": [], "unknown": [], "problem": None}
try:
    import argparse, sglang
    from sglang.version import __version__
    out["version"] = __version__
    from sglang.srt.server_args import ServerArgs
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    out["known"] = sorted(parser._option_string_actions)
    try:
        _, rest = parser.parse_known_args(sys.argv[1:])
        out["unknown"] = [word for word in rest if word.startswith("--")]
    except (argparse.ArgumentError, SystemExit) as error:
        out["problem"] = str(error)
except Exception as error:
    out["problem"] = f"{type(error).__name__}: {error}"
print("\\n@" + json.dumps(out))
"""

_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class UnknownFlag:
    """A flag that SGLang does not know, and the one it knows that is most like it."""

    flag: str
    nearest: str | None


@dataclass(frozen=True, slots=True)
class FlagReport:
    """``version`` None: the interpreter has no SGLang, ``problem`` says why. ``problem`` else: a flag's value."""

    version: str | None
    unknown: tuple[UnknownFlag, ...]
    problem: str | None


def ask_parser(python: str, command: EngineCommand) -> FlagReport:
    """Has the engine's own interpreter parse the command's flags; takes as long as importing SGLang."""
    flags = command.argv[command.argv.index("sglang.launch_server") + 1 :]
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, *flags], env=command.env, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FlagReport(None, (), f"{python} did not import SGLang within {_TIMEOUT_S} s")
    _, mark, found = asked.stdout.rpartition(b"\n@")
    if not mark:
        words = asked.stderr.decode(errors="replace").strip().splitlines()
        return FlagReport(None, (), words[-1] if words else f"{python} ended with status {asked.returncode}")
    reply = orjson.loads(found)
    unknown = tuple(UnknownFlag(flag, _nearest(flag, reply["known"])) for flag in reply["unknown"])
    return FlagReport(reply["version"], unknown, reply["problem"])


def _nearest(flag: str, known: list[str]) -> str | None:
    matches = difflib.get_close_matches(flag.split("=")[0], known, 1)
    return matches[0] if matches else None
