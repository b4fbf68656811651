"""Is this machine ready: what each check says where something is not as it should be. No engine, no SGLang."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from pipeline import doctor, verbs
from pipeline.config import Config, EngineConfig, ModelConfig
from pipeline.doctor import Check, examine
from pipeline.engine.command import EngineCommand
from pipeline.engine.flags import FlagReport, OutdatedFlag, UnknownFlag
from pipeline.engine.probe import EngineFacts
from pipeline.errors import EngineDown, InputError

FINE = FlagReport("0.5.23", (), None)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A machine that is ready for a run on a CPU engine, as far as files go."""
    made = Config()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "r0", "messages": [{"role": "user", "content": "What is 0?"}]}\n')
    made.run.dir = str(tmp_path / "outputs" / "run")
    made.dataset.name, made.dataset.path = "made", str(rows)
    made.model.name, made.model.path = "m", str(tmp_path)
    made.engine.hicache.size_gb = 4
    return made


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the checks ask of the machine; a test changes what it is about. All is well at first."""
    answers = SimpleNamespace(flags=FINE, memory_gb=64.0, free_gb=100.0, asked=[])

    def ask(python: str, command: EngineCommand) -> FlagReport:
        answers.asked.append((python, command))
        found: FlagReport = answers.flags
        return found

    def template(model: ModelConfig) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=1024)

    monkeypatch.setattr(doctor, "ask_parser", ask)
    monkeypatch.setattr(doctor, "load_template", template)
    monkeypatch.setattr(doctor, "_available_memory_gb", lambda: answers.memory_gb)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=answers.free_gb * 1e9))
    return answers


def found(config: Config, what: str) -> Check:
    """The one check of that name."""
    (check,) = [check for check in examine(config) if check.what == what]
    return check


def marks(config: Config) -> dict[str, str]:
    return {check.what: check.mark for check in examine(config)}


def test_a_machine_that_is_ready(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["python", "sglang", "flags", "memory", "model", "disk", "dataset"]
    assert marks(config) == dict.fromkeys(names, "ok")
    assert verbs.doctor(config, "") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in names]
    assert "first row made/r0/t0/s0" in lines[-1]


def test_the_command_that_is_checked_is_the_one_that_would_run(config: Config, machine: SimpleNamespace) -> None:
    config.engine.args = ["--schedule-policy", "lpm"]
    list(examine(config))
    ((python, command),) = machine.asked
    assert command.argv[0] == python
    assert command.argv[-2:] == ["--schedule-policy", "lpm"]
    assert command.env["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"


def test_one_bad_check_makes_status_2_and_the_others_are_shown_too(
    config: Config, machine: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.memory_gb = 5.0
    assert verbs.doctor(config, "") == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok", "ok", "BAD", "ok", "ok", "ok"]


def test_a_python_that_is_too_old(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 2, "final", 0))  # type: ignore[attr-defined]
    assert found(config, "python") == Check("BAD", "python", "3.10.2")


# Engines that we start


def test_no_interpreter(config: Config) -> None:
    config.engine.python = "/nowhere/python"
    check = found(config, "engine.python")
    assert check.mark == "BAD"
    assert check.found.startswith("engine.python: '/nowhere/python' is no Python interpreter")
    assert "sglang" not in marks(config)


def test_no_model(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.model.path = "/nowhere/model"
    assert found(config, "model") == Check(
        "BAD", "model", "model.path: /nowhere/model does not exist (accepted: a model folder or a hub id)"
    )
    assert found(config, "engine").found.startswith("model.path: /nowhere/model does not exist")

    def broken(model: ModelConfig) -> None:
        raise InputError("model.path", "it has no chat template")

    config.model.path = "nobody/model"
    monkeypatch.setattr(doctor, "load_template", broken)
    assert found(config, "model") == Check("BAD", "model", "model.path: it has no chat template")


def test_no_sglang(config: Config, machine: SimpleNamespace) -> None:
    machine.flags = FlagReport(None, (), "ModuleNotFoundError: No module named 'sglang'")
    check = found(config, "sglang")
    assert check.mark == "BAD"
    assert check.found.endswith(" has none: ModuleNotFoundError: No module named 'sglang'")
    assert "flags" not in marks(config)


def test_wrong_flags(config: Config, machine: SimpleNamespace) -> None:
    unknown = (UnknownFlag("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"), UnknownFlag("--zzz", None))
    outdated = (OutdatedFlag("--enable-dp-attention", "--attn-dp-size"), OutdatedFlag("--idle", None))
    machine.flags = FlagReport("0.5.23", unknown, None, outdated)
    assert [check for check in examine(config) if check.what == "flag"] == [
        Check("BAD", "flag", "SGLang 0.5.23 knows no --cuda-graph-max-bs; did you mean --cuda-graph-max-bs-decode?"),
        Check("BAD", "flag", "SGLang 0.5.23 knows no --zzz"),
        Check("warn", "flag", "--enable-dp-attention is deprecated; use --attn-dp-size"),
        Check("warn", "flag", "--idle is read and ignored"),
    ]
    assert "flags" not in marks(config)


def test_outdated_flags_alone_stop_nothing(config: Config, machine: SimpleNamespace) -> None:
    machine.flags = FlagReport("0.5.23", (), None, (OutdatedFlag("--idle", None),))
    assert "BAD" not in marks(config).values()
    assert verbs.doctor(config, "") == 0


def test_a_flags_value(config: Config, machine: SimpleNamespace) -> None:
    problem = "argument --dtype: invalid choice: 'float17'"
    machine.flags = FlagReport("0.5.23", (), problem)
    assert found(config, "flags") == Check("BAD", "flags", problem)


# Memory


def test_a_host_pool_that_does_not_fit(config: Config, machine: SimpleNamespace) -> None:
    config.engine.hicache.size_gb, config.engine.tp_size, config.engine.replicas = 48, 4, 2
    machine.memory_gb = 200.0
    assert found(config, "memory") == Check(
        "BAD",
        "memory",
        "host pool 384 GB over 8 ranks, 200 GB available, of which SGLang keeps 11 GB free; "
        "engine.hicache.size_gb=23 would fit",
    )
    config.engine.hicache.size_gb = 23
    assert found(config, "memory").mark == "ok"
    config.engine.hicache.size_gb = 24
    assert found(config, "memory").mark == "BAD"


def test_a_machine_on_which_no_host_pool_fits(config: Config, machine: SimpleNamespace) -> None:
    """A size that the configuration would refuse is not advised."""
    machine.memory_gb = 11.0
    assert found(config, "memory").found.endswith("; only engine.hicache.enabled=false would fit")


def test_memory_that_is_not_looked_at(
    config: Config, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.engine.hicache.size_gb = None
    assert found(config, "memory") == Check("ok", "memory", "64 GB available; the host pool is sized by ratio at start")
    config.engine.hicache.enabled = False
    assert found(config, "memory") == Check("warn", "memory", "64 GB available; HiCache is off")

    def unreadable() -> float:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(doctor, "_available_memory_gb", unreadable)
    check = found(config, "memory")
    assert check.mark == "warn"
    assert "cannot be read" in check.found
    assert "/proc/meminfo" in check.found


# Disk and data


def test_a_full_disk(config: Config, machine: SimpleNamespace) -> None:
    machine.free_gb = 0.5
    assert found(config, "disk") == Check(
        "BAD", "disk", f"0.5 GB free for {config.run.dir}; store.min_free_gb asks for 1"
    )


def test_a_folder_that_cannot_be_written(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: mode != os.W_OK)
    assert found(config, "disk") == Check("BAD", "disk", f"run.dir: {tmp_path} cannot be written")


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_file_in_the_folders_place(below: str, config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config.run.dir = f"{tmp_path}/file{below}"
    assert found(config, "disk") == Check("BAD", "disk", f"run.dir: {tmp_path}/file is no folder")


def test_a_dataset_that_is_not_there(config: Config) -> None:
    config.dataset.path = "/nowhere/rows.jsonl"
    check = found(config, "dataset")
    assert check.mark == "BAD"
    assert check.found.startswith("dataset.path: '/nowhere/rows.jsonl' does not exist")


def test_a_dataset_without_rows(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    check = found(config, "dataset")
    assert (check.mark, "rows" in check.found) == ("BAD", True)
    monkeypatch.setattr(doctor, "read_prompts", lambda dataset: iter(()))
    assert found(config, "dataset") == Check("BAD", "dataset", f"{config.dataset.path} has no rows")


def test_a_first_row_that_makes_no_prompt(config: Config, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"colour": "green"}\n')
    check = found(config, "dataset")
    assert check.mark == "warn"
    assert check.found.startswith("its first row makes no prompt: ")


# Engines that run already


def facts(**more: Any) -> EngineFacts:
    known = {"url": "http://a", "version": "0.5.23", "model_path": "/models/m", "kv_pool_tokens": 1000}
    return EngineFacts(**(dict.fromkeys(EngineFacts.__dataclass_fields__) | known | more))


def test_attached_engines_are_asked_one_by_one(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.engine.kind, config.model.path = "attach", "elsewhere/m"
    config.engine.urls = ["http://a/", "http://gone", "http://other"]

    async def answer(session: aiohttp.ClientSession, url: str) -> EngineFacts:
        if url == "http://gone":
            raise EngineDown(f"{url} does not answer: refused")
        return facts(url=url) if url == "http://a" else facts(url=url, model_path="/models/another")

    monkeypatch.setattr(doctor, "engine_facts", answer)
    monkeypatch.setattr(doctor, "local_model", lambda model: model.path)
    checks = [check for check in examine(config) if check.what == "engine"]
    assert checks == [
        Check("ok", "engine", "http://a: SGLang 0.5.23, /models/m, 1000 KV tokens"),
        Check("BAD", "engine", "http://gone does not answer: refused"),
        Check(
            "BAD",
            "engine",
            "engine.urls: http://other serves /models/another, the run is for elsewhere/m "
            "(accepted: an engine of that model; engine.check_model=false takes this one)",
        ),
    ]
    assert not {"sglang", "flags", "memory"} & {*marks(config)}
    config.engine.check_model = False
    assert [check.mark for check in examine(config) if check.what == "engine"] == ["ok", "BAD", "ok"]


class OpenAIServer(BaseHTTPRequestHandler):
    """Lists its models to whoever has the key, and is broken below ``/broken``."""

    key = ""

    def do_GET(self) -> None:
        allowed = not self.key or self.headers.get("Authorization") == f"Bearer {self.key}"
        status = 500 if "broken" in self.path else (401 if not allowed else 200)
        status = 404 if status == 200 and self.path != "/v1/models" else status
        body = json.dumps({"data": []}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def openai_server(key: str = "") -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (OpenAIServer,), {"key": key}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_openai_servers(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "secret")
    config.engine.kind, config.engine.api_key_env, config.model.served_name = "openai", "TEST_KEY", "gpt"
    with openai_server("secret") as url, openai_server("another") as locked:
        config.engine.urls = [url, f"{url}/v1", f"{url}/broken", locked]
        checks = [check for check in examine(config) if check.what == "engine"]
    config.engine.urls = [url]
    checks += [check for check in examine(config) if check.what == "engine"]
    assert [check.mark for check in checks] == ["ok", "ok", "BAD", "BAD", "BAD"]
    assert checks[0].found == checks[1].found == f"{url}/v1/models answers"
    assert checks[2].found == f"engine.urls: {url}/broken/v1/models answers HTTP 500"
    assert checks[3].found == f"engine.api_key_env: {locked}/v1/models refuses the key in TEST_KEY"
    assert checks[4].found.startswith(f"engine.urls: {url} does not answer: ")
    assert found(config, "model") == Check("ok", "model", "gpt, rendered by the server")


@pytest.mark.parametrize("address", ["http://", "http://host:port", "http://127.0.0.1:1"])
def test_an_address_that_leads_nowhere(address: str, config: Config) -> None:
    config.engine.urls = [address]
    for kind in ("openai", "attach"):
        config.engine.kind = kind
        assert found(config, "engine").mark == "BAD"


def test_available_memory_is_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    meminfo = "MemTotal:       32000000 kB\nMemFree: 1 kB\nMemAvailable:   16000000 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: meminfo)
    assert doctor._available_memory_gb() == pytest.approx(16.384)
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 1 kB\n")
    with pytest.raises(OSError, match="no MemAvailable line"):
        doctor._available_memory_gb()


def test_a_gpu_engine_needs_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    config = Config(engine=EngineConfig(kind="gpu", tp_size=2))
    assert doctor._gpus(config) == Check("ok", "gpu", "2 NVIDIA GPUs here, 2 needed")
    config.engine.tp_size = 4
    assert doctor._gpus(config) == Check("BAD", "gpu", "2 NVIDIA GPUs here, 4 needed")
