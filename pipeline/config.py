"""The configuration, as plain dataclasses: what every key means, its unit, and its default.

Defaults of mechanism live here. Choices that shape the data (which model, how it samples, how much is kept) live in
the YAML files under ``conf/``. Nothing below ``cli`` sees anything but these classes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Union

from pipeline.errors import InputError

SOURCES = ("hub", "bundled")
TURNS = ("first", "last", "all")
ENGINE_KINDS = ("cpu", "gpu", "attach", "openai")
WRITE_POLICIES = ("write_through", "write_back", "write_through_selective")
IO_BACKENDS = ("kernel", "direct")
MEM_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head")
COMPRESSION_LEVELS = {"zstd": (1, 22), "gzip": (1, 9), "brotli": (0, 11)}
COMPRESSIONS = (*COMPRESSION_LEVELS, "snappy", "lz4", "none")
WHOLE_OUTPUT = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
    *("stop", "regex", "json_schema"),
)


@dataclass
class RunConfig:
    """``extend`` lets a finished or running folder grow to a larger ``dataset.limit``; ``drain_s`` is how long
    answers in flight may take to finish after the first SIGINT or SIGTERM; ``retry_failed`` takes back the recorded
    failures and asks for those prompts again; ``max_failures_in_a_row`` failed requests end a run (0: never)."""

    name: str = ""
    dir: str = ""
    extend: bool = False
    retry_failed: bool = False
    max_failures_in_a_row: int = 50
    drain_s: float = 60.0


@dataclass
class DatasetConfig:
    """Where prompts come from. ``path`` is a hub id, or a local file or folder; ``subset`` a hub configuration."""

    name: str = ""
    path: str = ""
    subset: Optional[str] = None
    split: str = "train"
    source: str = "hub"
    limit: Optional[int] = None
    turns: str = "first"
    samples: int = 1


@dataclass
class ModelConfig:
    """The target. ``tokenizer`` is the folder or hub id of the tokenizer where it is not ``path``;
    ``context_length`` (tokens) overrides what the engine and the model's own configuration say."""

    name: str = ""
    path: str = ""
    served_name: Optional[str] = None
    tokenizer: Optional[str] = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    context_length: Optional[int] = None


@dataclass
class HiCacheConfig:
    """SGLang's hierarchical KV cache. ``ratio`` is host tokens per device token; ``size_gb`` (1e9 bytes, per rank)
    overrides it."""

    enabled: bool = True
    ratio: Optional[float] = None
    size_gb: Optional[int] = None
    write_policy: str = "write_through"
    io_backend: str = "kernel"
    mem_layout: str = "layer_first"


@dataclass
class EngineConfig:
    """Engines: ``cpu`` and ``gpu`` are started here, ``attach`` and ``openai`` are used where they run.

    ``urls``: base addresses of engines that run already. ``replicas``: engines to start; ``port``: of the first of
    them, 0 picks free ones. ``args``: further SGLang flags, which win over those made from the keys here. ``env``:
    environment added to the engine's. ``python``: the interpreter that has SGLang (default: this one).
    ``max_total_tokens``: size of the KV pool in tokens. ``api_key_env``: the environment variable that holds the
    key of an OpenAI-compatible server. Times in seconds: an engine of ours that makes no token for ``stall_s`` while it
    has requests is started again; ``restart_pause_s`` is the first pause before that, doubling up to a minute;
    ``lost_after_s`` without any attached engine ends a run.
    """

    kind: str = "cpu"
    urls: list[str] = field(default_factory=list)
    replicas: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    python: Optional[str] = None
    dtype: str = "auto"
    tp_size: int = 1
    hicache: HiCacheConfig = field(default_factory=HiCacheConfig)
    max_total_tokens: Optional[int] = None
    mem_fraction_static: Optional[float] = None
    check_model: bool = True
    api_key_env: str = "OPENAI_API_KEY"
    start_timeout_s: float = 1800.0
    stop_timeout_s: float = 30.0
    stall_s: float = 300.0
    restart_pause_s: float = 1.0
    restarts_per_hour: int = 6
    lost_after_s: float = 600.0

    @property
    def started_here(self) -> bool:
        """Whether the engines are processes of ours."""
        return self.kind in ("cpu", "gpu")


@dataclass
class SamplingConfig:
    """How the target samples. ``top_k`` -1 keeps the whole vocabulary; ``seed`` None leaves the draw to the engine.

    ``segment_tokens``: tokens asked for at a time, 0 for the whole answer at once. What depends on the whole output
    (penalties, ``min_new_tokens``, ``stop`` strings, a grammar in ``regex`` or ``json_schema``) excludes segments.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 4096
    seed: Optional[int] = None
    segment_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    regex: Optional[str] = None
    json_schema: Optional[str] = None

    @property
    def whole_output_options(self) -> dict[str, Any]:
        """The options in use that depend on the whole output, by the names that SGLang gives them too."""
        unused = SamplingConfig()
        return {name: value for name in WHOLE_OUTPUT if (value := getattr(self, name)) != getattr(unused, name)}


@dataclass
class CaptureConfig:
    """What is kept of the distribution at each generated position: the ``top_k`` largest entries, 0 for none."""

    top_k: int = 20
    allow_scaled: bool = False


@dataclass
class ClientConfig:
    """``concurrency``: requests in flight per engine. ``timeout_s``: one request, from sending to the last byte.
    ``max_attempts``: requests made for one prompt before it is a failure; ``backoff_s`` is the longest pause before
    the second of them, doubled for each further one up to ``backoff_max_s``."""

    concurrency: int = 64
    max_attempts: int = 5
    timeout_s: float = 3600.0
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0


@dataclass
class StoreConfig:
    """``sync_interval_s``: the longest an outcome waits for its fsync. ``min_free_gb`` (1e9 bytes): a run is not
    started with less disk than this. ``mirror``: where a second copy of each sealed shard goes, a folder on any
    filesystem that pyarrow or fsspec knows."""

    rows_per_shard: int = 1000
    sync_interval_s: float = 1.0
    compression: str = "zstd"
    compression_level: int = 3
    min_free_gb: float = 1.0
    mirror: Optional[str] = None


@dataclass
class ExportConfig:
    """``dir``: where the files go (default: a folder of the run); ``max_length``: rows longer than this many tokens
    are left out, counted and listed."""

    to: str = ""
    dir: Optional[str] = None
    max_length: Optional[int] = None


@dataclass
class ProfileConfig:
    """The name of the profile, shown in the first line of a run."""

    name: str = ""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


def check(config: Config) -> None:
    """Checks what types alone do not say.

    Raises:
        InputError: naming the first key at fault and the values it takes.
    """
    _not_empty("run.name", config.run.name, "a name for the run")
    _not_empty("run.dir", config.run.dir, "a folder, new or of an earlier run")
    _at_least("run.drain_s", config.run.drain_s, 0)

    _not_empty("dataset.path", config.dataset.path, "a file, a folder or a hub id")
    _at_least("run.max_failures_in_a_row", config.run.max_failures_in_a_row, 0)
    _one_of("dataset.source", config.dataset.source, SOURCES)
    _one_of("dataset.turns", config.dataset.turns, TURNS)
    _at_least("dataset.samples", config.dataset.samples, 1)
    if config.dataset.limit is not None:
        _at_least("dataset.limit", config.dataset.limit, 1)

    if config.engine.kind != "openai" or not config.model.served_name:
        _not_empty("model.path", config.model.path, "a model folder or a hub id")
    if config.model.context_length is not None:
        _at_least("model.context_length", config.model.context_length, 1)

    engine = config.engine
    _one_of("engine.kind", engine.kind, ENGINE_KINDS)
    _one_of("engine.hicache.write_policy", engine.hicache.write_policy, WRITE_POLICIES)
    _one_of("engine.hicache.io_backend", engine.hicache.io_backend, IO_BACKENDS)
    _one_of("engine.hicache.mem_layout", engine.hicache.mem_layout, MEM_LAYOUTS)
    _at_least("engine.replicas", engine.replicas, 1)
    _at_least("engine.tp_size", engine.tp_size, 1)
    _between("engine.port", engine.port, 0, 65535)
    if engine.port:
        _between("engine.replicas", engine.replicas, 1, 65536 - engine.port)
    if not all(isinstance(argument, str) for argument in engine.args):
        raise InputError("engine.args", f"{engine.args} holds more than words", "engine.args=[--flag,value]")
    if engine.hicache.ratio is not None and not 1.0 < engine.hicache.ratio < math.inf:
        raise InputError("engine.hicache.ratio", f"{engine.hicache.ratio} is too small", "a number above 1")
    if engine.hicache.size_gb is not None:
        _at_least("engine.hicache.size_gb", engine.hicache.size_gb, 1)
    if engine.max_total_tokens is not None:
        _at_least("engine.max_total_tokens", engine.max_total_tokens, 64)
    if engine.mem_fraction_static is not None and not 0.0 < engine.mem_fraction_static < 1.0:
        raise InputError("engine.mem_fraction_static", f"{engine.mem_fraction_static} is out of range", "0 < x < 1")
    _above_zero("engine.start_timeout_s", engine.start_timeout_s)
    _at_least("engine.stop_timeout_s", engine.stop_timeout_s, 0)
    _above_zero("engine.stall_s", engine.stall_s)
    _above_zero("engine.lost_after_s", engine.lost_after_s)
    _at_least("engine.restart_pause_s", engine.restart_pause_s, 0)
    _at_least("engine.restarts_per_hour", engine.restarts_per_hour, 0)
    if not engine.started_here and not engine.urls:
        raise InputError(
            "engine.urls",
            f"engine={engine.kind} needs the address of at least one running engine",
            "engine.urls=[http://HOST:PORT,...]",
        )
    for url in engine.urls:
        if not url.startswith(("http://", "https://")):
            raise InputError("engine.urls", f"{url!r} is not an address", "http://HOST:PORT or https://HOST:PORT")

    sampling = config.sampling
    _at_least("sampling.temperature", sampling.temperature, 0)
    if not 0.0 < sampling.top_p <= 1.0:
        raise InputError("sampling.top_p", f"{sampling.top_p} is out of range", "0 < x <= 1")
    if sampling.top_k != -1:
        _at_least("sampling.top_k", sampling.top_k, 1)
    _between("sampling.min_p", sampling.min_p, 0.0, 1.0)
    _at_least("sampling.max_new_tokens", sampling.max_new_tokens, 1)
    _between("sampling.frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _between("sampling.presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    if not 0.0 < sampling.repetition_penalty <= 2.0:
        raise InputError("sampling.repetition_penalty", f"{sampling.repetition_penalty} is out of range", "0 < x <= 2")
    _between("sampling.min_new_tokens", sampling.min_new_tokens, 0, sampling.max_new_tokens)
    if not all(isinstance(text, str) and text for text in sampling.stop):
        raise InputError("sampling.stop", f"{sampling.stop} holds more than texts", "sampling.stop=[TEXT,...]")
    if sampling.regex is not None and sampling.json_schema is not None:
        raise InputError("sampling.json_schema", "an answer follows one grammar, sampling.regex is set too", "null")
    if sampling.seed is not None and engine.kind == "cpu":
        # SGLang draws from a seed only in its deterministic mode, which none of its CPU attention backends has.
        raise InputError("sampling.seed", "SGLang on the CPU cannot draw from a seed", "null, or another engine")
    _at_least("sampling.segment_tokens", sampling.segment_tokens, 0)
    if sampling.segment_tokens and (options := sampling.whole_output_options):
        name = next(iter(options))
        raise InputError(
            f"sampling.{name}",
            f"it depends on the whole output, and sampling.segment_tokens={sampling.segment_tokens} asks in pieces",
            "sampling.segment_tokens=0",
        )
    if sampling.segment_tokens and engine.kind == "openai":
        raise InputError("sampling.segment_tokens", "engine=openai cannot go on with an answer begun", "0")
    _between("capture.top_k", config.capture.top_k, 0, 1000)
    _at_least("client.concurrency", config.client.concurrency, 1)
    _at_least("client.max_attempts", config.client.max_attempts, 1)
    _above_zero("client.timeout_s", config.client.timeout_s)
    _at_least("client.backoff_s", config.client.backoff_s, 0)
    _at_least("client.backoff_max_s", config.client.backoff_max_s, 0)
    _at_least("store.rows_per_shard", config.store.rows_per_shard, 1)
    _above_zero("store.sync_interval_s", config.store.sync_interval_s)
    _one_of("store.compression", config.store.compression, COMPRESSIONS)
    if levels := COMPRESSION_LEVELS.get(config.store.compression):
        _between("store.compression_level", config.store.compression_level, *levels)
    _at_least("store.min_free_gb", config.store.min_free_gb, 0)
    if config.export.max_length is not None:
        _at_least("export.max_length", config.export.max_length, 1)


def content_settings(config: Config) -> dict[str, Any]:
    """The settings that decide what a row holds, as plain values: those that the fingerprint covers."""
    return {
        "dataset": asdict(config.dataset),
        "model": asdict(config.model),
        "sampling": asdict(config.sampling),
        "capture": asdict(config.capture),
    }


def fingerprint(config: Config) -> str:
    """SHA-256 (hex) over the content settings, as canonical JSON."""
    text = json.dumps(content_settings(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested mappings, with both values (None where absent)."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[prefix + key] = (old, new)
    return found


def _one_of(key: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise InputError(key, f"{value!r} is not known", accepted)


def _not_empty(key: str, value: str, accepted: str) -> None:
    if not value.strip():
        raise InputError(key, "a value is needed", accepted)


# Comparisons are written so that NaN fails them, and none lets infinity through: both can be typed.
def _at_least(key: str, value: Union[int, float], least: int) -> None:
    if not least <= value < math.inf:
        raise InputError(key, f"{value} is out of range", f"{least} or more")


def _above_zero(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(key, f"{value} is out of range", "a number above 0")


def _between(key: str, value: Union[int, float], low: float, high: float) -> None:
    if not low <= value <= high:
        raise InputError(key, f"{value} is out of range", f"{low} to {high}")
