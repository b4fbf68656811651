"""An engine's command line and environment, made from the configuration."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.engine.cpu import site_dir
from pipeline.engine.orphans import OWNER, this_process
from pipeline.errors import InputError

# Idle, the scheduler would poll without pause: a whole core of the few there are.
_CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--sleep-on-idle",
)
# OpenMP threads that wait for each other by spinning stand still when anything else wants their cores.
_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What is executed: ``argv`` (the interpreter first), and the whole environment."""

    argv: list[str]
    env: dict[str, str]


def engine_command(engine: EngineConfig, model: ModelConfig, sampling: SamplingConfig, port: int) -> EngineCommand:
    """The command that serves ``model`` on ``port``.

    Flags in ``engine.args`` come last, so that they win over those made from configuration keys.

    Raises:
        InputError: the interpreter or the local model folder does not exist, or this installation is incomplete.
    """
    argv = [
        interpreter(engine),
        "-m",
        "sglang.launch_server",
        *("--model-path", local_model(model)),
        *("--host", engine.host, "--port", str(port)),
        *("--dtype", engine.dtype),
        "--enable-metrics",
        *_flags(engine, model, sampling),
        *engine.args,
    ]
    return EngineCommand(argv, _environment(engine))


def interpreter(engine: EngineConfig) -> str:
    """The Python that has SGLang: ``engine.python``, a program or the folder of an environment, or this one.

    Raises:
        InputError: it is none of these.
    """
    if engine.python is None:
        return sys.executable
    path = Path(engine.python).expanduser()
    found = shutil.which(str(path / "bin" / "python" if path.is_dir() else path))
    if found is None:
        raise InputError(
            "engine.python",
            f"{engine.python!r} is no Python interpreter and no environment of one",
            "a program, the folder of an environment, or null for this one",
        )
    return found


def local_model(model: ModelConfig) -> str:
    """``model.path``; a path (rather than a hub id) must exist.

    Raises:
        InputError: it does not.
    """
    path = Path(model.path).expanduser()
    looks_local = model.path.startswith(("/", ".", "~"))
    if looks_local and not path.exists():
        hint = f"`python -m pipeline.models {model.name}` makes it" if model.name in ("smollm2", "tiny") else ""
        raise InputError("model.path", f"{model.path} does not exist", hint or "a model folder or a hub id")
    return str(path) if looks_local else model.path


def _flags(engine: EngineConfig, model: ModelConfig, sampling: SamplingConfig) -> list[str]:
    flags: list[str] = list(_CPU_FLAGS) if engine.kind == "cpu" else []
    values = {
        "--served-model-name": model.served_name,
        "--tokenizer-path": model.tokenizer,
        "--context-length": model.context_length,
        "--tp-size": engine.tp_size if engine.tp_size > 1 else None,
        "--max-total-tokens": engine.max_total_tokens,
        "--mem-fraction-static": engine.mem_fraction_static,
    }
    for flag, value in values.items():
        if value is not None:
            flags += [flag, str(value)]
    if model.trust_remote_code:
        flags.append("--trust-remote-code")
    if sampling.seed is not None:
        # Without it SGLang reads a request's seed and does not use it.
        flags.append("--enable-deterministic-inference")
    return flags + _hicache_flags(engine)


def _hicache_flags(engine: EngineConfig) -> list[str]:
    cache = engine.hicache
    if not cache.enabled:
        return []
    flags = [
        "--enable-hierarchical-cache",
        *("--hicache-write-policy", cache.write_policy),
        *("--hicache-io-backend", cache.io_backend),
        *("--hicache-mem-layout", cache.mem_layout),
    ]
    if cache.ratio is not None:
        flags += ["--hicache-ratio", str(cache.ratio)]
    if cache.size_gb is not None:
        flags += ["--hicache-size", str(cache.size_gb)]
    return flags


def _environment(engine: EngineConfig) -> dict[str, str]:
    env = dict(os.environ)
    # The model's own distribution, whatever temperature a request samples at.
    env["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    # Importing SGLang without bytecode doubles the time that an engine takes to start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env[OWNER] = this_process()
    if engine.kind == "cpu":
        env |= _CPU_ENV
    env |= engine.env
    if engine.kind == "cpu":
        # In front of a PYTHONPATH from engine.env, not replaced by it: without it no engine starts here.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [_cpu_site(), env.get("PYTHONPATH")]))
    return env


def _cpu_site() -> str:
    try:
        return str(site_dir())
    except FileNotFoundError as error:
        raise InputError("engine", str(error)) from None
