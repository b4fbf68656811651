"""The configuration as dataclasses: defaults, the fingerprint, and the page that documents every key."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from pipeline.cli import compose_config, group_choices
from pipeline.config import Config, content_settings, differences, fingerprint
from pipeline.errors import EXIT_BAD_INPUT, EXIT_BROKEN, EXIT_OK, EXIT_SOME_FAILED, EXIT_STOPPED

PAGE = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
CONTENT = ("dataset", "model", "sampling", "capture")


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values, down to what is no dataclass."""
    found: dict[str, Any] = {}
    for field in fields(node):
        value = getattr(node, field.name)
        key = f"{prefix}{field.name}"
        found |= leaves(value, f"{key}.") if is_dataclass(value) else {key: value}
    return found


DEFAULTS = leaves(Config())


def changed(key: str) -> Config:
    """The default configuration with another value under ``key``."""
    config = Config()
    *parents, leaf = key.split(".")
    node: Any = config
    for name in parents:
        node = getattr(node, name)
    old = getattr(node, leaf)
    other = {bool: lambda: not old, list: lambda: ["x"], dict: lambda: {"x": "y"}, str: lambda: f"{old}x"}
    setattr(node, leaf, other.get(type(old), lambda: 7 if old is None else old + 1)())
    return config


# What the contract fixes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("capture.top_k", 20),
        ("capture.allow_scaled", False),
        ("engine.hicache.enabled", True),
        ("engine.check_model", True),
        ("model.trust_remote_code", False),
        ("sampling.segment_tokens", 0),
        ("dataset.samples", 1),
        ("dataset.limit", None),
        ("engine.replicas", 1),
        ("engine.args", []),
        ("engine.urls", []),
        ("sampling.temperature", 1.0),
    ],
)
def test_defaults(key: str, value: Any) -> None:
    assert DEFAULTS[key] == value


FIXED = {
    "run": "name dir",
    "dataset": "path split limit source turns samples",
    "model": "path served_name chat_template_kwargs trust_remote_code",
    "engine": "urls replicas args env python max_total_tokens mem_fraction_static check_model",
    "engine.hicache": "enabled ratio size_gb write_policy io_backend mem_layout",
    "sampling": "temperature top_p top_k max_new_tokens seed segment_tokens",
    "capture": "top_k allow_scaled",
    "client": "concurrency max_attempts timeout_s",
    "store": "rows_per_shard sync_interval_s",
}


@pytest.mark.parametrize("key", [f"{parent}.{name}" for parent, names in FIXED.items() for name in names.split()])
def test_keys_whose_names_are_fixed_exist(key: str) -> None:
    assert key in DEFAULTS


# The fingerprint


@pytest.mark.parametrize("key", DEFAULTS)
def test_fingerprint_covers_what_decides_a_row_and_nothing_else(key: str) -> None:
    config = changed(key)
    is_content = key.split(".")[0] in CONTENT
    assert (fingerprint(config) != fingerprint(Config())) == is_content
    found = differences(content_settings(Config()), content_settings(config))
    # A mapping's difference is told by the name below it.
    assert [name.removesuffix(".x") for name in found] == ([key] if is_content else [])


def test_fingerprint_is_the_same_in_every_process_and_for_every_order_of_names() -> None:
    one, two = Config(), Config()
    one.model.chat_template_kwargs = {"a": 1, "b": {"c": [1, "é"], "d": None}}
    two.model.chat_template_kwargs = {"b": {"d": None, "c": [1, "é"]}, "a": 1}
    assert fingerprint(one) == fingerprint(two) != fingerprint(Config())
    assert re.fullmatch("[0-9a-f]{64}", fingerprint(one))


def test_content_settings_are_plain_values_of_their_own() -> None:
    config = Config()
    content_settings(config)["model"]["chat_template_kwargs"]["x"] = 1
    assert config.model.chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({}, {}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a.c": (2, 3)}),
        ({"a": {"b": 1}}, {"a": {}}, {"a.b": (1, None)}),
        ({"a": {}}, {"a": {"b": 1}}, {"a.b": (None, 1)}),
        ({"a": {"b": 1}}, {"a": 1}, {"a": ({"b": 1}, 1)}),
        ({"a": [1, 2]}, {"a": [2, 1]}, {"a": ([1, 2], [2, 1])}),
        ({"b": 1, "a": {"y": 1, "x": 1}}, {}, {"a": ({"y": 1, "x": 1}, None), "b": (1, None)}),
    ],
)
def test_differences(before: dict[str, Any], after: dict[str, Any], found: dict[str, tuple[Any, Any]]) -> None:
    given = deepcopy((before, after))
    assert differences(before, after) == found
    assert list(differences(before, after)) == sorted(found)
    assert (before, after) == given


# The page


def documented() -> dict[str, str]:
    """The keys that the tables of the page explain, with the defaults they give."""
    rows = re.findall(r"^\| `([a-z_]+\.[\w.]+)` \| `([^`]*)` \| .+ \|$", PAGE, re.M)
    assert len(rows) == len(dict(rows)), "a key is explained twice"
    return dict(rows)


def test_the_page_explains_every_key_and_no_other() -> None:
    assert sorted(documented()) == sorted(DEFAULTS)


def test_every_key_named_on_the_page_exists() -> None:
    named = set(re.findall(rf"(?<![\w./{{:])(?:{'|'.join(Config.__dataclass_fields__)})\.[a-z_0-9.]*[a-z_0-9]", PAGE))
    known = set(DEFAULTS) | {key.rpartition(".")[0] for key in DEFAULTS}
    mappings = {key for key, value in DEFAULTS.items() if isinstance(value, dict)}
    assert named >= set(DEFAULTS)
    assert {key for key in named - known if key.rpartition(".")[0] not in mappings} == set()


def test_the_page_gives_the_defaults() -> None:
    composed: Any = OmegaConf.to_container(compose_config(["profile=none"]))
    for key, shown in documented().items():
        group, *names = key.split(".")
        default = DEFAULTS[key]
        if group not in ("dataset", "model", "engine"):
            default = composed[group]
            for name in names:
                default = default[name]
        assert (yaml.safe_load(shown) if "$" not in shown else shown) == default, key


def test_the_page_names_every_group() -> None:
    listed = re.search(r"^Groups: ((?:`\w+`,?\s)*`\w+`)\.", PAGE, re.M)
    assert listed
    assert sorted(re.findall(r"`(\w+)`", listed.group(1))) == sorted(group_choices())


def test_the_page_gives_every_exit_status() -> None:
    statuses = [int(status) for status in re.findall(r"^\| (\d+) \| .+ \|$", PAGE, re.M)]
    assert statuses == [EXIT_OK, EXIT_BROKEN, EXIT_BAD_INPUT, EXIT_SOME_FAILED, EXIT_STOPPED]
