"""The command line: ``python -m pipeline VERB [key=value ...]``. The only module that knows Hydra."""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from pipeline import verbs
from pipeline.config import Config, check
from pipeline.errors import EXIT_BAD_INPUT, EXIT_BROKEN, EXIT_STOPPED, InputError, PipelineError

# Keys that hold mappings: any name may be set below them.
_OPEN_KEYS = ("engine.env.", "model.chat_template_kwargs.")


@dataclass(frozen=True, slots=True)
class Verb:
    """One command: what it does in a line, an example, and the function that does it (returning the exit status).

    ``reads_run`` marks the commands that look at a folder; they take no notice of what else is configured.
    """

    summary: str
    example: str
    act: Callable[[Config, str], int]
    reads_run: bool = False


VERBS = {
    "run": Verb("generate, resuming what is there", "run dataset=B2", verbs.run),
    "serve": Verb("start and supervise engines, nothing else", "serve engine=cpu engine.port=30000", verbs.serve),
    "status": Verb("progress of a run, live or dead", "status run.dir=outputs/NAME", verbs.status, True),
    "audit": Verb("re-read a run and check every invariant", "audit run.dir=outputs/NAME", verbs.audit, True),
    "export": Verb("trainer-ready files", "export run.dir=outputs/NAME to=specforge", verbs.export, True),
    "doctor": Verb("is this machine ready: engine, flags, RAM, disk", "doctor profile=demo", verbs.doctor),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(usage())
            return 0 if words else EXIT_BAD_INPUT
        verb = find_verb(words[0])
        overrides, options = split_options(words[1:])
        if "--help" in options:
            print(verb_help(words[0], verb))
            return 0
        if "--cfg" in options:
            print(OmegaConf.to_yaml(compose_config(overrides), resolve="--resolve" in options), end="")
            return 0
        config, text = load_config(overrides)
        _refuse_absent_folder(verb, overrides)
        return verb.act(config, text)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; everything recorded so far is safe, the same command goes on from here", file=sys.stderr)
        return EXIT_STOPPED
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN


def usage() -> str:
    """The verbs, and how the rest of a command line is written."""
    lines = ["usage: python -m pipeline VERB [key=value ...]", ""]
    lines += [f"  {name:<8} {verb.summary}" for name, verb in VERBS.items()]
    lines += [
        "",
        "VERB --help lists the groups and keys, VERB --cfg job shows the configuration that a command would use.",
        "The first command to try: python -m pipeline run dataset=B2",
    ]
    return "\n".join(lines)


def verb_help(name: str, verb: Verb) -> str:
    """One verb's summary, its example, the configuration groups with their choices, and every key with its value."""
    groups = [f"  {group}={'|'.join(choices)}" for group, choices in group_choices().items()]
    config = OmegaConf.to_yaml(compose_config([]))
    return "\n".join(
        [
            f"{name}: {verb.summary}",
            "",
            f"example: python -m pipeline {verb.example}",
            "",
            "groups (GROUP=CHOICE):",
            *groups,
            "",
            "keys (KEY=VALUE, nested keys joined by dots), with the default profile's values:",
            *(f"  {line}" for line in config.splitlines()),
        ]
    )


def find_verb(word: str) -> Verb:
    """The verb of that name.

    Raises:
        InputError: there is none; the nearest is named.
    """
    if word in VERBS:
        return VERBS[word]
    if "=" in word or word.startswith("-"):
        raise InputError("command", f"the verb comes first, before {word!r}", VERBS)
    raise InputError("command", f"{word!r} is no verb{_nearest(word, VERBS)}", VERBS)


def split_options(words: Sequence[str]) -> tuple[list[str], set[str]]:
    """Separates ``--help``, ``--cfg job`` and ``--resolve`` from the ``key=value`` words.

    Raises:
        InputError: an option of another name.
    """
    overrides, options = [], set()
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word in ("-h", "--help"):
            options.add("--help")
        elif word in ("--cfg", "-c"):
            if pending[:1] != ["job"]:
                raise InputError("--cfg", f"{pending[0] if pending else 'nothing'!r} cannot be shown", "job")
            pending.pop(0)
            options.add("--cfg")
        elif word == "--cfg=job":
            options.add("--cfg")
        elif word == "--resolve":
            options.add("--resolve")
        elif word.startswith("-"):
            raise InputError(word, "no such option", ("--help", "--cfg job", "--resolve", "key=value"))
        else:
            overrides.append(word)
    return overrides, options


def load_config(overrides: Sequence[str]) -> tuple[Config, str]:
    """The checked configuration, and the same as resolved YAML.

    Raises:
        InputError: naming the key at fault and what it takes.
    """
    composed = compose_config(overrides)
    try:
        text = OmegaConf.to_yaml(composed, resolve=True)
        config = cast(Config, OmegaConf.to_object(composed))
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise InputError(str(key), "a value is needed", f"{key}=VALUE") from None
    except OmegaConfBaseException as error:
        raise InputError(str(getattr(error, "full_key", None) or "configuration"), _one_line(error)) from None
    check(config)
    return config, text


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Composes ``conf/`` with the overrides.

    Raises:
        InputError: an override that cannot be read, or names a key, group or choice that does not exist.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("models", models_folder, replace=True)
    words = [_as_hydra(word) for word in overrides]
    for word in words:
        _parse(word)
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose("config", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, words) from None


def conf_dir() -> Path:
    """The folder of configuration files: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def models_folder(name: str) -> str:
    """Where ``./run.sh setup`` puts a model made without a hub."""
    return str(cache_dir() / "models" / name)


def cache_dir() -> Path:
    """``EAGLE3_DATA_CACHE``, or ``eagle3-data`` in the user's cache folder."""
    if given := os.environ.get("EAGLE3_DATA_CACHE"):
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle3-data"


def group_choices() -> dict[str, list[str]]:
    """The configuration groups and the choices of each."""
    folders = sorted(folder for folder in conf_dir().iterdir() if folder.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def _as_hydra(word: str) -> str:
    """``to=X`` chooses the export group; a name below a mapping needs Hydra's ``++``."""
    if word.startswith("to="):
        return f"export={word.removeprefix('to=')}"
    return f"++{word}" if word.startswith(_OPEN_KEYS) else word


def _parse(word: str) -> None:
    if "=" not in word and not word.startswith("~"):
        raise InputError(word, "is no key=value")
    try:
        OverridesParser.create().parse_override(word)
    except HydraException as error:
        hint = "quote values that hold commas, brackets or spaces: 'key=\"a, b\"'"
        raise InputError(word, f"cannot be read: {_one_line(error).split(': ')[-1]}", hint) from None


def _explain(error: Exception, overrides: Sequence[str]) -> InputError:
    """A Hydra or OmegaConf error as one line that names the key."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(texts)
    if match := re.search(r"Could not find '([\w/]+)/([^'/]+)'", text):
        group, choice = match.groups()
        choices = group_choices().get(group, [])
        key = "to" if group == "export" else group
        return InputError(key, f"{choice!r} is not known{_nearest(choice, choices)}", choices)
    if match := re.search(r"Could not override '([^']*)'", text):
        return _unknown_key(match.group(1))
    if match := re.search(r"Error merging override (\S+?)=", text):
        reason = next((line for line in text.splitlines() if line.startswith("Value ")), _one_line(error))
        return InputError(match.group(1).lstrip("+"), reason)
    if match := re.search(r"full_key: (\S+)", text):
        return InputError(match.group(1), _one_line(error))
    return InputError("configuration", _one_line(error))


def _unknown_key(key: str) -> InputError:
    keys = _known_keys(OmegaConf.to_container(OmegaConf.structured(Config)), "")
    parent = key.rpartition(".")[0]
    beside = [known for known in keys if known.rpartition(".")[0] == parent] if parent else list(group_choices())
    return InputError(key, f"no such key{_nearest(key, keys)}", beside)


def _known_keys(node: Any, prefix: str) -> list[str]:
    if not isinstance(node, dict):
        return []
    found = []
    for name, value in node.items():
        found += [f"{prefix}{name}", *_known_keys(value, f"{prefix}{name}.")]
    return found


def _nearest(word: str, known: Any) -> str:
    matches = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _refuse_absent_folder(verb: Verb, overrides: Sequence[str]) -> None:
    if verb.reads_run and not any(word.startswith(("run.dir=", "run.name=")) for word in overrides):
        raise InputError("run.dir", "which run?", "run.dir=outputs/NAME")


if __name__ == "__main__":
    logging.basicConfig()
    sys.exit(main())
