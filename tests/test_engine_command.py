"""An engine's command line and environment, and what the parser of the installed SGLang says of it."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import load_config
from pipeline.config import Config, EngineConfig, HiCacheConfig, ModelConfig, SamplingConfig
from pipeline.engine import command as command_module
from pipeline.engine import flags as flags_module
from pipeline.engine.command import EngineCommand, engine_command, interpreter, local_model
from pipeline.engine.cpu import site_dir
from pipeline.engine.flags import IGNORED, RENAMED, FlagReport, OutdatedFlag, UnknownFlag, ask_parser
from pipeline.errors import InputError

HUB_MODEL = ModelConfig(name="m", path="nobody/model")


def made(kind: str, model: ModelConfig = HUB_MODEL, seed: int | None = None, **engine: Any) -> EngineCommand:
    return engine_command(EngineConfig(kind=kind, **engine), model, SamplingConfig(seed=seed), 31000)


def composed(*overrides: str) -> Config:
    return load_config(list(overrides))[0]


def command_of(config: Config) -> EngineCommand:
    return engine_command(config.engine, config.model, config.sampling, 31000)


def value_of(command: EngineCommand, flag: str) -> str | None:
    """What follows a flag that is given once; None where it is not given."""
    assert command.argv.count(flag) <= 1, command.argv
    return command.argv[command.argv.index(flag) + 1] if flag in command.argv else None


# Flags


def test_argv_begins_with_the_interpreter_and_names_model_and_address() -> None:
    command = made("gpu", host="0.0.0.0", dtype="bfloat16")
    assert command.argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert value_of(command, "--model-path") == "nobody/model"
    assert (value_of(command, "--host"), value_of(command, "--port")) == ("0.0.0.0", "31000")
    assert value_of(command, "--dtype") == "bfloat16"
    assert "--enable-metrics" in command.argv
    assert all(type(word) is str for word in command.argv)


def test_the_cpu_engine_gets_what_runs_without_cuda() -> None:
    command = made("cpu")
    flags = {"--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
    assert {flag: value_of(command, flag) for flag in flags} == flags
    assert "--sleep-on-idle" in command.argv
    assert not {*flags, "--sleep-on-idle"} & {*made("gpu").argv}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_hicache_is_on_by_default_and_off_where_disabled(kind: str) -> None:
    on, off = made(kind), made(kind, hicache=HiCacheConfig(enabled=False, ratio=2.0, size_gb=3))
    assert "--enable-hierarchical-cache" in on.argv
    assert not [word for word in off.argv if "hicache" in word or "hierarchical" in word]


@pytest.mark.parametrize(
    ("profile", "flags"),
    [
        (
            ("engine=cpu",),
            {
                "--hicache-size": "1",
                "--hicache-ratio": None,
                "--hicache-io-backend": "direct",
                "--hicache-mem-layout": "layer_first",
                "--hicache-write-policy": "write_through",
                "--max-total-tokens": "32768",
            },
        ),
        (
            ("engine=gpu",),
            {
                "--hicache-size": None,
                "--hicache-ratio": "2.0",
                "--hicache-io-backend": "kernel",
                "--hicache-mem-layout": "page_first",
                "--max-total-tokens": None,
            },
        ),
        (
            (
                "engine=gpu",
                "engine.hicache.size_gb=48",
                "engine.hicache.ratio=4",
                "engine.hicache.write_policy=write_back",
            ),
            {"--hicache-size": "48", "--hicache-ratio": "4.0", "--hicache-write-policy": "write_back"},
        ),
    ],
)
def test_hicache_keys_become_flags(profile: tuple[str, ...], flags: dict[str, str | None]) -> None:
    command = command_of(composed("model=custom", "model.path=nobody/model", *profile))
    assert "--enable-hierarchical-cache" in command.argv
    assert {flag: value_of(command, flag) for flag in flags} == flags


def test_keys_that_are_not_set_give_no_flag() -> None:
    plain = made("gpu")
    unset = "served-model-name tokenizer-path context-length tp-size max-total-tokens mem-fraction-static"
    unset += " trust-remote-code enable-deterministic-inference"
    assert not {f"--{name}" for name in unset.split()} & {*plain.argv}


def test_keys_that_are_set_give_their_flag() -> None:
    model = ModelConfig("m", "nobody/model", "served", "nobody/tokenizer", {}, True, 4096)
    command = made("gpu", model, seed=0, tp_size=8, max_total_tokens=1000, mem_fraction_static=0.85)
    flags = {
        "--served-model-name": "served",
        "--tokenizer-path": "nobody/tokenizer",
        "--context-length": "4096",
        "--tp-size": "8",
        "--max-total-tokens": "1000",
        "--mem-fraction-static": "0.85",
    }
    assert {flag: value_of(command, flag) for flag in flags} == flags
    assert {"--trust-remote-code", "--enable-deterministic-inference"} <= {*command.argv}


def test_engine_args_come_last_so_that_they_win() -> None:
    args = ["--mem-fraction-static", "0.5", "--schedule-policy", "lpm"]
    assert made("gpu", mem_fraction_static=0.8, args=args).argv[-4:] == args


# Environment


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_logprobs_are_asked_for_before_temperature(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
    assert made(kind).env["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"


def test_the_environment_is_ours_with_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_TEST", "here")
    before = dict(os.environ)
    env = made("gpu", env={"HF_TOKEN": "x"}).env
    assert (env["EAGLE3_TEST"], env["HF_TOKEN"], env["PYTHONUNBUFFERED"]) == ("here", "x", "1")
    assert dict(os.environ) == before


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_the_cpu_site_is_on_the_cpu_engines_path_alone(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before:
        monkeypatch.setenv("PYTHONPATH", before)
    else:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    expected = [str(site_dir()), *([before] if before else [])]
    assert made("cpu").env["PYTHONPATH"].split(os.pathsep) == expected
    assert made("gpu").env.get("PYTHONPATH") == before
    assert "SGLANG_USE_CPU_ENGINE" not in made("gpu").env.keys() - os.environ.keys()
    assert str(site_dir()) not in sys.path


def test_engine_env_wins() -> None:
    given = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "OMP_WAIT_POLICY": "ACTIVE", "SGLANG_USE_CPU_ENGINE": "2"}
    env = made("cpu", env=given).env
    assert {name: env[name] for name in given} == given


def test_a_pythonpath_of_the_users_does_not_push_the_cpu_site_out() -> None:
    env = made("cpu", env={"PYTHONPATH": "/mine"}).env
    assert env["PYTHONPATH"].split(os.pathsep) == [str(site_dir()), "/mine"]
    assert made("gpu", env={"PYTHONPATH": "/mine"}).env["PYTHONPATH"] == "/mine"


def test_an_incomplete_installation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> Path:
        raise FileNotFoundError("incomplete installation: x lacks y")

    monkeypatch.setattr(command_module, "site_dir", lacking)
    with pytest.raises(InputError, match=r"^engine: incomplete installation"):
        made("cpu")
    made("gpu")


# Interpreter and model


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = program(tmp_path / "env" / "bin" / "python")
    monkeypatch.setenv("PATH", str(python.parent))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert interpreter(EngineConfig()) == sys.executable
    for given in (str(python), str(tmp_path / "env"), "~/env", "~/env/bin/python", "python"):
        assert interpreter(EngineConfig(python=given)) == str(python), given
    assert Path(interpreter(EngineConfig(python="env"))).samefile(python)
    assert made("gpu", python=str(python)).argv[0] == str(python)


@pytest.mark.parametrize("given", ["/nowhere/python", "folder", "plain-text", "nonsense-program", ""])
def test_what_is_no_interpreter_is_refused(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain-text").write_text("text")
    with pytest.raises(InputError, match=r"^engine\.python: .* is no Python interpreter .* \(accepted: a program, "):
        made("gpu", python=given)


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "../model", "~/no/model"])
def test_a_missing_model_folder_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^model\.path: .* does not exist \(accepted: a model folder or a hub id\)$"):
        made("gpu", ModelConfig("m", path))


def test_how_to_make_a_model_of_ours_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist \(accepted: `python -m pipeline.models tiny` makes it\)$"):
        local_model(ModelConfig("tiny", str(tmp_path / "tiny-llama")))


def test_model_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert local_model(ModelConfig("m", "~/model")) == str(tmp_path / "model")
    assert local_model(ModelConfig("m", str(tmp_path / "model"))) == str(tmp_path / "model")
    assert local_model(ModelConfig("m", "nobody/model")) == "nobody/model"


# Interpreters that are asked about flags, named after how they answer


def asked(tmp_path: Path, script: str) -> FlagReport:
    python = program(tmp_path / "python", script)
    return ask_parser(str(python), replace(made("gpu"), env={"PATH": os.environ["PATH"]}))


def test_an_interpreter_without_sglang(tmp_path: Path) -> None:
    line = (
        '{"version": null, "known": [], "unknown": [], "deprecated": {}, "problem": "ModuleNotFoundError: no sglang"}'
    )
    assert asked(tmp_path, f"#!/bin/sh\necho chatter\necho '@{line}'\n") == FlagReport(
        None, (), "ModuleNotFoundError: no sglang"
    )


def test_an_interpreter_that_dies(tmp_path: Path) -> None:
    assert asked(tmp_path, "#!/bin/sh\necho first >&2\necho last >&2\nexit 3\n") == FlagReport(None, (), "last")
    assert asked(tmp_path, "#!/bin/sh\nexit 3\n") == FlagReport(None, (), f"{tmp_path}/python ended with status 3")


def test_a_file_that_cannot_be_executed(tmp_path: Path) -> None:
    report = asked(tmp_path, "\x7fELF and then nothing\n")
    assert report == FlagReport(None, (), f"{tmp_path}/python cannot be run: Exec format error")


def test_an_interpreter_that_takes_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags_module, "_TIMEOUT_S", 0.2)
    assert (
        asked(tmp_path, "#!/bin/sh\nexec sleep 20\n").problem == f"{tmp_path}/python did not import SGLang within 0.2 s"
    )


# The installed SGLang. Importing its parser takes seconds, so it is asked once, everything together.

WRONG = (
    *("--hicache-raito", "2"),
    *("--mem-fraction-statik=0.8",),
    "--cuda-graph-backend",  # the beginning of two flags' names, so the engine takes it for neither
    *(word for flag in RENAMED for word in (flag, "1")),
)
OUTDATED = ("--enable-dp-attention", "--disable-cuda-graph", *(word for flag in IGNORED for word in (flag, "2")))
# Names of 0.5.23, and the beginning of a name, which its parser completes.
RIGHT = ("--cuda-graph-max-bs-decode", "8", "--attn-dp-size", "2", "--tp", "2", "--schedule-conserv=0.3")


@pytest.fixture(scope="module")
def report() -> FlagReport:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    model = ("model=custom", "model.path=nobody/model", "model.served_name=m", "model.context_length=4096")
    cpu = command_of(composed(*model))
    gpu = command_of(composed(*model, "engine=gpu", "engine.tp_size=2", "sampling.seed=1", "engine.hicache.size_gb=2"))
    flags = [word for command in (gpu, cpu) for word in command.argv[3:]]
    return ask_parser(cpu.argv[0], EngineCommand([*cpu.argv[:3], *flags, *WRONG, *OUTDATED, *RIGHT], cpu.env))


def test_sglang_knows_every_flag_of_ours_and_none_of_the_wrong_ones(report: FlagReport) -> None:
    assert report.version
    assert report.problem is None
    given = {word for word in WRONG if word.startswith("--")}
    assert {unknown.flag for unknown in report.unknown} == given


def test_a_misspelt_flag_is_met_with_the_nearest(report: FlagReport) -> None:
    assert UnknownFlag("--hicache-raito", "--hicache-ratio") in report.unknown
    assert UnknownFlag("--mem-fraction-statik=0.8", "--mem-fraction-static") in report.unknown


def test_renamed_flags_are_met_with_their_new_names(report: FlagReport) -> None:
    """Also that the table is right: SGLang takes none of the old names and every one of the new."""
    assert {unknown.flag: unknown.nearest for unknown in report.unknown if unknown.flag in RENAMED} == RENAMED


def test_deprecated_and_ignored_flags_are_told(report: FlagReport) -> None:
    assert set(report.outdated) == {
        OutdatedFlag("--enable-dp-attention", "--attn-dp-size <dp-size>"),
        OutdatedFlag("--disable-cuda-graph", "--cuda-graph-backend-{decode,prefill}=disabled"),
        *(OutdatedFlag(flag, None) for flag in IGNORED),
    }
