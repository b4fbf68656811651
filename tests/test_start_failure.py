"""Why an engine did not start, from its log. The logs are tails of real ones, of SGLang 0.5.23, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.engine.start_failure import describe_exit, explain_start_failure, last_error

HOST_POOL = """\
[2026-11-30 17:06:08] Init Unified Radix Cache. Components: (<ComponentType.FULL: 0>,).
[2026-11-30 17:06:09] Scheduler hit an exception: Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 6349, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/env/lib/python3.11/site-packages/sglang/srt/mem_cache/pool_host/base.py", line 252, in _allocate_host_buffer
    raise ValueError(
ValueError: Not enough host memory available. Requesting 4000.00 GB but only have 1.74 GB free. Please reduce the \
size of the hierarchical cache.

[2026-11-30 17:06:09] Received sigquit from a child process. It usually means the child failed.
[2026-11-30 17:06:09] kill_process_tree called: parent_pid=13901, include_parent=True, pid=13901
"""

FLAG = """\
usage: sglang serve [-h] --model-path MODEL_PATH
                    [--tokenizer-path TOKENIZER_PATH]
                    [--metrics-host METRICS_HOST]
sglang serve: error: unrecognized arguments: --no-such-flag 3
"""

MODEL = """\
huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/where'.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/env/lib/python3.11/site-packages/transformers/utils/hub.py", line 595, in cached_files
    raise OSError(f"{e}") from e
OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/where'. Use `repo_type` if needed.
"""

PORT = """\
[2026-11-30 17:13:50] Started server process [14321]
[2026-11-30 17:13:50] Waiting for application startup.
[2026-11-30 17:13:50] Application startup complete.
[2026-11-30 17:13:50] [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use
[2026-11-30 17:13:50] Waiting for application shutdown.
[2026-11-30 17:13:51] kill_process_tree called: parent_pid=14321, include_parent=False, pid=14321
"""

DEVICE_MEMORY = """\
[2026-11-30 17:20:03 TP3] Scheduler hit an exception: Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/sglang/srt/model_loader/loader.py", line 412, in load_model
    model = _initialize_model(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 94.97 GiB.

[2026-11-30 17:20:03] Received sigquit from a child process. It usually means the child failed.
"""

NO_POOL = """\
[2026-11-30 17:20:03 TP0] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
"""

NO_SGLANG = """\
/usr/bin/python3: Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: No module \
named 'sglang')
"""

CRASH = """\
[2026-11-30 17:01:03] Tree cache initialized: source=default impl=UnifiedRadixCache hicache_attached=True
[2026-11-30 17:01:03] Scheduler hit an exception: Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 384, in _send
    n = write(self._handle, buf)
        ^^^^^^^^^^^^^^^^^^^^^^^^
BrokenPipeError: [Errno 32] Broken pipe
"""

SLOW = """\
[2026-11-30 17:01:02] Load weight begin. avail mem=20.51 GB
Multi-thread loading shards:  37% Completed | 24/64 [14:02<23:24, 35.1s/it]
"""


def log_of(folder: Path, text: str) -> Path:
    path = folder / "engine-0.log"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            HOST_POOL,
            "Not enough host memory available. Requesting 4000.00 GB but only have 1.74 GB free. Please reduce the "
            "size of the hierarchical cache. (see engine.hicache.size_gb, or engine.hicache.ratio)",
        ),
        (FLAG, "unrecognized arguments: --no-such-flag 3 (see engine.args)"),
        (
            MODEL,
            "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/where'. Use `repo_type` "
            "if needed. (see model.path, or model.tokenizer)",
        ),
        (PORT, "address already in use (see engine.port)"),
        (
            DEVICE_MEMORY,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
            "94.97 GiB. (see engine.mem_fraction_static)",
        ),
        (NO_POOL, "Not enough memory. Please try to increase --mem-fraction-static. (see engine.mem_fraction_static)"),
        (NO_SGLANG, "No module named 'sglang' (see engine.python, the interpreter that has SGLang)"),
        (CRASH, "BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_the_engines_own_reason_in_one_line(text: str, reason: str, tmp_path: Path) -> None:
    log = log_of(tmp_path, text)
    assert explain_start_failure(log, 1) == f"{reason} (log: {log})"


@pytest.mark.parametrize("text", [FLAG, MODEL, HOST_POOL, CRASH])
def test_a_known_reason_does_not_depend_on_how_it_ended(text: str, tmp_path: Path) -> None:
    log = log_of(tmp_path, text)
    assert explain_start_failure(log, -9) == explain_start_failure(log, None) == explain_start_failure(log, 1)


def test_without_a_reason_the_end_and_the_last_line(tmp_path: Path) -> None:
    log = log_of(tmp_path, SLOW)
    last = "Multi-thread loading shards:  37% Completed | 24/64 [14:02<23:24, 35.1s/it]"
    assert explain_start_failure(log, None) == f"it did not get ready in time; its log ends: {last} (log: {log})"
    assert explain_start_failure(log, 3).startswith("it ended with status 3; its log ends: Multi-thread")


@pytest.mark.parametrize("text", ["", "\n \n", None])
def test_an_empty_log(text: str | None, tmp_path: Path) -> None:
    log = tmp_path / "none.log" if text is None else log_of(tmp_path, text)
    assert explain_start_failure(log, -15) == f"it was ended by signal 15; its log ends: (empty) (log: {log})"
    assert last_error(log) is None


def test_only_the_last_start_counts(tmp_path: Path) -> None:
    """The log is appended to: what an earlier start failed of, and was cured of since, is no reason now."""
    first, second = (f"# /env/bin/python -m sglang.launch_server --port {port}\n" for port in (1, 2))
    log = log_of(tmp_path, first + HOST_POOL + second + SLOW)
    assert explain_start_failure(log, None).startswith("it did not get ready in time; its log ends: Multi-thread")
    assert last_error(log) is None
    log = log_of(tmp_path, first + HOST_POOL + second + FLAG)
    assert explain_start_failure(log, 2).startswith("unrecognized arguments: --no-such-flag 3")
    log = log_of(tmp_path, first + HOST_POOL + second)
    assert explain_start_failure(log, 1).startswith("it ended with status 1; its log ends: (empty)")


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    noise = "[2026-11-30 17:00:00] Decode batch, #running-req: 16, token usage: 0.51\n" * 20_000
    log = log_of(tmp_path, HOST_POOL + noise + CRASH)
    assert explain_start_failure(log, -9).startswith("BrokenPipeError")
    log = log_of(tmp_path, noise + HOST_POOL)
    assert explain_start_failure(log, -9).startswith("Not enough host memory")


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_bytes(b"\xff\xfe\x00\n" + FLAG.encode())
    assert explain_start_failure(log, 2).startswith("unrecognized arguments")


def test_last_error_of_an_engine_that_served(tmp_path: Path) -> None:
    assert last_error(log_of(tmp_path, CRASH + SLOW)) == "BrokenPipeError: [Errno 32] Broken pipe"
    line = "[2026-11-30 17:20:03 TP3] RuntimeError: CUDA error: an illegal memory access was encountered"
    assert last_error(log_of(tmp_path, line + "\n" + SLOW)) == line
    assert last_error(log_of(tmp_path, "Ignore import error when loading x: 'y'\n")) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "it did not get ready in time"),
        (0, "it ended with status 0"),
        (1, "it ended with status 1"),
        (-15, "it was ended by signal 15"),
        (-9, "it was killed (SIGKILL: the kernel's out-of-memory killer, or SGLang ending itself after a crash)"),
    ],
)
def test_exit_statuses_in_words(status: int | None, words: str) -> None:
    assert describe_exit(status) == words
