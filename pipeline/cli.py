"""The command line: ``python -m pipeline VERB [key=value ...]``. The only module that knows Hydra."""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from pipeline import verbs
from pipeline.config import Config, check
from pipeline.errors import EXIT_BROKEN, EXIT_OK, EXIT_STOPPED, InputError, PipelineError
from pipeline.prompts.rows import BUNDLED

# Keys that hold mappings: any name may be set below them.
_OPEN_KEYS = ("engine.env.", "model.chat_template_kwargs.")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


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
        if not words:
            raise InputError("command", "a verb is needed; --help tells what each does", VERBS)
        if words[0] in ("-h", "--help", "help"):
            print(usage())
            return EXIT_OK
        verb = find_verb(words[0])
        overrides, options = split_options(words[1:])
        if "--help" in options:
            print(verb_help(words[0], verb))
            return EXIT_OK
        if "--cfg" in options:
            print(_to_yaml(compose_config(overrides), resolve="--resolve" in options), end="")
            return EXIT_OK
        config, text = load_config(overrides)
        _refuse_absent_folder(verb, overrides)
        return verb.act(config, text)
    except PipelineError as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
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
    if "--resolve" in options and "--cfg" not in options:
        raise InputError("--resolve", "says how --cfg shows the configuration", "--cfg job --resolve")
    return overrides, options


def load_config(overrides: Sequence[str]) -> tuple[Config, str]:
    """The checked configuration, and the same as resolved YAML.

    Raises:
        InputError: naming the key at fault and what it takes.
    """
    composed = compose_config(overrides)
    text = _to_yaml(composed, resolve=True)
    with _values_complete():
        config = cast(Config, OmegaConf.to_object(composed))
    check(config)
    return config, text


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Composes ``conf/`` with the overrides.

    Raises:
        InputError: an override that cannot be read, or names a key, group or choice that does not exist.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("models", models_folder, replace=True)
    OmegaConf.register_new_resolver("where_bundled", where_bundled, replace=True)
    words = [_as_hydra(word) for word in overrides]
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose("config", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, words) from None
    except yaml.YAMLError as error:
        raise InputError(str(conf_dir()), f"a file in it is no YAML: {' '.join(str(error).split())}") from None


def conf_dir() -> Path:
    """The folder of configuration files: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def models_folder(name: str) -> str:
    """Where ``./run.sh setup`` puts a model made without a hub."""
    return str(cache_dir() / "models" / name)


def where_bundled(value: Any, otherwise: Any, *, _root_: DictConfig) -> Any:
    """``value`` where the chosen dataset has a bundled sample, else ``otherwise``."""
    return value if _root_.dataset.path in BUNDLED else otherwise


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
    """One ``key=value`` as Hydra is to read it: ``to=X`` chooses the export group, names below a mapping get the
    ``++`` that Hydra asks for, and no other key may be added.

    Raises:
        InputError: the key does not exist, or the value cannot be read.
    """
    name, mark, value = word.partition("=")
    given = name.lstrip("+")
    if not mark or not given:
        raise InputError(word or "''", "is no key=value", "KEY=VALUE")
    key = "export" if given == "to" else given
    choices = group_choices()
    is_open = key.startswith(_OPEN_KEYS)
    if key not in choices and not is_open and key not in _known_keys(Config):
        raise _unknown_key(key)
    override = _parse(key, value)
    if key in choices and override.value() not in choices[key]:
        raise _unknown_choice(given, value, choices[key])
    return f"++{key}={value}" if is_open else f"{key}={value}"


def _parse(key: str, value: str) -> Override:
    hint = f"one value, quoted where it holds commas, brackets or spaces: '{key}=\"a, b\"'"
    try:
        override = OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException as error:
        raise InputError(key, f"{value!r} cannot be read: {_one_line(error).split(': ')[-1]}", hint) from None
    if override.is_sweep_override():
        raise InputError(key, f"{value!r} is more than one value", hint)
    return override


def _to_yaml(composed: DictConfig, resolve: bool) -> str:
    with _values_complete():
        return OmegaConf.to_yaml(composed, resolve=resolve)


@contextmanager
def _values_complete() -> Iterator[None]:
    """Makes an InputError of a value that is missing, or refers to something that does not exist."""
    try:
        yield
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise InputError(str(key), "a value is needed", f"{key}=VALUE") from None
    except OmegaConfBaseException as error:
        raise InputError(str(getattr(error, "full_key", None) or "configuration"), _one_line(error)) from None


def _explain(error: Exception, overrides: Sequence[str]) -> InputError:
    """What Hydra or OmegaConf says of an override, or of a file in ``conf/``, as one line that names the key."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(texts)
    if match := re.search(r"Could not find '([\w/]+)/([^'/]*)'", text):
        group, choice = match.groups()
        return _unknown_choice(group, choice, group_choices().get(group, []))
    if match := re.search(r"Key '[^']*' not in '.*'\n\s*full_key: (\S+)", text):
        return _unknown_key(match.group(1))
    if match := re.search(r"(.*)\n\s*full_key: (\S+)", text):
        reason, key = match.group(1), match.group(2).split("[")[0]
        values = [value for name, _, value in (word.lstrip("+").partition("=") for word in overrides) if name == key]
        return InputError(key, f"{values[-1]!r} does not fit" if values else reason, _accepted(key))
    if match := re.search(r"Could not override '([^']*)'", text):
        return _unknown_key(match.group(1))
    return InputError("configuration", _one_line(error))


def _unknown_choice(key: str, choice: str, choices: list[str]) -> InputError:
    named = [name for name in choices if name != "none"] if key == "to" else choices
    return InputError(key, f"{choice!r} is not known{_nearest(choice, named)}", named)


def _unknown_key(key: str) -> InputError:
    parent, _, leaf = key.rpartition(".")
    keys = _known_keys(Config)
    beside = [known for known in keys if known.rpartition(".")[0] == parent]
    # The last parts are compared: a key is more often put in the wrong place than misspelt.
    places: dict[str, str] = {}
    for known in [*beside, *keys]:
        places.setdefault(known.rpartition(".")[2], known)
    matches = difflib.get_close_matches(leaf, places, 1)
    near = f"; did you mean {places[matches[0]]}?" if matches else ""
    return InputError(key, f"no such key{near}", beside or [field.name for field in fields(Config)])


def _known_keys(schema: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a dataclass, those of its nested dataclasses too."""
    found = []
    for name, kind in get_type_hints(schema).items():
        found.append(f"{prefix}{name}")
        if is_dataclass(kind):
            found += _known_keys(kind, f"{prefix}{name}.")
    return found


def _accepted(key: str) -> str:
    """What a key takes, in words, from its type."""
    kind: Any = Config
    for name in key.split("."):
        kind = get_type_hints(kind)[name] if is_dataclass(kind) else (get_args(kind) or (Any,))[-1]
    optional = NoneType in get_args(kind)
    if optional:
        kind = next(member for member in get_args(kind) if member is not NoneType)
    if is_dataclass(kind):
        return f"{key}.NAME=VALUE, NAME one of {', '.join(get_type_hints(kind))}"
    if get_origin(kind) is list:
        return f"a list: {key}=[A,B]"
    if get_origin(kind) is dict:
        return f"{key}.NAME=VALUE"
    return _WORDS.get(kind, "a value") + (", or null" if optional else "")


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _refuse_absent_folder(verb: Verb, overrides: Sequence[str]) -> None:
    if verb.reads_run and not any(word.lstrip("+").startswith(("run.dir=", "run.name=")) for word in overrides):
        raise InputError("run.dir", "which run?", "run.dir=outputs/NAME")


if __name__ == "__main__":
    logging.basicConfig()
    sys.exit(main())
