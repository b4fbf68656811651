"""The command line: what it takes, what it refuses and with which words, and what a configuration is composed of."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli, verbs
from pipeline.cli import VERBS, conf_dir, group_choices, load_config, main
from pipeline.config import Config, check
from pipeline.errors import EngineDown, InputError

ROOT = Path(__file__).parent.parent
URLS = "engine.urls=[http://127.0.0.1:1]"

# What a choice needs beside itself, and the key that is asked for where it is left out.
NEEDS = {
    ("dataset", "local"): ("dataset.path=rows.jsonl", "dataset.path"),
    ("model", "custom"): ("model.path=nobody/model", "model.path"),
    ("engine", "attach"): (URLS, "engine.urls"),
    ("engine", "openai"): (URLS, "engine.urls"),
}
CHOICES = [(group, choice) for group, choices in group_choices().items() for choice in choices]


@pytest.fixture(autouse=True)
def acted(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that a verb was called with: in this file verbs do nothing, so that no engine is started."""
    seen: list[Config] = []

    def act(config: Config, text: str) -> int:
        seen.append(config)
        return 77

    for name, verb in VERBS.items():
        monkeypatch.setitem(VERBS, name, replace(verb, act=act))
    return seen


@pytest.fixture(scope="module")
def demo() -> Config:
    """What the default profile composes to."""
    return load_config([])[0]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], acted: list[Config]) -> Callable[..., str]:
    """Runs a command that must be refused: one line on stderr, exit status 2, no verb called. Gives that line."""

    def run(*words: str) -> str:
        status = main(words)
        output, errors = capsys.readouterr()
        assert (status, output, acted) == (2, "", []), (status, output, errors)
        assert errors.startswith("error: ")
        assert errors.endswith("\n")
        assert errors.count("\n") == 1, errors
        return errors.removeprefix("error: ").rstrip("\n")

    return run


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``conf/`` that a test may spoil."""
    copy = tmp_path / "conf"
    shutil.copytree(conf_dir(), copy)
    monkeypatch.setattr(cli, "conf_dir", lambda: copy)
    return copy


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def with_value(config: Config, key: str, value: Any) -> Config:
    made = deepcopy(config)
    parent, _, leaf = key.rpartition(".")
    setattr(value_at(made, parent) if parent else made, leaf, value)
    return made


# The files of conf/


def test_every_file_is_a_choice_of_a_group() -> None:
    files = {path.relative_to(conf_dir()).with_suffix("").as_posix() for path in conf_dir().rglob("*.yaml")}
    assert files == {f"{group}/{choice}" for group, choice in CHOICES} | {"config"}


@pytest.mark.parametrize(("group", "choice"), [pair for pair in CHOICES if pair[0] != "profile"])
def test_every_choice_composes_and_its_values_arrive(group: str, choice: str) -> None:
    need = [NEEDS[group, choice][0]] if (group, choice) in NEEDS else []
    config, _ = load_config(["profile=none", f"{group}={choice}", *need])
    given = [word.partition("=")[0] for word in need]

    def arrived(values: dict[str, Any], prefix: str) -> int:
        count = 0
        for name, value in values.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict):
                count += arrived(value, f"{key}.")
            elif key not in given and "${" not in str(value):
                assert value_at(config, key) == value, key
                count += 1
        return count

    assert arrived(yaml.safe_load((conf_dir() / group / f"{choice}.yaml").read_text()), f"{group}.") > 0


@pytest.mark.parametrize("choice", group_choices()["profile"])
def test_every_profile_composes_and_says_its_name(choice: str) -> None:
    for dataset in ("B1", "B2"):
        config, _ = load_config([f"profile={choice}", f"dataset={dataset}"])
        assert (config.profile.name, config.dataset.name) == (choice, dataset)


@pytest.mark.parametrize(("choice", "need"), NEEDS.items())
def test_what_a_choice_needs_is_asked_for(
    choice: tuple[str, str], need: tuple[str, str], refusal: Callable[..., str]
) -> None:
    line = refusal("run", "=".join(choice))
    assert line.startswith(f"{need[1]}: ")
    assert "(accepted: " in line


def test_an_openai_server_may_go_by_its_name_alone() -> None:
    config, _ = load_config(["model=custom", "engine=openai", URLS, "model.served_name=gpt"])
    assert (config.model.served_name, config.model.path) == ("gpt", "")


def test_the_default_profile_is_the_demo_and_says_so(demo: Config) -> None:
    assert (demo.profile.name, demo.engine.kind, demo.dataset.source) == ("demo", "cpu", "bundled")
    assert demo.engine.hicache.enabled
    line = verbs.first_line(demo)
    assert line.startswith("profile=demo: the first 32 rows of the bundled sample (B2), answered by smollm2 in at most")
    assert "HiCache on" in line
    assert line.endswith("No GPU and no network are needed.")
    assert demo.run.dir in line


def test_the_first_line_tells_what_is_done_and_not_what_the_profile_was_for(demo: Config) -> None:
    config, _ = load_config(["engine=attach", URLS, "dataset.source=hub", "dataset.limit=null", "model=tiny"])
    line = verbs.first_line(config)
    assert "all rows of nvidia/OpenCodeInstruct (B2), answered by tiny in at most 96 tokens" in line
    assert "on running SGLang engines, into" in line
    assert "No GPU" not in line


def test_the_demo_takes_a_sample_of_bundled_rows_and_all_of_your_own(tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    for words in (["dataset=local", f"dataset.path={data}"], ["dataset=B2", f"dataset.path={data}"]):
        config, _ = load_config(words)
        assert (config.dataset.limit, config.dataset.source) == (None, "hub")
        assert f"all rows of {data}" in verbs.first_line(config)
    for words in (["dataset=B1"], ["dataset=B1", "dataset.path=glaiveai/glaive-code-assistant-v3"]):
        config, _ = load_config(words)
        assert (config.dataset.limit, config.dataset.source) == (32, "bundled")
    assert load_config(["dataset.limit=5"])[0].dataset.limit == 5


def test_code_from_a_model_repository_is_said_aloud(demo: Config) -> None:
    line = verbs.first_line(with_value(demo, "model.trust_remote_code", True))
    assert "Code from the model's repository will run (model.trust_remote_code)" in line


# Precedence


def test_profile_wins_over_group_file_and_command_line_over_both(conf: Path) -> None:
    (conf / "store" / "default.yaml").write_text("rows_per_shard: 11\nsync_interval_s: 11\nmin_free_gb: 11\n")
    (conf / "profile" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /sampling: greedy\n  - override /capture: none\n"
        "profile:\n  name: mine\n"
        "store:\n  rows_per_shard: 22\n  sync_interval_s: 22\n"
    )
    config, _ = load_config(["profile=mine", "store.rows_per_shard=33", "capture=default"])
    assert (config.store.min_free_gb, config.store.sync_interval_s, config.store.rows_per_shard) == (11, 22, 33)
    assert (config.sampling.temperature, config.capture.top_k) == (0.0, 20)
    # Neither the order of the words nor that of group and key makes a difference.
    again, _ = load_config(["capture=default", "store.rows_per_shard=33", "profile=mine", "store=default"])
    assert again == config


def test_the_last_of_two_words_for_a_key_counts() -> None:
    config, _ = load_config(["dataset=B1", "dataset.limit=3", "dataset=B2", "dataset.limit=4"])
    assert (config.dataset.name, config.dataset.limit) == ("B2", 4)


def test_mappings_take_new_names_without_a_plus() -> None:
    words = [
        "engine.env.X=1",
        "engine.env.http_proxy=http://proxy:3128",
        "model.chat_template_kwargs.enable_thinking=false",
        "model.chat_template_kwargs.levels=[1,{a:2}]",
    ]
    config, text = load_config(words)
    assert config.engine.env == {"X": "1", "http_proxy": "http://proxy:3128"}
    assert config.model.chat_template_kwargs == {"enable_thinking": False, "levels": [1, {"a": 2}]}
    assert type(config.model.chat_template_kwargs) is dict
    assert type(config.engine.env) is dict
    assert yaml.safe_load(text)["engine"]["env"]["X"] == "1"
    assert load_config([f"+{word}" for word in words])[0] == load_config([f"++{word}" for word in words])[0] == config


def test_lists_arrive_as_lists_of_words() -> None:
    config, _ = load_config(["engine.args=[--schedule-policy,lpm,--page-size,16]", "engine.hicache={enabled:false}"])
    assert config.engine.args == ["--schedule-policy", "lpm", "--page-size", "16"]
    assert not config.engine.hicache.enabled
    assert config.engine.hicache.size_gb == 1, "a mapping given as a whole changes the keys it names"


@pytest.mark.parametrize("word", ["to=specforge", "export=specforge", "+to=specforge"])
def test_to_is_the_export_group(word: str) -> None:
    assert load_config([word])[0].export.to == "specforge"


def test_the_resolved_text_is_the_configuration(demo: Config) -> None:
    _, text = load_config([])
    assert "${" not in text
    assert yaml.safe_load(text)["sampling"]["max_new_tokens"] == demo.sampling.max_new_tokens


# Verbs


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_groups_choices_and_keys(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert output.startswith(f"{verb}: {VERBS[verb].summary}\n")
    assert f"python -m pipeline {verb} " in output
    for group, choices in group_choices().items():
        assert f"  {group}={'|'.join(choices)}" in output
    assert "segment_tokens: 0" in output


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("resolve", [False, True], ids=["as written", "resolved"])
def test_cfg_job_shows_what_the_verb_would_use(
    verb: str, resolve: bool, capsys: pytest.CaptureFixture[str], acted: list[Config]
) -> None:
    words = ["--cfg", "job", "dataset=B1", *(["--resolve"] if resolve else []), "dataset.limit=5"]
    assert main([verb, *words]) == 0
    output, errors = capsys.readouterr()
    shown = yaml.safe_load(output)
    assert (errors, acted) == ("", [])
    assert (shown["dataset"]["name"], shown["dataset"]["limit"]) == ("B1", 5)
    assert shown["run"]["dir"] == ("outputs/demo-B1-smollm2" if resolve else "outputs/${run.name}")
    assert list(shown) == list(Config.__dataclass_fields__)


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_alone_lists_the_verbs(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    for name, verb in VERBS.items():
        assert re.search(rf"^ +{name} +{re.escape(verb.summary)}$", output, re.M)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_acts_on_the_checked_configuration(verb: str, acted: list[Config]) -> None:
    assert main([verb, "run.dir=elsewhere"]) == 77
    assert [config.run.dir for config in acted] == ["elsewhere"]


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.reads_run])
def test_verbs_that_read_a_run_ask_which(verb: str, refusal: Callable[..., str]) -> None:
    assert refusal(verb, "dataset=B1") == "run.dir: which run? (accepted: run.dir=outputs/NAME)"


@pytest.mark.parametrize("kind", ["attach", "openai"])
def test_serve_does_not_start_other_peoples_engines(kind: str, demo: Config) -> None:
    with pytest.raises(InputError, match=rf"^engine: engine={kind} .* \(accepted: cpu, gpu\)$"):
        verbs.serve(with_value(demo, "engine.kind", kind), "")


# Refusals

VERB_NAMES = ", ".join(VERBS)
DATASETS, ENGINES, PROFILES, TRAINERS = (
    ", ".join(name for name in group_choices()[group] if (group, name) != ("export", "none"))
    for group in ("dataset", "engine", "profile", "export")
)
GROUPS_AND_RUN = "run, dataset, model, engine, sampling, capture, client, store, export, profile"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("", f"command: a verb is needed; --help tells what each does (accepted: {VERB_NAMES})"),
        ("runn dataset=B2", f"command: 'runn' is no verb; did you mean run? (accepted: {VERB_NAMES})"),
        ("zzz", f"command: 'zzz' is no verb (accepted: {VERB_NAMES})"),
        ("dataset=B2 run", f"command: the verb comes first, before 'dataset=B2' (accepted: {VERB_NAMES})"),
        ("--cfg job run", f"command: the verb comes first, before '--cfg' (accepted: {VERB_NAMES})"),
        ("run --nope", "--nope: no such option (accepted: --help, --cfg job, --resolve, key=value)"),
        ("run -m", "-m: no such option (accepted: --help, --cfg job, --resolve, key=value)"),
        ("run --cfg hydra", "--cfg: 'hydra' cannot be shown (accepted: job)"),
        ("run --cfg", "--cfg: 'nothing' cannot be shown (accepted: job)"),
        ("run --resolve", "--resolve: says how --cfg shows the configuration (accepted: --cfg job --resolve)"),
        ("run foo=1", f"foo: no such key (accepted: {GROUPS_AND_RUN})"),
        ("run dataset=B3", f"dataset: 'B3' is not known (accepted: {DATASETS})"),
        ("run dataset=", f"dataset: '' is not known (accepted: {DATASETS})"),
        ("run dataset=null", f"dataset: 'null' is not known (accepted: {DATASETS})"),
        ("run dataset=[B1,B2]", f"dataset: '[B1,B2]' is not known (accepted: {DATASETS})"),
        ("run dataset={name:B1}", f"dataset: '{{name:B1}}' is not known (accepted: {DATASETS})"),
        ("run sampling=greeedy", "sampling: 'greeedy' is not known; did you mean greedy?"),
        ("run profile=zzz", f"profile: 'zzz' is not known (accepted: {PROFILES})"),
        ("export run.dir=x to=nonsense", f"to: 'nonsense' is not known (accepted: {TRAINERS})"),
        ("export run.dir=x to=", f"to: '' is not known (accepted: {TRAINERS})"),
        ("export run.dir=x export=spec", "export: 'spec' is not known"),
        ("run dataset.limit", "dataset.limit: is no key=value (accepted: KEY=VALUE)"),
        ("run B2", "B2: is no key=value (accepted: KEY=VALUE)"),
        ("run ''", "'': is no key=value (accepted: KEY=VALUE)"),
        ("run =3", "=3: is no key=value (accepted: KEY=VALUE)"),
        ("run ~dataset", "~dataset: is no key=value (accepted: KEY=VALUE)"),
        ("run ~engine.port=0", "~engine.port: no such key; did you mean engine.port?"),
        ("run engine.url=[http://x]", "engine.url: no such key; did you mean engine.urls? (accepted: engine.kind, "),
        ("run temperature=1", "temperature: no such key; did you mean sampling.temperature?"),
        ("run engine.size_gb=1", "engine.size_gb: no such key; did you mean engine.hicache.size_gb?"),
        ("run engine.hicache.foo=1", "engine.hicache.foo: no such key (accepted: engine.hicache.enabled, "),
        ("run +engine.foo=1", "engine.foo: no such key (accepted: engine.kind, "),
        ("run ++engine.foo=1", "engine.foo: no such key (accepted: engine.kind, "),
        ("run ++foo.bar=1", f"foo.bar: no such key (accepted: {GROUPS_AND_RUN})"),
        ("run engine.hicache={foo:1}", "engine.hicache.foo: no such key (accepted: engine.hicache.enabled, "),
        ("run engine.port.x=1", f"engine.port.x: no such key (accepted: {GROUPS_AND_RUN})"),
        ("run hydra.run.dir=x", "hydra.run.dir: no such key; did you mean run.dir?"),
        ("run hydra/launcher=basic", "hydra/launcher: no such key"),
        ("run dataset@model=B1", "dataset@model: no such key"),
        ("run 'dataset.path=[a'", "dataset.path: '[a' cannot be read: "),
        ("run 'dataset.path=a(b'", "dataset.path: 'a(b' cannot be read: "),
        ("run 'engine.env.=1'", "engine.env.: '1' cannot be read: "),
        ("run dataset.path=a,b", "dataset.path: 'a,b' is more than one value (accepted: one value, quoted where "),
        ("run 'engine.port=range(1,3)'", "engine.port: 'range(1,3)' is more than one value"),
        ("run dataset.limit=abc", "dataset.limit: 'abc' does not fit (accepted: a whole number, or null)"),
        ("run dataset.limit=1.5", "dataset.limit: '1.5' does not fit (accepted: a whole number, or null)"),
        ("run dataset.limit=", "dataset.limit: '' does not fit (accepted: a whole number, or null)"),
        ("run engine.port=null", "engine.port: 'null' does not fit (accepted: a whole number)"),
        ("run engine.check_model=maybe", "engine.check_model: 'maybe' does not fit (accepted: true or false)"),
        ("run sampling.top_p=x", "sampling.top_p: 'x' does not fit (accepted: a number)"),
        ("run dataset.name=[a]", "dataset.name: '[a]' does not fit (accepted: text)"),
        ("run engine.urls=http://x", "engine.urls: 'http://x' does not fit (accepted: a list: engine.urls=[A,B])"),
        ("run engine.args=[null]", "engine.args: '[null]' does not fit (accepted: a list: engine.args=[A,B])"),
        ("run engine.args=[[a]]", "engine.args: [['a']] holds more than words (accepted: engine.args=[--flag,value])"),
        ("run engine.env=3", "engine.env: '3' does not fit (accepted: engine.env.NAME=VALUE)"),
        ("run engine.env.X=[1]", "engine.env.X: '[1]' does not fit (accepted: text)"),
        ("run engine.hicache=null", "engine.hicache: 'null' does not fit (accepted: engine.hicache.NAME=VALUE, NAME "),
        ("run run=3", "run: '3' does not fit (accepted: run.NAME=VALUE, NAME one of name, dir, "),
        ("run run.dir=???", "run.dir: a value is needed (accepted: run.dir=VALUE)"),
        ("run 'dataset.path=${nothing}'", "dataset.path: Interpolation key 'nothing' not found"),
        ("run 'dataset.path=${nothing}' --cfg job --resolve", "dataset.path: Interpolation key 'nothing' not found"),
        ("run dataset.limit=0", "dataset.limit: 0 is out of range (accepted: 1 or more)"),
        ("run sampling.temperature=nan", "sampling.temperature: nan is out of range (accepted: 0 or more)"),
        ("run engine=attach engine.urls=[]", "engine.urls: engine=attach needs the address of at least one running"),
    ],
)
def test_refused_in_one_line(command: str, line: str, refusal: Callable[..., str]) -> None:
    found = refusal(*shlex.split(command))
    assert found.startswith(line), found
    assert not line.endswith(")") or found == line


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("dataset/mine", "name: mine\npath: x\nfoo: 1\n", "dataset.foo: no such key (accepted: dataset.name, "),
        ("engine/mine", "hicache:\n  foo: 1\n", "engine.hicache.foo: no such key (accepted: engine.hicache.enabled, "),
        ("sampling/mine", "top_k: many\n", "sampling.top_k: Value 'many' of type 'str' could not be converted to"),
        ("profile/mine", "# @package _global_\nsampling:\n  foo: 1\n", "sampling.foo: no such key"),
        ("profile/mine", "# @package _global_\nfoo: 1\n", "foo: no such key (accepted: run, dataset, "),
        (
            "profile/mine",
            "# @package _global_\ndefaults:\n  - override /engine: zzz\n",
            f"engine: 'zzz' is not known (accepted: {ENGINES})",
        ),
        ("profile/mine", "# @package _global_\ndefaults:\n  - override /nope: cpu\n", "nope: no such key"),
        ("profile/mine", "a: [1\n", ""),
    ],
)
def test_files_are_held_to_the_schema(name: str, text: str, line: str, conf: Path, refusal: Callable[..., str]) -> None:
    (conf / f"{name}.yaml").write_text(text)
    assert refusal("run", f"{name.split('/')[0]}=mine").startswith(line or f"{conf}: a file in it is no YAML: ")


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("run.name", ["", " "]),
        ("run.dir", [""]),
        ("run.drain_s", [-1.0, INFINITY, NAN]),
        ("run.max_failures_in_a_row", [-1]),
        ("dataset.path", [""]),
        ("dataset.source", ["disk", ""]),
        ("dataset.turns", ["second"]),
        ("dataset.samples", [0]),
        ("dataset.limit", [0, -3]),
        ("model.path", [""]),
        ("model.context_length", [0]),
        ("engine.kind", ["tpu"]),
        ("engine.hicache.write_policy", ["write_never"]),
        ("engine.hicache.io_backend", ["mmap"]),
        ("engine.hicache.mem_layout", ["page_last"]),
        ("engine.hicache.ratio", [1.0, 0.5, NAN, INFINITY]),
        ("engine.hicache.size_gb", [0, -1]),
        ("engine.replicas", [0]),
        ("engine.tp_size", [0]),
        ("engine.port", [-1, 65536]),
        ("engine.args", [[["--flag"]]]),
        ("engine.max_total_tokens", [63]),
        ("engine.mem_fraction_static", [0.0, 1.0, NAN]),
        ("engine.start_timeout_s", [0.0, NAN]),
        ("engine.stop_timeout_s", [-1.0]),
        ("engine.stall_s", [0.0, NAN]),
        ("engine.lost_after_s", [0.0]),
        ("engine.restart_pause_s", [-1.0]),
        ("engine.restarts_per_hour", [-1]),
        ("engine.urls", [["ftp://x"], ["http://x", "x:1"]]),
        ("sampling.temperature", [-0.1, NAN, INFINITY]),
        ("sampling.top_p", [0.0, 1.01, NAN]),
        ("sampling.top_k", [0, -2]),
        ("sampling.min_p", [-0.1, 1.1, NAN]),
        ("sampling.max_new_tokens", [0]),
        ("sampling.frequency_penalty", [-2.1, 2.1, NAN]),
        ("sampling.presence_penalty", [-2.1, 2.1, NAN]),
        ("sampling.repetition_penalty", [0.0, 2.1, NAN]),
        ("sampling.min_new_tokens", [-1, 97]),
        ("sampling.stop", [[""], [["a"]]]),
        ("sampling.seed", [0, 7]),
        ("sampling.segment_tokens", [-1]),
        ("capture.top_k", [-1, 1001]),
        ("client.concurrency", [0]),
        ("client.max_attempts", [0]),
        ("client.timeout_s", [0.0, -1.0, NAN, INFINITY]),
        ("client.backoff_s", [-1.0, NAN]),
        ("client.backoff_max_s", [-1.0]),
        ("store.rows_per_shard", [0]),
        ("store.sync_interval_s", [0.0, NAN]),
        ("store.compression", ["best"]),
        ("store.compression_level", [0, 23]),
        ("store.min_free_gb", [-1.0, NAN]),
        ("export.max_length", [0]),
    ],
)
def test_values_out_of_range_are_refused_by_key(key: str, values: list[Any], demo: Config) -> None:
    for value in values:
        with pytest.raises(InputError) as refused:
            check(with_value(demo, key, value))
        assert refused.value.key == key, value
        assert re.fullmatch(r"[\w.]+: .+ \(accepted: .+\)", str(refused.value)), value


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("run.drain_s", [0.0]),
        ("dataset.limit", [1, None]),
        ("engine.port", [0, 65535]),
        ("engine.hicache.ratio", [1.5, None]),
        ("engine.hicache.size_gb", [1, None]),
        ("engine.max_total_tokens", [64, None]),
        ("engine.stop_timeout_s", [0.0]),
        ("engine.urls", [["https://x"], []]),
        ("sampling.temperature", [0.0, 2.0]),
        ("sampling.top_p", [1.0]),
        ("sampling.top_k", [-1, 1]),
        ("sampling.min_p", [0.0, 1.0]),
        ("sampling.repetition_penalty", [0.1, 2.0]),
        ("sampling.min_new_tokens", [0, 96]),
        ("sampling.stop", [[], ["END"]]),
        ("capture.top_k", [0, 1000]),
        ("client.concurrency", [1]),
        ("store.compression", ["zstd", "snappy", "none"]),
        ("store.compression_level", [1, 22]),
        ("store.min_free_gb", [0.0]),
    ],
)
def test_the_ends_of_the_ranges_are_taken(key: str, values: list[Any], demo: Config) -> None:
    for value in values:
        check(with_value(demo, key, value))


def test_ports_of_all_replicas_exist(demo: Config) -> None:
    two = with_value(demo, "engine.replicas", 2)
    check(with_value(two, "engine.port", 65534))
    with pytest.raises(InputError, match=r"^engine\.replicas: 2 is out of range \(accepted: 1 to 1\)"):
        check(with_value(two, "engine.port", 65535))


def test_an_openai_server_takes_no_segments(demo: Config) -> None:
    segments = with_value(demo, "sampling.segment_tokens", 64)
    check(segments)
    openai = with_value(with_value(segments, "engine.kind", "openai"), "engine.urls", ["http://x"])
    with pytest.raises(InputError, match=r"^sampling\.segment_tokens: .* \(accepted: 0\)$"):
        check(openai)


def test_an_answer_follows_one_grammar(demo: Config) -> None:
    regex = with_value(demo, "sampling.regex", "yes|no")
    check(regex)
    with pytest.raises(InputError, match=r"^sampling\.json_schema: .* \(accepted: null\)$"):
        check(with_value(regex, "sampling.json_schema", "{}"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("frequency_penalty", 0.5), ("repetition_penalty", 1.1), ("min_new_tokens", 1), ("stop", ["x"]), ("regex", "a")],
)
def test_what_depends_on_the_whole_answer_excludes_segments(key: str, value: Any, demo: Config) -> None:
    whole = with_value(demo, f"sampling.{key}", value)
    check(whole)
    with pytest.raises(InputError, match=rf"^sampling\.{key}: .* \(accepted: sampling\.segment_tokens=0\)$"):
        check(with_value(whole, "sampling.segment_tokens", 64))


def test_a_seed_is_taken_where_an_engine_can_draw_from_it(demo: Config) -> None:
    check(with_value(with_value(demo, "engine.kind", "gpu"), "sampling.seed", 7))


# The ends of a command


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (EngineDown("engine-0 is gone:\nkilled"), 1, "error: engine-0 is gone: killed\n"),
        (InputError("dataset.path", "no such file"), 2, "error: dataset.path: no such file\n"),
        (KeyboardInterrupt(), 130, "stopped; everything recorded so far is safe, the same command goes on from here\n"),
        (asyncio.CancelledError(), 130, "stopped; everything recorded so far is safe"),
    ],
)
def test_errors_of_a_verb_are_one_line_and_a_status(
    raised: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(config: Config, text: str) -> int:
        raise raised

    monkeypatch.setitem(VERBS, "run", replace(VERBS["run"], act=act))
    assert main(["run"]) == status
    errors = capsys.readouterr().err
    assert errors.startswith(line)
    assert errors.count("\n") == 1


def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *words],
        cwd=ROOT,
        env=os.environ | {"HYDRA_FULL_ERROR": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("export", "run.dir=x", "to=nonsense"), "error: to: 'nonsense' is not known (accepted: specforge, "),
        (("status", "run.dir=/nowhere/at/all"), "error: run.dir: /nowhere/at/all holds no run (no manifest.json in "),
    ],
)
def test_a_process_refuses_in_one_line(words: tuple[str, ...], line: str) -> None:
    done = in_a_process(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_a_process_shows_its_configuration() -> None:
    done = in_a_process("run", "--cfg", "job", "--resolve", "engine.env.X=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["engine"]["env"] == {"X": "1"}
