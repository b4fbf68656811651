"""What tests share: the tiny model, and one real SGLang engine for the whole session."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli import cache_dir
from pipeline.models import tiny

KV_POOL_TOKENS = 6000
"""Small enough that the prompts of a few tests evict each other to the host tier."""

START_TIMEOUT_S = 240


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the random 6-layer Llama that `./run.sh setup` makes too."""
    return tiny(cache_dir() / "models")


@pytest.fixture(scope="session")
def engine_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real SGLang engine on the CPU, HiCache on, serving the tiny model; started by our own
    ``serve``, ended with SIGTERM."""
    folder = tmp_path_factory.mktemp("engine")
    with serve(folder, f"engine.max_total_tokens={KV_POOL_TOKENS}") as url:
        yield url


class serve:
    """``with serve(folder, *overrides) as url``: an engine of the tiny model through the command line."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        words = ["serve", "model=tiny", "engine=cpu", f"run.dir={folder}", *overrides]
        self._output = folder / "serve.out"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )

    def __enter__(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"engine\.urls=\[(http\S+)\]", self._output.read_text()):
                return found.group(1)
            time.sleep(0.2)
        self.__exit__()
        raise RuntimeError(f"no engine came up:\n{self._output.read_text()}")

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
